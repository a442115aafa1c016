"""The experts of rows that were dispatched, and the combine of their rows, with one gradient for all of it.

So the order of both passes is in one place. `beside` runs communication beside products.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._experts.mlp import (
    MlpOperands,
    Saved,
    backward,
    backward_until_up,
    down,
    until_down,
    with_gradients,
)
from jax_ep._jax.custom_vjp import (
    custom_vjp,
    inlined,
    is_differentiated,
    nonzero_cotangents,
    primal_values,
)
from jax_ep._jax.sharding import align_axes, vary_alike
from jax_ep._ops.beside import (
    Hidden,
    LayerCall,
    ToSum,
    pull_beside_up,
    push_beside_shared,
    push_beside_up,
    push_cotangents,
    sums_of,
    sums_of_hidden,
)
from jax_ep._rows.fp8 import as_bits
from jax_ep._rows.weights import as_array
from jax_ep._transport.backend import Pull, Push
from jax_ep._transport.push_pull import Pulled, pull
from jax_ep._transport.routing import Handle, for_backward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """A shared expert, which all tokens of a rank go to."""

    operands: MlpOperands
    product: jax.Array | None = None
    """Its first product, if it was computed beside the dispatch. It has the derivatives of that product."""


class LayerOperands(NamedTuple):
    """The arrays of a layer, whose rows and weights come from the dispatch of `sent`."""

    handle: Handle
    sent: Push  # tokens [T, H] and their weights [T, K]
    arrived_weights: jax.Array
    experts: MlpOperands
    shared: Shared | None


def expert_layer(call: LayerCall, operands: LayerOperands) -> jax.Array:
    """Returns the sums [T, H] of the experts' rows, plus those of a shared expert.

    The gradient goes to `sent` directly, and none to what was dispatched. Only a second derivative goes
    through it.
    """
    moved = align_axes(operands[:3], operands.handle.routing.ranks.axes)
    operands = vary_alike(LayerOperands(*moved, *operands[3:]))
    with jax.named_scope("jax_ep.experts"):
        experts, shared = as_bits((operands.experts, operands.shared))
        return _inlined_layer(call, operands._replace(experts=experts, shared=shared))


@custom_vjp(0)
def _layer(call: LayerCall, operands: LayerOperands) -> jax.Array:
    hidden, _ = until_down(call.mlp, operands.experts)
    of_shared, _ = _until_down_of_shared(call, operands.shared)
    weights = operands.arrived_weights if call.weighs else None
    return sums_of_hidden(call, ToSum(operands.handle, weights, Hidden(hidden, operands.experts), of_shared))


def _until_down_of_shared(call: LayerCall, shared: Shared | None) -> tuple[Hidden | None, Saved | None]:
    if shared is None:
        return None, None
    assert call.shared is not None
    hidden, saved = until_down(call.shared, shared.operands, shared.product)
    return Hidden(hidden, shared.operands), saved


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """The arrays that the backward pass needs."""

    handle: Handle
    x: jax.Array  # a scalar of the tokens' dtype
    weights: jax.Array
    out: jax.Array | None  # the experts' rows, if the combine multiplies them by the weights
    mlp: Saved
    shared: Saved | None
    needs_both: bool = dataclasses.field(metadata={"static": True})
    """True if a gradient of the tokens is needed, and one of w_up. Otherwise XLA drops what is not."""
    needs_shared: bool = dataclasses.field(metadata={"static": True})
    """True if gradients of what travels are needed, and of what a shared expert's first product leads to."""


def _layer_forward(call: LayerCall, differentiated: LayerOperands) -> tuple[jax.Array, _Residuals]:
    def run(
        handle: Handle, weights: jax.Array, experts: MlpOperands, shared: Shared | None
    ) -> tuple[jax.Array, jax.Array | None, Saved, Saved | None]:
        hidden, saved = until_down(call.mlp, experts)
        of_shared, saved_shared = _until_down_of_shared(call, shared)
        if not call.weighs:
            sums = sums_of_hidden(call, ToSum(handle, None, Hidden(hidden, experts), of_shared))
            return sums, None, saved, saved_shared
        out = down(call.mlp, experts, hidden)
        return sums_of(call, handle, call.pull_of(out, weights), of_shared), out, saved, saved_shared

    handle, sent, weights, experts, shared = primal_values(differentiated)
    sums, out, saved, saved_shared = call.once_in_fp8(run, handle, weights, experts, shared)
    _, of_sent, _, of_experts, of_shared = differentiated
    first = None if of_shared is None else (of_shared.operands.rows, of_shared.operands.w_up)
    return sums, _Residuals(
        handle=for_backward(handle),
        x=jnp.zeros((), sent.leaves[0].dtype),
        weights=weights,
        out=out,
        mlp=saved,
        shared=saved_shared,
        needs_both=is_differentiated(of_sent) and is_differentiated(of_experts.w_up),
        needs_shared=is_differentiated(first) and is_differentiated((of_sent, of_experts)),
    )


def _layer_backward(call: LayerCall, residuals: _Residuals, d_sums: jax.Array) -> tuple[LayerOperands | None]:
    cotangent = nonzero_cotangents(d_sums)
    if cotangent is None:
        return (None,)
    sent, experts, shared = call.once_in_fp8(functools.partial(_gradients, call), residuals, cotangent)
    return (LayerOperands(None, sent, None, experts, shared),)  # pyright: ignore


def _gradients(
    call: LayerCall, residuals: _Residuals, d_sums: jax.Array
) -> tuple[Push, MlpOperands, Shared | None]:
    handle, weights, out = residuals.handle, residuals.weights, residuals.out
    pulled: Pulled = (handle, None if out is None else ((out,), weights), [])
    saved, d_hidden = residuals.mlp, None
    engine = None if call.mlp.saves_preactivation else call.engine_beside(d_sums.size)
    if engine is not None:
        d_pulled, saved = push_beside_up(call, engine, pulled, d_sums, saved)
    elif residuals.needs_shared:
        d_pulled, d_hidden = push_beside_shared(call, pulled, d_sums, residuals.shared)
    else:
        d_pulled = push_cotangents(call, pulled, d_sums)
    (d_out,), d_weights = d_pulled.rows, d_pulled.row_weights
    gradients, of_up = backward_until_up(call.mlp, saved, d_out)
    if d_weights is None:
        d_weights = gradients.row_weights
    assert d_weights is not None
    d_rows = as_array(gradients.rows).astype(residuals.x.dtype)
    returned = Pull((d_rows,), weights=d_weights.astype(weights.dtype))
    if residuals.needs_both:
        (sums, returned_weights), d_w_up = pull_beside_up(call, handle, returned, of_up)
    else:
        sums, returned_weights = pull(call.backend, handle, returned)
        d_w_up = of_up.compute(call.mlp.products)
    gradients = with_gradients(residuals.mlp, gradients, d_w_up)
    shared = None
    if residuals.shared is not None:
        assert call.shared is not None
        d_rows = d_sums.astype(residuals.shared[0].dtype())
        shared = Shared(backward(call.shared, residuals.shared, d_rows, d_hidden))
    return Push(sums, returned_weights), dataclasses.replace(gradients, rows=None, row_weights=None), shared


_layer.defvjp(_layer_forward, _layer_backward, symbolic_zeros=True)
_inlined_layer = inlined(_layer)
