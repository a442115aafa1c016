"""dispatch and combine in two steps, a start and a done, with room for other work between them.

On GPUs an op then runs on XLA's stream for communication: XLA splits it into a start and a done, and
schedules ops that do not use its results in between. It is still one kernel, because no array of XLA can hold
the rows of an unfinished op (docs/howto/overlap.md).
"""

import dataclasses
from typing import Any, Generic, Literal, TypeVar, overload

import jax

from jax_ep._group.group import Group
from jax_ep._ops.combine import combine
from jax_ep._ops.dispatch import DispatchedByExpert, DispatchedByRank, dispatch
from jax_ep._transport.choice import Asynchronous
from jax_ep._transport.routing import Handle, Order

Result = TypeVar("Result")


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
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["expert", "expert_padded"] = "expert",
    implementation: str | None = None,
    **options: Any,
) -> PendingDispatch[DispatchedByExpert]: ...


@overload
def dispatch_start(
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    group: Group,
    num_experts: int,
    order: Literal["rank"],
    implementation: str | None = None,
    **options: Any,
) -> PendingDispatch[DispatchedByRank]: ...


def dispatch_start(
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    group: Group,
    num_experts: int,
    order: Order = "expert",
    implementation: str | None = None,
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
    asynchronous: Any = Asynchronous(implementation)
    sent = dispatch(
        x,
        topk_idx,
        topk_weights,
        group=group,
        num_experts=num_experts,
        order=order,
        implementation=asynchronous,
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


def combine_start(
    y: Any, handle: Handle, *, implementation: str | None = None, **options: Any
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
