"""dispatch and combine in two steps, a start and a done, with room for other work between them.

On GPUs an op then runs on XLA's stream for communication: XLA splits it into a start and a done, and
schedules ops that do not use its results in between. It is still one kernel, because no array of XLA can hold
the rows of an unfinished op (docs/howto/overlap.md).
"""

import dataclasses
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_ep._extension import Implementation
from jax_ep._group.group import Group
from jax_ep._ops.combine import combine
from jax_ep._ops.dispatch import DispatchedByExpert, DispatchedByRank, DispatchOptions, dispatch
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._transport.attendance import OnTimeout
from jax_ep._transport.choice import Asynchronous
from jax_ep._transport.routing import Handle, Order

Result = TypeVar("Result")
Rows = TypeVar("Rows")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingDispatch(Generic[Result]):
    """A dispatch that has been started. `dispatch_done` returns its result. A pytree."""

    _result: Result


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingCombine(Generic[Result]):
    """A combine that has been started. `combine_done` returns its sums. A pytree."""

    _result: Result


@overload
def dispatch_start(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["expert", "expert_padded"] = "expert",
    quantize: Literal["fp8"],
    **options: Unpack[DispatchOptions],
) -> PendingDispatch[DispatchedByExpert[QuantizedArray]]: ...


@overload
def dispatch_start(
    x: Rows,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["expert", "expert_padded"] = "expert",
    quantize: Literal["fp8_dequantize"] | None = None,
    **options: Unpack[DispatchOptions],
) -> PendingDispatch[DispatchedByExpert[Rows]]: ...


@overload
def dispatch_start(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["rank"],
    quantize: Literal["fp8"],
    **options: Unpack[DispatchOptions],
) -> PendingDispatch[DispatchedByRank[QuantizedArray]]: ...


@overload
def dispatch_start(
    x: Rows,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["rank"],
    quantize: Literal["fp8_dequantize"] | None = None,
    **options: Unpack[DispatchOptions],
) -> PendingDispatch[DispatchedByRank[Rows]]: ...


def dispatch_start(
    x: Any,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group,
    num_experts: int,
    order: Order = "expert",
    implementation: Implementation | None = None,
    **options: Any,
) -> PendingDispatch[Any]:
    """Starts a `dispatch`, beside which other work can run until `dispatch_done`.

    On GPUs, ops that do not use its results may run meanwhile. Its gradient, a combine, also has a start and
    a done. On other devices, with implementation="xla", between hosts, and beside mesh axes that are not
    manual, it is an ordinary dispatch.

    Args:
      x: [T, ...] rows, as for `dispatch`; so are all arguments.
      topk_idx: [T, K] expert ids.
      topk_weights: [T, K], or None.
      group: the ranks.
      num_experts: E.
      order: "expert", "rank" or "expert_padded".
      implementation: None, "ffi" or "xla".
      **options: other options of `dispatch`.

    Returns:
      The argument of `dispatch_done`.

    Raises:
      ValueError, TypeError: as `dispatch`.
    """
    any_dispatch: Any = dispatch  # no overload has all types of all options
    sent = any_dispatch(
        x,
        topk_idx,
        topk_weights,
        group=group,
        num_experts=num_experts,
        order=order,
        implementation=Asynchronous(implementation),
        **options,
    )
    return PendingDispatch(sent)


def dispatch_done(pending: PendingDispatch[Result]) -> Result:
    """Returns the result of a dispatch that has been started, the same bits as from `dispatch`.

    Args:
      pending: of `dispatch_start`.

    Returns:
      `DispatchedByExpert` or `DispatchedByRank`, as the order says.

    Raises:
      TypeError: `pending` does not come from `dispatch_start`.
    """
    if not isinstance(pending, PendingDispatch):
        raise TypeError(
            f"dispatch_done: pending must be what dispatch_start returned, got {type(pending).__name__}"
        )
    return pending._result


class CombineOptions(TypedDict, total=False):
    """Options of `combine` that do not change the type of its result."""

    row_weights: ArrayLike | None
    bias: Any
    quantize_gradient: Literal["fp8"] | None
    implementation: Implementation | None


@overload
def combine_start(  # pyright: ignore[reportOverlappingOverload]
    y: Rows,
    handle: Handle,
    *,
    active_ranks: None = None,
    on_timeout: Literal["raise"] = "raise",
    **options: Unpack[CombineOptions],
) -> PendingCombine[Rows]: ...


@overload
def combine_start(
    y: Rows,
    handle: Handle,
    *,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    **options: Unpack[CombineOptions],
) -> PendingCombine[tuple[Rows, jax.Array]]: ...


def combine_start(
    y: Any, handle: Handle, *, implementation: Implementation | None = None, **options: Any
) -> PendingCombine[Any]:
    """Starts a `combine`, beside which other work can run until `combine_done`, as `dispatch_start` does.

    Args:
      y: [C, ...] rows, as for `combine`; so are all arguments.
      handle: of the dispatch.
      implementation: None, "ffi" or "xla".
      **options: other options of `combine`.

    Returns:
      The argument of `combine_done`.

    Raises:
      ValueError, TypeError: as `combine`.
    """
    asynchronous: Any = Asynchronous(implementation)
    return PendingCombine(combine(y, handle, implementation=asynchronous, **options))


def combine_done(pending: PendingCombine[Result]) -> Result:
    """Returns the sums of a combine that has been started, the same bits as from `combine`.

    Args:
      pending: of `combine_start`.

    Returns:
      The result of `combine`.

    Raises:
      TypeError: `pending` does not come from `combine_start`.
    """
    if not isinstance(pending, PendingCombine):
        raise TypeError(
            f"combine_done: pending must be what combine_start returned, got {type(pending).__name__}"
        )
    return pending._result
