"""Which products of a layer run beside which communication, between GPUs of one domain.

- Forward: the first product of a shared expert beside the dispatch. Of the second product some columns, while
  those before them are combined, and then that of the shared expert.
- Backward: the first product, if it is repeated, or a shared expert's first one, while the cotangents of the
  sums travel to the experts. The gradient of w_up, for which nothing waits, beside the tokens' gradient.

All functions here have the same results, and derivatives, as the sequence of their parts.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_ep._experts.gated import Rows
from jax_ep._experts.kernel_engine import KernelEngine
from jax_ep._experts.mlp import (
    MlpCall,
    MlpOperands,
    Saved,
    UpGradient,
    d_hidden,
    d_hidden_factors,
    down,
    down_factors,
    once_in_fp8,
    up_factors,
    with_preactivation,
)
from jax_ep._jax.custom_vjp import differentiated_as
from jax_ep._jax.ffi_call import Call, run_beside
from jax_ep._rows.weights import Matrices, as_array
from jax_ep._transport.backend import Backend, Packing, Pull
from jax_ep._transport.ffi import Ffi
from jax_ep._transport.fp8_rows import cotangents_of_fp8, cotangents_sent_as_fp8, pull_backward_as_fp8
from jax_ep._transport.push_pull import Moved, Pulled, cotangents_of, cotangents_sent, pull, pull_backward
from jax_ep._transport.routing import Handle
from jax_ep._transport.stream import has_stream

Result = TypeVar("Result")

# On two ranks, communication is so short that layers without a shared expert were up to 1 % slower
# (docs/tuning.md).
_MIN_RANKS = 3
_MIN_RANKS_OF_SHARED = 2
_MIN_ELEMENTS = 4 << 20  # of sums. Communication of fewer is too short to hide
# Of a second product in two parts, the share of the columns in the first one: its combine then takes about as
# long as the product of the other one.
_FIRST_PART = 0.72
_COLUMNS = 512  # of which the first part has a multiple, so that the scales of FP8 matrices stay aligned
_COLUMN_UNIT = 8  # of which the other part must have a multiple


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The static part of a layer's call."""

    mlp: MlpCall
    backend: Backend
    weighs: bool  # the combine multiplies rows by their weights; otherwise the experts have done so
    packing: Packing  # the form in which the sums travel
    quantizes_gradient: bool  # the cotangents of the sums travel as FP8
    overlap: bool | None
    shared: MlpCall | None = None

    def engine_beside(self, num_elements: int) -> KernelEngine | None:
        """Returns the engine of products beside communication of so many elements, if they run there."""
        return engine_beside(self.mlp, self.backend, self.overlap, num_elements, _MIN_RANKS)

    def pull_of(self, rows: jax.Array, weights: jax.Array | None) -> Pull:
        """Returns the pull that sums the experts' rows [C, H], times their weights if any."""
        return Pull((rows,), weights, packing=self.packing)

    def engine_of_shared(self, num_elements: int) -> KernelEngine | None:
        if self.shared is None:
            return None
        return engine_beside(self.shared, self.backend, self.overlap, num_elements)

    def once_in_fp8(self, function: Callable[..., Result], *operands: object) -> Result:
        """Returns function(*operands), half of a first derivative, which in FP8 has no derivative."""
        both = [call for call in (self.mlp, self.shared) if call is not None]
        quantized = next((call for call in both if call.quantize is not None), self.mlp)
        return once_in_fp8(quantized, lambda _, *operands: function(*operands), *operands)


def engine_beside(
    mlp: MlpCall,
    backend: Backend,
    overlap: bool | None,
    num_elements: int,
    min_ranks: int = _MIN_RANKS_OF_SHARED,
) -> KernelEngine | None:
    """Returns the engine of products beside communication of so many elements, if they run there."""
    engine = mlp.products.engine
    if overlap is False or not isinstance(backend, Ffi) or not isinstance(engine, KernelEngine):
        return None
    if overlap is None and (num_elements < _MIN_ELEMENTS or backend.ranks.size < min_ranks):
        return None
    return engine if has_stream(backend.ranks) else None


class Hidden(NamedTuple):
    """The operands of a second product, as `down` takes them."""

    rows: Rows
    operands: MlpOperands


class ToSum(NamedTuple):
    """The operands of second products, and of the sums of their rows."""

    handle: Handle
    weights: jax.Array | None  # by which the combine multiplies rows
    experts: Hidden
    shared: Hidden | None  # of a shared expert


def sums_of_hidden(call: LayerCall, to_sum: ToSum) -> jax.Array:
    """Returns the sums of the second product's rows, and of a shared expert's."""
    operands = to_sum.experts.operands
    num_sums = to_sum.handle.routing.num_tokens * operands.w_down.shape[2]
    engine = call.engine_beside(num_sums)
    columns = None if engine is None or operands.b_down is not None else _parts(operands)

    def in_sequence(to_sum: ToSum) -> jax.Array:
        handle, weights, (hidden, operands), shared = to_sum
        out = down(call.mlp, operands, hidden)
        return sums_of(call, handle, call.pull_of(out, weights), shared)

    def in_parts(to_sum: ToSum) -> jax.Array:
        handle, weights, (hidden, operands), shared = to_sum
        factors, dtype = down_factors(call.mlp, operands, hidden), operands.dtype()
        assert engine is not None
        assert columns is not None
        first, second = (engine.call_of(factors, part) for part in columns)
        if first is None or second is None:
            return in_sequence(to_sum)
        of_first = call.pull_of(as_array(first.run()).astype(dtype), weights)
        ((sums,), _, _), rows = run_beside(_ffi(call).pull_call(handle, of_first), second)
        of_second = call.pull_of(as_array(rows).astype(dtype), weights)
        rest, of_shared = _pull_beside_down(call, handle, of_second, shared)
        return _added(jnp.concatenate([sums, rest], axis=1), of_shared)

    return in_sequence(to_sum) if columns is None else differentiated_as(in_parts, in_sequence, to_sum)


def _parts(operands: MlpOperands) -> tuple[slice, slice] | None:
    """Returns the columns of a second product that are computed first, and the others."""
    width = operands.w_down.shape[2]
    first = int(_FIRST_PART * width) // _COLUMNS * _COLUMNS
    if first == 0 or width % _COLUMN_UNIT:
        return None
    return slice(0, first), slice(first, width)


def sums_of(call: LayerCall, handle: Handle, pulled: Pull, shared: Hidden | None) -> jax.Array:
    """Returns the sums of rows, and of a shared expert's."""

    def beside(handle: Handle, pulled: Pull, shared: Hidden | None) -> jax.Array:
        return _added(*_pull_beside_down(call, handle, pulled, shared))

    def in_sequence(handle: Handle, pulled: Pull, shared: Hidden | None) -> jax.Array:
        (sums,), _ = pull(call.backend, handle, pulled)
        return _added(sums, None if shared is None else _shared_rows(call, shared))

    if call.engine_of_shared(handle.routing.num_tokens * pulled.rows[0].shape[1]) is None:
        return in_sequence(handle, pulled, shared)
    return differentiated_as(beside, in_sequence, handle, pulled, shared)


def _pull_beside_down(
    call: LayerCall, handle: Handle, pulled: Pull, shared: Hidden | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the sums of rows, and a shared expert's rows, without derivatives."""
    rows = pulled.rows[0]
    engine = call.engine_of_shared(handle.routing.num_tokens * rows.shape[1])
    if call.shared is not None and shared is not None and engine is not None:
        hidden, operands = shared
        product = engine.call_of(down_factors(call.shared, operands, hidden))
        if product is not None:
            ((sums,), _, _), computed = run_beside(_ffi(call).pull_call(handle, pulled), product)
            return sums, _shared_rows(call, shared, as_array(computed))
    (sums,), _ = pull(call.backend, handle, pulled)
    return sums, None if shared is None else _shared_rows(call, shared)


def _added(sums: jax.Array, of_shared: jax.Array | None) -> jax.Array:
    return sums if of_shared is None else sums + of_shared.astype(sums.dtype)


def _shared_rows(call: LayerCall, shared: Hidden, product: jax.Array | None = None) -> jax.Array:
    assert call.shared is not None
    hidden, operands = shared
    return down(call.shared, operands, hidden, product)


def push_beside_up(
    call: LayerCall, engine: KernelEngine, pulled: Pulled, d_sums: jax.Array, saved: Saved
) -> tuple[Pull, Saved]:
    """Returns the cotangents of a pull, and what was saved, with the first product, which is repeated."""

    def in_sequence(pulled: Pulled, d_sums: jax.Array, saved: Saved) -> tuple[Pull, Saved]:
        return push_cotangents(call, pulled, d_sums), with_preactivation(call.mlp, saved)

    def beside(pulled: Pulled, d_sums: jax.Array, saved: Saved) -> tuple[Pull, Saved]:
        product = engine.call_of(up_factors(call.mlp, saved[0]))
        if product is None:
            return in_sequence(pulled, d_sums, saved)
        d_pulled, computed = _push_beside(call, pulled, d_sums, product)
        return d_pulled, with_preactivation(call.mlp, saved, as_array(computed))

    return differentiated_as(beside, in_sequence, pulled, d_sums, saved)


def push_beside_shared(
    call: LayerCall, pulled: Pulled, d_sums: jax.Array, shared: Saved | None
) -> tuple[Pull, jax.Array | None]:
    """Returns the cotangents of a pull, and `d_hidden` of a shared expert, if it is computed beside."""
    mlp, engine = call.shared, call.engine_of_shared(d_sums.size)
    if mlp is None or engine is None or shared is None or shared[2] is None:
        return push_cotangents(call, pulled, d_sums), None

    def in_sequence(pulled: Pulled, d_sums: jax.Array, shared: Saved) -> tuple[Pull, jax.Array]:
        return push_cotangents(call, pulled, d_sums), d_hidden(mlp, shared, d_sums)

    def beside(pulled: Pulled, d_sums: jax.Array, shared: Saved) -> tuple[Pull, jax.Array]:
        product = engine.call_of(d_hidden_factors(mlp, shared, d_sums))
        if product is None:
            return in_sequence(pulled, d_sums, shared)
        d_pulled, computed = _push_beside(call, pulled, d_sums, product)
        return d_pulled, as_array(computed)

    return differentiated_as(beside, in_sequence, pulled, d_sums, shared)


def push_cotangents(call: LayerCall, pulled: Pulled, d_sums: jax.Array) -> Pull:
    transpose = pull_backward_as_fp8 if call.quantizes_gradient else pull_backward
    _, d_pulled = transpose(call.backend, pulled, ((d_sums,), None))
    return d_pulled


def _push_beside(
    call: LayerCall, pulled: Pulled, d_sums: jax.Array, product: Call[Matrices]
) -> tuple[Pull, Matrices]:
    """Returns the cotangents of a pull, and a product, without derivatives."""
    backend, cotangents = _ffi(call), ((d_sums,), None)
    if call.quantizes_gradient:
        sent, arrived = cotangents_sent_as_fp8(backend, cotangents), cotangents_of_fp8
    else:
        sent, arrived = cotangents_sent(pulled, cotangents), cotangents_of
    moved, computed = run_beside(backend.push_call(pulled[0], sent), product)
    return arrived(pulled, cotangents, moved), computed


def pull_beside_up(
    call: LayerCall, handle: Handle, pulled: Pull, of_up: UpGradient
) -> tuple[Moved, Matrices]:
    """Returns a pull, and the gradient of w_up."""

    def in_sequence(handle: Handle, pulled: Pull, of_up: UpGradient) -> tuple[Moved, Matrices]:
        return pull(call.backend, handle, pulled), of_up.compute(call.mlp.products)

    def beside(handle: Handle, pulled: Pull, of_up: UpGradient) -> tuple[Moved, Matrices]:
        assert engine is not None
        product = engine.call_of(of_up.factors(call.mlp.products))
        if product is None:
            return in_sequence(handle, pulled, of_up)
        (sums, returned, _), d_w_up = run_beside(_ffi(call).pull_call(handle, pulled), product)
        return (sums, returned), d_w_up

    engine = call.engine_beside(handle.routing.num_tokens * pulled.rows[0].shape[1])
    if engine is None:
        return in_sequence(handle, pulled, of_up)
    return differentiated_as(beside, in_sequence, handle, pulled, of_up)


def _ffi(call: LayerCall) -> Ffi:
    assert isinstance(call.backend, Ffi)  # or there is no engine beside
    return call.backend
