"""Counts that a program computes: sums that do not wrap around, and where groups of rows end.

A program may pass any numbers as counts, and it cannot be stopped. So negative counts are 0, sums are at most
2**31 - 1, and groups end where the rows end. The kernels count in the same way.
"""

import jax
import jax.numpy as jnp
import numpy as np

MOST = np.int32(2**31 - 1)


def sum_of_counts(counts: jax.Array, axis: int | None = None) -> jax.Array:
    """Returns int32 sums of at most 2**15 counts each, at most 2**31 - 1."""
    high, low = _halves(counts)
    return _joined(jnp.sum(high, axis=axis, dtype=jnp.int32), jnp.sum(low, axis=axis, dtype=jnp.int32))


def group_ends(group_sizes: jax.Array, num_rows: int, first_row: jax.Array | None = None) -> jax.Array:
    """Returns int32 [L]: where the groups end that follow one another from `first_row` (0 if None) on.

    No group goes past the last of `num_rows` rows.
    """
    high, low = _halves(group_sizes)
    ends = _joined(jnp.cumsum(high, dtype=jnp.int32), jnp.cumsum(low, dtype=jnp.int32))
    if first_row is None:
        return jnp.minimum(ends, num_rows)
    first_row = jnp.clip(first_row, 0, num_rows)
    return first_row + jnp.minimum(ends, num_rows - first_row)


def group_rows(
    group_sizes: jax.Array, num_rows: int, rows_per_group: int, first_row: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns int32 [L] each: where groups begin and end.

    If `rows_per_group` is not 0, each group has so many rows, of which it fills the first ones. Otherwise
    groups follow one another from `first_row` (0 if None) on.
    """
    if rows_per_group == 0:
        ends = group_ends(group_sizes, num_rows, first_row)
        return group_begins(ends, num_rows, first_row), ends
    begins = jnp.arange(group_sizes.shape[0], dtype=jnp.int32) * rows_per_group
    return begins, begins + jnp.clip(group_sizes, 0, rows_per_group)


def groups_of_rows(group_sizes: jax.Array, num_rows: int, rows_per_group: int) -> jax.Array:
    """Returns int32 [num_rows]: the group of each row, L in rows of no group."""
    number = jnp.arange(num_rows, dtype=jnp.int32)
    if rows_per_group == 0:
        return jnp.searchsorted(group_ends(group_sizes, num_rows), number, side="right").astype(jnp.int32)
    is_row = rows_in_groups(group_sizes, num_rows, rows_per_group)
    return jnp.where(is_row, number // rows_per_group, group_sizes.shape[0])


def rows_in_groups(group_sizes: jax.Array, num_rows: int, rows_per_group: int) -> jax.Array:
    """Returns bool [num_rows]: which rows belong to a group."""
    if rows_per_group == 0:
        return jnp.arange(num_rows) < sum_of_counts(group_sizes)
    number = jnp.arange(rows_per_group, dtype=jnp.int32)[None]
    return (number < group_sizes[:, None]).reshape(num_rows)


def group_begins(ends: jax.Array, num_rows: int, first_row: jax.Array | None = None) -> jax.Array:
    """Returns int32 [L]: where the groups begin whose `ends` `group_ends` returned."""
    first = jnp.zeros_like(ends[:1])
    if first_row is not None:
        first = jnp.clip(first_row, 0, num_rows)[None]
    return jnp.concatenate([first, ends[:-1]])


def _halves(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the upper 15 and the lower 16 bits of counts, of which negative ones are 0."""
    counts = jnp.maximum(counts, 0)
    return counts >> 16, counts & 0xFFFF


def _joined(high: jax.Array, low: jax.Array) -> jax.Array:
    high = high + (low >> 16)
    return jnp.where(high > MOST >> 16, MOST, (high << 16) | (low & 0xFFFF))
