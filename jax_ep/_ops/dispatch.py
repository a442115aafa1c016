"""dispatch: tokens to their ranks or experts."""

import dataclasses
from typing import Literal, TypeVar, overload

import jax
from jax.typing import ArrayLike

from jax_ep import _checks, checkpoint_names
from jax_ep._checks import PyTree
from jax_ep._extension import Implementation
from jax_ep._group.group import Group, ranks_of, resolve_implementation
from jax_ep._jax.ffi_call import Call
from jax_ep._jax.sharding import align_axes, unshard
from jax_ep._ops.arguments import OpArguments, count_invalid, wrong_valid_tokens
from jax_ep._ops.dispatched import DispatchedByExpert, DispatchedByRank
from jax_ep._ops.statistics import DispatchStatistics, add_to, check_statistics
from jax_ep._rows.checkpoint import name_all
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._transport import debug
from jax_ep._transport.attendance import Attendance, OnTimeout
from jax_ep._transport.choice import Asynchronous, choose, requested_implementation
from jax_ep._transport.fp8_rows import Quantize, check_quantize, send_fp8
from jax_ep._transport.payload import Payload
from jax_ep._transport.push_pull import send
from jax_ep._transport.routing import (
    Order,
    Routing,
    in_buffers,
    uniform_rows,
    worst_case_capacity,
)

Rows = TypeVar("Rows")
Computed = TypeVar("Computed")


@overload
def dispatch(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["expert", "expert_padded"] = "expert",
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Literal["fp8"],
    round_scale: bool = False,
    num_valid_tokens: ArrayLike | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    statistics: DispatchStatistics | None = None,
    implementation: Implementation | None = None,
) -> DispatchedByExpert[QuantizedArray]: ...


@overload
def dispatch(
    x: Rows,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["expert", "expert_padded"] = "expert",
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Literal["fp8_dequantize"] | None = None,
    round_scale: bool = False,
    num_valid_tokens: ArrayLike | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    statistics: DispatchStatistics | None = None,
    implementation: Implementation | None = None,
) -> DispatchedByExpert[Rows]: ...


@overload
def dispatch(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["rank"],
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Literal["fp8"],
    round_scale: bool = False,
    num_valid_tokens: ArrayLike | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    statistics: DispatchStatistics | None = None,
    implementation: Implementation | None = None,
) -> DispatchedByRank[QuantizedArray]: ...


@overload
def dispatch(
    x: Rows,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["rank"],
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Literal["fp8_dequantize"] | None = None,
    round_scale: bool = False,
    num_valid_tokens: ArrayLike | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    statistics: DispatchStatistics | None = None,
    implementation: Implementation | None = None,
) -> DispatchedByRank[Rows]: ...


def dispatch(
    x: PyTree,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Order = "expert",
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    round_scale: bool = False,
    num_valid_tokens: ArrayLike | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    statistics: DispatchStatistics | None = None,
    implementation: Implementation | None = None,
) -> DispatchedByRank[PyTree] | DispatchedByExpert[PyTree]:
    """Sends each token to its experts, or to the ranks where they live. Call it inside `jax.shard_map`.

    Shapes are one rank's shard: T tokens on this rank, K choices per token, R ranks, E experts in all,
    L = E / R of them on each rank (expert e on rank e // L).

    Args:
      x: [T, ...] array or pytree of such arrays, of any dtype; an empty pytree routes only. Rows are moved
        bit for bit. Floating leaves of 16 bits or more are differentiable; a gradient of complex ones is an
        error. T may be 0.
      topk_idx: int32 or int64 [T, K] expert ids. -1, and any id out of range, means unused. An id that
        a token repeats is a choice of its own.
      topk_weights: floating [T, K] of 16 bits or more, or None. Differentiable.
      group: the ranks.
      num_experts: E, a multiple of R.
      order: "expert": one row for each (token, k), by local expert, then source rank, then token, then k.
        "rank": one row for each (token, rank), by source rank, then token. "expert_padded": as "expert", but
        in an array [L, C, ...] with C rows for each expert, which `grouped_dot` and `gated_mlp` take as it
        is. On GPUs the empty rows of the result may hold anything, including NaN. They are cleared only if x
        or topk_weights are differentiated, and never with quantize="fp8".
      capacity: C, rows of the result. None means the worst case of distinct ids: by rank R * T; by expert
        a * floor((R * T * min(K, L) + L * (a - 1)) / a), a the alignment. Rows past C are dropped in the
        stated order and carry no gradient; `num_dropped` counts them. Must be at least a. With
        order="expert_padded", C is the number of rows of each expert (GShard's expert capacity), and None
        means R * T; an expert's further rows are dropped.
      capacity_factor: in place of a capacity, a multiple of the rows of a uniform routing: by expert T * K,
        by rank T * min(K, R), of each padded expert R * T * K / E. It is rounded up to a multiple of a. It is
        at most the worst case.
      domain_capacity: if ranks span domains, the rows that this rank can receive in the hop between domains,
        in all. They are divided evenly among the domains, its own included: domain_capacity // domains from
        each. Must be at least the number of domains. None means T from each, so that this hop drops nothing.
        Otherwise a rank sends each domain only the first of its tokens for that domain, as many as fit. The
        later ones are dropped: their choices on that domain count as -1, and the ranks that would have
        received them count them in `num_dropped`.
      expert_alignment: a; by expert each block starts at a multiple of it. Padding rows are zero.
      quantize: None sends the rows as they are. With the other values x must be one floating array
        [T, ..., H], H a multiple of 128. "fp8" sends `quantize_fp8(x)`: the rows arrive as a
        `QuantizedArray`, as `grouped_dot` takes it. They have a gradient only in `gated_mlp`, and in
        `grouped_dot` with the result of `quantize_weights`. "fp8_dequantize" sends the same, but the rows
        arrive in x's dtype, and have the gradients of a dispatch that did not quantize ("straight through";
        a cotangent is not rounded to FP8).
      round_scale: if true, scales are rounded up to powers of two. (A number within 1/32 of the largest one
        of x's dtype may then come back as infinity.)
      num_valid_tokens: int32 scalar (or [1]), at most T. Tokens with an index from it on are ignored, as if
        all their ids were -1. Use it for partial batches. None: T.
      active_ranks: integers or bools [R], the same on all ranks. 0 marks a rank that does not take part. Its
        tokens, and choices of its experts, count as -1, and no rank waits for it. It may still call the op,
        but receives no rows. None: all ranks take part. With active_ranks or on_timeout="mask" there are
        limits (docs/howto/failing_ranks.md has all of them). The op has no gradient (TypeError). It must not
        be rematerialized, because different ranks may take part the second time. All ranks must share a
        domain (otherwise ValueError). On GPUs a rank may have at most 128 tokens, and num_sms of the group,
        if set, must be at least 8.
      on_timeout: "raise": the op fails if a rank does not come within the group's `timeout_s`. "mask": the
        others continue without it, and `active_ranks` of the result marks it 0. Pass this result to the next
        op. A rank that comes too late gets `active_ranks` with all others marked 0. (On GPUs it may first get
        the rows that they sent before the timeout. It then counts these ranks as present, and its next op
        marks them 0.) implementation="xla" waits for every rank without a limit, and returns `active_ranks`
        as they were passed.
      statistics: those of earlier dispatches, or None.
      implementation: None, "ffi" or "xla".

    Returns:
      `DispatchedByExpert` or `DispatchedByRank`, depending on `order`.

    Raises:
      ValueError: an argument is out of range or does not fit the others, or no shard_map binds the
        group's axis.
      TypeError: a leaf of x is of a kind that cannot be sent, num_valid_tokens is no integer, statistics are
        no `DispatchStatistics`, or a gradient was requested through rows of quantize="fp8" in an op
        that has none for them, or through a dispatch with active_ranks or on_timeout="mask".
    """
    sent, _ = dispatch_as(
        OpArguments("dispatch"),
        x,
        topk_idx,
        topk_weights,
        group=group,
        num_experts=num_experts,
        order=order,
        capacity=capacity,
        capacity_factor=capacity_factor,
        domain_capacity=domain_capacity,
        expert_alignment=expert_alignment,
        quantize=quantize,
        round_scale=round_scale,
        num_valid_tokens=num_valid_tokens,
        active_ranks=active_ranks,
        on_timeout=on_timeout,
        statistics=statistics,
        implementation=implementation,
    )
    return sent


def dispatch_as(
    check: OpArguments,
    x: PyTree,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None,
    *,
    group: Group,
    num_experts: int,
    order: Order = "expert",
    capacity: int | None,
    capacity_factor: float | None,
    domain_capacity: int | None,
    expert_alignment: int,
    quantize: Quantize | None,
    round_scale: bool = False,
    num_valid_tokens: ArrayLike | None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    statistics: DispatchStatistics | None = None,
    implementation: str | Asynchronous | None,
    beside: Call[Computed] | None = None,
) -> tuple[DispatchedByRank[PyTree] | DispatchedByExpert[PyTree], Computed | None]:
    """Does what `dispatch` does. Errors in its arguments name the op of `check`.

    Also returns the result of a call that runs at the same time, if there is one and it could do so.
    """
    check.require_manual(group)
    resolve_implementation(group, requested_implementation(implementation))  # raises before the other checks
    if not isinstance(order, str) or order not in ("rank", "expert", "expert_padded"):
        raise ValueError(f"{check.op}: order must be 'rank', 'expert' or 'expert_padded', got {order!r}")
    ids = check.topk_idx(topk_idx)
    num_tokens, top_k = ids.shape
    payload = Payload.check(check, "x", x, (num_tokens,), "T", "of topk_idx")
    num_experts = check.num_experts(num_experts, group.size)
    alignment = check.at_least_one("expert_alignment", expert_alignment)
    if order == "rank" and alignment != 1:
        raise ValueError(f"{check.op}: expert_alignment needs order='expert'; rows by rank are not padded")
    if order == "expert_padded" and alignment != 1:
        raise ValueError(
            f"{check.op}: order='expert_padded' has `capacity` rows for each expert, so it takes no "
            f"expert_alignment, got {alignment}"
        )
    check_quantize(check, quantize, round_scale, x, payload.leaves)
    if num_valid_tokens is not None:
        ids = check.valid_tokens(num_valid_tokens, ids)
    capacity, alignment = _capacity_and_alignment(
        check, order, capacity, capacity_factor, group.size, num_tokens, top_k, num_experts, alignment
    )
    weights = None
    if topk_weights is not None:
        weights = check.weights("topk_weights", topk_weights, ids.shape, "[T, K]")
    domain_rows = check.domain_rows(domain_capacity, group, num_tokens)
    routing = Routing(
        ranks_of(group), order, num_tokens, top_k, num_experts, capacity, alignment, domain_rows
    )
    if statistics is not None:
        check_statistics(check, statistics, routing)
    attendance = Attendance.check(check, active_ranks, on_timeout, group, statistics is not None)
    statistics = unshard(statistics)
    payload, ids, weights, attendance = align_axes((payload, ids, weights, attendance), routing.ranks.axes)
    with jax.named_scope("jax_ep.dispatch"):
        backend = choose(group, implementation, is_empty=routing.is_empty)
        if quantize is None:
            rows, out = send(backend, routing, payload, ids, weights, attendance, beside)
        else:
            options = quantize, round_scale
            rows, out = send_fp8(backend, routing, payload, ids, weights, attendance, *options, beside)
        arrived_weights = in_buffers(routing, name_all(out.weights, checkpoint_names.weights))
    if statistics is not None:
        statistics = add_to(statistics, out)
    checked = {
        "tokens_per_expert": out.tokens_per_expert,
        "num_tokens": out.num_tokens,
        "num_dropped": out.num_dropped,
        "num_invalid": count_invalid(ids, num_experts),
        "handle": out.handle,
        "active_ranks": out.attended.active_ranks,
        "statistics": statistics,
    }

    def find() -> list[debug.Finding]:
        dropped = debug.dropped_rows(routing, out.num_dropped, out.num_tokens)
        return [
            debug.invalid_ids(ids, num_experts),
            dropped,
            *wrong_valid_tokens(num_valid_tokens, ids),
        ]

    checked = debug.check(check.op, checked, find, routing.ranks, alone=out.attended.may_miss)
    common = {"x": rows, **checked}
    if out.topk_idx is not None:
        return DispatchedByRank(topk_idx=out.topk_idx, topk_weights=arrived_weights, **common), out.beside
    assert out.group_sizes is not None  # by expert
    common["handle"] = dataclasses.replace(checked["handle"], has_weights=weights is not None)
    sent = DispatchedByExpert(row_weights=arrived_weights, group_sizes=out.group_sizes, **common)
    return sent, out.beside


def _capacity_and_alignment(
    check: OpArguments,
    order: Order,
    capacity: int | None,
    capacity_factor: float | None,
    num_ranks: int,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    alignment: int,
) -> tuple[int, int]:
    """Returns the rows of the buffer, and the alignment of its blocks."""
    all_tokens, local_experts = num_ranks * num_tokens, num_experts // num_ranks
    worst = worst_case_capacity(order, all_tokens, top_k, local_experts, alignment)
    is_padded = order == "expert_padded"
    if capacity_factor is not None:
        uniform = uniform_rows(order, num_ranks, num_tokens, top_k, num_experts)
        most = all_tokens if is_padded else worst
        capacity = check.rows_of_factor(capacity_factor, capacity, uniform, most, alignment)
    if not is_padded:
        return check.capacity(capacity, worst, alignment), alignment
    if capacity is None:
        return check.capacity(None, worst, alignment), max(all_tokens, 1)
    most = _checks.MOST_ROWS // local_experts
    rows = check.at_least_one("capacity, of each expert,", capacity, most)
    return rows * local_experts, rows
