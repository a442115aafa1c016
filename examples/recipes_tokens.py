"""Tokens that come in other ways: fewer than usual, the same ones on every rank, or with a mask for ids.

Each function takes whole arrays and shows the `shard_map` that belongs to it. E is the number of experts, H
the width of a token, F the width inside an expert. `parameters` has the matrices "up" [E, H, F] and "down"
[E, F, H]. `group` is the `jax_ep.Group` of the axis "ep" of `mesh`. docs/recipes.md says when you need which.
The buffers hold all rows; with a capacity, watch the `num_dropped` that `dispatch` and `moe` return.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from recipes_experts import feed_forward

import jax_ep


def last_batch(mesh, group, parameters, router, top_k, x, num_tokens):
    """A batch `x` [N, H] of which only the first `num_tokens` rows, an int32 scalar, are tokens.

    N is the same for all batches, so one compiled program runs them all.
    """
    num_experts = parameters["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P("ep"), P()), out_specs=P("ep"))
    def layer(parameters, router, x, num_tokens):
        weights, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ router), top_k)
        # How many of the tokens are this rank's. No row is sent for the others, and their sums are zero.
        here = jnp.clip(num_tokens - jax.lax.axis_index("ep") * x.shape[0], 0, x.shape[0])
        experts = lambda sent: feed_forward(parameters, sent.x, sent.group_sizes)
        shared = {"group": group, "num_experts": num_experts}
        return jax_ep.moe(x, topk_idx, weights, experts, **shared, num_valid_tokens=here)

    return layer(parameters, router, x, num_tokens)


def replicated_tokens(mesh, group, parameters, x, topk_idx, topk_weights):
    """All tokens on every rank, as when one sequence is decoded: x [T, H], topk_idx and topk_weights [T, K].

    Nothing is dispatched. Each rank computes what its own experts add, and the ranks add that up.
    """
    num_local_experts = parameters["up"].shape[0] // group.size

    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P(), P()), out_specs=P())
    def layer(parameters, x, topk_idx, topk_weights):
        first = jax.lax.axis_index("ep") * num_local_experts
        # Experts of earlier ranks get negative ids here, those of later ranks ids that are too large. Both
        # count as unused, so no mask is needed.
        local = topk_idx - first
        sent = jax_ep.permute(x, local, num_local_experts=num_local_experts)
        y = feed_forward(parameters, sent.x, sent.group_sizes)
        # In float32, so that the sum over all ranks is rounded only once.
        part = jax_ep.unpermute(y, sent.row_map, topk_weights=topk_weights, out_dtype=jnp.float32)
        return jax.lax.psum(part, "ep").astype(x.dtype)

    return layer(parameters, x, topk_idx, topk_weights)


def ids_of_mask(chosen, probabilities, top_k):
    """The choices `topk_idx` and `topk_weights` [T, top_k] of a mask (or routing map) `chosen`, bool [T, E].

    Where a mask names more than top_k experts, the first top_k are taken. Where it names fewer, the remaining
    ids are -1, unused.
    """
    # Of equal values top_k takes the earlier one first: the named experts, in ascending order, then others.
    named, topk_idx = jax.lax.top_k(chosen.astype(jnp.int32), top_k)
    topk_weights = jnp.take_along_axis(probabilities, topk_idx, axis=1)
    return jnp.where(named > 0, topk_idx, -1), topk_weights


def routing_map(mesh, group, parameters, top_k, x, chosen, probabilities):
    """Experts named by a mask `chosen`, bool [N, E], with weights `probabilities` [N, E]."""
    num_experts = parameters["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(parameters, x, chosen, probabilities):
        topk_idx, topk_weights = ids_of_mask(chosen, probabilities, top_k)
        experts = lambda sent: feed_forward(parameters, sent.x, sent.group_sizes)
        return jax_ep.moe(x, topk_idx, topk_weights, experts, group=group, num_experts=num_experts)

    return layer(parameters, x, chosen, probabilities)
