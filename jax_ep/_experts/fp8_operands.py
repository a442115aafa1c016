"""The operands of FP8 products in both directions.

Tensor cores read FP8 operands along the dimension that a product sums over. So the product of a gradient
needs a transposed copy, with scales along that dimension (the recipe of DeepSeek-V3, arXiv:2412.19437,
section 3.3).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._rows.fp8 import BLOCK, QuantizedArray, dequantize_fp8
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
    def padded_sizes(group_sizes: jax.Array, most_rows: int) -> jax.Array:
        """Returns the columns of each group, which has at most `most_rows` rows."""
        return -(-jnp.clip(group_sizes, 0, most_rows) // BLOCK) * BLOCK

    @staticmethod
    def num_columns(num_rows: int, num_groups: int) -> int:
        """Returns C'."""
        return (num_rows // BLOCK + num_groups) * BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Matrices of experts in FP8, as products read them. `quantize_weights` makes it.

    Matrices that a checkpoint already has in FP8, [L, N, M] with such scales, need no more than
    `QuantizedWeights(QuantizedArray(values, scales))` for forward passes.

    Attributes:
      transposed: values [L, N, M], scales [L, N / 128, M / 128], for the product with rows.
      kept: values [L, M, N], scales [L, M / 128, N / 128], for the gradient of the rows; or None, if no
        gradient passes through the products.
      w: [L, M, N] the matrices that it was made of. Gradients go to them, and no product reads them. None if
        `kept` is None.
    Of w [L, M, 2, N] the arrays of `kept` end with [2, N], those of `transposed` begin with [L, 2, N].
    """

    transposed: QuantizedArray
    kept: QuantizedArray | None = None
    w: jax.Array | PhysicalWeights | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices, (L, M, N) or (L, M, 2, N)."""
        num_experts, *columns, rows = self.transposed.shape
        return (num_experts, rows, *columns)
