"""The protocol of engines, which compute the products of experts and convert their operands to FP8.

`KernelEngine` (kernel_engine.py) calls this package's kernels, and `XlaEngine` (xla_engine.py) uses `jax.lax`
alone. `choose_engine` (choice.py) chooses the engine of an op, once. All engines convert to the same bits. A
new option of a product or conversion is a field of `Options`; a new operand of a product is a field of
`Factors`, and of an activation one of `Gated`.
"""

import dataclasses
import enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jax_ep._experts.activations import Gated, activation_gradients
from jax_ep._experts.fp8_operands import Columns
from jax_ep._rows.fp8 import COTANGENT_FLOOR, FLOOR, QuantizedArray, dequantize_fp8
from jax_ep._rows.weights import Matrices, PhysicalWeights

Left_co = TypeVar("Left_co", covariant=True)
Right_co = TypeVar("Right_co", covariant=True)


class Product(enum.IntEnum):
    """Products of rows by groups: GroupedDot in ffi/core/params.h, with the same numbers."""

    ROWS = 0  # rows [C, M] times matrices [L, M, N]
    ROWS_TRANSPOSED = 1  # rows [C, N] times the transposes of matrices [L, M, N]
    WEIGHTS = 2  # for each group, its rows [C, M], transposed, times others [C, N]: [L, M, N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factors(Generic[Left_co, Right_co]):
    """The operands of a product. Rows lie group by group; sizes of groups need not be multiples of a tile.

    With `Options.rows_per_group` rows [L * S, M] are those of L groups with S rows each. A `product` also
    takes them as [L, S, M].
    """

    rows: Left_co
    others: Right_co  # matrices, or for a product WEIGHTS rows
    group_sizes: jax.Array  # [L]
    first_row: jax.Array | None = None  # where the groups begin; None: at row 0
    kind: Product = dataclasses.field(default=Product.ROWS, metadata={"static": True})
    num_redundant: int = dataclasses.field(default=0, metadata={"static": True})
    """Of the matrices that a product WEIGHTS returns, the number of the last ones, of redundant experts."""


AnyFactors = Factors[Any, Any]
"""Operands that are arrays, QuantizedArrays, or Columns."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an op's products and conversions."""

    num_sms: int = 0  # the most SMs that the fast kernels (grouped_dot's docstring) use; 0: all
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT  # of products of float32 operands
    round_scale: bool = False  # scales are rounded up to powers of two
    rows_per_group: int = 0
    """S, if each group has S rows, of which it fills the first ones. 0: groups follow each other."""
    clears_rows: bool = True
    """False: results in rows of no group may be undefined, also those of products."""


class Gradients(NamedTuple):
    """The operands of a backward pass after the activation's gradient."""

    hidden: jax.Array | Columns  # as `weight_gradient` takes rows
    d_z: jax.Array | QuantizedArray  # as `times_transposed` takes rows
    d_z_columns: jax.Array | Columns  # as `weight_gradient` takes the others
    d_z_wide: jax.Array | None  # may be None unless `Gated.needs_wide_d_z`
    d_row_weights: jax.Array | None


class Engine(Protocol):
    """Products and conversions of one op. It is hashable.

    Results in rows of no group are undefined, except those of products, which are zero unless
    `Options.clears_rows` is false.
    """

    @property
    def options(self) -> Options: ...

    def with_precision(self, precision: jax.lax.Precision) -> "Engine":
        """Returns the engine with another precision of products of float32 operands."""
        ...

    def with_adjacent_groups(self) -> "Engine":
        """Returns the engine for rows whose groups follow each other."""
        ...

    def grouped_dot(self, factors: Factors[jax.Array, Matrices]) -> Matrices:
        """Returns a product: rows [C, N] or [C, M]; of WEIGHTS, matrices [L, M, N]."""
        ...

    def grouped_dot_fp8(self, factors: Factors[QuantizedArray, QuantizedArray]) -> jax.Array:
        """Returns a product ROWS of rows with scales [C, M / 128], bfloat16 [C, N]."""
        ...

    def grouped_dot_fp8_weights(self, factors: Factors[Columns, Columns]) -> Matrices:
        """Returns a product WEIGHTS, bfloat16 [L, M, N]."""
        ...

    def quantize(self, x: jax.Array, block: tuple[int, int]) -> QuantizedArray:
        """Returns x [..., M, N] in FP8 with a scale for each block, which has no gradient."""
        ...

    def quantize_rows(self, x: jax.Array, group_sizes: jax.Array, floor: float = FLOOR) -> QuantizedArray:
        """Returns rows in FP8, with scales of 128 elements."""
        ...

    def quantize_columns(self, x: jax.Array | QuantizedArray, group_sizes: jax.Array) -> Columns:
        """Returns rows transposed. Rows in FP8 have scales of 128 elements, and are quantized again."""
        ...

    def quantize_both(
        self, x: jax.Array, group_sizes: jax.Array, floor: float = FLOOR
    ) -> tuple[QuantizedArray, Columns]:
        """Returns rows in FP8, with scales of 128 elements, and the same transposed."""
        ...

    def quantize_matrices(
        self, w: jax.Array, kept: bool, transposed: bool
    ) -> tuple[QuantizedArray, QuantizedArray]:
        """Returns matrices [L, M, N] in FP8, with scales of 128 x 128 elements.

        Untransposed if `kept`, and transposed. A layout that is not requested may be undefined.
        """
        ...

    def activate_fp8(self, gated: Gated) -> QuantizedArray:
        """Returns the activation, times the row weights, in FP8."""
        ...

    def activation_gradients_fp8(self, gated: Gated, d_hidden: jax.Array) -> Gradients:
        """Returns the operands of a backward pass whose products are all in FP8."""
        ...


def quantize_physical(
    engine: Engine, w: Matrices, *, kept: bool = True, transposed: bool = True
) -> tuple[QuantizedArray, QuantizedArray]:
    """Returns `Engine.quantize_matrices` of matrices, or of both parts of `PhysicalWeights`."""
    if isinstance(w, PhysicalWeights):
        parts = (engine.quantize_matrices(part, kept, transposed) for part in (w.home, w.redundant))
        return jax.tree.map(PhysicalWeights, *parts)
    return engine.quantize_matrices(w, kept, transposed)


def dequantized_dot(engine: Engine, factors: Factors[QuantizedArray, QuantizedArray]) -> jax.Array:
    """Computes `grouped_dot_fp8` of operands that are converted to float32."""
    rows, matrices = (
        dequantize_fp8(QuantizedArray(jnp.asarray(q.values), jnp.asarray(q.scales)), jnp.float32)
        for q in (factors.rows, factors.others)
    )
    out = engine.grouped_dot(Factors(rows, matrices, factors.group_sizes))
    return jnp.asarray(out).astype(jnp.bfloat16)


def dequantized_dot_weights(engine: Engine, factors: Factors[Columns, Columns]) -> Matrices:
    """Computes `grouped_dot_fp8_weights` of operands that are converted to float32."""
    rows, others = factors.rows.dequantized(), factors.others.dequantized()
    most = engine.options.rows_per_group or factors.rows.values.shape[1]
    padded = Columns.padded_sizes(factors.group_sizes, most)
    wide = Factors(rows, others, padded, kind=Product.WEIGHTS, num_redundant=factors.num_redundant)
    matrices = engine.with_adjacent_groups().grouped_dot(wide)
    return jax.tree.map(lambda array: array.astype(jnp.bfloat16), matrices)


def quantized_gradients(engine: Engine, gated: Gated, d_hidden: jax.Array) -> Gradients:
    """Computes `activation_gradients_fp8` in a pass for the activation, and one for each conversion."""
    hidden, d_z, d_row_weights = activation_gradients(gated, d_hidden)
    rows, columns = engine.quantize_both(d_z, gated.group_sizes, COTANGENT_FLOOR)
    hidden = engine.quantize_columns(hidden, gated.group_sizes)
    return Gradients(hidden, rows, columns, d_z, d_row_weights)
