"""What ranks tell each other where they span hosts: a few numbers, in the same two hops as rows.

Between hosts each rank hears from one rank of every other host, and so it finds out by itself if one of them
has ended: in a ring, as JAX's gather may be, it would wait for a neighbour that does not fail. Within a host
the numbers take an op of that host, whose waits are bounded.
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from jax_ep._handle import Routing


def exchange_within(module: ModuleType, routing: Routing, blocks: jax.Array) -> jax.Array:
    """[ranks of a host, n]: block r goes to rank r of this host, and what it sends takes its place."""
    within = routing.within
    ranks = within.num_ranks
    # A dispatch by rank, in which each rank has a token for each: they arrive by source.
    one_each = Routing(within.group, "rank", ranks, 1, ranks, ranks, 1)
    ids = jnp.arange(ranks, dtype=jnp.int32)[:, None]
    return module.route(one_each, (blocks,), ids, None).rows[0]


def exchange(module: ModuleType, routing: Routing, blocks: jax.Array) -> jax.Array:
    """[R, n]: block r goes to rank r, and what it sends takes its place."""
    hosts, per_host = routing.num_hosts, routing.within.num_ranks
    came = module.between_hosts(routing.group, blocks.reshape(hosts, -1)).reshape(hosts, per_host, -1)
    came = exchange_within(module, routing, came.swapaxes(0, 1).reshape(per_host, -1))
    return came.reshape(per_host, hosts, -1).swapaxes(0, 1).reshape(blocks.shape)


def gather_numbers(module: ModuleType, routing: Routing, numbers: jax.Array) -> jax.Array:
    """[R, n] from every rank's numbers [n]."""
    hosts, per_host = routing.num_hosts, routing.within.num_ranks
    came = module.between_hosts(routing.group, jnp.broadcast_to(numbers, (hosts, *numbers.shape)))
    came = exchange_within(module, routing, jnp.broadcast_to(came.reshape(1, -1), (per_host, came.size)))
    return came.reshape(per_host, hosts, -1).swapaxes(0, 1).reshape(routing.num_ranks, -1)
