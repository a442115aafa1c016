"""Gated experts, in FP8 or not: how the operands of their products are prepared."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jax_ep._experts.activations import Activation, activate, activation_gradients
from jax_ep._experts.engine import Engine, Gradients, Product, quantize_physical
from jax_ep._experts.fp8_operands import QuantizedWeights
from jax_ep._experts.products import fp8_product, fp8_weight_gradient, product
from jax_ep._jax.custom_vjp import without_gradient
from jax_ep._jax.sharding import vary_alike
from jax_ep._rows.fp8 import COTANGENT_FLOOR, QuantizedArray, dequantize_fp8
from jax_ep._rows.weights import PhysicalWeights


class Products(Protocol):
    """The products of gated experts, and how their operands are prepared. Hashable."""

    def times(self, rows: Any, w: Any, sizes: jax.Array) -> jax.Array:
        """Multiplies rows as they are, or as `prepare` or `activate` returns them."""
        ...

    def times_transposed(self, rows: Any, w: Any, sizes: jax.Array) -> jax.Array: ...

    def weight_gradient(self, rows: Any, d_rows: Any, sizes: jax.Array, num_redundant: int) -> Any:
        """Returns the matrices' gradients as a `product` WEIGHTS does."""
        ...

    def prepare(self, rows: Any, sizes: jax.Array) -> tuple[Any, Any]:
        """Returns rows as `times` takes them, and as they are kept for `weight_gradient`."""
        ...

    def cotangents(self, d: jax.Array, sizes: jax.Array) -> tuple[Any, Any]:
        """Returns cotangents as `times_transposed`, and as `weight_gradient` takes them."""
        ...

    def activate(
        self, activation: Activation, z: jax.Array, row_weights: jax.Array | None, sizes: jax.Array
    ) -> Any:
        """Returns the activation of z [C, 2F], times the row weights, as `times` takes it."""
        ...

    def gradients(
        self,
        activation: Activation,
        z: jax.Array,
        row_weights: jax.Array | None,
        d_hidden: jax.Array,
        sizes: jax.Array,
        needs_wide_d_z: bool,
    ) -> Gradients: ...


@dataclasses.dataclass(frozen=True)
class Wide:
    """Products of operands as they are."""

    engine: Engine

    def times(self, rows: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
        return product(Product.ROWS, self.engine, 0, rows, w, sizes)

    def times_transposed(self, rows: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
        return product(Product.ROWS_TRANSPOSED, self.engine, 0, rows, w, sizes)

    def weight_gradient(
        self, rows: jax.Array, d_rows: jax.Array, sizes: jax.Array, num_redundant: int
    ) -> Any:
        return product(Product.WEIGHTS, self.engine, num_redundant, rows, d_rows, sizes)

    def prepare(self, rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows, rows

    def cotangents(self, d: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return d, d

    def activate(
        self, activation: Activation, z: jax.Array, row_weights: jax.Array | None, sizes: jax.Array
    ) -> jax.Array:
        return activate(activation, z, row_weights)

    def gradients(
        self,
        activation: Activation,
        z: jax.Array,
        row_weights: jax.Array | None,
        d_hidden: jax.Array,
        sizes: jax.Array,
        needs_wide_d_z: bool,
    ) -> Gradients:
        hidden, d_z, d_row_weights = activation_gradients(activation, z, row_weights, d_hidden)
        return Gradients(hidden, d_z, d_z, d_z, d_row_weights)


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Products of FP8 operands. Weights are quantized in each product, unless they come quantized."""

    engine: Engine
    rounds: bool
    weight_gradients: bool  # in FP8, too; otherwise they have bfloat16 operands

    def times(self, rows: jax.Array | QuantizedArray, w: Any, sizes: jax.Array) -> jax.Array:
        if not isinstance(rows, QuantizedArray):
            rows = self.engine.quantize_rows(rows, sizes, self.rounds)
        is_ready = isinstance(w, QuantizedWeights)
        transposed = w.transposed if is_ready else self._quantize(w, kept=False)[1]
        return self._product(rows, transposed, sizes)

    def times_transposed(self, rows: QuantizedArray, w: Any, sizes: jax.Array) -> jax.Array:
        is_ready = isinstance(w, QuantizedWeights)
        kept = w.kept if is_ready else self._quantize(w, transposed=False)[0]
        return self._product(rows, kept, sizes)

    def weight_gradient(self, rows: Any, d_rows: Any, sizes: jax.Array, num_redundant: int) -> Any:
        if self.weight_gradients:
            if isinstance(rows, QuantizedArray):
                rows = self.engine.quantize_columns(rows, sizes, self.rounds)
            return fp8_weight_gradient(self.engine, num_redundant, rows, d_rows, sizes)
        rows = dequantize_fp8(rows) if isinstance(rows, QuantizedArray) else rows.astype(jnp.bfloat16)
        return product(Product.WEIGHTS, self.engine, num_redundant, rows, d_rows, sizes)

    def prepare(self, rows: jax.Array | QuantizedArray, sizes: jax.Array) -> tuple[Any, Any]:
        if isinstance(rows, QuantizedArray):
            return rows, dataclasses.replace(rows, carrier=None)
        if self.weight_gradients:
            return self.engine.quantize_both(rows, sizes, self.rounds)
        return rows, rows

    def cotangents(self, d: jax.Array, sizes: jax.Array) -> tuple[QuantizedArray, Any]:
        if self.weight_gradients:
            return self.engine.quantize_both(d, sizes, self.rounds, COTANGENT_FLOOR)
        return self.engine.quantize_rows(d, sizes, self.rounds, COTANGENT_FLOOR), d

    def activate(
        self, activation: Activation, z: jax.Array, row_weights: jax.Array | None, sizes: jax.Array
    ) -> QuantizedArray:
        return self.engine.activate_fp8(activation, z, row_weights, sizes, self.rounds)

    def gradients(
        self,
        activation: Activation,
        z: jax.Array,
        row_weights: jax.Array | None,
        d_hidden: jax.Array,
        sizes: jax.Array,
        needs_wide_d_z: bool,
    ) -> Gradients:
        if self.weight_gradients:
            return self.engine.activation_gradients_fp8(
                activation, z, row_weights, d_hidden, sizes, self.rounds, needs_wide_d_z
            )
        hidden, d_z, d_row_weights = activation_gradients(activation, z, row_weights, d_hidden)
        rows, columns = self.cotangents(d_z, sizes)
        return Gradients(hidden, rows, columns, d_z, d_row_weights)

    def _quantize(self, w: Any, *, kept: bool = True, transposed: bool = True) -> tuple[Any, Any]:
        return quantize_physical(self.engine, w, self.rounds, kept=kept, transposed=transposed)

    def _product(self, rows: QuantizedArray, transposed: QuantizedArray, sizes: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda part: part.swapaxes(1, 2), transposed)
        return fp8_product(self.engine, rows, w, sizes)


def cotangent_of(primal: Any, gradient: Any) -> Any:
    """Returns a gradient in the place where it belongs in an argument."""
    if isinstance(primal, PhysicalWeights):
        return jax.tree.map(cotangent_of, primal, gradient)
    if isinstance(primal, QuantizedWeights):
        return QuantizedWeights(cotangent_of(primal.w, gradient), None, None)  # pyright: ignore
    if isinstance(primal, QuantizedArray):
        carrier = None if primal.carrier is None else gradient.astype(primal.carrier.dtype)
        return QuantizedArray(None, None, carrier)  # pyright: ignore
    return sharded_like(primal, gradient).astype(primal.dtype)


def once_differentiable(error: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Returns function(*operands), whose gradient raises TypeError, because it would have to be FP8 too.

    Operands that the function returns stay what they are, so that a scan does not store them again.
    """
    fixed = jax.lax.stop_gradient(operands)
    pairs = zip(jax.tree.leaves(fixed), jax.tree.leaves(operands), strict=True)
    returned = {id(leaf): operand for leaf, operand in pairs}
    leaves, tree = jax.tree.flatten(function(*fixed))
    computed = iter(without_gradient(error, operands, [x for x in leaves if id(x) not in returned]))
    return tree.unflatten([returned[id(x)] if id(x) in returned else next(computed) for x in leaves])


def sharded_like(primal: Any, gradient: jax.Array) -> jax.Array:
    """Returns a gradient with the Explicit sharding of an array of its shape, if the primal is one."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit and isinstance(primal, jax.Array) and primal.shape == gradient.shape:
        return jax.sharding.reshard(gradient, jax.typeof(primal).sharding.spec)
    return gradient


def without_gradient_of_values(error: str, rows: Any, out: jax.Array) -> jax.Array:
    """Returns out, whose gradient in FP8 rows without a carrier raises TypeError."""
    if isinstance(rows, QuantizedArray) and rows.carrier is None:
        return without_gradient(error, *vary_alike([(rows.values, rows.scales), out]))
    return out


def without_carrier(rows: Any) -> Any:
    """Drops the carrier of rows, except for its dtype, so that a scan does not store it."""
    if isinstance(rows, QuantizedArray) and rows.carrier is not None:
        return dataclasses.replace(rows, carrier=jnp.zeros((), rows.carrier.dtype))
    return rows


def without_values(rows: Any) -> Any:
    """Drops rows, except for the dtype that `cotangent_of` needs."""
    if isinstance(rows, QuantizedArray):
        return dataclasses.replace(without_carrier(rows), values=None, scales=None)
    return jnp.zeros((), rows.dtype)
