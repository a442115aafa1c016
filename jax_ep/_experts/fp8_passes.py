"""Conversions to FP8 for products in both directions: on GPUs one pass of a kernel, elsewhere XLA's ops.

Tensor cores read FP8 operands along the dimension that a product sums over. So the product of a gradient
needs a transposed copy, with scales along that dimension (the recipe of DeepSeek-V3, arXiv:2412.19437,
section 3.3).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import _extension
from jax_ep._rows.counts import group_begins, group_ends
from jax_ep._rows.fp8 import (
    BLOCK,
    FLOOR,
    QuantizedArray,
    dequantize_fp8,
    quantize_blocks,
)
from jax_ep._rows.quantize import matrices_by_kernel, rows_by_kernel
from jax_ep._rows.weights import PhysicalWeights


class Columns(NamedTuple):
    """Rows [C, M], transposed, in FP8: a scale for each 128 rows of a column.

    Each group of rows begins at a multiple of 128. C' is a number of columns that suffices for any groups.
    """

    values: jax.Array  # [M, C']; zero in a group's padding, undefined past the last group
    scales: jax.Array  # [C' / 128, M]

    def dequantized(self) -> jax.Array:
        """Returns the rows [C', M] in float32, with the groups' padding."""
        return dequantize_fp8(QuantizedArray(self.values.swapaxes(0, 1), self.scales), jnp.float32)

    @staticmethod
    def padded_sizes(group_sizes: jax.Array, num_columns: int) -> jax.Array:
        """Returns the columns of each group, of which there are `num_columns` in all."""
        return -(-jnp.clip(group_sizes, 0, num_columns) // BLOCK) * BLOCK

    @staticmethod
    def num_columns(num_rows: int, num_groups: int) -> int:
        """Returns C'."""
        return (num_rows // BLOCK + num_groups) * BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Matrices of experts in FP8, as products in both directions read them. `quantize_weights` makes it.

    Attributes:
      w: [L, M, N] the matrices that it was made of. Gradients go to them.
      transposed: values [L, N, M], scales [L, N / 128, M / 128], for the product with rows.
      kept: values [L, M, N], scales [L, M / 128, N / 128], for the gradient of the rows.
    Of w [L, M, 2, N] the arrays of `kept` end with [2, N], those of `transposed` begin with [L, 2, N].
    """

    w: jax.Array | PhysicalWeights
    transposed: QuantizedArray
    kept: QuantizedArray


def quantize_both(
    x: jax.Array, group_sizes: jax.Array, round_scale: bool, floor: float = FLOOR
) -> tuple[QuantizedArray, Columns]:
    """Returns rows [C, M] in FP8, with scales of 128 elements, and the same transposed.

    On GPUs the rows past the groups are undefined.
    """
    if _extension.runs_kernels():
        shape = x.shape[0], group_sizes.shape[0]
        values, scales, *columns = rows_by_kernel(
            x, None, group_sizes, round_scale, floor, True, Columns.num_columns(*shape)
        )
        return QuantizedArray(values, scales), Columns(*columns)
    rows = quantize_blocks(x, (1, BLOCK), round_scale, floor)
    return rows, _columns(x, group_sizes, round_scale, floor)


def quantize_rows(
    x: jax.Array, group_sizes: jax.Array | None, round_scale: bool, floor: float = FLOOR
) -> QuantizedArray:
    """Returns rows [C, M] in FP8, with scales of 128 elements. On GPUs rows past the groups are undefined."""
    if _extension.runs_kernels():
        values, scales, *_ = rows_by_kernel(x, None, group_sizes, round_scale, floor, True, 0)
        return QuantizedArray(values, scales)
    return quantize_blocks(x, (1, BLOCK), round_scale, floor)


def quantize_columns(x: jax.Array | QuantizedArray, group_sizes: jax.Array, round_scale: bool) -> Columns:
    """Returns rows [C, M] transposed. Rows in FP8 have scales of 128 elements, and are quantized again."""
    is_fp8 = isinstance(x, QuantizedArray)
    if _extension.runs_kernels():
        rows, scales = (x.values, x.scales) if is_fp8 else (x, None)
        count = Columns.num_columns(rows.shape[0], group_sizes.shape[0])
        made = rows_by_kernel(rows, scales, group_sizes, round_scale, FLOOR, False, count)
        return Columns(*made[2:])
    return _columns(dequantize_fp8(x, jnp.float32) if is_fp8 else x, group_sizes, round_scale, FLOOR)


def quantize_matrices(
    w: jax.Array | PhysicalWeights, round_scale: bool, *, kept: bool = True, transposed: bool = True
) -> tuple[QuantizedArray, QuantizedArray]:
    """Returns matrices [L, M, N] in FP8, with scales of 128 x 128 elements, as they lie and transposed.

    A layout that is not asked for may be undefined.
    """
    if isinstance(w, PhysicalWeights):
        parts = (
            quantize_matrices(part, round_scale, kept=kept, transposed=transposed)
            for part in (w.home, w.redundant)
        )
        return jax.tree.map(PhysicalWeights, *parts)
    if _extension.runs_kernels():
        values, scales, turned = matrices_by_kernel(w, round_scale, kept, transposed)
    else:
        q = quantize_blocks(w, (BLOCK, BLOCK), round_scale, FLOOR)
        values, scales, turned = q.values, q.scales, q.values.swapaxes(1, 2)
    return QuantizedArray(values, scales), QuantizedArray(turned, scales.swapaxes(1, 2))


def _columns(x: jax.Array, group_sizes: jax.Array, round_scale: bool, floor: float) -> Columns:
    count = Columns.num_columns(x.shape[0], group_sizes.shape[0])
    row_ends = group_ends(group_sizes, x.shape[0])
    first_rows = group_begins(row_ends, x.shape[0])
    sizes = row_ends - first_rows
    padded = Columns.padded_sizes(sizes, count)
    ends = jnp.cumsum(padded)
    column = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, column, side="right"), sizes.shape[0] - 1)
    within = column - (ends - padded)[group]
    source = first_rows[group] + within
    is_row = within < sizes[group]
    rows = jnp.where(is_row[:, None], jnp.take(x, source, axis=0, mode="clip"), 0)
    q = quantize_blocks(rows, (BLOCK, 1), round_scale, floor)
    return Columns(q.values.swapaxes(0, 1), q.scales)
