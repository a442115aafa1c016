"""The gated MLP of experts, and its gradient."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._experts.activations import Activation, Gated, weighted
from jax_ep._experts.engine import AnyFactors, Engine
from jax_ep._experts.fp8_operands import QuantizedWeights
from jax_ep._experts.gated import (
    Kept,
    Products,
    Rows,
    Weights,
    cotangent_of,
    once_differentiable,
    sharded_like,
    wide_of,
    without_carrier,
    without_values,
)
from jax_ep._experts.products import factors_of_weights, product
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.sharding import merge_dimensions, split_dimension, vary_alike
from jax_ep._rows.counts import groups_of_rows
from jax_ep._rows.dtypes import sum_dtype
from jax_ep._rows.fp8 import QuantizedArray, as_bits, from_bits
from jax_ep._rows.weights import Matrices, as_array, num_redundant_of

Result = TypeVar("Result")
Tree = TypeVar("Tree")

_ONE_GRADIENT = (
    "gated_mlp: quantize={!r} has no second derivative, because the first one is computed in FP8; pass "
    "quantize=None where it is taken"
)


@dataclasses.dataclass(frozen=True)
class MlpCall:
    """The static part of a call."""

    activation: Activation
    engine: Engine
    products: Products
    saves_preactivation: bool
    quantize: str | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlpOperands:
    """The arrays of a call, and in the backward pass their gradients."""

    rows: Rows  # [C, H], or a QuantizedArray
    w_up: Weights  # [L, H, 2F], or QuantizedWeights, with gate and up in one dimension
    w_down: Weights  # [L, F, H], or QuantizedWeights
    group_sizes: jax.Array  # [L]
    b_up: jax.Array | None
    b_down: jax.Array | None
    row_weights: jax.Array | None

    def dtype(self) -> np.dtype:
        """Returns the dtype of the result."""
        return jnp.dtype(jnp.bfloat16) if isinstance(self.rows, QuantizedArray) else self.rows.dtype


Saved = tuple[MlpOperands, Kept | None, jax.Array | None]
"""The arrays of a call, the rows as they are kept, and the preactivation."""


@custom_vjp(0)
def mlp(call: MlpCall, operands: MlpOperands) -> jax.Array:
    operands = _merged(from_bits(operands))
    return down(call, operands, _activate(call, operands, _preactivation(call, operands, operands.rows)))


def _preactivation(
    call: MlpCall, operands: MlpOperands, rows: Rows, product: jax.Array | None = None
) -> jax.Array:
    z = call.products.times(rows, operands.w_up, operands.group_sizes) if product is None else product
    if operands.b_up is None:
        return z
    bias = _per_row(call, operands.b_up, operands.group_sizes, z)
    return (z.astype(sum_dtype(z.dtype)) + bias).astype(z.dtype)


def _activate(call: MlpCall, operands: MlpOperands, z: jax.Array) -> Rows:
    return call.products.activate(Gated(z, operands.row_weights, operands.group_sizes, call.activation))


def up(call: MlpCall, operands: MlpOperands) -> jax.Array:
    """Returns the first product, without its bias."""
    operands = from_bits(operands)
    rows, _ = call.products.prepare(operands.rows, operands.group_sizes)
    return call.products.times(rows, _merged(operands).w_up, operands.group_sizes)


def up_factors(call: MlpCall, operands: MlpOperands) -> AnyFactors:
    """Returns the operands of the first product."""
    operands = from_bits(operands)
    rows, _ = call.products.prepare(operands.rows, operands.group_sizes)
    return call.products.factors(rows, _merged(operands).w_up, operands.group_sizes)


def down_factors(call: MlpCall, operands: MlpOperands, hidden: Rows) -> AnyFactors:
    """Returns the operands of the second product."""
    operands = from_bits(operands)
    return call.products.factors(hidden, operands.w_down, operands.group_sizes)


def down(call: MlpCall, operands: MlpOperands, hidden: Rows, product: jax.Array | None = None) -> jax.Array:
    """Returns the second product of what `until_down` returns, if it is not given, and its bias."""
    operands = from_bits(operands)
    out = call.products.times(hidden, operands.w_down, operands.group_sizes) if product is None else product
    if operands.b_down is not None:
        wide = out.astype(sum_dtype(out.dtype))
        bias = _per_row(call, operands.b_down, operands.group_sizes, out)
        out = wide + weighted(bias, operands.row_weights)
    return out.astype(operands.dtype())


def _per_row(call: MlpCall, bias: jax.Array, sizes: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the bias of each row's expert, in float32; zero in rows of no expert."""
    expert = groups_of_rows(sizes, rows.shape[0], call.engine.options.rows_per_group)
    return jnp.take(bias, expert, axis=0, mode="fill", fill_value=0).astype(sum_dtype(rows.dtype))


def _mlp_forward(call: MlpCall, operands: MlpOperands) -> tuple[jax.Array, Saved]:
    return once_in_fp8(call, _forward, operands)


def once_in_fp8(call: MlpCall, function: Callable[..., Result], *operands: object) -> Result:
    """Returns function(call, *operands), half of a first derivative, which in FP8 has no derivative."""
    if call.quantize is None:
        return function(call, *operands)
    error = _ONE_GRADIENT.format(call.quantize)
    return once_differentiable(error, functools.partial(function, call), *operands)


def _forward(call: MlpCall, operands: MlpOperands) -> tuple[jax.Array, Saved]:
    if not call.saves_preactivation:
        rows = without_carrier(operands.rows)
        return mlp(call, operands), (dataclasses.replace(operands, rows=rows), None, None)
    hidden, saved = until_down(call, operands)
    return down(call, operands, hidden), saved


def until_down(call: MlpCall, operands: MlpOperands, product: jax.Array | None = None) -> tuple[Rows, Saved]:
    """Returns the activation, as the second product takes it, and what the backward pass needs.

    `product`: the first product, if it is already computed.
    """
    given, operands = operands, from_bits(operands)
    merged = _merged(operands)  # what is saved is what came, so that a scan does not store it again
    if not call.saves_preactivation:
        hidden = _activate(call, merged, _preactivation(call, merged, operands.rows, product))
        return hidden, (dataclasses.replace(given, rows=without_carrier(given.rows)), None, None)
    rows, saved_rows = call.products.prepare(operands.rows, operands.group_sizes)
    z = _preactivation(call, merged, rows, product)
    operands = dataclasses.replace(operands, rows=without_values(operands.rows))
    return _activate(call, merged, z), as_bits((operands, saved_rows, z))


def _mlp_backward(call: MlpCall, saved: Saved, d_out: jax.Array) -> tuple[MlpOperands]:
    return once_in_fp8(call, _backward, saved, d_out)


def _backward(call: MlpCall, saved: Saved, d_out: jax.Array) -> tuple[MlpOperands]:
    return (backward(call, saved, d_out),)


def backward(call: MlpCall, saved: Saved, d_out: jax.Array, d_hidden: jax.Array | None = None) -> MlpOperands:
    """Returns the gradients in the places of their primals. `d_hidden`: as for `backward_until_up`."""
    gradients, of_up = backward_until_up(call, saved, d_out, d_hidden)
    return with_gradients(saved, gradients, of_up.compute(call.products))


def with_preactivation(call: MlpCall, saved: Saved, product: jax.Array | None = None) -> Saved:
    """Returns what was saved, with the preactivation. `product`: the first product, if it is computed."""
    operands, _, _ = from_bits(saved)
    rows, saved_rows = call.products.prepare(operands.rows, operands.group_sizes)
    return as_bits((operands, saved_rows, _preactivation(call, _merged(operands), rows, product)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpGradient:
    """The gradient of w_up before it is computed. Nothing else in a backward pass depends on it."""

    rows: Kept
    d_z: Kept
    group_sizes: jax.Array
    num_redundant: int = dataclasses.field(metadata={"static": True})

    def factors(self, products: Products) -> AnyFactors:
        return products.weight_factors(self.rows, self.d_z, self.group_sizes, self.num_redundant)

    def compute(self, products: Products) -> Matrices:
        return products.weight_gradient(self.rows, self.d_z, self.group_sizes, self.num_redundant)


def d_hidden_factors(call: MlpCall, saved: Saved, d_out: jax.Array) -> AnyFactors:
    """Returns the operands of the first product of a backward pass."""
    operands, rows = _cotangent_rows(call, saved, d_out)
    return call.products.transposed_factors(rows, operands.w_down, operands.group_sizes)


def d_hidden(call: MlpCall, saved: Saved, d_out: jax.Array) -> jax.Array:
    """Returns the first product of a backward pass."""
    operands, rows = _cotangent_rows(call, saved, d_out)
    return call.products.times_transposed(rows, operands.w_down, operands.group_sizes)


def _cotangent_rows(call: MlpCall, saved: Saved, d_out: jax.Array) -> tuple[MlpOperands, Rows]:
    operands, _, z = from_bits(saved)
    assert z is not None
    rows, _ = call.products.cotangents(d_out.astype(z.dtype), operands.group_sizes)
    return operands, rows


def backward_until_up(
    call: MlpCall, saved: Saved, d_out: jax.Array, d_hidden: jax.Array | None = None
) -> tuple[MlpOperands, UpGradient]:
    """Returns all gradients except that of w_up: of rows as an array, of matrices as they are computed.

    `d_hidden`: the first product, if it is already computed.
    """
    sizes = saved[0].group_sizes
    if saved[2] is None:
        # Without it XLA keeps the product of the forward pass, or computes this one too early to save memory.
        saved, d_out = jax.lax.optimization_barrier((saved, d_out))
        saved = with_preactivation(call, saved)
    operands, saved_rows, z = from_bits(saved)
    products = call.products
    assert saved_rows is not None
    assert z is not None
    d_out_rows, d_out_columns = products.cotangents(d_out.astype(z.dtype), sizes)
    if d_hidden is None:
        d_hidden = products.times_transposed(d_out_rows, operands.w_down, sizes)
    gated = Gated(z, operands.row_weights, sizes, call.activation, needs_wide_d_z=operands.b_up is not None)
    gradients = products.gradients(gated, d_hidden)
    d_w_down = products.weight_gradient(
        gradients.hidden, d_out_columns, sizes, _num_redundant(operands.w_down)
    )
    d_row_weights = gradients.d_row_weights
    d_b_up, d_b_down = None, None
    if operands.b_up is not None:
        assert gradients.d_z_wide is not None
        d_b_up = _sum_of_groups(call.engine, gradients.d_z_wide, sizes).astype(operands.b_up.dtype)
        d_b_up = _split_like(operands.b_up, d_b_up, 1)
    if operands.b_down is not None:
        d_b_down = _sum_of_groups(call.engine, weighted(d_out, operands.row_weights), sizes)
        d_b_down = d_b_down.astype(operands.b_down.dtype)
        if operands.row_weights is not None:
            bias = _per_row(call, operands.b_down, sizes, z)
            assert d_row_weights is not None
            of_bias = jnp.sum(d_out.astype(bias.dtype) * bias, axis=1)
            d_row_weights = d_row_weights + of_bias.astype(d_row_weights.dtype)
    d_rows = products.times_transposed(gradients.d_z, _merged(operands).w_up, sizes)
    of_up = UpGradient(saved_rows, gradients.d_z_columns, sizes, _num_redundant(operands.w_up))
    return dataclasses.replace(
        operands,
        rows=sharded_like(saved_rows, d_rows),
        w_up=None,
        w_down=d_w_down,
        group_sizes=None,
        b_up=d_b_up,
        b_down=d_b_down,
        row_weights=d_row_weights,
    ), of_up


def with_gradients(saved: Saved, gradients: MlpOperands, d_w_up: Matrices) -> MlpOperands:
    """Returns the gradients of `backward_until_up`, and that of w_up, in the places of their primals."""
    operands, _, _ = from_bits(saved)
    return dataclasses.replace(
        gradients,
        rows=cotangent_of(operands.rows, gradients.rows),
        w_up=cotangent_of(operands.w_up, _split_like(wide_of(operands.w_up), d_w_up, 2)),
        w_down=cotangent_of(operands.w_down, gradients.w_down),
    )


mlp.defvjp(_mlp_forward, _mlp_backward)


def _sum_of_groups(engine: Engine, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns each group's sum of rows [L, ...]: a product, which has the same bits when it is repeated.

    Its operands must not be rounded to tf32, as no other sum's are.
    """
    ones = vary_alike([jnp.ones((rows.shape[0], 8), rows.dtype), rows])[0]
    exact = engine.with_precision(jax.lax.Precision.HIGHEST)
    return as_array(product(exact, factors_of_weights(ones, rows, sizes, 0)))[:, 0]


def _num_redundant(w: Weights) -> int:
    return num_redundant_of(wide_of(w))


def _merged(operands: MlpOperands) -> MlpOperands:
    """Returns the arrays with w_up [L, H, 2F] and b_up [L, 2F], which copies nothing on a device."""

    def merge(tree: Tree, dimension: int) -> Tree:
        return jax.tree.map(lambda array: merge_dimensions(array, dimension), tree)

    w, b_up = operands.w_up, operands.b_up
    if len(w.shape) == 4:
        if isinstance(w, QuantizedWeights):
            w = QuantizedWeights(merge(w.transposed, 1), merge(w.kept, 2), merge(w.w, 2))
        else:
            w = merge(w, 2)
    if b_up is not None and b_up.ndim == 3:
        b_up = merge(b_up, 1)
    return dataclasses.replace(operands, w_up=w, b_up=b_up)


def _split_like(primal: Matrices, gradient: Tree, dimension: int) -> Tree:
    """Returns the gradient of a merged array in the shape that it came in."""
    if primal.ndim == jax.tree.leaves(gradient)[0].ndim:
        return gradient
    return jax.tree.map(lambda array: split_dimension(array, dimension, 2), gradient)
