"""combine: sums the experts' rows at their tokens."""

import enum
from typing import Literal, TypeVar, overload

import jax
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._checks import PyTree, TreeDef
from jax_ep._extension import Implementation
from jax_ep._jax.sharding import align_axes
from jax_ep._ops.arguments import OpArguments
from jax_ep._transport import debug
from jax_ep._transport.attendance import Attendance, AttendanceResult, OnTimeout
from jax_ep._transport.backend import Pull
from jax_ep._transport.choice import Asynchronous
from jax_ep._transport.fp8_rows import (
    check_quantize_gradient,
    check_quantize_sums,
    pull_with_fp8_gradient,
)
from jax_ep._transport.payload import Payload
from jax_ep._transport.push_pull import pull, pull_attended
from jax_ep._transport.routing import Handle

Rows = TypeVar("Rows")


class Default(enum.Enum):
    """The default of `row_weights`, because None means a sum without weights."""

    UNSET = enum.auto()


@overload
def combine(  # pyright: ignore[reportOverlappingOverload]
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
) -> Rows: ...


@overload
def combine(
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
) -> tuple[Rows, jax.Array]: ...


def combine(
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
) -> PyTree:
    """Sums each token's rows and returns them to the token's rank. Call it inside `jax.shard_map`.

    The sum is in float32 (of float64 rows in float64), in a fixed order, rounded once to y's dtype: by
    rank in the order of the ranks; by expert a rank's rows by k, then by rank. (On GPUs, by expert, a
    rank's part of a 16-bit sum is rounded too before it travels, if it is of several rows. Where ranks span
    domains, a domain's part of any sum is rounded to y's dtype before it travels, and domains are added in
    order.) Padding, tail, empty rows and dropped rows are never read and get zero gradient.

    Without weights this is the transpose of `dispatch`, and the gradient of each is the other. By rank,
    multiply y by the weights before.

    Args:
      y: floating [C, ...] array or pytree of such arrays, of 16 bits or more, C the capacity of the dispatch;
        [L, C, ...] of padded experts.
      handle: the handle of the dispatch. The group is part of it.
      row_weights: floating [C] or [L, C] of 16 bits or more, as `DispatchedByExpert` has them: each row
        of every leaf is multiplied by its weight in float32. Differentiable. None sums without weights. It
        must be passed, None or not, if weights were dispatched by expert.
      bias: floating [T, ...], or a tuple of such arrays, added in float32 before the rounding. If y is a
        pytree: a pytree of the same structure with such a bias, or None, for each leaf; each leaf then
        travels in an op of its own, which needs all ranks. Differentiable.
      quantize: "fp8" sends each rank's part of a sum as FP8, with a float32 scale for each 128 elements. A
        rank's part is the float32 sum of its rows of the token, times their weights if any; by rank it is one
        row. Every part is rounded, also that of the token's own rank. Parts are added as above. The error of
        an element of a part is at most 1/16 of its magnitude, or 2^-10 of its scale; that of a sum is about
        2.6 % (docs/howto/fp8.md). y must be one array of float16, bfloat16 or float32 whose last dimension is
        a multiple of 128. The gradient is that of the combine without it. Where ranks span domains, only what
        travels between domains is FP8: a domain's part, after it was rounded to y's dtype.
      round_scale: if true, scales of quantize are rounded up to powers of two, as for `dispatch`.
      quantize_gradient: "fp8" sends the cotangent of the sums to the experts as FP8, with a float32 scale for
        each 128 elements, as `dispatch(quantize="fp8_dequantize")` sends tokens; it arrives in y's dtype. y
        must be one array whose last dimension is a multiple of 128. Of use where links limit the backward
        pass. There is then no second derivative.
      active_ranks: integers or bools [R], as for `dispatch`: nothing comes from a rank marked 0, and a rank
        that is itself marked 0 gets the sums of no rows. As there, no gradient goes through a combine with
        active_ranks or on_timeout="mask", it must not be rematerialized, and on GPUs it takes few tokens, in
        one array that is not float64.
      on_timeout: "raise" or "mask", as for `dispatch`: nothing comes from a rank that is too late.
      implementation: None, "ffi" or "xla".

    Returns:
      [T, ...] of y's structure and dtypes. With active_ranks, or on_timeout="mask", `(sums, active_ranks)`:
      those and int32 [R], 1 for each rank that took part, as this rank knows.

    Raises:
      ValueError: shapes or the structure of a bias do not fit, weights with a rank-order handle, no
        row_weights although weights were dispatched, quantize or quantize_gradient with a pytree or with rows
        whose last dimension is not a multiple of 128, or no shard_map binds the axis of the handle's group.
      TypeError: a leaf of y or a bias is not floating of 16 bits or more, rows of float64 with quantize, or a
        gradient was requested through a combine that ranks may miss.
    """
    return combine_as(
        OpArguments("combine"),
        y,
        handle,
        row_weights=row_weights,
        bias=bias,
        quantize=quantize,
        round_scale=round_scale,
        quantize_gradient=quantize_gradient,
        active_ranks=active_ranks,
        on_timeout=on_timeout,
        implementation=implementation,
    )


def combine_as(
    check: OpArguments,
    y: PyTree,
    handle: Handle,
    *,
    row_weights: ArrayLike | Default | None,
    bias: PyTree = None,
    quantize: Literal["fp8"] | None = None,
    round_scale: bool = False,
    quantize_gradient: Literal["fp8"] | None,
    active_ranks: ArrayLike | None = None,
    on_timeout: OnTimeout = "raise",
    implementation: str | Asynchronous | None,
) -> PyTree:
    """Does what `combine` does. Errors in its arguments name the op of `check`."""
    handle, backend = check.open_handle(handle, implementation)
    routing = handle.routing
    payload = Payload.check(check, "y", y, routing.buffer, routing.axes, "the capacity of the handle")
    if not payload.leaves:
        raise ValueError(f"{check.op}: y holds no array")
    leaves = [leaf.reshape(routing.capacity, *leaf.shape[len(routing.buffer) :]) for leaf in payload.leaves]
    check.floating("y", leaves)
    if row_weights is Default.UNSET:
        if handle.has_weights:
            raise ValueError(
                f"{check.op}: this dispatch sent topk_weights, so combine needs row_weights: pass "
                "row_weights=sent.row_weights for weighted sums (sent: the result of dispatch), or "
                "row_weights=None for sums without weights, if the experts have applied them"
            )
        row_weights = None
    weights = None
    if row_weights is not None:
        if not routing.has_row_per_choice:
            raise ValueError(
                f"{check.op}: row_weights needs a handle of order 'expert'. By rank a row stands for several "
                "experts: multiply y by the weights, or pass them as a leaf of y to take them back"
            )
        weights = check.weights("row_weights", row_weights, routing.buffer, f"[{routing.axes}]")
        weights = weights.reshape(routing.capacity)
    packing = check_quantize_sums(check, "quantize", quantize, round_scale, payload.tree, leaves)
    if quantize_gradient is not None:
        check_quantize_gradient(check, quantize_gradient, payload.tree, leaves)
    biases = _biases(check, bias, payload.tree, leaves, routing.num_tokens)
    attendance = Attendance.check(check, active_ranks, on_timeout, routing.group)
    operands = (handle, tuple(leaves), weights, biases, attendance)
    handle, rows, weights, biases, attendance = align_axes(operands, routing.ranks.axes)
    attended = AttendanceResult()
    with jax.named_scope("jax_ep.combine"):
        if attendance.may_miss:
            if len(rows) > 1 and any(biases):
                raise ValueError(
                    f"{check.op}: with active_ranks or on_timeout='mask' a bias needs y to be one array"
                )
            pulled = Pull(rows, weights, biases[0], packing=packing)
            sums, attended = pull_attended(backend, handle, pulled, attendance)
        elif quantize_gradient is not None:
            pulled = Pull(rows, weights, biases[0], packing=packing)
            sums, _ = pull_with_fp8_gradient(backend, handle, pulled)
        elif not any(biases):
            sums, _ = pull(backend, handle, Pull(rows, weights, packing=packing))
        else:  # an op adds biases to one array
            pulls = [
                Pull((row,), weights, added, packing=packing) for row, added in zip(rows, biases, strict=True)
            ]
            sums = tuple(pull(backend, handle, pulled)[0][0] for pulled in pulls)
    if routing.padded_rows is not None:
        find = lambda: [debug.nan_rows(handle, rows)]
        sums = debug.check(check.op, sums, find, routing.ranks, alone=attendance.may_miss)
    result = payload.rebuild(sums)
    return (result, attended.active_ranks) if attendance.may_miss else result


def _biases(
    check: OpArguments, bias: PyTree, tree: TreeDef, leaves: list[jax.Array], num_tokens: int
) -> tuple[tuple[jax.Array, ...], ...]:
    """Returns the biases of each leaf of y."""
    if bias is None:
        return ((),) * len(leaves)
    try:
        given = tree.flatten_up_to(bias)
    except ValueError as error:
        raise ValueError(
            f"{check.op}: bias must be a pytree of the same structure as y, with an array [T, ...], a tuple "
            f"of them or None for each leaf; got {jax.tree.structure(bias)} for {tree}"
        ) from error
    return tuple(_biases_of(check, one, leaf, num_tokens) for one, leaf in zip(given, leaves, strict=True))


def _biases_of(check: OpArguments, bias: PyTree, leaf: jax.Array, num_tokens: int) -> tuple[jax.Array, ...]:
    if bias is None:
        return ()
    arrays = bias if isinstance(bias, tuple | list) else (bias,)
    biases = [check.array("bias", array) for array in arrays]
    check.floating("bias", biases)
    shape = (num_tokens, *leaf.shape[1:])
    for array in biases:
        if array.shape != shape:
            raise ValueError(
                f"{check.op}: bias must have the shape of the result {list(shape)}, "
                f"got {_checks.shape_text(array)}"
            )
    return tuple(biases)
