"""redispatch: another payload along the routes of an earlier dispatch."""

from typing import Literal, TypeVar, overload

import jax
from jax.typing import ArrayLike

from jax_ep import checkpoint_names
from jax_ep._checks import PyTree
from jax_ep._extension import Implementation
from jax_ep._jax.sharding import align_axes
from jax_ep._ops.arguments import OpArguments
from jax_ep._rows.checkpoint import name_all
from jax_ep._transport.attendance import Attendance, AttendanceResult, OnTimeout
from jax_ep._transport.backend import Push
from jax_ep._transport.payload import Payload
from jax_ep._transport.push_pull import arrived, push, push_attended
from jax_ep._transport.routing import Handle, in_buffers

Rows = TypeVar("Rows")


@overload
def redispatch(  # pyright: ignore[reportOverlappingOverload]
    x: Rows,
    handle: Handle,
    *,
    topk_weights: None = None,
    active_ranks: None = None,
    on_timeout: Literal["raise"] = "raise",
    implementation: Implementation | None = None,
) -> Rows: ...


@overload
def redispatch(  # pyright: ignore[reportOverlappingOverload]
    x: Rows,
    handle: Handle,
    *,
    topk_weights: ArrayLike,
    active_ranks: None = None,
    on_timeout: Literal["raise"] = "raise",
    implementation: Implementation | None = None,
) -> tuple[Rows, jax.Array]: ...


@overload
def redispatch(
    x: Rows,
    handle: Handle,
    *,
    topk_weights: None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    implementation: Implementation | None = None,
) -> tuple[Rows, jax.Array]: ...


@overload
def redispatch(
    x: Rows,
    handle: Handle,
    *,
    topk_weights: ArrayLike,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    implementation: Implementation | None = None,
) -> tuple[Rows, jax.Array, jax.Array]: ...


def redispatch(
    x: PyTree,
    handle: Handle,
    *,
    topk_weights: ArrayLike | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    implementation: Implementation | None = None,
) -> PyTree:
    """Sends another payload along the routes of an earlier dispatch. Call it inside `jax.shard_map`.

    Each row lands where that dispatch put the token's row; what was dropped stays dropped, padding, tail
    and empty rows are zero. It is the transpose of an unweighted `combine`.

    Args:
      x: [T, ...] array or pytree of such arrays, as for `dispatch`; it may be empty where weights are given.
      handle: of the dispatch.
      topk_weights: floating [T, K] of 16 bits or more, or None. Differentiable.
      active_ranks: integers or bools [R], as for `dispatch`, with its limits. Rows of ranks that do not take
        part are zero.
      on_timeout: "raise" or "mask", as for `dispatch`.
      implementation: None, "ffi" or "xla".

    Returns:
      The rows [C, ...], or [L, C, ...] with padded experts, in the structure of x. With topk_weights:
      `(rows, weights)`, where the weights are [C, K] by rank, and [C] or [L, C] by expert, as from
      `dispatch`. With active_ranks, or on_timeout="mask", the resulting `active_ranks`, int32 [R], come last
      in the tuple.

    Raises:
      ValueError: shapes do not fit the handle, or no shard_map binds the axis of its group.
      TypeError: a leaf of x, or the handle, is of a kind that cannot be sent; a gradient was asked for
        through a redispatch that ranks may miss.
    """
    check = OpArguments("redispatch")
    handle, backend = check.open_handle(handle, implementation)
    routing = handle.routing
    payload = Payload.check(check, "x", x, (routing.num_tokens,), "T", "of the handle")
    weights = None
    if topk_weights is not None:
        shape = (routing.num_tokens, routing.top_k)
        weights = check.weights("topk_weights", topk_weights, shape, "[T, K]")
    if not payload.leaves and weights is None:
        raise ValueError(f"{check.op}: x holds no array, got {x!r}; pass rows, or topk_weights, or both")
    attendance = Attendance.check(check, active_ranks, on_timeout, routing.group)
    operands = (handle, payload, weights, attendance)
    handle, payload, weights, attendance = align_axes(operands, routing.ranks.axes)
    attended = AttendanceResult()
    with jax.named_scope("jax_ep.redispatch"):
        sent = Push(payload.leaves, weights)
        if attendance.may_miss:
            moved, arrived_weights, attended = push_attended(backend, handle, sent, attendance)
        else:
            moved, arrived_weights = push(backend, handle, sent)
        results = [arrived(routing, payload, moved)]
    if topk_weights is not None:
        results.append(in_buffers(routing, name_all(arrived_weights, checkpoint_names.weights)))
    if attendance.may_miss:
        results.append(attended.active_ranks)
    return results[0] if len(results) == 1 else tuple(results)
