"""Asynchronous dispatch, combine and replicate: a start, other work, and a done.

On GPUs such an op runs on XLA's stream for communication. XLA splits it into a start and a done, and
schedules ops that do not use its results in between. The op is still one kernel, because no array of XLA can
hold the rows of an unfinished op (docs/howto/overlap.md).
"""

import dataclasses
from typing import TYPE_CHECKING, Generic, Literal, NoReturn, TypeVar, overload

import jax
from jax.typing import ArrayLike

from jax_ep._checks import PyTree
from jax_ep._extension import Implementation
from jax_ep._group.group import Group
from jax_ep._ops.arguments import OpArguments
from jax_ep._ops.combine import Default, combine_as
from jax_ep._ops.dispatch import dispatch_as
from jax_ep._ops.dispatched import DispatchedByExpert, DispatchedByRank
from jax_ep._ops.replicate import replicate_as
from jax_ep._ops.statistics import DispatchStatistics
from jax_ep._placement.placement import Placement
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._transport.attendance import OnTimeout
from jax_ep._transport.choice import Asynchronous
from jax_ep._transport.fp8_rows import Quantize
from jax_ep._transport.routing import Handle, Order

Result = TypeVar("Result")
Rows = TypeVar("Rows")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending(Generic[Result]):
    """Started op: a dispatch, combine or replicate. `done` returns its result. A pytree."""

    _result: Result

    def done(self) -> Result:
        """Returns the op's result. It has the same bits as the result of the synchronous op."""
        return self._result

    if not TYPE_CHECKING:  # type checkers still report names that do not exist

        def __getattr__(self, name: str) -> NoReturn:
            """Raises an error that names `done`, because users forget it and read the result's attributes."""
            raise AttributeError(f"Pending has no {name!r}; pending.done() returns the op's result")


@overload
def dispatch_start(
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
) -> Pending[DispatchedByExpert[QuantizedArray]]: ...


@overload
def dispatch_start(
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
) -> Pending[DispatchedByExpert[Rows]]: ...


@overload
def dispatch_start(
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
) -> Pending[DispatchedByRank[QuantizedArray]]: ...


@overload
def dispatch_start(
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
) -> Pending[DispatchedByRank[Rows]]: ...


def dispatch_start(
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
) -> Pending[PyTree]:
    """Starts a `dispatch`. Other work can overlap with it until `Pending.done`.

    Its arguments are those of `dispatch`. On GPUs, ops that do not use its results may overlap with it. Its
    gradient, a combine, is also asynchronous. The op is an ordinary dispatch on other devices, with
    implementation="xla", between domains, and if the mesh has axes that are not manual.

    Returns:
      The started op. Its `done()` returns `DispatchedByExpert` or `DispatchedByRank`, depending on `order`.

    Raises:
      ValueError, TypeError: as `dispatch`.
    """
    sent, _ = dispatch_as(
        OpArguments("dispatch_start"),
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
        implementation=Asynchronous(implementation),
    )
    return Pending(sent)


@overload
def combine_start(  # pyright: ignore[reportOverlappingOverload]
    y: Rows,
    handle: Handle,
    *,
    row_weights: ArrayLike | Default | None = Default.UNSET,
    bias: PyTree = None,
    quantize: Literal["fp8"] | None = None,
    round_scale: bool = False,
    quantize_gradient: Literal["fp8"] | None = None,
    active_ranks: None = None,
    on_timeout: Literal["raise"] = "raise",
    implementation: Implementation | None = None,
) -> Pending[Rows]: ...


@overload
def combine_start(
    y: Rows,
    handle: Handle,
    *,
    row_weights: ArrayLike | Default | None = Default.UNSET,
    bias: PyTree = None,
    quantize: Literal["fp8"] | None = None,
    round_scale: bool = False,
    quantize_gradient: Literal["fp8"] | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    implementation: Implementation | None = None,
) -> Pending[tuple[Rows, jax.Array]]: ...


def combine_start(
    y: PyTree,
    handle: Handle,
    *,
    row_weights: ArrayLike | Default | None = Default.UNSET,
    bias: PyTree = None,
    quantize: Literal["fp8"] | None = None,
    round_scale: bool = False,
    quantize_gradient: Literal["fp8"] | None = None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    implementation: Implementation | None = None,
) -> Pending[PyTree]:
    """Starts a `combine`. Other work can overlap with it until `Pending.done`, as with `dispatch_start`.

    Its arguments are those of `combine`.

    Returns:
      The started op. Its `done()` returns the result of `combine`.

    Raises:
      ValueError, TypeError: as `combine`.
    """
    return Pending(
        combine_as(
            OpArguments("combine_start"),
            y,
            handle,
            row_weights=row_weights,
            bias=bias,
            quantize=quantize,
            round_scale=round_scale,
            quantize_gradient=quantize_gradient,
            active_ranks=active_ranks,
            on_timeout=on_timeout,
            implementation=Asynchronous(implementation),
        )
    )


def replicate_start(
    w: PyTree, placement: Placement, *, group: Group, implementation: Implementation | None = None
) -> Pending[PyTree]:
    """Starts a `replicate`. Other work can overlap with it until `Pending.done`.

    On GPUs, ops that do not use its results may overlap with it: a shared expert, or the attention of the
    next layer, but no other op of the group (docs/howto/overlap.md). If `dispatch_start` would be an ordinary
    dispatch, this is an ordinary replicate.

    Args:
      w: as for `replicate`.
      placement: as for `replicate`.
      group: the ranks.
      implementation: None, "ffi" or "xla".

    Returns:
      The started op. Its `done()` returns the result of `replicate`.

    Raises:
      ValueError, TypeError: as `replicate`.
    """
    check = OpArguments("replicate_start")
    return Pending(replicate_as(check, "w", w, placement, group, Asynchronous(implementation)))
