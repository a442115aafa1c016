"""Manual and Explicit mesh axes: brings the operands of an op to one type."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep._jax.vmap import rejects_sharded_batch

Tree = TypeVar("Tree")


def vary_alike(arrays: Tree, axes: Iterable[str] = ()) -> Tree:
    """Makes all arrays of a pytree vary over the same manual axes: `axes`, and those any of them varies over.

    Under `check_vma=True` the operands of one op must agree in this. Elsewhere nothing changes. A
    replicated array that becomes varying gets its gradient summed over the axes by JAX.
    """

    def varying(array: jax.Array) -> frozenset[str]:
        return jax.typeof(array).manual_axis_type.varying

    union = set(axes).union(*map(varying, jax.tree.leaves(arrays)))

    def vary(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(union - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, arrays)


def whole(arrays: Tree) -> Tree:
    """Gathers the arrays of a pytree over Explicit axes of the mesh: an op needs all rows, and whole ones.

    Its results are then not sharded over these axes, and gradients have the types that JAX expects.
    A batch of `jax.vmap` cannot be gathered here, so it must not be sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return arrays

    def gather(array: jax.Array) -> jax.Array:
        array = rejects_sharded_batch(array)
        spec = jax.typeof(array).sharding.spec
        return jax.sharding.reshard(array, P(*[None] * array.ndim)) if any(spec) else array

    return jax.tree.map(gather, arrays)


def axes_of(entry: Any) -> set[str]:
    """The mesh axes that one entry of a PartitionSpec names."""
    return set() if entry is None else {entry} if isinstance(entry, str) else set(entry)


def may_differ_along(arrays: Any) -> set[str]:
    """The manual mesh axes along which `arrays` may differ, and so what an op computes of them."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(arrays)]
    # Under check_vma=False arrays do not know what they vary along.
    return set().union(*varying) or set(jax.sharding.get_abstract_mesh().manual_axes)


def in_lists_along(axes: set[str], place: jax.Array) -> jax.Array:
    """A place [2] of a mesh whose devices along these axes, too, belong to different lists of ranks."""
    if not axes:
        return place
    names = tuple(sorted(axes))
    number = place[1] * jax.lax.axis_size(names) + jax.lax.axis_index(names)
    return jnp.stack([place[0], number.astype(jnp.int32)])
