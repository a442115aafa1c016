"""The protocol of engines, which compute the products of experts and convert their operands to FP8.

`KernelEngine` (kernel_engine.py) calls this package's kernels, and `XlaEngine` (xla_engine.py) uses `jax.lax`
alone. `choose_engine` (choice.py) chooses the engine of an op, once. All engines convert to the same bits.
"""

import enum
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_ep._experts.activations import Activation, activation_gradients
from jax_ep._experts.fp8_operands import Columns
from jax_ep._rows.fp8 import COTANGENT_FLOOR, FLOOR, QuantizedArray, dequantize_fp8
from jax_ep._rows.weights import PhysicalWeights

Matrices = jax.Array | PhysicalWeights


class Product(enum.IntEnum):
    """Products of rows by groups: GroupedDot in ffi/core/params.h, with the same numbers."""

    ROWS = 0  # rows [C, M] times matrices [L, M, N]
    ROWS_TRANSPOSED = 1  # rows [C, N] times the transposes of matrices [L, M, N]
    WEIGHTS = 2  # for each group, its rows [C, M], transposed, times others [C, N]: [L, M, N]


class Gradients(NamedTuple):
    """The operands of a backward pass after the activation's gradient."""

    hidden: Any  # as `weight_gradient` takes rows
    d_z: Any  # as `times_transposed` takes rows
    d_z_columns: Any  # as `weight_gradient` takes the others
    d_z_wide: jax.Array | None  # may be None, unless it is needed
    d_row_weights: jax.Array | None


class Engine(Protocol):
    """Products and conversions of one op, with the op's options. It is hashable.

    Rows [C, M] lie group by group, and `group_sizes` [L] may be any numbers. Results in rows past the groups
    are undefined, except those of `grouped_dot`, which are zero.
    """

    def with_precision(self, precision: jax.lax.Precision) -> "Engine":
        """Returns the engine with another precision of products of float32 operands."""
        ...

    def grouped_dot(
        self,
        product: Product,
        num_redundant: int,
        rows: jax.Array,
        others: Any,
        group_sizes: jax.Array,
        first_row: jax.Array | None = None,
    ) -> Any:
        """Computes a product. The groups begin at `first_row`, or at row 0 if it is None.

        Others are matrices [L, M, N] or `PhysicalWeights`, or for a product WEIGHTS rows. The last
        `num_redundant` matrices that a product WEIGHTS returns are those of redundant experts.
        """
        ...

    def grouped_dot_fp8(self, rows: QuantizedArray, w: QuantizedArray, group_sizes: jax.Array) -> jax.Array:
        """Multiplies FP8 rows, with scales [C, M / 128], by FP8 matrices. Returns bfloat16 [C, N]."""
        ...

    def grouped_dot_fp8_weights(
        self, num_redundant: int, rows: Columns, others: Columns, group_sizes: jax.Array
    ) -> Any:
        """Multiplies, for each group, rows [C, M], transposed, by rows [C, N]. Returns bfloat16 [L, M, N]."""
        ...

    def quantize(self, x: jax.Array, block: tuple[int, int], round_scale: bool) -> QuantizedArray:
        """Returns x [..., M, N] in FP8 with a scale for each block, which has no gradient."""
        ...

    def quantize_rows(
        self, x: jax.Array, group_sizes: jax.Array, round_scale: bool, floor: float = FLOOR
    ) -> QuantizedArray:
        """Returns rows in FP8, with scales of 128 elements."""
        ...

    def quantize_columns(
        self, x: jax.Array | QuantizedArray, group_sizes: jax.Array, round_scale: bool
    ) -> Columns:
        """Returns rows transposed. Rows in FP8 have scales of 128 elements, and are quantized again."""
        ...

    def quantize_both(
        self, x: jax.Array, group_sizes: jax.Array, round_scale: bool, floor: float = FLOOR
    ) -> tuple[QuantizedArray, Columns]:
        """Returns rows in FP8, with scales of 128 elements, and the same transposed."""
        ...

    def quantize_matrices(
        self, w: jax.Array, round_scale: bool, kept: bool, transposed: bool
    ) -> tuple[QuantizedArray, QuantizedArray]:
        """Returns matrices [L, M, N] in FP8, with scales of 128 x 128 elements, as they lie and transposed.

        A layout that is not asked for may be undefined.
        """
        ...

    def activate_fp8(
        self,
        activation: Activation,
        z: jax.Array,
        row_weights: jax.Array | None,
        group_sizes: jax.Array,
        round_scale: bool,
    ) -> QuantizedArray:
        """Returns the activation of z [C, 2F], times the row weights, in FP8."""
        ...

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
        """Returns the operands of a backward pass whose products are all in FP8."""
        ...


def quantize_physical(
    engine: Engine, w: Matrices, round_scale: bool, *, kept: bool = True, transposed: bool = True
) -> tuple[Any, Any]:
    """Returns `Engine.quantize_matrices` of matrices, or of both parts of `PhysicalWeights`."""
    if isinstance(w, PhysicalWeights):
        parts = (
            engine.quantize_matrices(part, round_scale, kept, transposed) for part in (w.home, w.redundant)
        )
        return jax.tree.map(PhysicalWeights, *parts)
    return engine.quantize_matrices(w, round_scale, kept, transposed)


def dequantized_dot(
    engine: Engine, rows: QuantizedArray, w: QuantizedArray, group_sizes: jax.Array
) -> jax.Array:
    """Computes `grouped_dot_fp8` of operands that are converted to float32."""
    wide_rows, wide_matrices = (
        dequantize_fp8(QuantizedArray(jnp.asarray(q.values), jnp.asarray(q.scales)), jnp.float32)
        for q in (rows, w)
    )
    out: jax.Array = engine.grouped_dot(Product.ROWS, 0, wide_rows, wide_matrices, group_sizes)
    return out.astype(jnp.bfloat16)


def dequantized_dot_weights(
    engine: Engine, num_redundant: int, rows: Columns, others: Columns, group_sizes: jax.Array
) -> Any:
    """Computes `grouped_dot_fp8_weights` of operands that are converted to float32."""
    left, right = rows.dequantized(), others.dequantized()
    padded = Columns.padded_sizes(group_sizes, rows.values.shape[1])
    out = engine.grouped_dot(Product.WEIGHTS, num_redundant, left, right, padded)
    return jax.tree.map(lambda matrices: matrices.astype(jnp.bfloat16), out)


def quantized_gradients(
    engine: Engine,
    activation: Activation,
    z: jax.Array,
    row_weights: jax.Array | None,
    d_hidden: jax.Array,
    group_sizes: jax.Array,
    round_scale: bool,
) -> Gradients:
    """Computes `activation_gradients_fp8` in a pass for the activation, and one for each conversion."""
    hidden, d_z, d_row_weights = activation_gradients(activation, z, row_weights, d_hidden)
    rows, columns = engine.quantize_both(d_z, group_sizes, round_scale, COTANGENT_FLOOR)
    hidden = engine.quantize_columns(hidden, group_sizes, round_scale)
    return Gradients(hidden, rows, columns, d_z, d_row_weights)
