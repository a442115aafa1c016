"""moe: the whole expert-parallel layer."""

from collections.abc import Callable
from typing import Any

import jax

from jax_ep._combine import combine
from jax_ep._dispatch import dispatch
from jax_ep._group import Group


def moe(
    x: jax.Array,
    topk_idx: Any,
    topk_weights: Any,
    expert_fn: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
    expert_alignment: int = 1,
    implementation: str | None = None,
) -> jax.Array:
    """A Mixture-of-Experts layer: tokens to their experts, the experts, the weighted sum back.

    Call it inside `jax.shard_map`, with `expert_fn` closing over this rank's expert weights.

    Args:
      x: [T, H] tokens of this rank.
      topk_idx: int32 or int64 [T, K] experts of each token, -1 unused.
      topk_weights: floating [T, K].
      expert_fn: (rows [C, H], group_sizes int32 [L]) -> [C, H']. The rows of expert l follow those of
        expert l - 1; `jax_ep.grouped_dot(rows, w, group_sizes)` with w [L, H, H'] is such a product (on
        NVIDIA GPUs `jax.lax.ragged_dot` is right too, but multiplies all rows by every matrix). What it
        returns for padding and tail rows does not matter.
      group: the ranks.
      num_experts: E, in all.
      capacity: C, rows that this rank can take; None means the worst case. Further rows are dropped:
        their experts add nothing to the token.
      expert_alignment: each expert's rows start at a multiple of it.
      implementation: None, "ffi" or "xla".

    Returns:
      [T, H'] sums over k of topk_weights[:, k] * expert_k(x), in the dtype of expert_fn's result.
    """
    sent = dispatch(
        x,
        topk_idx,
        topk_weights,
        group=group,
        num_experts=num_experts,
        order="expert",
        capacity=capacity,
        expert_alignment=expert_alignment,
        implementation=implementation,
    )
    assert sent.group_sizes is not None  # it is there by expert
    with jax.named_scope("jax_ep.experts"):
        y = expert_fn(sent.x, sent.group_sizes)
    return combine(y, sent.handle, group=group, topk_weights=sent.topk_weights, implementation=implementation)
