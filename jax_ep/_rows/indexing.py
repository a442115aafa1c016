"""Rows and experts by index, where -1 means none."""

import jax
import jax.numpy as jnp

from jax_ep._jax.sharding import vary_alike


def routed_experts(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 ids, -1 where out of range."""
    in_range = (topk_idx >= 0) & (topk_idx < num_experts)
    return jnp.where(in_range, topk_idx, -1).astype(jnp.int32)


def take(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns array[rows], zero where a row is -1. Such rows are not read and get no gradient."""
    if array.shape[0] == 0:
        return jnp.zeros_like(array, shape=(*rows.shape, *array.shape[1:]))
    safe = jnp.where(rows < 0, array.shape[0], rows)
    return jnp.take(array, safe, axis=0, mode="fill", fill_value=0)


def invert(rows: jax.Array, capacity: int) -> jax.Array:
    """Returns int32 [C]: the flat index of the entry of `rows` that is c, -1 if there is no such entry."""
    sources = jnp.full((capacity,), -1, jnp.int32)
    sources = vary_alike(sources, jax.typeof(rows).manual_axis_type.varying)
    flat = rows.reshape(-1)
    index = jnp.arange(flat.shape[0], dtype=jnp.int32)
    return sources.at[jnp.where(flat < 0, capacity, flat)].set(index, mode="drop")
