"""Balance: routing that spreads tokens over the experts, and numbers of experts that ranks do not divide.

Each function takes whole arrays and shows the `shard_map` that belongs to it. E is the number of experts, H
the width of a token, F the width inside an expert. `parameters` has the matrices "up" [E, H, F] and "down"
[E, F, H]. `group` is the `jax_ep.Group` of the axis "ep" of `mesh`. docs/recipes.md says when you need which.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from recipes_experts import feed_forward

import jax_ep


def balanced_layer(mesh, group, parameters, router, bias, x, *, top_k, capacity=None):
    """Routing as in DeepSeek-V3 (arXiv:2412.19437): `bias` [E] only helps to choose the experts.

    Returns the layer's result [N, H], the balancing loss, the number of choices of each expert [E], and the
    `MoEStats` of all ranks: `tokens_per_expert` [E], `num_tokens` and `num_dropped` [R].
    """
    num_experts = parameters["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P(), P("ep")), out_specs=(P("ep"), P(), P(), P("ep")))
    def layer(parameters, router, bias, x):
        scores = jax.nn.sigmoid(x @ router)
        _, topk_idx = jax.lax.top_k(scores + bias[None], top_k)
        weights = jnp.take_along_axis(scores, topk_idx, axis=1)
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)

        experts = lambda sent: feed_forward(parameters, sent.x, sent.group_sizes)
        y, stats = jax_ep.moe(
            x,
            topk_idx,
            weights,
            experts,
            group=group,
            num_experts=num_experts,
            capacity=capacity,
            return_stats=True,
        )
        # stats.tokens_per_expert counts only the rows that found a place. An expert that is chosen too often
        # must look so even where its rows are dropped, so the choices themselves are counted.
        layout = jax_ep.get_dispatch_layout(topk_idx, num_experts=num_experts, num_ranks=group.size)
        counts = jax.lax.psum(layout.num_tokens_per_expert, "ep")
        share = counts / jnp.sum(counts)
        probabilities = scores / jnp.sum(scores, axis=1, keepdims=True)
        mean = jax.lax.pmean(jnp.mean(probabilities, axis=0), "ep")
        loss = num_experts * jnp.sum(share * mean)  # 1 where all experts get the same
        return y, loss, counts, stats

    return layer(parameters, router, bias, x)


def updated_bias(bias, counts, speed=1e-3):
    """The bias [E] of the next step: larger where an expert got too few tokens, smaller where too many."""
    counts = counts.astype(bias.dtype)
    return bias + speed * jnp.sign(jnp.mean(counts) - counts)


def expert_places(num_experts, num_ranks):
    """Where each expert lies among experts that were padded to a multiple of the ranks: int32 [E].

    They are dealt out to the ranks like cards, so the numbers of experts on two ranks differ by at most one.
    """
    each = -(-num_experts // num_ranks)
    expert = np.arange(num_experts, dtype=np.int32)
    return expert % num_ranks * each + expert // num_ranks


def pad_experts(parameters, num_ranks):
    """Parameters [E, ...] with experts of zeros added, so that the ranks divide their number."""

    def pad(leaf):
        num_experts = leaf.shape[0]
        padded = jnp.zeros((-(-num_experts // num_ranks) * num_ranks, *leaf.shape[1:]), leaf.dtype)
        return padded.at[expert_places(num_experts, num_ranks)].set(leaf)

    return jax.tree.map(pad, parameters)


def uneven_experts(mesh, group, padded, num_experts, x, topk_idx, topk_weights):
    """`num_experts` experts, though the ranks do not divide them: `padded` is what `pad_experts` returned."""
    places = jnp.asarray(expert_places(num_experts, group.size))
    num_padded = padded["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(padded, x, topk_idx, topk_weights):
        experts = lambda sent: feed_forward(padded, sent.x, sent.group_sizes)
        # Unused choices stay unused. No token chooses an expert of zeros.
        used = (topk_idx >= 0) & (topk_idx < num_experts)
        at = jnp.where(used, places[jnp.where(used, topk_idx, 0)], -1)
        return jax_ep.moe(x, at, topk_weights, experts, group=group, num_experts=num_padded)

    return layer(padded, x, topk_idx, topk_weights)
