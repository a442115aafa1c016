"""The experts of rows that were dispatched, and the combine of their rows, with one gradient for all of it.

So the order of both passes is in one place. `beside` runs communication beside products.
"""

import dataclasses
import functools
from typing import cast

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
    LayerCall,
    SharedRows,
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


def expert_layer(
    call: LayerCall,
    handle: Handle,
    sent: Push,
    arrived_weights: jax.Array,
    operands: MlpOperands,
    shared: Shared | None,
) -> jax.Array:
    """Returns the sums [T, H] of the experts' rows, plus those of a shared expert.

    Rows and weights come from the dispatch of `sent`, tokens [T, H] and their weights [T, K]. The gradient
    goes to `sent` directly, and none to what was dispatched. Only a second derivative goes through it.
    """
    moved = align_axes((handle, sent, arrived_weights), handle.routing.ranks.axes)
    (handle, sent, arrived_weights), operands, shared = vary_alike((moved, operands, shared))
    with jax.named_scope("jax_ep.experts"):
        return _inlined_layer(call, handle, sent, arrived_weights, *as_bits((operands, shared)))


@custom_vjp(0)
def _layer(
    call: LayerCall,
    handle: Handle,
    sent: Push,
    arrived_weights: jax.Array,
    operands: MlpOperands,
    shared: Shared | None,
) -> jax.Array:
    hidden, _ = until_down(call.mlp, operands)
    of_shared, _ = _until_down_of_shared(call, shared)
    weights = arrived_weights if call.weighs else None
    return sums_of_hidden(call, handle, weights, hidden, operands, of_shared)


def _until_down_of_shared(call: LayerCall, shared: Shared | None) -> tuple[SharedRows | None, Saved | None]:
    if shared is None:
        return None, None
    assert call.shared is not None
    hidden, saved = until_down(call.shared, shared.operands, shared.product)
    return (hidden, shared.operands), saved


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


def _layer_forward(call: LayerCall, *differentiated: object) -> tuple[jax.Array, _Residuals]:
    handle, sent, arrived_weights, operands, shared = primal_values(differentiated)
    given = cast(tuple[Handle, Push, jax.Array, MlpOperands, Shared | None], differentiated)
    _, of_sent, _, of_experts, given_shared = given
    needs_both = is_differentiated(of_sent) and is_differentiated(of_experts.w_up)
    needs_shared = is_differentiated((of_sent, of_experts)) and given_shared is not None
    if needs_shared and given_shared is not None:
        needs_shared = is_differentiated((given_shared.operands.rows, given_shared.operands.w_up))

    def run(
        handle: Handle, weights: jax.Array, operands: MlpOperands, shared: Shared | None
    ) -> tuple[jax.Array, jax.Array | None, Saved, Saved | None]:
        hidden, saved = until_down(call.mlp, operands)
        of_shared, saved_shared = _until_down_of_shared(call, shared)
        if not call.weighs:
            sums = sums_of_hidden(call, handle, None, hidden, operands, of_shared)
            return sums, None, saved, saved_shared
        out = down(call.mlp, operands, hidden)
        return sums_of(call, handle, Pull((out,), weights), of_shared), out, saved, saved_shared

    sums, out, of_mlp, of_shared = call.once_in_fp8(run, handle, arrived_weights, operands, shared)
    x = jnp.zeros((), sent.leaves[0].dtype)
    saved = for_backward(handle), x, arrived_weights, out, of_mlp, of_shared
    return sums, _Residuals(*saved, needs_both, needs_shared)


def _layer_backward(
    call: LayerCall, residuals: _Residuals, d_sums: jax.Array
) -> tuple[None, Push | None, None, MlpOperands | None, Shared | None]:
    cotangent = nonzero_cotangents(d_sums)
    if cotangent is None:
        return None, None, None, None, None
    run = functools.partial(_gradients, call)
    sent, gradients, shared = call.once_in_fp8(run, residuals, cotangent)
    return None, sent, None, gradients, shared


def _gradients(
    call: LayerCall, residuals: _Residuals, d_sums: jax.Array
) -> tuple[Push, MlpOperands, Shared | None]:
    handle, weights, out = residuals.handle, residuals.weights, residuals.out
    pulled: Pulled = (handle, None if out is None else ((out,), weights), [])
    saved, d_hidden = residuals.mlp, None
    if not call.mlp.saves_preactivation and call.engine_beside(d_sums.size) is not None:
        d_pulled, saved = push_beside_up(call, pulled, d_sums, saved)
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
