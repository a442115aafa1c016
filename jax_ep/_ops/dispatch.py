"""dispatch and redispatch: tokens to their ranks or experts."""

import dataclasses
from typing import Any, Literal, TypedDict, Unpack, overload

import jax

from jax_ep import _checks
from jax_ep._group.group import Group
from jax_ep._jax.sharding import align_axes, unshard
from jax_ep._ops import arguments
from jax_ep._ops.arguments import open_handle, require_manual
from jax_ep._ops.statistics import DispatchStatistics, add_to, check_statistics
from jax_ep._transport.attendance import Attendance, OnTimeout
from jax_ep._transport.checkpoint import CHECKPOINT_WEIGHTS, name_all
from jax_ep._transport.choice import choose, requested_implementation
from jax_ep._transport.fp8_rows import Quantize, choose_send
from jax_ep._transport.payload import Payload
from jax_ep._transport.push_pull import arrived, push
from jax_ep._transport.routing import Handle, Order, Routing, in_slots, row_experts, worst_case_capacity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchedByRank:
    """Rows that arrived at this rank, one per token. C rows of capacity, K choices, L local experts."""

    x: Any
    """[C, ...] rows, an array or pytree as passed in, by source rank, then token; zero in the tail. A
    `QuantizedArray` with quantize="fp8"."""
    topk_idx: jax.Array
    """int32 [C, K] local ids of the experts here that the token chose, -1 elsewhere and in the tail."""
    topk_weights: jax.Array | None
    """float32 [C, K] weights of these choices, 0 where the id is -1; None if no weights were passed."""
    tokens_per_expert: jax.Array
    """int32 [L] kept (row, k) pairs of each expert."""
    num_tokens: jax.Array
    """int32 [1] rows kept at this rank."""
    num_dropped: jax.Array
    """int32 [1] rows dropped because the buffer of this rank was full."""
    handle: Handle
    """Destinations of all rows, for `combine` and `redispatch`."""
    active_ranks: jax.Array | None
    """int32 [R] 1 for each rank that took part, as seen by this rank; None unless `active_ranks` or
    on_timeout="mask" was passed."""
    statistics: DispatchStatistics | None
    """The statistics that were passed plus those of this dispatch; None if none were passed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchedByExpert:
    """Rows that arrived at this rank, one per choice. C rows of capacity, L local experts.

    With order="expert_padded" buffers are [L, R * T, ...] instead of [C, ...]: R * T slots for each expert.
    On GPUs empty slots of x may hold anything, including NaN. If x or topk_weights are differentiated, they
    are zero, except with quantize="fp8". `is_row` is their mask, and `row_weights` are 0 there.
    """

    x: Any
    """[C, ...] rows, an array or pytree as passed in, by local expert, then source rank, then token, then
    k; zero in padding and tail (of padded experts see above). A `QuantizedArray` with quantize="fp8"."""
    row_weights: jax.Array | None
    """float32 [C] weight of each row's choice, 0 in padding and tail; None if no weights were passed."""
    group_sizes: jax.Array
    """int32 [L] rows of each expert's block, padding included, as `jax.lax.ragged_dot` takes them; of padded
    experts the slots that are filled, which come first."""
    tokens_per_expert: jax.Array
    """int32 [L] kept rows of each expert, without padding."""
    num_tokens: jax.Array
    """int32 [1] rows kept at this rank, without padding: a token counts once for each of its choices."""
    num_dropped: jax.Array
    """int32 [1] rows dropped because the buffer of this rank was full."""
    handle: Handle
    """Destinations of all rows, for `combine` and `redispatch`."""
    active_ranks: jax.Array | None
    """int32 [R] 1 for each rank that took part, as seen by this rank; None unless `active_ranks` or
    on_timeout="mask" was passed."""
    statistics: DispatchStatistics | None
    """The statistics that were passed plus those of this dispatch; None if none were passed."""

    def row_experts(self) -> jax.Array:
        """Returns int32 [C] or [L, R * T]: the local expert of each row, -1 in padding and tail.

        Each call computes it, from one rank's shard. Call it inside the shard_map of the dispatch.
        """
        handle = arguments.handle("row_experts", self.handle)
        return in_slots(handle.routing, row_experts(handle))

    def is_row(self) -> jax.Array:
        """Returns bool [C] or [L, R * T]: which rows hold a token, not padding or tail."""
        return self.row_experts() >= 0


class DispatchOptions(TypedDict, total=False):
    """Options of `dispatch` that do not change the type of its result."""

    capacity: int | None
    host_capacity: int | None
    expert_alignment: int
    quantize: Quantize | None
    round_scale: bool
    num_valid_tokens: Any
    active_ranks: Any
    on_timeout: OnTimeout
    statistics: DispatchStatistics | None
    implementation: str | None


@overload
def dispatch(
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["expert", "expert_padded"] = "expert",
    **options: Unpack[DispatchOptions],
) -> DispatchedByExpert: ...


@overload
def dispatch(
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["rank"],
    **options: Unpack[DispatchOptions],
) -> DispatchedByRank: ...


def dispatch(
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    group: Group,
    num_experts: int,
    order: Order = "expert",
    capacity: int | None = None,
    host_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    round_scale: bool = False,
    num_valid_tokens: Any = None,
    active_ranks: Any = None,
    on_timeout: OnTimeout = "raise",
    statistics: DispatchStatistics | None = None,
    implementation: str | None = None,
) -> DispatchedByRank | DispatchedByExpert:
    """Sends each token to its experts, or to the ranks where they live. Call it inside `jax.shard_map`.

    Shapes are one rank's shard: T tokens on this rank, K choices a token, R ranks, E experts in all,
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
        in an array [L, R * T, ...] with R * T slots for each expert, and without a capacity. Use it for
        batched products over all slots, with few tokens. On GPUs empty slots are not cleared: what x holds
        there may be NaN.
      capacity: C, rows of the result. None means the worst case of distinct ids: by rank R * T; by expert
        a * floor((R * T * min(K, L) + L * (a - 1)) / a), a the alignment. Rows past C are dropped in the
        stated order and carry no gradient; `num_dropped` counts them. Must be at least a.
      host_capacity: if ranks span hosts, the rows that this rank can receive in the hop between hosts, in
        all. They are divided evenly among the hosts, its own included: host_capacity // hosts from each. Must
        be at least the number of hosts. None means T from each, so that this hop drops nothing. Otherwise
        each host keeps the first tokens of a rank that fit. Of a token that is dropped, the choices on that
        host count as -1, and the ranks there that would have received it count it in `num_dropped`.
      expert_alignment: a; by expert each block starts at a multiple of it. Padding rows are zero.
      quantize: None sends the rows as they are. With the other values x must be one floating array
        [T, ..., H], H a multiple of 128. "fp8" sends `quantize_fp8(x)`: the rows arrive as a
        `QuantizedArray`, as `grouped_dot` takes it, and have a gradient only in `gated_mlp`. "fp8_dequantize"
        sends the same, but the rows arrive in x's dtype, and have the gradients of a dispatch that did not
        quantize ("straight through"; a cotangent is not rounded to FP8).
      round_scale: if true, scales are rounded up to powers of two. (A number within 1/32 of the largest one
        of x's dtype may then come back as infinity.)
      num_valid_tokens: int32 scalar (or [1]), at most T. Tokens with an index from it on are ignored, as if
        all their ids were -1. Use it for partial batches. None: T.
      active_ranks: integers or bools [R], the same on all ranks. None: all take part. A rank marked 0 is
        skipped: its tokens, and choices of its experts, count as -1, and no rank waits for it. It may still
        call the op, but nothing arrives there. Limits: no gradient goes through a dispatch with active_ranks
        or on_timeout="mask" (TypeError); it must not be rematerialized, because other ranks might take part
        the second time; all ranks must share a host (otherwise ValueError); on GPUs a rank has few tokens,
        and the group's num_sms must be at least 8 (docs/howto/failing_ranks.md has all limits).
      on_timeout: "raise": a rank that does not come within the group's `timeout_s` makes the op fail. "mask":
        the others continue without it, and `active_ranks` of the result marks it 0. Pass those to the next
        op. A rank that comes too late gets `active_ranks` with all others marked 0. (On GPUs it may first get
        the rows that they had sent before they gave up. It then counts these ranks as present, and its next
        op marks them.) With implementation="xla" every rank is waited for, however long, and `active_ranks`
        are returned as they were passed.
      statistics: those of earlier dispatches, or None.
      implementation: None, "ffi" or "xla".

    Returns:
      `DispatchedByExpert` or `DispatchedByRank`, depending on `order`.

    Raises:
      ValueError: an argument is out of range or does not fit the others, or no shard_map binds the
        group's axis.
      TypeError: a leaf of x is of a kind that cannot be sent, num_valid_tokens is no integer, statistics are
        no `DispatchStatistics`, or a gradient was asked for through rows of quantize="fp8", outside of
        `gated_mlp`, or through a dispatch that ranks may miss.
    """
    require_manual("dispatch", group)
    group._resolve(requested_implementation(implementation))  # raises before the other checks
    if not isinstance(order, str) or order not in ("rank", "expert", "expert_padded"):
        raise ValueError(f"dispatch: order must be 'rank', 'expert' or 'expert_padded', got {order!r}")
    ids = _checks.topk_idx("dispatch", topk_idx)
    num_tokens, top_k = ids.shape
    payload = Payload.check("dispatch", "x", x, (num_tokens,), "T", "of topk_idx")
    num_experts = _checks.num_experts("dispatch", num_experts, group.size)
    alignment = _checks.at_least_one("dispatch", "expert_alignment", expert_alignment)
    if order == "rank" and alignment != 1:
        raise ValueError("dispatch: expert_alignment needs order='expert'; rows by rank are not padded")
    if order == "expert_padded" and (alignment != 1 or capacity is not None):
        raise ValueError(
            "dispatch: order='expert_padded' has R * T rows for each expert, so it takes neither a capacity "
            f"nor an expert_alignment, got {capacity} and {alignment}"
        )
    send = choose_send(quantize, round_scale, x, payload.leaves)
    if num_valid_tokens is not None:
        ids = arguments.valid_tokens("dispatch", num_valid_tokens, ids)
    worst = worst_case_capacity(order, group.size * num_tokens, top_k, num_experts // group.size, alignment)
    capacity = _checks.capacity("dispatch", capacity, worst, alignment)
    if order == "expert_padded":
        alignment = max(group.size * num_tokens, 1)
    weights = None
    if topk_weights is not None:
        weights = _checks.weights("dispatch", "topk_weights", topk_weights, ids.shape, "[T, K]")
    host_rows = arguments.host_rows("dispatch", host_capacity, group, num_tokens)
    routing = Routing(group, order, num_tokens, top_k, num_experts, capacity, alignment, host_rows)
    if statistics is not None:
        check_statistics(statistics, routing)
    attendance = Attendance.check("dispatch", active_ranks, on_timeout, group, statistics is not None)
    statistics = unshard(statistics)
    operands = align_axes((payload, ids, weights, attendance), group._axes)
    with jax.named_scope("jax_ep.dispatch"):
        rows, out = send(choose(routing, implementation), routing, *operands)
        arrived_weights = in_slots(routing, name_all(out.weights, CHECKPOINT_WEIGHTS))
    if statistics is not None:
        statistics = add_to(statistics, out)
    common = {
        "x": rows,
        "tokens_per_expert": out.tokens_per_expert,
        "num_tokens": out.num_tokens,
        "num_dropped": out.num_dropped,
        "handle": out.handle,
        "active_ranks": out.attended.active_ranks,
        "statistics": statistics,
    }
    if out.topk_idx is not None:
        return DispatchedByRank(topk_idx=out.topk_idx, topk_weights=arrived_weights, **common)
    assert out.group_sizes is not None  # by expert
    return DispatchedByExpert(row_weights=arrived_weights, group_sizes=out.group_sizes, **common)


@overload
def redispatch(
    x: Any, handle: Handle, *, topk_weights: None = None, implementation: str | None = None
) -> Any: ...


@overload
def redispatch(
    x: Any, handle: Handle, *, topk_weights: jax.typing.ArrayLike, implementation: str | None = None
) -> tuple[Any, jax.Array]: ...


def redispatch(x: Any, handle: Handle, *, topk_weights: Any = None, implementation: str | None = None) -> Any:
    """Sends another payload along the routes of an earlier dispatch. Call it inside `jax.shard_map`.

    Each row lands where that dispatch put the token's row; what was dropped stays dropped, padding, tail
    and empty slots are zero. It is the transpose of an unweighted `combine`.

    Args:
      x: [T, ...] array or pytree of such arrays, as for `dispatch`; it may be empty where weights are given.
      handle: of the dispatch.
      topk_weights: floating [T, K] of 16 bits or more, or None. Differentiable.
      implementation: None, "ffi" or "xla".

    Returns:
      The rows [C, ...], or [L, R * T, ...] of padded experts, as x is made; with topk_weights
      `(rows, weights)`, the weights as `dispatch` gives them: [C, K] by rank, [C] or [L, R * T] by expert.

    Raises:
      ValueError: shapes do not fit the handle, or no shard_map binds the axis of its group.
      TypeError: a leaf of x, or the handle, is of a kind that cannot be sent.
    """
    handle, backend = open_handle("redispatch", handle, implementation)
    routing = handle.routing
    payload = Payload.check("redispatch", "x", x, (routing.num_tokens,), "T", "of the handle")
    weights = None
    if topk_weights is not None:
        shape = (routing.num_tokens, routing.top_k)
        weights = _checks.weights("redispatch", "topk_weights", topk_weights, shape, "[T, K]")
    if not payload.leaves and weights is None:
        raise ValueError(f"redispatch: x holds no array, got {x!r}; pass rows, or topk_weights, or both")
    handle, payload, weights = align_axes((handle, payload, weights), routing.group._axes)
    with jax.named_scope("jax_ep.redispatch"):
        moved, arrived_weights = push(backend, handle, payload.leaves, weights)
        rows = arrived("redispatch", routing, payload, moved)
    if topk_weights is None:
        return rows
    return rows, in_slots(routing, name_all(arrived_weights, CHECKPOINT_WEIGHTS))
