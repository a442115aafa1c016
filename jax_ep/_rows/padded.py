"""Rows of padded experts [L, C, ...] as one dimension of rows [L * C, ...], and back."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_ep._jax.sharding import merge_dimensions, unmerge_dimensions
from jax_ep._rows.fp8 import QuantizedArray

Rows = TypeVar("Rows", bound=jax.Array | QuantizedArray)


def values_of(rows: jax.Array | QuantizedArray) -> jax.Array:
    """Returns rows as they are, or the values of those in FP8."""
    return rows.values if isinstance(rows, QuantizedArray) else rows


def flat_rows(rows: Rows) -> Rows:
    """Returns rows [L, C, M] as [L * C, M], and rows [C, M] as they are."""
    if len(rows.shape) != 3:
        return rows
    return jax.tree.map(lambda array: merge_dimensions(jnp.asarray(array), 0), rows)


def shaped_like(rows: jax.Array | QuantizedArray, out: jax.Array) -> jax.Array:
    """Returns a result of `flat_rows(rows)` with the dimensions of these rows: [L, C, N] or [C, N]."""
    return unmerge_dimensions(out, 0, jnp.asarray(values_of(rows))) if len(rows.shape) == 3 else out
