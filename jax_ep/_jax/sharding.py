"""Sharding types of an op's operands, under manual and Explicit mesh axes."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep._jax.vmap import reject_sharded_batch

Tree = TypeVar("Tree")


def vary_alike(arrays: Tree, axes: Iterable[str] = ()) -> Tree:
    """Makes all arrays of a pytree vary over the same manual axes: `axes`, and the axes of any of the arrays.

    Under `check_vma=True` all operands of an op must vary over the same axes. Without it nothing changes. If
    a replicated array becomes varying, JAX sums its gradient over the new axes.
    """

    def varying(array: jax.Array) -> frozenset[str]:
        return jax.typeof(array).manual_axis_type.varying

    union = set(axes).union(*map(varying, jax.tree.leaves(arrays)))

    def vary(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(union - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, arrays)


def unshard(arrays: Tree) -> Tree:
    """Gathers the arrays of a pytree over Explicit mesh axes, because an op needs all rows and all columns.

    The op's results are then not sharded over these axes, and gradients have the types that JAX expects.
    A batch of `jax.vmap` cannot be gathered here, so Explicit axes must not shard it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return arrays

    def gather(array: jax.Array) -> jax.Array:
        array = reject_sharded_batch(array)
        spec = jax.typeof(array).sharding.spec
        return jax.sharding.reshard(array, P(*[None] * array.ndim)) if any(spec) else array

    return jax.tree.map(gather, arrays)


def align_axes(arrays: Tree, axes: Iterable[str] = ()) -> Tree:
    """Gathers an op's operands over Explicit axes, and makes them vary over the same manual axes."""
    return vary_alike(unshard(arrays), axes)


def axes_of(entry: Any) -> set[str]:
    """Returns the mesh axes that one entry of a PartitionSpec names."""
    return set() if entry is None else {entry} if isinstance(entry, str) else set(entry)


def varying_axes(arrays: Any) -> set[str]:
    """Returns the manual mesh axes along which `arrays`, and so an op's results, may differ."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(arrays)]
    # Under check_vma=False the arrays' types do not list the axes.
    return set().union(*varying) or set(jax.sharding.get_abstract_mesh().manual_axes)


def with_own_lists(axes: set[str], position: jax.Array) -> jax.Array:
    """Returns a device's position [2] in a mesh where each index along `axes` has its own lists of ranks.

    A position holds the device's rank, and the number of the list of ranks that the device belongs to.
    """
    if not axes:
        return position
    names = tuple(sorted(axes))
    list_number = position[1] * jax.lax.axis_size(names) + jax.lax.axis_index(names)
    return jnp.stack([position[0], list_number.astype(jnp.int32)])


def is_per_device() -> bool:
    """Returns whether arrays are those of one device, as in `jax.shard_map` over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or 0 < len(mesh.axis_names) == len(mesh.manual_axes)
