"""Collectives among the ranks of a group, and between domains."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _extension
from jax_ep._group.ranks import IndexGroups, Ranks
from jax_ep._jax.ffi_call import call
from jax_ep._jax.sharding import varying_axes


def rank(ranks: Ranks) -> jax.Array:
    """Returns the number of this rank in its group."""
    index = jax.lax.axis_index(ranks.axis_name)
    return index if ranks.index_groups is None else index % ranks.size


def mesh_position(ranks: Ranks, arrays: object) -> jax.Array:
    """Returns the device's position in the mesh, int32 [2]: its rank, and the number of its list of ranks.

    A handler checks with it that the program runs on the group's mesh: the rank must be that of the device in
    the group, and ranks that exchange rows must belong to the same list. There is one list for each position
    along the mesh axes that the group does not have, and, if the group is that of a domain, for each domain.
    Axes along which none of `arrays` varies do not count, because all devices along them have the same rows.
    The position must not vary along them either, because otherwise the op's results would (`check_vma=True`).
    If `jax.vmap` lets them vary later, `with_own_lists` counts these axes.
    """
    index = jax.lax.axis_index(ranks.axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    known = varying_axes((index, arrays)) - set(ranks.axes)
    others = [axis for axis in mesh.axis_names if axis in known]
    number = (jax.lax.axis_index((*others, *ranks.axes)) if others else index).astype(jnp.int32)
    size = np.int32(ranks.size)
    return jnp.stack([jax.lax.rem(number, size), jax.lax.div(number, size)])


def domain(ranks: Ranks) -> jax.Array:
    """Returns the number of this rank's domain."""
    return jax.lax.axis_index(ranks.axis_name) // ranks.ranks_per_domain


def all_gather(ranks: Ranks, array: jax.Array) -> jax.Array:
    """Returns the arrays of all ranks: [R, ...]."""
    if ranks.index_groups is None:
        return jax.lax.all_gather(array, ranks.axis_name)
    return among(jax.lax.all_gather, ranks.axis_name, ranks.index_groups)(array)


def exchange(ranks: Ranks, blocks: jax.Array) -> jax.Array:
    """Sends block r of [R, ...] to rank r. Returns the blocks that arrive, by source rank."""
    if ranks.index_groups is None:
        return jax.lax.all_to_all(blocks, ranks.axis_name, split_axis=0, concat_axis=0)
    return among(all_to_all, ranks.axis_name, ranks.index_groups)(blocks)


def all_to_all(
    blocks: jax.Array, axis_name: str | tuple[str, ...], axis_index_groups: IndexGroups
) -> jax.Array:
    return jax.lax.all_to_all(blocks, axis_name, 0, 0, axis_index_groups=axis_index_groups)


@functools.cache
def among(
    collective: Callable[..., jax.Array], axis_name: str | tuple[str, ...], index_groups: IndexGroups
) -> Callable[[jax.Array], jax.Array]:
    """Returns a collective among each of several groups of an axis, with a rule for `jax.vmap`."""

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


def between_domains(ranks: Ranks, blocks: jax.Array) -> jax.Array:
    """Sends block d of [domains, ...] to the rank of this index in domain d. Returns those that arrive."""
    per_domain = ranks.ranks_per_domain
    alike = tuple(tuple(range(index, ranks.size, per_domain)) for index in range(per_domain))
    exchange = among(all_to_all, ranks.axis_name, alike)
    within = ranks.within
    if within is None or not ranks.spans_processes or ranks.platform != "cpu":
        return exchange(blocks)
    return _report_exchange(within, exchange(_report_exchange(within, blocks, ends=False)), ends=True)


def _report_exchange(within: Ranks, blocks: jax.Array, ends: bool) -> jax.Array:
    """Returns the blocks. On CPUs it lets `Group.check` report exchanges that begin and do not end."""
    if _extension.extension() is None:
        return blocks
    options = {"group": within.key, "num_ranks": np.int64(within.size), "ends": np.int64(ends)}
    return call("hop", [mesh_position(within, blocks), blocks], [(blocks.shape, blocks.dtype)], **options)[0]
