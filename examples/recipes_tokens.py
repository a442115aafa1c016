"""Other kinds of token input: a smaller batch, the same tokens on every rank, or a mask instead of ids.

Each function takes whole arrays and contains its `shard_map`. E is the number of experts, H
the width of a token, F the width inside an expert. `parameters` has the matrices "up" [E, H, F] and "down"
[E, F, H]. `group` is the `jax_ep.Group` of the axis "ep" of `mesh`. docs/recipes.md shows when to use each.
The default buffers drop no rows; with a capacity, watch the `num_dropped` of `dispatch` and `moe`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from recipes_experts import feed_forward

import jax_ep


def last_batch(mesh, group, parameters, router, top_k, x, num_tokens):
    """Runs a batch `x` [N, H] in which only the first `num_tokens` (an int32 scalar) rows are tokens.

    N is the same for all batches, so they share one compiled program.
    """
    num_experts = parameters["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P("ep"), P()), out_specs=P("ep"))
    def layer(parameters, router, x, num_tokens):
        weights, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ router), top_k)
        # The number of tokens on this rank. No row is sent for the other rows of x, and their sums are zero.
        here = jnp.clip(num_tokens - jax.lax.axis_index("ep") * x.shape[0], 0, x.shape[0])
        experts = lambda sent: feed_forward(parameters, sent.x, sent.group_sizes)
        shared = {"group": group, "num_experts": num_experts}
        return jax_ep.moe(x, topk_idx, weights, experts, **shared, num_valid_tokens=here)

    return layer(parameters, router, x, num_tokens)


def replicated_tokens(mesh, group, parameters, x, topk_idx, topk_weights):
    """Runs tokens that every rank has, as in decoding: x [T, H], topk_idx and topk_weights [T, K].

    No dispatch is needed. Each rank computes the contribution of its own experts, and `psum` adds these.
    """
    num_local_experts = parameters["up"].shape[0] // group.size

    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P(), P()), out_specs=P())
    def layer(parameters, x, topk_idx, topk_weights):
        first = jax.lax.axis_index("ep") * num_local_experts
        # Experts of earlier ranks get negative ids here, and those of later ranks get ids that are too large.
        # Both count as unused, so no mask is needed.
        local = topk_idx - first
        sent = jax_ep.permute(x, local, num_local_experts=num_local_experts)
        y = feed_forward(parameters, sent.x, sent.group_sizes)
        # In float32, so that the sum over all ranks is rounded only once.
        part = jax_ep.unpermute(y, sent.row_map, topk_weights=topk_weights, out_dtype=jnp.float32)
        return jax.lax.psum(part, "ep").astype(x.dtype)

    return layer(parameters, x, topk_idx, topk_weights)


def ids_of_mask(chosen, probabilities, top_k):
    """Converts a mask (or routing map) `chosen`, bool [T, E], to `topk_idx` and `topk_weights` [T, top_k].

    If a token has more than top_k experts, the first top_k are used. If it has fewer, the remaining ids are
    -1 (unused).
    """
    # Among equal values top_k takes the earlier first: the chosen experts in ascending order, then others.
    named, topk_idx = jax.lax.top_k(chosen.astype(jnp.int32), top_k)
    topk_weights = jnp.take_along_axis(probabilities, topk_idx, axis=1)
    return jnp.where(named > 0, topk_idx, -1), topk_weights


def routing_map(mesh, group, parameters, top_k, x, chosen, probabilities):
    """Runs the experts of a mask `chosen`, bool [N, E], with weights `probabilities` [N, E]."""
    num_experts = parameters["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(parameters, x, chosen, probabilities):
        topk_idx, topk_weights = ids_of_mask(chosen, probabilities, top_k)
        experts = lambda sent: feed_forward(parameters, sent.x, sent.group_sizes)
        return jax_ep.moe(x, topk_idx, topk_weights, experts, group=group, num_experts=num_experts)

    return layer(parameters, x, chosen, probabilities)
