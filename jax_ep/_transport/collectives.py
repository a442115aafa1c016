"""Collectives among the ranks of a group, and between hosts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _extension
from jax_ep._group.group import Group
from jax_ep._jax.ffi_call import call
from jax_ep._jax.sharding import may_differ_along

IndexGroups = tuple[tuple[int, ...], ...]


def rank(group: Group) -> jax.Array:
    """The number of this rank in its group."""
    index = jax.lax.axis_index(group.axis_name)
    return index if group._index_groups is None else index % group.size


def place(group: Group, arrays: Any) -> jax.Array:
    """The device's place in the mesh, [2] int32: its rank, and the number of its list of ranks.

    With it a handler finds out whether the program runs on the group's mesh: the rank must be the one that
    the device has in the group, and ranks that exchange rows must come from the same list. There is a list
    for each place along the mesh axes that the group does not have; where the group is that of a host, for
    each host, too. Axes along which none of `arrays` varies do not count: all devices along them have the
    same rows, and the place must not vary along them either, or else the op's results would
    (`check_vma=True`). If `jax.vmap` lets them vary later, `in_lists_along` counts these axes.
    """
    index = jax.lax.axis_index(group.axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    known = may_differ_along((index, arrays)) - set(group._axes)
    others = [axis for axis in mesh.axis_names if axis in known]
    number = (jax.lax.axis_index((*others, *group._axes)) if others else index).astype(jnp.int32)
    size = np.int32(group.size)
    return jnp.stack([jax.lax.rem(number, size), jax.lax.div(number, size)])


def host(group: Group) -> jax.Array:
    """The number of this rank's host."""
    return jax.lax.axis_index(group.axis_name) // group.ranks_per_node


def gather(group: Group, array: jax.Array) -> jax.Array:
    """[R, ...] from every rank's array."""
    if group._index_groups is None:
        return jax.lax.all_gather(array, group.axis_name)
    return among(jax.lax.all_gather, group.axis_name, group._index_groups)(array)


def exchange(group: Group, blocks: jax.Array) -> jax.Array:
    """[R, ...]: block r goes to rank r, and what comes from there takes its place."""
    if group._index_groups is None:
        return jax.lax.all_to_all(blocks, group.axis_name, split_axis=0, concat_axis=0)
    return among(all_to_all, group.axis_name, group._index_groups)(blocks)


def all_to_all(
    blocks: jax.Array, axis_name: str | tuple[str, ...], axis_index_groups: IndexGroups
) -> jax.Array:
    return jax.lax.all_to_all(blocks, axis_name, 0, 0, axis_index_groups=axis_index_groups)


@functools.cache
def among(
    collective: Callable[..., jax.Array], axis_name: str | tuple[str, ...], index_groups: IndexGroups
) -> Callable[[jax.Array], jax.Array]:
    """A collective among each of several groups of an axis, which `jax.vmap` does not know otherwise."""

    @jax.custom_batching.custom_vmap
    def run(array: jax.Array) -> jax.Array:
        return collective(array, axis_name, axis_index_groups=index_groups)

    @run.def_vmap
    def _(size: int, is_batched: list[bool], array: jax.Array) -> tuple[jax.Array, bool]:
        # The batch becomes a dimension of the rows, behind that of the blocks or ranks.
        gathers = collective is jax.lax.all_gather
        moved = run(array if gathers else jnp.moveaxis(array, 0, 1))
        return jnp.moveaxis(moved, 1, 0), True

    return run


def between_hosts(group: Group, blocks: jax.Array) -> jax.Array:
    """[hosts, ...]: block h goes to the rank of this one's index on host h; what comes takes its place."""
    per_host = group.ranks_per_node
    alike = tuple(tuple(range(index, group.size, per_host)) for index in range(per_host))
    exchange = among(all_to_all, group.axis_name, alike)
    within = group._within
    if within is None or not group._spans_processes or group._platform != "cpu":
        return exchange(blocks)
    return _told(within, exchange(_told(within, blocks, ends=False)), ends=True)


def _told(within: Group, blocks: jax.Array, ends: bool) -> jax.Array:
    """The blocks. On CPUs `Group.check` so knows of exchanges that begin and do not end."""
    if _extension.extension() is None:
        return blocks
    options = {"group": within._key, "num_ranks": np.int64(within.size), "ends": np.int64(ends)}
    return call("hop", [place(within, blocks), blocks], [(blocks.shape, blocks.dtype)], **options)[0]
