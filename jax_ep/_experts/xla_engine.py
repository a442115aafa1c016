"""Engine "xla": grouped products and conversions to FP8 by `jax.lax` alone.

The time of a product grows with the rows of the groups, not with all rows.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ep._experts.activations import Gated, activate
from jax_ep._experts.engine import (
    Factors,
    Gradients,
    Options,
    Product,
    dequantized_dot,
    dequantized_dot_weights,
    quantized_gradients,
)
from jax_ep._experts.fp8_operands import Columns
from jax_ep._extension import current_platform
from jax_ep._jax.sharding import vary_alike
from jax_ep._rows.counts import group_rows, rows_in_groups
from jax_ep._rows.dtypes import bits_of, sum_dtype
from jax_ep._rows.fp8 import BLOCK, FLOOR, QuantizedArray, dequantize_fp8, quantize_blocks
from jax_ep._rows.weights import Matrices, PhysicalWeights

# Numbers of rows of a tile. A group is cut into tiles of the first size, and its remainder into tiles of the
# second. XLA:CPU takes nearly as long for 32 rows as for 64, so groups of 64 rows and more on average have
# larger remainders. Tiles of `_times_rows` are larger because each reads and writes a whole sum [M, N].
_TILES_OF_ROWS, _TILES_OF_LONG_GROUPS = (128, 32), (128, 64)
_TILES_OF_SUMS = (256, 64)

# Takes (state, first row of a tile, size of the tile, bool [size]: rows that belong to it, or None: all of
# them), and returns the state.
_Step = Callable[[jax.Array, jax.Array, int, jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True)
class XlaEngine:
    """Engine "xla": `jax.lax` alone."""

    options: Options

    def with_precision(self, precision: jax.lax.Precision) -> "XlaEngine":
        return XlaEngine(dataclasses.replace(self.options, precision=precision))

    def with_adjacent_groups(self) -> "XlaEngine":
        return XlaEngine(dataclasses.replace(self.options, rows_per_group=0))

    def grouped_dot(self, factors: Factors[jax.Array, Matrices]) -> Matrices:
        matrices = _grouped_dot(factors, self.options)
        if factors.num_redundant == 0:
            return matrices
        num_home = matrices.shape[0] - factors.num_redundant
        return PhysicalWeights(matrices[:num_home], matrices[num_home:])

    def grouped_dot_fp8(self, factors: Factors[QuantizedArray, QuantizedArray]) -> jax.Array:
        return dequantized_dot(self, factors)

    def grouped_dot_fp8_weights(self, factors: Factors[Columns, Columns]) -> Matrices:
        return dequantized_dot_weights(self, factors)

    def quantize(self, x: jax.Array, block: tuple[int, int]) -> QuantizedArray:
        return quantize_blocks(x, block, self.options.round_scale, FLOOR)

    def quantize_rows(self, x: jax.Array, group_sizes: jax.Array, floor: float = FLOOR) -> QuantizedArray:
        return quantize_blocks(x, (1, BLOCK), self.options.round_scale, floor)

    def quantize_columns(self, x: jax.Array | QuantizedArray, group_sizes: jax.Array) -> Columns:
        wide = dequantize_fp8(x, jnp.float32) if isinstance(x, QuantizedArray) else x
        return _columns(wide, group_sizes, self.options, FLOOR)

    def quantize_both(
        self, x: jax.Array, group_sizes: jax.Array, floor: float = FLOOR
    ) -> tuple[QuantizedArray, Columns]:
        rows = self.quantize_rows(x, group_sizes, floor)
        return rows, _columns(x, group_sizes, self.options, floor)

    def quantize_matrices(
        self, w: jax.Array, kept: bool, transposed: bool
    ) -> tuple[QuantizedArray, QuantizedArray]:
        q = quantize_blocks(w, (BLOCK, BLOCK), self.options.round_scale, FLOOR)
        return q, QuantizedArray(q.values.swapaxes(1, 2), q.scales.swapaxes(1, 2))

    def activate_fp8(self, gated: Gated) -> QuantizedArray:
        return self.quantize_rows(activate(gated), gated.group_sizes)

    def activation_gradients_fp8(self, gated: Gated, d_hidden: jax.Array) -> Gradients:
        return quantized_gradients(self, gated, d_hidden)


def _grouped_dot(factors: Factors[jax.Array, Matrices], options: Options) -> jax.Array:
    """Computes a product. Rows of no group do not matter."""
    rows, others = factors.rows, jnp.asarray(factors.others)
    precision, rows_per_group = options.precision, options.rows_per_group
    begins, ends = group_rows(factors.group_sizes, rows.shape[0], rows_per_group, factors.first_row)
    is_transposed = factors.kind is Product.ROWS_TRANSPOSED
    if current_platform() == "tpu" and factors.kind is not Product.WEIGHTS:
        matrices = others.swapaxes(1, 2) if is_transposed else others
        if rows_per_group > 0:
            return _padded_dot(rows, matrices, ends - begins, rows_per_group, precision)
        group_sizes = ends - begins
        if factors.first_row is not None:  # a group whose matrix is zero
            matrices = jnp.pad(matrices, ((1, 0), (0, 0), (0, 0)))
            group_sizes = jnp.concatenate([begins[:1], group_sizes])
        return jax.lax.ragged_dot(rows, matrices, group_sizes, precision=precision)
    if factors.kind is Product.WEIGHTS:
        return _times_rows(precision, rows, others, begins, ends)
    # Elsewhere XLA's ragged dot adds up products with all matrices, of zeros where a row is another group's:
    # that takes long, and a single matrix that is not finite would spoil all rows.
    shape = rows.shape[0], others.shape[1 if is_transposed else 2]
    contracted = (((1,), (1 if is_transposed else 0,)), ((), ()))
    are_long = rows.shape[0] >= _TILES_OF_LONG_GROUPS[1] * begins.shape[0]
    tiles = _TILES_OF_LONG_GROUPS if are_long else _TILES_OF_ROWS

    def add(result: jax.Array, group: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
        matrix = _slice(others, group, 1)[0]

        def multiply(result: jax.Array, start: jax.Array, size: int, is_row: jax.Array | None) -> jax.Array:
            tile = _slice(rows, start, size)
            dtype = sum_dtype(rows.dtype)
            out = jax.lax.dot_general(
                tile, matrix, contracted, precision=precision, preferred_element_type=dtype
            )
            out = _as_bits(out.astype(rows.dtype))
            if is_row is not None:
                before = jax.lax.dynamic_slice_in_dim(result, start, size)
                out = jnp.where(is_row[:, None], out, before)
            return jax.lax.dynamic_update_slice_in_dim(result, out, start, axis=0)

        return _over_tiles(tiles, rows.shape[0], begin, end, multiply, result)

    rows, others, begins, ends = vary_alike([rows, others, begins, ends])
    return _over_groups(shape, rows, others, begins, ends, add)


def _padded_dot(
    rows: jax.Array,
    matrices: jax.Array,
    group_sizes: jax.Array,
    rows_per_group: int,
    precision: jax.lax.Precision,
) -> jax.Array:
    """Returns [L * S, N]: the rows of each group [L * S, M] times its matrix, zero in rows of no group."""
    batch = rows.reshape(-1, rows_per_group, rows.shape[1])
    contracted = (((2,), (1,)), ((0,), (0,)))
    out = jax.lax.dot_general(
        batch, matrices, contracted, precision=precision, preferred_element_type=sum_dtype(rows.dtype)
    )
    out = out.astype(rows.dtype).reshape(rows.shape[0], matrices.shape[2])
    return jnp.where(rows_in_groups(group_sizes, rows.shape[0], rows_per_group)[:, None], out, 0)


def _times_rows(
    precision: jax.lax.Precision,
    rows: jax.Array,
    others: jax.Array,
    begins: jax.Array,
    ends: jax.Array,
) -> jax.Array:
    """Returns [L, M, N]: for each group, rows [C, M] transposed times the others [C, N]."""
    shape = begins.shape[0], rows.shape[1], others.shape[1]
    over_rows = (((0,), (0,)), ((), ()))

    def add(result: jax.Array, group: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
        def multiply(total: jax.Array, start: jax.Array, size: int, is_row: jax.Array | None) -> jax.Array:
            tile, other = (_slice(array, start, size) for array in (rows, others))
            if is_row is not None:
                tile, other = (jnp.where(is_row[:, None], array, 0) for array in (tile, other))
            return total + jax.lax.dot_general(
                tile, other, over_rows, precision=precision, preferred_element_type=total.dtype
            )

        zeros = vary_alike([jnp.zeros(shape[1:], sum_dtype(rows.dtype)), rows])[0]
        total = _over_tiles(_TILES_OF_SUMS, rows.shape[0], begin, end, multiply, zeros)
        total = _as_bits(total.astype(rows.dtype))
        return jax.lax.dynamic_update_index_in_dim(result, total, group, axis=0)

    rows, others, begins, ends = vary_alike([rows, others, begins, ends])
    return _over_groups(shape, rows, others, begins, ends, add)


def _over_groups(
    shape: tuple[int, ...],
    rows: jax.Array,
    others: jax.Array,
    begins: jax.Array,
    ends: jax.Array,
    add: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Returns zeros of a shape and of the dtype of rows after add(result, group, begin, end) of each group.

    It skips empty groups, whose matrices would otherwise be read. `add` gets the result as `_as_bits` returns
    it.
    """
    result = jnp.zeros_like(rows, shape=shape)
    if 0 in (*rows.shape, *others.shape):
        return vary_alike([result, rows, others])[0]
    result = vary_alike([_as_bits(result), rows])[0]
    is_empty = begins >= ends
    by_emptiness = jnp.argsort(is_empty, stable=True)

    def step(index: jax.Array, result: jax.Array) -> jax.Array:
        group = by_emptiness[index]
        return add(result, group, begins[group], ends[group])

    result = jax.lax.fori_loop(0, jnp.count_nonzero(~is_empty), step, result)
    return jax.lax.bitcast_convert_type(result, rows.dtype)


def _over_tiles(
    sizes: tuple[int, int],
    num_rows: int,
    begin: jax.Array,
    end: jax.Array,
    function: _Step,
    state: jax.Array,
) -> jax.Array:
    """Calls function(state, start, size, is_row) for each tile of the rows from `begin` to `end`.

    A tile is `size` rows from `start` on. `is_row` [size] marks those of the tile that no other tile has; it
    is None if that holds for all of them.
    """
    large, small = sizes

    def whole(index: jax.Array, state: jax.Array) -> jax.Array:
        return function(state, begin + index * large, large, None)

    if large <= num_rows:
        count = (end - begin) // large
        state = jax.lax.fori_loop(0, count, whole, state)
        begin += count * large
    small = min(small, num_rows)

    def partial(index: jax.Array, state: jax.Array) -> jax.Array:
        first = begin + index * small
        start = jnp.minimum(first, num_rows - small)
        number = start + jnp.arange(small, dtype=jnp.int32)
        return function(state, start, small, (number >= first) & (number < jnp.minimum(first + small, end)))

    return jax.lax.fori_loop(0, (end - begin + small - 1) // small, partial, state)


def _slice(array: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Returns array[start : start + size].

    XLA:CPU computes slices of 16-bit floats in float32. The barrier keeps it from converting the whole array
    ahead of the loop that this is called in.
    """
    if current_platform() == "cpu":
        array, start = jax.lax.optimization_barrier((array, start))
    return jax.lax.dynamic_slice_in_dim(array, start, size)


def _as_bits(array: jax.Array) -> jax.Array:
    """Returns 16-bit floats as integers, because XLA:CPU updates floats of 16 bits by copying all of them."""
    return jax.lax.bitcast_convert_type(array, bits_of(array.dtype)) if array.dtype.itemsize == 2 else array


def _columns(x: jax.Array, group_sizes: jax.Array, options: Options, floor: float) -> Columns:
    count = Columns.num_columns(x.shape[0], group_sizes.shape[0])
    first_rows, row_ends = group_rows(group_sizes, x.shape[0], options.rows_per_group)
    sizes = row_ends - first_rows
    padded = Columns.padded_sizes(sizes, count)
    ends = jnp.cumsum(padded)
    column = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, column, side="right"), sizes.shape[0] - 1)
    row_in_group = column - (ends - padded)[group]
    source = first_rows[group] + row_in_group
    is_row = row_in_group < sizes[group]
    rows = jnp.where(is_row[:, None], jnp.take(x, source, axis=0, mode="clip"), 0)
    q = quantize_blocks(rows, (BLOCK, 1), options.round_scale, floor)
    return Columns(q.values.swapaxes(0, 1), q.scales)
