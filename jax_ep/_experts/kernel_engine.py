"""Engine "ffi": calls of the handlers of products and of conversions to FP8. GPUs only."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _extension
from jax_ep._experts.activations import OF_KERNELS, Activation, activate
from jax_ep._experts.engine import (
    Gradients,
    Product,
    dequantized_dot,
    dequantized_dot_weights,
    quantized_gradients,
)
from jax_ep._experts.fp8_operands import Columns
from jax_ep._experts.xla_engine import XlaEngine
from jax_ep._jax.ffi_call import Result, call, or_scalar
from jax_ep._rows.fp8 import BLOCK, COTANGENT_FLOOR, FLOOR, FP8, QuantizedArray
from jax_ep._rows.quantize import KERNEL_DTYPES, matrices_by_kernel, quantize_by_kernel, rows_by_kernel
from jax_ep._rows.weights import PhysicalWeights, home_of, redundant_of


@dataclasses.dataclass(frozen=True)
class KernelEngine:
    """Engine "ffi": this package's kernels. What they do not take, XLA computes."""

    num_sms: int = 0  # the most SMs that CUTLASS's kernels use; 0: all
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT

    def with_precision(self, precision: jax.lax.Precision) -> "KernelEngine":
        return dataclasses.replace(self, precision=precision)

    def grouped_dot(
        self,
        product: Product,
        num_redundant: int,
        rows: jax.Array,
        others: Any,
        group_sizes: jax.Array,
        first_row: jax.Array | None = None,
    ) -> Any:
        if rows.dtype not in KERNEL_DTYPES:
            xla = XlaEngine(self.precision)
            return xla.grouped_dot(product, num_redundant, rows, others, group_sizes, first_row)
        if product is Product.WEIGHTS:
            shapes = _matrices(group_sizes, num_redundant, (rows.shape[1], others.shape[1]))
        else:
            shapes = [(rows.shape[0], others.shape[2 if product is Product.ROWS else 1]), (0,)]
        redundant = or_scalar(redundant_of(others), rows.dtype)
        *matrices, _ = call(
            "grouped_dot",
            [rows, home_of(others), redundant, group_sizes, or_scalar(first_row, jnp.int32)],
            [*((shape, rows.dtype) for shape in shapes), _scratch(group_sizes)],
            product=np.int64(product),
            allow_tf32=np.int64(self.precision is not jax.lax.Precision.HIGHEST),
            num_sms=np.int64(self.num_sms),
        )
        return PhysicalWeights(*matrices) if num_redundant else matrices[0]

    def grouped_dot_fp8(self, rows: QuantizedArray, w: QuantizedArray, group_sizes: jax.Array) -> jax.Array:
        if not _extension.has_fp8_products():
            return dequantized_dot(self, rows, w, group_sizes)
        # Tensor cores read matrices [L, N, M].
        values, scales = (
            jax.tree.map(lambda array: array.swapaxes(1, 2), part) for part in (w.values, w.scales)
        )
        home = [home_of(values), home_of(scales)]
        redundant = [or_scalar(redundant_of(values), FP8), or_scalar(redundant_of(scales))]
        operands = [rows.values, rows.scales, *home, *redundant, group_sizes]
        return self._product("grouped_dot_fp8", operands, [(rows.shape[0], values.shape[1])])[0]

    def grouped_dot_fp8_weights(
        self, num_redundant: int, rows: Columns, others: Columns, group_sizes: jax.Array
    ) -> Any:
        if not _extension.has_fp8_products():
            return dequantized_dot_weights(self, num_redundant, rows, others, group_sizes)
        operands = [*rows, *others, group_sizes]
        shapes = _matrices(group_sizes, num_redundant, (rows.values.shape[0], others.values.shape[0]))
        matrices = self._product("grouped_dot_fp8_weights", operands, shapes)
        return PhysicalWeights(*matrices) if num_redundant else matrices[0]

    def _product(
        self, target: str, operands: list[jax.Array], shapes: list[tuple[int, ...]]
    ) -> list[jax.Array]:
        results: list[Result] = [*((shape, jnp.bfloat16) for shape in shapes), _scratch(operands[-1])]
        return call(target, operands, results, num_sms=np.int64(self.num_sms))[:-1]

    def quantize(self, x: jax.Array, block: tuple[int, int], round_scale: bool) -> QuantizedArray:
        return quantize_by_kernel(x, block, round_scale)

    def quantize_rows(
        self, x: jax.Array, group_sizes: jax.Array, round_scale: bool, floor: float = FLOOR
    ) -> QuantizedArray:
        values, scales, *_ = rows_by_kernel(x, None, group_sizes, round_scale, floor, True, 0)
        return QuantizedArray(values, scales)

    def quantize_columns(
        self, x: jax.Array | QuantizedArray, group_sizes: jax.Array, round_scale: bool
    ) -> Columns:
        rows, scales = (x.values, x.scales) if isinstance(x, QuantizedArray) else (x, None)
        count = Columns.num_columns(rows.shape[0], group_sizes.shape[0])
        return Columns(*rows_by_kernel(rows, scales, group_sizes, round_scale, FLOOR, False, count)[2:])

    def quantize_both(
        self, x: jax.Array, group_sizes: jax.Array, round_scale: bool, floor: float = FLOOR
    ) -> tuple[QuantizedArray, Columns]:
        count = Columns.num_columns(x.shape[0], group_sizes.shape[0])
        values, scales, *columns = rows_by_kernel(x, None, group_sizes, round_scale, floor, True, count)
        return QuantizedArray(values, scales), Columns(*columns)

    def quantize_matrices(
        self, w: jax.Array, round_scale: bool, kept: bool, transposed: bool
    ) -> tuple[QuantizedArray, QuantizedArray]:
        values, scales, turned = matrices_by_kernel(w, round_scale, kept, transposed)
        return QuantizedArray(values, scales), QuantizedArray(turned, scales.swapaxes(1, 2))

    def activate_fp8(
        self,
        activation: Activation,
        z: jax.Array,
        row_weights: jax.Array | None,
        group_sizes: jax.Array,
        round_scale: bool,
    ) -> QuantizedArray:
        if not _is_fused(activation, z, row_weights):
            return self.quantize_rows(activate(activation, z, row_weights), group_sizes, round_scale)
        results = _scaled((z.shape[0], z.shape[1] // 2))
        operands = [z, or_scalar(None), group_sizes]
        return QuantizedArray(*_quantize_gated(activation, operands, results, round_scale, FLOOR))

    def activation_gradients_fp8(
        self,
        activation: Activation,
        z: jax.Array,
        row_weights: jax.Array | None,
        d_hidden: jax.Array,
        group_sizes: jax.Array,
        round_scale: bool,
        needs_wide_d_z: bool,
    ) -> Gradients:
        if needs_wide_d_z or not _is_fused(activation, z, row_weights):
            return quantized_gradients(self, activation, z, row_weights, d_hidden, group_sizes, round_scale)
        width, columns = d_hidden.shape[1], Columns.num_columns(z.shape[0], group_sizes.shape[0])
        results = [
            *_scaled_columns(width, columns),
            *_scaled(z.shape),
            *_scaled_columns(2 * width, columns),
        ]
        operands = [z, d_hidden, group_sizes]
        converted = _quantize_gated(activation, operands, results, round_scale, COTANGENT_FLOOR)
        hidden, d_z, d_z_columns = converted[:2], converted[2:4], converted[4:]
        return Gradients(Columns(*hidden), QuantizedArray(*d_z), Columns(*d_z_columns), None, None)


def _is_fused(activation: Activation, z: jax.Array, row_weights: jax.Array | None) -> bool:
    """Returns whether a kernel computes the activation and quantizes it in one pass."""
    is_known = any(activation is known for known in OF_KERNELS) and z.dtype == jnp.bfloat16
    return is_known and row_weights is None


def _quantize_gated(
    activation: Activation,
    operands: list[jax.Array],
    results: list[Result],
    round_scale: bool,
    floor: float,
) -> list[jax.Array]:
    attributes = {"round_scale": np.int64(round_scale), "floor": np.float32(floor)}
    index = np.int64(OF_KERNELS.index(activation))
    return call("quantize_gated", operands, results, activation=index, **attributes)


def _matrices(group_sizes: jax.Array, num_redundant: int, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """Returns the shapes of the matrices of home experts, and of redundant ones."""
    return [(group_sizes.size - num_redundant, *shape), (num_redundant, *shape) if num_redundant else (0,)]


def _scaled(shape: tuple[int, ...]) -> list[Result]:
    return [(shape, FP8), ((shape[0], shape[1] // BLOCK), jnp.float32)]


def _scaled_columns(width: int, columns: int) -> list[Result]:
    return [((width, columns), FP8), ((columns // BLOCK, width), jnp.float32)]


def _scratch(group_sizes: jax.Array) -> Result:
    """Returns the scratch memory of a product: GroupedDotScratchBytes in ffi/core/params.h."""
    return ((128 << 10) + 80 * group_sizes.size,), jnp.uint8
