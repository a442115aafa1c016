"""Grouped products by `jax.lax` alone. Their time grows with the rows of the groups, not with all rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ep._extension import current_platform
from jax_ep._jax.sharding import vary_alike
from jax_ep._transport.backend import Product
from jax_ep._transport.dtypes import sum_dtype

MOST_TILE_ROWS = 128


def grouped_dot(product: Product, rows: jax.Array, others: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Computes a product of rows that are stored group by group. Rows past the groups do not matter."""
    dtype = sum_dtype(rows.dtype)
    if product is Product.WEIGHTS:
        return _times_rows(rows, others, group_sizes)
    is_transposed = product is Product.ROWS_TRANSPOSED
    if current_platform() == "tpu":
        return jax.lax.ragged_dot(rows, others.swapaxes(1, 2) if is_transposed else others, group_sizes)
    # Elsewhere XLA's ragged dot adds up products with all matrices, of zeros where a row is another group's:
    # that takes long, and a single matrix that is not finite would spoil all rows.
    result = jnp.zeros_like(rows, shape=(rows.shape[0], others.shape[1 if is_transposed else 2]))
    if 0 in (*rows.shape, *others.shape):
        return vary_alike([result, rows, others])[0]
    result, rows, others, group_sizes = vary_alike([result, rows, others, group_sizes])
    contracted = (((1,), (1 if is_transposed else 0,)), ((), ()))

    def add(result: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        matrix, begin, end = group

        def multiply(result: jax.Array, start: jax.Array, is_row: jax.Array) -> jax.Array:
            tile = jax.lax.dynamic_slice_in_dim(rows, start, is_row.shape[0])
            found = jax.lax.dot_general(tile, matrix, contracted, preferred_element_type=dtype)
            before = jax.lax.dynamic_slice_in_dim(result, start, is_row.shape[0])
            found = jnp.where(is_row[:, None], found.astype(rows.dtype), before)
            return jax.lax.dynamic_update_slice_in_dim(result, found, start, axis=0)

        return _over_tiles(rows.shape[0], group_sizes.shape[0], begin, end, multiply, result), None

    ends = jnp.cumsum(group_sizes)
    return jax.lax.scan(add, result, (others, ends - group_sizes, ends))[0]


def _times_rows(rows: jax.Array, others: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns [L, M, N]: for each group, rows [C, M] transposed times the others [C, N]."""
    dtype = sum_dtype(rows.dtype)
    zeros = jnp.zeros((rows.shape[1], others.shape[1]), dtype)
    if 0 in (*rows.shape, *others.shape):
        nothing = jnp.zeros_like(rows, shape=(group_sizes.shape[0], *zeros.shape))
        return vary_alike([nothing, rows, others])[0]
    zeros, rows, others, group_sizes = vary_alike([zeros, rows, others, group_sizes])

    def sum_of(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        begin, end = group

        def multiply(total: jax.Array, start: jax.Array, is_row: jax.Array) -> jax.Array:
            def tile_of(x: jax.Array) -> jax.Array:
                return jnp.where(is_row[:, None], jax.lax.dynamic_slice_in_dim(x, start, is_row.shape[0]), 0)

            over_rows = (((0,), (0,)), ((), ()))
            return total + jax.lax.dot_general(
                tile_of(rows), tile_of(others), over_rows, preferred_element_type=dtype
            )

        total = _over_tiles(rows.shape[0], group_sizes.shape[0], begin, end, multiply, zeros)
        return total.astype(rows.dtype)

    ends = jnp.cumsum(group_sizes)
    return jax.lax.map(sum_of, (ends - group_sizes, ends))


def _over_tiles(
    num_rows: int,
    num_groups: int,
    begin: jax.Array,
    end: jax.Array,
    function: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    state: jax.Array,
) -> jax.Array:
    """Calls function(state, start, is_row) for each tile of the rows from `begin` to `end`.

    A tile is the rows from `start` on. `is_row` [tile] marks those of the tile that no other tile has.
    """
    size = min(num_rows, _tile_rows(num_rows // max(num_groups, 1)))
    end = jnp.minimum(end, num_rows)

    def step(index: jax.Array, state: jax.Array) -> jax.Array:
        first = begin + index * size
        start = jnp.minimum(first, num_rows - size)
        number = start + jnp.arange(size, dtype=jnp.int32)
        return function(state, start, (number >= first) & (number < jnp.minimum(first + size, end)))

    return jax.lax.fori_loop(0, (end - begin + size - 1) // size, step, state)


def _tile_rows(rows_per_group: int) -> int:
    """Returns a power of two that wastes few rows of groups of this size."""
    size = MOST_TILE_ROWS
    while size > 8 and size > rows_per_group:
        size //= 2
    return size
