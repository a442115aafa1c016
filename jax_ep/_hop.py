"""Hop 1, between hosts, by JAX's collectives. Where hosts are joined by rails, `_ffi.py` takes these."""

import jax
import numpy as np

from jax_ep import _extension
from jax_ep._call import call
from jax_ep._collectives import all_to_all, among, place
from jax_ep._group import Group


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
