"""Gated experts, in FP8 or not: how the operands of their products are prepared."""

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

from jax_ep._checks import Arguments, PyTree
from jax_ep._experts.activations import Gated, activate, activation_gradients
from jax_ep._experts.engine import AnyFactors, Engine, Factors, Gradients, Product, quantize_physical
from jax_ep._experts.fp8_operands import Columns, QuantizedWeights
from jax_ep._experts.products import factors_of_weights, fp8_product, fp8_weight_gradient, product
from jax_ep._jax.custom_vjp import without_gradient
from jax_ep._jax.sharding import vary_alike
from jax_ep._rows.fp8 import BLOCK, COTANGENT_FLOOR, QuantizedArray, block_of, dequantize_fp8
from jax_ep._rows.weights import Matrices, PhysicalWeights, as_array

Result = TypeVar("Result")

_FORWARD_ONLY = (
    "{}: quantize_weights(gradients=False) keeps only what a forward pass reads, so products with its result "
    "have no gradient, not even in rows or tokens; leave gradients=False out, or pass "
    "jax.lax.stop_gradient(...) of what was computed"
)

Weights = Matrices | QuantizedWeights
"""Matrices of experts, in FP8 or not."""
Rows = jax.Array | QuantizedArray
"""Rows as products with matrices take them."""
Kept = jax.Array | QuantizedArray | Columns
"""Rows as they are kept for the gradient of matrices."""


class Products(Protocol):
    """The products of gated experts, and how their operands are prepared. Hashable."""

    def factors(self, rows: Rows, w: Weights, sizes: jax.Array) -> AnyFactors:
        """Returns the operands of `times`."""
        ...

    def times(self, rows: Rows, w: Weights, sizes: jax.Array) -> jax.Array:
        """Multiplies rows as they are, or as `prepare` or `activate` returns them."""
        ...

    def transposed_factors(self, rows: Rows, w: Weights, sizes: jax.Array) -> AnyFactors:
        """Returns the operands of `times_transposed`."""
        ...

    def times_transposed(self, rows: Rows, w: Weights, sizes: jax.Array) -> jax.Array: ...

    @property
    def engine(self) -> Engine: ...

    def weight_factors(self, rows: Kept, d_rows: Kept, sizes: jax.Array, num_redundant: int) -> AnyFactors:
        """Returns the operands of `weight_gradient`."""
        ...

    def weight_gradient(self, rows: Kept, d_rows: Kept, sizes: jax.Array, num_redundant: int) -> Matrices:
        """Returns the matrices' gradients as a `product` WEIGHTS does."""
        ...

    def prepare(self, rows: Rows, sizes: jax.Array) -> tuple[Rows, Kept]:
        """Returns rows as `times` takes them, and as they are kept for `weight_gradient`."""
        ...

    def cotangents(self, d: jax.Array, sizes: jax.Array) -> tuple[Rows, Kept]:
        """Returns cotangents as `times_transposed`, and as `weight_gradient` takes them."""
        ...

    def activate(self, gated: Gated) -> Rows:
        """Returns the activation, times the row weights, as `times` takes it."""
        ...

    def gradients(self, gated: Gated, d_hidden: jax.Array) -> Gradients: ...


@dataclasses.dataclass(frozen=True)
class FloatProducts:
    """Products of operands as they are."""

    engine: Engine

    def factors(self, rows: Rows, w: Weights, sizes: jax.Array) -> Factors[jax.Array, Matrices]:
        return Factors(as_array(rows), wide_of(w), sizes)

    def times(self, rows: Rows, w: Weights, sizes: jax.Array) -> jax.Array:
        return as_array(product(self.engine, self.factors(rows, w, sizes)))

    def transposed_factors(self, rows: Rows, w: Weights, sizes: jax.Array) -> Factors[jax.Array, Matrices]:
        return Factors(as_array(rows), wide_of(w), sizes, kind=Product.ROWS_TRANSPOSED)

    def times_transposed(self, rows: Rows, w: Weights, sizes: jax.Array) -> jax.Array:
        return as_array(product(self.engine, self.transposed_factors(rows, w, sizes)))

    def weight_factors(
        self, rows: Kept, d_rows: Kept, sizes: jax.Array, num_redundant: int
    ) -> Factors[jax.Array, Matrices]:
        return factors_of_weights(as_array(rows), as_array(d_rows), sizes, num_redundant)

    def weight_gradient(self, rows: Kept, d_rows: Kept, sizes: jax.Array, num_redundant: int) -> Matrices:
        return product(self.engine, self.weight_factors(rows, d_rows, sizes, num_redundant))

    def prepare(self, rows: Rows, sizes: jax.Array) -> tuple[Rows, Kept]:
        return rows, rows

    def cotangents(self, d: jax.Array, sizes: jax.Array) -> tuple[Rows, Kept]:
        return d, d

    def activate(self, gated: Gated) -> Rows:
        return activate(gated)

    def gradients(self, gated: Gated, d_hidden: jax.Array) -> Gradients:
        hidden, d_z, d_row_weights = activation_gradients(gated, d_hidden)
        return Gradients(hidden, d_z, d_z, d_z, d_row_weights)


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Products of FP8 operands. Weights are quantized in each product, unless they come quantized."""

    engine: Engine
    weight_gradients: bool  # in FP8, too; otherwise they have bfloat16 operands

    def factors(self, rows: Rows, w: Weights, sizes: jax.Array) -> Factors[QuantizedArray, QuantizedArray]:
        if not isinstance(rows, QuantizedArray):
            rows = self.engine.quantize_rows(rows, sizes)
        is_ready = isinstance(w, QuantizedWeights)
        transposed = w.transposed if is_ready else quantize_physical(self.engine, w, kept=False)[1]
        return _of_turned(rows, transposed, sizes)

    def times(self, rows: Rows, w: Weights, sizes: jax.Array) -> jax.Array:
        return fp8_product(self.engine, self.factors(rows, w, sizes))

    def transposed_factors(
        self, rows: Rows, w: Weights, sizes: jax.Array
    ) -> Factors[QuantizedArray, QuantizedArray]:
        assert isinstance(rows, QuantizedArray)
        if isinstance(w, QuantizedWeights):
            kept = w.kept
            assert kept is not None  # see without_gradient_if_forward_only
        else:
            kept, _ = quantize_physical(self.engine, w, transposed=False)
        return _of_turned(rows, kept, sizes)

    def times_transposed(self, rows: Rows, w: Weights, sizes: jax.Array) -> jax.Array:
        return fp8_product(self.engine, self.transposed_factors(rows, w, sizes))

    def weight_factors(self, rows: Kept, d_rows: Kept, sizes: jax.Array, num_redundant: int) -> AnyFactors:
        if self.weight_gradients:
            if isinstance(rows, QuantizedArray):
                rows = self.engine.quantize_columns(rows, sizes)
            assert isinstance(rows, Columns)
            assert isinstance(d_rows, Columns)
            return factors_of_weights(rows, d_rows, sizes, num_redundant)
        is_fp8 = isinstance(rows, QuantizedArray)
        rows = dequantize_fp8(rows) if is_fp8 else as_array(rows).astype(jnp.bfloat16)
        return factors_of_weights(rows, as_array(d_rows), sizes, num_redundant)

    def weight_gradient(self, rows: Kept, d_rows: Kept, sizes: jax.Array, num_redundant: int) -> Matrices:
        factors = self.weight_factors(rows, d_rows, sizes, num_redundant)
        is_fp8 = isinstance(factors.rows, Columns)
        return (fp8_weight_gradient if is_fp8 else product)(self.engine, factors)

    def prepare(self, rows: Rows, sizes: jax.Array) -> tuple[Rows, Kept]:
        if isinstance(rows, QuantizedArray):
            return rows, dataclasses.replace(rows, carrier=None)
        if self.weight_gradients:
            return self.engine.quantize_both(rows, sizes)
        return rows, rows

    def cotangents(self, d: jax.Array, sizes: jax.Array) -> tuple[QuantizedArray, jax.Array | Columns]:
        if self.weight_gradients:
            return self.engine.quantize_both(d, sizes, COTANGENT_FLOOR)
        return self.engine.quantize_rows(d, sizes, COTANGENT_FLOOR), d

    def activate(self, gated: Gated) -> Rows:
        return self.engine.activate_fp8(gated)

    def gradients(self, gated: Gated, d_hidden: jax.Array) -> Gradients:
        if self.weight_gradients:
            return self.engine.activation_gradients_fp8(gated, d_hidden)
        hidden, d_z, d_row_weights = activation_gradients(gated, d_hidden)
        return Gradients(hidden, *self.cotangents(d_z, gated.group_sizes), d_z, d_row_weights)


def _of_turned(
    rows: QuantizedArray, turned: QuantizedArray, sizes: jax.Array
) -> Factors[QuantizedArray, QuantizedArray]:
    """Returns the operands of rows times matrices that are stored transposed."""
    return Factors(rows, jax.tree.map(lambda part: part.swapaxes(1, 2), turned), sizes)


def wide_of(w: Weights) -> Matrices:
    """Returns matrices that are not quantized, as a backward pass has them."""
    matrices = w.w if isinstance(w, QuantizedWeights) else w
    assert matrices is not None  # see without_gradient_if_forward_only
    return matrices


def cotangent_of(primal: PyTree, gradient: PyTree) -> PyTree:
    """Returns a gradient in the place where it belongs in an argument."""
    if isinstance(primal, PhysicalWeights):
        return jax.tree.map(cotangent_of, primal, gradient)
    if isinstance(primal, QuantizedWeights):
        return QuantizedWeights(None, None, cotangent_of(primal.w, gradient))  # pyright: ignore
    if isinstance(primal, QuantizedArray):
        carrier = None if primal.carrier is None else gradient.astype(primal.carrier.dtype)
        return QuantizedArray(None, None, carrier)  # pyright: ignore
    return sharded_like(primal, gradient).astype(primal.dtype)


def once_differentiable(error: str, function: Callable[..., Result], *operands: object) -> Result:
    """Returns function(*operands), whose gradient raises TypeError, because it would have to be FP8 too.

    If the function returns an operand unchanged, the result holds the operand itself and not a new value, so
    that a scan does not store it again.
    """
    fixed = jax.lax.stop_gradient(operands)
    pairs = zip(jax.tree.leaves(fixed), jax.tree.leaves(operands), strict=True)
    returned = {id(leaf): operand for leaf, operand in pairs}
    leaves, tree = jax.tree.flatten(function(*fixed))
    computed = iter(without_gradient(error, operands, [x for x in leaves if id(x) not in returned]))
    return tree.unflatten([returned[id(x)] if id(x) in returned else next(computed) for x in leaves])


def sharded_like(primal: object, gradient: jax.Array) -> jax.Array:
    """Returns a gradient with the Explicit sharding of an array of its shape, if the primal is one."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit and isinstance(primal, jax.Array) and primal.shape == gradient.shape:
        return jax.sharding.reshard(gradient, jax.typeof(primal).sharding.spec)
    return gradient


def without_gradient_of_values(error: str, rows: object, out: jax.Array) -> jax.Array:
    """Returns out, whose gradient in FP8 rows without a carrier raises TypeError."""
    if isinstance(rows, QuantizedArray) and rows.carrier is None:
        return without_gradient(error, *vary_alike(((rows.values, rows.scales), out)))
    return out


def quantized_weights(check: Arguments, name: str, w: QuantizedWeights) -> QuantizedWeights:
    """Returns weights in FP8, checked. Their gradient goes to `w.w`, if there is one."""
    is_forward_only = w.kept is None and w.w is None
    has_all = isinstance(w.kept, QuantizedArray) and w.w is not None
    if not isinstance(w.transposed, QuantizedArray) or not (is_forward_only or has_all):
        raise TypeError(
            f"{check.op}: {name} must be a result of quantize_weights, or for forward passes "
            "QuantizedWeights(QuantizedArray(...)); gradients need all three fields"
        )
    w = jax.tree.map(jnp.asarray, w)
    if block_of(check, w.transposed) != (BLOCK, BLOCK):
        rows, columns = block_of(check, w.transposed)
        raise ValueError(
            f"{check.op}: {name} must have scales of 128 x 128 elements, as quantize_weights makes them, got "
            f"{rows} x {columns}"
        )
    if w.kept is None:
        return w
    return dataclasses.replace(w, **jax.lax.stop_gradient({"transposed": w.transposed, "kept": w.kept}))


def without_gradient_if_forward_only(op: str, operands: PyTree, out: jax.Array) -> jax.Array:
    """Returns out, whose gradient raises TypeError if weights among the operands have none."""
    nodes = jax.tree.leaves(operands, is_leaf=lambda node: isinstance(node, QuantizedWeights))
    if all(node.kept is not None for node in nodes if isinstance(node, QuantizedWeights)):
        return out
    return without_gradient(_FORWARD_ONLY.format(op), *vary_alike((operands, out)))


def without_carrier(rows: Rows) -> Rows:
    """Drops the carrier of rows, except for its dtype, so that a scan does not store it."""
    if isinstance(rows, QuantizedArray) and rows.carrier is not None:
        return dataclasses.replace(rows, carrier=jnp.zeros((), rows.carrier.dtype))
    return rows


def without_values(rows: Rows) -> Rows:
    """Drops rows, except for the dtype that `cotangent_of` needs."""
    if isinstance(rows, QuantizedArray):
        kept = without_carrier(rows)
        assert isinstance(kept, QuantizedArray)
        return dataclasses.replace(kept, values=None, scales=None)
    return jnp.zeros((), rows.dtype)
