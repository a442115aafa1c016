"""A user's program, which `make lint` checks strictly: types of results follow from those of arguments."""

from typing import assert_type

import jax

import jax_ep
from jax_ep import DispatchedByExpert, DispatchedByRank, QuantizedArray


def program(
    group: jax_ep.Group, x: jax.Array, ids: jax.Array, w: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    sent = jax_ep.dispatch(x, ids, w, group=group, num_experts=8)
    assert_type(sent, DispatchedByExpert[jax.Array])
    assert_type(sent.x, jax.Array)
    fp8 = jax_ep.dispatch(x, ids, w, group=group, num_experts=8, quantize="fp8", capacity_factor=1.25)
    assert_type(fp8, DispatchedByExpert[QuantizedArray])
    by_rank = jax_ep.dispatch({"a": x}, ids, group=group, num_experts=8, order="rank", active_ranks=ids[0])
    assert_type(by_rank, DispatchedByRank[dict[str, jax.Array]])
    y = jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)
    assert_type(y, jax.Array)
    masked = jax_ep.combine(sent.x, sent.handle, row_weights=None, on_timeout="mask")
    assert_type(masked, tuple[jax.Array, jax.Array])
    again = jax_ep.redispatch(x, sent.handle)
    assert_type(again, jax.Array)
    both = jax_ep.redispatch(x, sent.handle, topk_weights=w)
    assert_type(both, tuple[jax.Array, jax.Array])

    def experts(sent: DispatchedByExpert[jax.Array]) -> jax.Array:
        return jax_ep.gated_mlp(sent.x, up, down, sent.group_sizes)

    scaled = jax_ep.moe(
        x, ids, w, lambda sent: jax_ep.grouped_dot(sent.x, up, sent.group_sizes), group=group, num_experts=8
    )
    assert_type(scaled, jax.Array)
    out = jax_ep.moe(x, ids, w, experts, group=group, num_experts=8)
    assert_type(out, jax.Array)
    out, stats = jax_ep.moe(x, ids, w, experts, group=group, num_experts=8, return_stats=True)
    assert_type(stats.num_dropped, jax.Array)
    gated = jax_ep.moe(x, ids, w, jax_ep.GatedExperts(up, down, quantize="fp8"), group=group)
    assert_type(gated, jax.Array)
    pending = jax_ep.dispatch_start(x, ids, group=group, num_experts=8)
    done = pending.done()
    assert_type(done, DispatchedByExpert[jax.Array])
    z = jax_ep.combine_start(done.x, done.handle).done()
    assert_type(z, jax.Array)
    plan = jax_ep.balance(ids, group=group, num_experts=8, num_redundant_experts=1)
    w = jax_ep.replicate(up, plan, group=group)
    assert_type(plan.topk_idx, jax.Array)
    assert_type(plan.capacity(8), int)
    assert_type(jax_ep.grouped_dot(x, w, done.group_sizes), jax.Array)
    p = jax_ep.permute(x, ids, num_local_experts=4)
    assert_type(p.x, jax.Array)
    return out + gated + y + z
