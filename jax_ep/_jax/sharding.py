"""Sharding types of an op's operands, under manual and Explicit mesh axes."""

import math
from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep._jax.vmap import reject_sharded_batch

Tree = TypeVar("Tree")
# Of a PartitionSpec: the mesh axes that shard a dimension.
Entry = str | tuple[str, ...] | None


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

    def unshard_array(array: jax.Array) -> jax.Array:
        array = reject_sharded_batch(array)
        spec = jax.typeof(array).sharding.spec
        return jax.sharding.reshard(array, P(*[None] * array.ndim)) if any(spec) else array

    return jax.tree.map(unshard_array, arrays)


def align_axes(arrays: Tree, axes: Iterable[str] = ()) -> Tree:
    """Gathers an op's operands over Explicit axes, and makes them vary over the same manual axes."""
    return vary_alike(unshard(arrays), axes)


def merge_dimensions(array: jax.Array, dimension: int) -> jax.Array:
    """Reshapes [..., M, N, ...] to [..., M * N, ...], where M is at `dimension`. Both may be sharded."""
    rows, columns = array.shape[dimension : dimension + 2]
    shape = *array.shape[:dimension], rows * columns, *array.shape[dimension + 2 :]
    entries = list(jax.typeof(array).sharding.spec)
    axes = [_axes_in_order(entry) for entry in entries[dimension : dimension + 2]]
    entries[dimension : dimension + 2] = [(*axes[0], *axes[1]) or None]
    return _reshape(array, shape, entries)


def split_dimension(array: jax.Array, dimension: int, count: int) -> jax.Array:
    """Reshapes [..., count * N, ...] to [..., count, N, ...]. The axes of the dimension then shard N."""
    size = array.shape[dimension] // count
    shape = *array.shape[:dimension], count, size, *array.shape[dimension + 1 :]
    entries = list(jax.typeof(array).sharding.spec)
    mesh = jax.sharding.get_abstract_mesh()
    divides = size % math.prod(mesh.shape[axis] for axis in axes_of(entries[dimension])) == 0
    entries[dimension : dimension + 1] = [None, entries[dimension] if divides else None]
    return _reshape(array, shape, entries)


def unmerge_dimensions(array: jax.Array, dimension: int, like: jax.Array) -> jax.Array:
    """Undoes `merge_dimensions`: splits a dimension into those of `like`, with their sharding."""
    shape = *array.shape[:dimension], *like.shape[dimension : dimension + 2], *array.shape[dimension + 1 :]
    entries = list(jax.typeof(array).sharding.spec)
    entries[dimension : dimension + 1] = jax.typeof(like).sharding.spec[dimension : dimension + 2]
    return _reshape(array, shape, entries)


def _axes_in_order(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _reshape(array: jax.Array, shape: tuple[int, ...], entries: list[Entry]) -> jax.Array:
    """Reshapes an array. JAX cannot infer how the result is sharded over Explicit axes."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return array.reshape(shape)
    return jax.lax.reshape(array, shape, out_sharding=P(*entries))


def axes_of(entry: Entry) -> set[str]:
    """Returns the mesh axes that one entry of a PartitionSpec names."""
    return set() if entry is None else {entry} if isinstance(entry, str) else set(entry)


def varying_axes(arrays: object) -> set[str]:
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
