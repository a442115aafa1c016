"""Load balance: balanced routing, static placement, and experts that are not a multiple of the ranks.

Each function takes whole arrays and contains its `shard_map`. E is the number of experts, H
the width of a token, F the width inside an expert. `parameters` has the matrices "up" [E, H, F] and "down"
[E, F, H]. `group` is the `jax_ep.Group` of the axis "ep" of `mesh`. docs/recipes.md shows when to use each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recipes_experts import feed_forward

import jax_ep


def balanced_layer(mesh, group, parameters, router, bias, x, *, top_k, capacity=None):
    """Routes as DeepSeek-V3 does (arXiv:2412.19437): `bias` [E] affects only the choice of experts.

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
        # stats.tokens_per_expert does not count dropped rows, so an overloaded expert could seem balanced.
        # Therefore count the choices.
        layout = jax_ep.get_dispatch_layout(topk_idx, num_experts=num_experts, num_ranks=group.size)
        counts = jax.lax.psum(layout.num_tokens_per_expert, "ep")
        share = counts / jnp.sum(counts)
        probabilities = scores / jnp.sum(scores, axis=1, keepdims=True)
        mean = jax.lax.pmean(jnp.mean(probabilities, axis=0), "ep")
        loss = num_experts * jnp.sum(share * mean)  # 1 if all experts get the same number
        return y, loss, counts, stats

    return layer(parameters, router, bias, x)


def updated_bias(bias, counts, speed=1e-3):
    """Returns the next bias [E]: larger for experts with too few tokens, smaller for those with too many."""
    counts = counts.astype(bias.dtype)
    return bias + speed * jnp.sign(jnp.mean(counts) - counts)


def plan_placement(mesh, counts, num_redundant_experts):
    """Returns the `jax_ep.Placement` of all experts: hot ones are also in redundant places of other ranks.

    counts [R, E] is the number of choices of each rank for each expert, summed over past steps. Zeros give
    the initial placement, with empty places.
    """
    placement = jax_ep.plan_redundant_experts(counts, num_redundant_experts=num_redundant_experts)
    # Placements that are sharded alike share a compiled program.
    return jax.device_put(placement, NamedSharding(mesh, P()))


def replicate_experts(mesh, group, parameters, placement):
    """Sends the weights [E, ...] to where `placement` needs them, once. Returns what `replicate` returns."""

    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P()), out_specs=P("ep"))
    def place(parameters, placement):
        return jax_ep.replicate(parameters, placement, group=group)

    return place(parameters, placement)


def placed_experts(mesh, group, placed, placement, x, topk_idx, topk_weights):
    """Serves a step with the weights of `replicate_experts`. No weights are sent.

    Returns the layer's result [N, H] and the number of choices of each rank for each expert [R, E].
    """

    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P("ep"), P("ep"), P("ep")), out_specs=P("ep"))
    def layer(placed, placement, x, topk_idx, topk_weights):
        step = jax_ep.balance(topk_idx, group=group, placement=placement, instances="local")
        sent = jax_ep.dispatch(x, step.topk_idx, topk_weights, group=group, num_experts=step.num_experts)
        y = feed_forward(placed, sent.x, sent.group_sizes)
        layout = jax_ep.get_dispatch_layout(
            topk_idx, num_experts=placement.num_logical_experts, num_ranks=group.size
        )
        counts = layout.num_tokens_per_expert[None]  # by logical expert, for the next placement
        return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights), counts

    return layer(placed, placement, x, topk_idx, topk_weights)


def expert_places(num_experts, num_ranks):
    """Returns each expert's index among the padded experts, int32 [E].

    Consecutive experts go to consecutive ranks, so the numbers of experts on two ranks differ by at most one.
    """
    each = -(-num_experts // num_ranks)
    expert = np.arange(num_experts, dtype=np.int32)
    return expert % num_ranks * each + expert // num_ranks


def pad_experts(parameters, num_ranks):
    """Pads parameters [E, ...] with experts of zeros, to a multiple of the ranks."""

    def pad(leaf):
        num_experts = leaf.shape[0]
        padded = jnp.zeros((-(-num_experts // num_ranks) * num_ranks, *leaf.shape[1:]), leaf.dtype)
        return padded.at[expert_places(num_experts, num_ranks)].set(leaf)

    return jax.tree.map(pad, parameters)


def uneven_experts(mesh, group, padded, num_experts, x, topk_idx, topk_weights):
    """Runs any number of experts. `padded` is the result of `pad_experts`."""
    places = jnp.asarray(expert_places(num_experts, group.size))
    num_padded = padded["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(padded, x, topk_idx, topk_weights):
        experts = lambda sent: feed_forward(padded, sent.x, sent.group_sizes)
        # Unused choices stay unused. No token chooses a padding expert.
        used = (topk_idx >= 0) & (topk_idx < num_experts)
        at = jnp.where(used, places[jnp.where(used, topk_idx, 0)], -1)
        return jax_ep.moe(x, at, topk_weights, experts, group=group, num_experts=num_padded)

    return layer(padded, x, topk_idx, topk_weights)
