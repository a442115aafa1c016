"""The experts of rows that were dispatched, and the combine of their rows, with one gradient for all of it.

So the order of both passes is in one place. Between GPUs of one host, communication runs beside products:
a combine of some columns beside the product that computes the others, and the combine of the tokens' gradient
beside the gradient of w_up, for which nothing else waits.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp

from jax_ep._experts.gated import Rows, wide_of
from jax_ep._experts.kernel_engine import KernelEngine
from jax_ep._experts.mlp import (
    MlpCall,
    MlpOperands,
    Saved,
    UpGradient,
    backward_until_up,
    down,
    once_in_fp8,
    until_down,
    with_gradients,
)
from jax_ep._jax.custom_vjp import (
    custom_vjp,
    differentiated_as,
    inlined,
    is_differentiated,
    nonzero_cotangents,
    primal_values,
)
from jax_ep._jax.ffi_call import run_beside
from jax_ep._jax.sharding import align_axes, vary_alike
from jax_ep._rows.fp8 import as_bits, from_bits
from jax_ep._rows.weights import Matrices, as_array
from jax_ep._transport.backend import Backend, Pull, Push
from jax_ep._transport.ffi import Ffi
from jax_ep._transport.fp8_rows import pull_backward_as_fp8
from jax_ep._transport.push_pull import Moved, pull, pull_backward
from jax_ep._transport.routing import Handle, for_backward
from jax_ep._transport.stream import has_stream

# Fewer ranks have too little communication: on two, layers were up to 1 % slower (docs/tuning.md).
_MIN_RANKS = 3
# Of a second product in two parts, the share of the columns in the first one: its combine then takes about as
# long as the product of the other one.
_FIRST_PART = 0.72
_COLUMNS = 512  # of which the first part has a multiple, so that the scales of FP8 matrices stay aligned
_COLUMN_UNIT = 8  # of which the other part must have a multiple
_MIN_ELEMENTS = 4 << 20  # of sums. A combine of fewer is too short to hide


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The static part of a call."""

    mlp: MlpCall
    backend: Backend
    weighs: bool  # the combine multiplies rows by their weights; otherwise the experts have done so
    quantizes_gradient: bool  # the cotangents of the sums travel as FP8
    overlap: bool

    def engine_beside(self, num_sums: int) -> KernelEngine | None:
        """Returns the engine of products that run beside a combine of so many elements, if it is faster."""
        backend, engine = self.backend, self.mlp.products.engine
        if num_sums < _MIN_ELEMENTS:
            return None
        if not self.overlap or not isinstance(backend, Ffi) or not isinstance(engine, KernelEngine):
            return None
        return engine if backend.ranks.size >= _MIN_RANKS and has_stream(backend.ranks) else None


def expert_layer(
    call: LayerCall, handle: Handle, sent: Push, arrived_weights: jax.Array, operands: MlpOperands
) -> jax.Array:
    """Returns the sums [T, H] of the experts' rows.

    Rows and weights come from the dispatch of `sent`, tokens [T, H] and their weights [T, K]. The gradient
    goes to `sent` directly, and none to what was dispatched. Only a second derivative goes through it.
    """
    moved = align_axes((handle, sent, arrived_weights), handle.routing.ranks.axes)
    (handle, sent, arrived_weights), operands = vary_alike((moved, operands))
    with jax.named_scope("jax_ep.experts"):
        return _inlined_layer(call, handle, sent, arrived_weights, as_bits(operands))


@custom_vjp(0)
def _layer(
    call: LayerCall, handle: Handle, sent: Push, arrived_weights: jax.Array, operands: MlpOperands
) -> jax.Array:
    hidden, _ = until_down(call.mlp, operands)
    return _down_beside_pull(call, handle, arrived_weights if call.weighs else None, hidden, operands)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """The arrays that the backward pass needs."""

    handle: Handle
    x: jax.Array  # a scalar of the tokens' dtype
    weights: jax.Array
    out: jax.Array | None  # the experts' rows, if the combine multiplies them by the weights
    mlp: Saved
    needs_both: bool = dataclasses.field(metadata={"static": True})
    """True if a gradient of the tokens is needed, and one of w_up. Otherwise XLA drops what is not."""


def _layer_forward(call: LayerCall, *differentiated: object) -> tuple[jax.Array, _Residuals]:
    handle, sent, arrived_weights, operands = primal_values(differentiated)
    _, of_sent, _, of_mlp = cast(tuple[Handle, Push, jax.Array, MlpOperands], differentiated)
    needs_both = is_differentiated(of_sent) and is_differentiated(of_mlp.w_up)

    def run(
        mlp: MlpCall, handle: Handle, weights: jax.Array, operands: MlpOperands
    ) -> tuple[jax.Array, jax.Array | None, Saved]:
        hidden, saved = until_down(mlp, operands)
        if not call.weighs:
            return _down_beside_pull(call, handle, None, hidden, operands), None, saved
        out = down(mlp, from_bits(operands), hidden)
        (sums,), _ = pull(call.backend, handle, Pull((out,), weights))
        return sums, out, saved

    sums, out, saved = once_in_fp8(call.mlp, run, handle, arrived_weights, operands)
    x = jnp.zeros((), sent.leaves[0].dtype)
    return sums, _Residuals(for_backward(handle), x, arrived_weights, out, saved, needs_both)


def _layer_backward(
    call: LayerCall, residuals: _Residuals, d_sums: jax.Array
) -> tuple[None, Push | None, None, MlpOperands | None]:
    cotangent = nonzero_cotangents(d_sums)
    if cotangent is None:
        return None, None, None, None

    def run(_: MlpCall, residuals: _Residuals, d_sums: jax.Array) -> tuple[Push, MlpOperands]:
        return _gradients(call, residuals, d_sums)

    sent, gradients = once_in_fp8(call.mlp, run, residuals, cotangent)
    return None, sent, None, gradients


def _gradients(call: LayerCall, residuals: _Residuals, d_sums: jax.Array) -> tuple[Push, MlpOperands]:
    handle, weights, out = residuals.handle, residuals.weights, residuals.out
    scaled = None if out is None else ((out,), weights)
    transpose = pull_backward_as_fp8 if call.quantizes_gradient else pull_backward
    _, d_pulled = transpose(call.backend, (handle, scaled, []), ((d_sums,), None))
    (d_out,), d_weights = d_pulled.rows, d_pulled.row_weights
    gradients, of_up = backward_until_up(call.mlp, residuals.mlp, d_out)
    if d_weights is None:
        d_weights = gradients.row_weights
    assert d_weights is not None
    d_rows = as_array(gradients.rows).astype(residuals.x.dtype)
    pulled = Pull((d_rows,), weights=d_weights.astype(weights.dtype))
    compute = _pull_beside_up if residuals.needs_both else _pull_and_up
    (sums, returned), d_w_up = compute(call, handle, pulled, of_up)
    gradients = with_gradients(residuals.mlp, gradients, d_w_up)
    return Push(sums, returned), dataclasses.replace(gradients, rows=None, row_weights=None)


_layer.defvjp(_layer_forward, _layer_backward, symbolic_zeros=True)
_inlined_layer = inlined(_layer)


def _down_beside_pull(
    call: LayerCall, handle: Handle, weights: jax.Array | None, hidden: Rows, operands: MlpOperands
) -> jax.Array:
    """Returns the sums of the second product's rows, which it computes in two parts where that is faster."""
    operands = from_bits(operands)
    width = wide_of(operands.w_down).shape[2]
    first = int(_FIRST_PART * width) // _COLUMNS * _COLUMNS
    engine = call.engine_beside(handle.routing.num_tokens * width)
    if engine is None or first == 0 or width % _COLUMN_UNIT or operands.b_down is not None:
        return _down_and_pull(call, handle, weights, hidden, operands)
    columns = slice(0, first), slice(first, width)
    in_parts = functools.partial(_down_in_parts, call, engine, columns)
    in_sequence = functools.partial(_down_and_pull, call)
    return differentiated_as(in_parts, in_sequence, handle, weights, hidden, operands)


def _down_and_pull(
    call: LayerCall, handle: Handle, weights: jax.Array | None, hidden: Rows, operands: MlpOperands
) -> jax.Array:
    out = down(call.mlp, operands, hidden)
    return pull(call.backend, handle, Pull((out,), weights))[0][0]


def _down_in_parts(
    call: LayerCall,
    engine: KernelEngine,
    columns: tuple[slice, slice],
    handle: Handle,
    weights: jax.Array | None,
    hidden: Rows,
    operands: MlpOperands,
) -> jax.Array:
    backend = call.backend
    assert isinstance(backend, Ffi)
    factors = call.mlp.products.factors(hidden, operands.w_down, operands.group_sizes)
    first, second = (engine.call_of(factors, part) for part in columns)
    if first is None or second is None:
        return _down_and_pull(call, handle, weights, hidden, operands)
    dtype = operands.dtype()
    of_first = Pull((as_array(first.run()).astype(dtype),), weights)
    ((sums,), _, _), rows = run_beside(backend.pull_call(handle, of_first), second)
    rest, _ = pull(backend, handle, Pull((as_array(rows).astype(dtype),), weights))
    return jnp.concatenate([sums, *rest], axis=1)


def _pull_beside_up(
    call: LayerCall, handle: Handle, pulled: Pull, of_up: UpGradient
) -> tuple[Moved, Matrices]:
    """Returns a pull, and the gradient of w_up."""
    (rows,) = pulled.rows
    engine = call.engine_beside(handle.routing.num_tokens * rows.shape[1])
    in_sequence = functools.partial(_pull_and_up, call)
    if engine is None:
        return in_sequence(handle, pulled, of_up)
    beside = functools.partial(_pull_with_up, call, engine)
    return differentiated_as(beside, in_sequence, handle, pulled, of_up)


def _pull_and_up(call: LayerCall, handle: Handle, pulled: Pull, of_up: UpGradient) -> tuple[Moved, Matrices]:
    return pull(call.backend, handle, pulled), of_up.compute(call.mlp.products)


def _pull_with_up(
    call: LayerCall, engine: KernelEngine, handle: Handle, pulled: Pull, of_up: UpGradient
) -> tuple[Moved, Matrices]:
    backend = call.backend
    assert isinstance(backend, Ffi)
    product = engine.call_of(of_up.factors(call.mlp.products))
    if product is None:
        return _pull_and_up(call, handle, pulled, of_up)
    (sums, returned, _), d_w_up = run_beside(backend.pull_call(handle, pulled), product)
    return (sums, returned), d_w_up
