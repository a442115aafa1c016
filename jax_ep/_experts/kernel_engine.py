"""Engine "ffi": calls of the handlers of products and of conversions to FP8. GPUs only."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep import _extension
from jax_ep._experts.activations import OF_KERNELS, Gated, activate
from jax_ep._experts.engine import (
    AnyFactors,
    Factors,
    Gradients,
    Options,
    Product,
    dequantized_dot,
    dequantized_dot_weights,
    quantized_gradients,
)
from jax_ep._experts.fp8_operands import Columns
from jax_ep._experts.xla_engine import XlaEngine
from jax_ep._jax.ffi_call import Call, Result, call, or_scalar
from jax_ep._rows.fp8 import BLOCK, COTANGENT_FLOOR, FLOOR, FP8, QuantizedArray
from jax_ep._rows.quantize import KERNEL_DTYPES, matrices_by_kernel, quantize_by_kernel, rows_by_kernel
from jax_ep._rows.weights import Matrices, PhysicalWeights, as_array, home_of, redundant_of

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KernelEngine:
    """Engine "ffi": this package's kernels. What they do not take, XLA computes."""

    options: Options

    def with_precision(self, precision: jax.lax.Precision) -> "KernelEngine":
        return KernelEngine(dataclasses.replace(self.options, precision=precision))

    def with_adjacent_groups(self) -> "KernelEngine":
        return KernelEngine(dataclasses.replace(self.options, rows_per_group=0))

    def grouped_dot(self, factors: Factors[jax.Array, Matrices]) -> Matrices:
        product = self.call_of(factors)
        return XlaEngine(self.options).grouped_dot(factors) if product is None else product.run()

    def grouped_dot_fp8(self, factors: Factors[QuantizedArray, QuantizedArray]) -> jax.Array:
        product = self.call_of(factors)
        return dequantized_dot(self, factors) if product is None else as_array(product.run())

    def grouped_dot_fp8_weights(self, factors: Factors[Columns, Columns]) -> Matrices:
        product = self.call_of(factors)
        return dequantized_dot_weights(self, factors) if product is None else product.run()

    def call_of(self, factors: AnyFactors, columns: slice | None = None) -> Call[Matrices] | None:
        """Returns the call of a product, or of some columns of one ROWS. None if no kernel computes it."""
        rows, others = factors.rows, factors.others
        if isinstance(rows, jax.Array):
            if rows.dtype not in KERNEL_DTYPES:
                return None
            if factors.kind is Product.WEIGHTS:
                shapes = _matrices(factors, rows.shape[1], others.shape[1])
            else:
                shapes = [(rows.shape[0], others.shape[2 if factors.kind is Product.ROWS else 1]), (0,)]
            return self._call(factors, _Factor(rows), _Factor(others), shapes, rows.dtype, columns)
        if not _extension.has_fp8_products():
            return None
        if isinstance(rows, Columns):
            shapes = _matrices(factors, rows.values.shape[0], others.values.shape[0])
            return self._call(factors, rows, others, shapes, jnp.bfloat16, columns)
        # Tensor cores read matrices [L, N, M].
        turned = QuantizedArray(
            *(jax.tree.map(lambda a: a.swapaxes(1, 2), part) for part in (others.values, others.scales))
        )
        factors = dataclasses.replace(factors, kind=Product.ROWS_TRANSPOSED)
        shapes = [(rows.shape[0], turned.values.shape[1]), (0,)]
        return self._call(factors, rows, turned, shapes, jnp.bfloat16, columns)

    def _call(
        self,
        factors: Factors[Any, Any],
        rows: "_Factor | QuantizedArray | Columns",
        others: "_Factor | QuantizedArray | Columns",
        shapes: list[Shape],
        dtype: DTypeLike,
        columns: slice | None,
    ) -> Call[Matrices]:
        if columns is not None:
            shapes = [(shapes[0][0], columns.stop - columns.start), (0,)]
        values, scales = others.values, others.scales
        operands = [
            rows.values,
            or_scalar(rows.scales),
            home_of(values),
            or_scalar(None if scales is None else home_of(scales)),
            or_scalar(redundant_of(values), home_of(values).dtype),
            or_scalar(None if scales is None else redundant_of(scales)),
            factors.group_sizes,
            or_scalar(factors.first_row, jnp.int32),
        ]
        scaled = rows.scales if isinstance(rows, QuantizedArray) else None
        attributes = {
            "product": np.int64(factors.kind),
            "allow_tf32": np.int64(self.options.precision is not jax.lax.Precision.HIGHEST),
            "num_sms": np.int64(self.options.num_sms),
            "rows_per_group": np.int64(self.options.rows_per_group),
            "first_column": np.int64(0 if columns is None else columns.start),
            "clears_rows": np.int64(self.options.clears_rows),
        }

        def read(results: list[jax.Array]) -> Matrices:
            matrices, redundant, _ = results
            return PhysicalWeights(matrices, redundant) if factors.num_redundant else matrices

        results = [*((shape, dtype) for shape in shapes), _scratch(factors.group_sizes, scaled)]
        return Call("grouped_dot", operands, results, attributes, read)

    def quantize(self, x: jax.Array, block: tuple[int, int]) -> QuantizedArray:
        return quantize_by_kernel(x, block, self.options.round_scale)

    def quantize_rows(self, x: jax.Array, group_sizes: jax.Array, floor: float = FLOOR) -> QuantizedArray:
        values, scales, *_ = self._convert(x, None, group_sizes, floor, keeps=True, columns=0)
        return QuantizedArray(values, scales)

    def quantize_columns(self, x: jax.Array | QuantizedArray, group_sizes: jax.Array) -> Columns:
        rows, scales = (x.values, x.scales) if isinstance(x, QuantizedArray) else (x, None)
        columns = Columns.num_columns(rows.shape[0], group_sizes.shape[0])
        return Columns(*self._convert(rows, scales, group_sizes, FLOOR, keeps=False, columns=columns)[2:])

    def quantize_both(
        self, x: jax.Array, group_sizes: jax.Array, floor: float = FLOOR
    ) -> tuple[QuantizedArray, Columns]:
        columns = Columns.num_columns(x.shape[0], group_sizes.shape[0])
        values, scales, *transposed = self._convert(x, None, group_sizes, floor, keeps=True, columns=columns)
        return QuantizedArray(values, scales), Columns(*transposed)

    def _convert(
        self,
        x: jax.Array,
        scales: jax.Array | None,
        group_sizes: jax.Array,
        floor: float,
        keeps: bool,
        columns: int,
    ) -> list[jax.Array]:
        options = self.options
        groups = group_sizes, options.rows_per_group
        return rows_by_kernel(x, scales, groups, options.round_scale, floor, keeps, columns)

    def quantize_matrices(
        self, w: jax.Array, kept: bool, transposed: bool
    ) -> tuple[QuantizedArray, QuantizedArray]:
        values, scales, turned = matrices_by_kernel(w, self.options.round_scale, kept, transposed)
        return QuantizedArray(values, scales), QuantizedArray(turned, scales.swapaxes(1, 2))

    def activate_fp8(self, gated: Gated) -> QuantizedArray:
        z = gated.z
        if not _is_fused(gated):
            return self.quantize_rows(activate(gated), gated.group_sizes)
        results = _scaled((z.shape[0], z.shape[1] // 2))
        return QuantizedArray(*self._quantize_gated(gated, None, results, FLOOR))

    def activation_gradients_fp8(self, gated: Gated, d_hidden: jax.Array) -> Gradients:
        if gated.needs_wide_d_z or not _is_fused(gated):
            return quantized_gradients(self, gated, d_hidden)
        width = d_hidden.shape[1]
        columns = Columns.num_columns(gated.z.shape[0], gated.group_sizes.shape[0])
        results = [
            *_scaled_columns(width, columns),
            *_scaled(gated.z.shape),
            *_scaled_columns(2 * width, columns),
        ]
        converted = self._quantize_gated(gated, d_hidden, results, COTANGENT_FLOOR)
        hidden, d_z, d_z_columns = converted[:2], converted[2:4], converted[4:]
        return Gradients(Columns(*hidden), QuantizedArray(*d_z), Columns(*d_z_columns), None, None)

    def _quantize_gated(
        self, gated: Gated, d_hidden: jax.Array | None, results: list[Result], floor: float
    ) -> list[jax.Array]:
        return call(
            "quantize_gated",
            [gated.z, or_scalar(d_hidden), gated.group_sizes],
            results,
            activation=np.int64(OF_KERNELS.index(gated.activation)),
            round_scale=np.int64(self.options.round_scale),
            rows_per_group=np.int64(self.options.rows_per_group),
            floor=np.float32(floor),
        )


class _Factor(NamedTuple):
    """Rows or matrices that are not in FP8."""

    values: Matrices
    scales: None = None


def _is_fused(gated: Gated) -> bool:
    """Returns whether a kernel computes the activation and quantizes it in one pass."""
    is_known = any(gated.activation is known for known in OF_KERNELS) and gated.z.dtype == jnp.bfloat16
    return is_known and gated.row_weights is None


def _matrices(factors: Factors[jax.Array, Matrices] | Factors[Columns, Columns], *shape: int) -> list[Shape]:
    """Returns the shapes of the matrices [M, N] of home experts, and of redundant ones."""
    redundant = factors.num_redundant
    return [(factors.group_sizes.size - redundant, *shape), (redundant, *shape) if redundant else (0,)]


def _scaled(shape: tuple[int, ...]) -> list[Result]:
    return [(shape, FP8), ((shape[0], shape[1] // BLOCK), jnp.float32)]


def _scaled_columns(width: int, columns: int) -> list[Result]:
    return [((width, columns), FP8), ((columns // BLOCK, width), jnp.float32)]


def _scratch(group_sizes: jax.Array, row_scales: jax.Array | None = None) -> Result:
    """Returns the scratch memory of a product: GroupedDotScratchBytes in ffi/core/params.h."""
    size = (128 << 10) + 80 * group_sizes.size
    if row_scales is not None:
        num_rows, blocks = row_scales.shape
        size += (num_rows + 3) // 4 * 16 * blocks
    return (size,), jnp.uint8
