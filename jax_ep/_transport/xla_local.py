"""Ops without communication by `jax.lax` alone: implementation="xla"."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep._jax.sharding import vary_alike
from jax_ep._rows.dtypes import sum_dtype
from jax_ep._rows.indexing import invert, routed_experts, take
from jax_ep._transport.backend import LayoutCounts, Permutation


def count_pairs(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 [N, E]: how often token n chose expert e. ids [N, K] are routed experts."""
    counts = jnp.zeros((ids.shape[0], num_experts), jnp.int32)
    counts = vary_alike(counts, jax.typeof(ids).manual_axis_type.varying)
    token = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return counts.at[token, jnp.where(ids < 0, num_experts, ids)].add(1, mode="drop")


def rows_by_expert(
    pairs: jax.Array,
    ids: jax.Array,
    num_ranks: int,
    capacity: int,
    blocks: jax.Array,
    padded_rows: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the row of each choice [N, K] at its receiver, and the start of each expert's block [E].

    pairs [N, E] and ids [N, K] are those of all ranks' tokens, by source rank. `blocks` [E] are the rows of
    each expert's block, which all equal `padded_rows` if that is given.
    """
    blocks = blocks.reshape(num_ranks, -1)
    starts = (jnp.cumsum(blocks, axis=1) - blocks).reshape(-1).astype(jnp.int32)
    rows = starts[None] + jnp.cumsum(pairs, axis=0, dtype=jnp.int32) - pairs
    rows = jnp.take_along_axis(rows, jnp.maximum(ids, 0), axis=1)
    earlier = jnp.tril(jnp.ones((ids.shape[-1],) * 2, bool), k=-1)  # choices of the same token
    rows += jnp.sum((ids[:, :, None] == ids[:, None, :]) & earlier[None], axis=-1, dtype=jnp.int32)
    end = capacity if padded_rows is None else (ids % blocks.shape[1] + 1) * padded_rows
    return jnp.where((ids >= 0) & (rows < end), rows, -1), starts


def over_row(factors: jax.Array, rows: jax.Array) -> jax.Array:
    """Reshapes one factor per row so that it multiplies rows."""
    return factors.astype(rows.dtype).reshape(factors.shape + (1,) * (rows.ndim - factors.ndim))


@dataclasses.dataclass(frozen=True)
class XlaLocal:
    """Ops of one rank by `jax.lax` alone."""

    keeps_bits: ClassVar[bool] = False

    def layout(
        self, topk_idx: jax.Array, num_experts: int, num_ranks: int, ranks_per_domain: int
    ) -> LayoutCounts:
        pairs = count_pairs(routed_experts(topk_idx, num_experts), num_experts)
        in_rank = jnp.any(pairs.reshape(-1, num_ranks, num_experts // num_ranks) > 0, axis=-1)
        in_domain = jnp.any(in_rank.reshape(-1, num_ranks // ranks_per_domain, ranks_per_domain), axis=-1)
        return LayoutCounts(
            jnp.sum(in_rank, axis=0, dtype=jnp.int32),
            jnp.sum(in_domain, axis=0, dtype=jnp.int32),
            jnp.sum(pairs, axis=0, dtype=jnp.int32),
            in_rank,
        )

    def permute(
        self,
        leaves: Sequence[jax.Array],
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        num_local_experts: int,
        expert_alignment: int,
        capacity: int,
    ) -> Permutation:
        ids = routed_experts(topk_idx, num_local_experts)
        pairs = count_pairs(ids, num_local_experts)
        counts = jnp.sum(pairs, axis=0, dtype=jnp.int32)
        blocks = -(-counts // expert_alignment) * expert_alignment
        row_map, starts = rows_by_expert(pairs, ids, 1, capacity, blocks, None)
        clipped = jnp.minimum(starts, capacity)
        tokens_per_expert = jnp.minimum(starts + counts, capacity) - clipped
        group_sizes = jnp.minimum(starts + blocks, capacity) - clipped
        dropped = jnp.sum(counts - tokens_per_expert, keepdims=True, dtype=jnp.int32)
        choice = invert(row_map, capacity)
        moved = tuple(self.repermute(row_map, leaf, capacity) for leaf in leaves)
        weights = None if topk_weights is None else take(topk_weights.reshape(-1), choice)
        return Permutation(moved, row_map, weights, group_sizes, tokens_per_expert, dropped)

    def repermute(self, row_map: jax.Array, leaf: jax.Array, num_permuted: int) -> jax.Array:
        choice = invert(jnp.where(row_map < num_permuted, row_map, -1), num_permuted)
        return take(leaf, jnp.where(choice < 0, -1, choice // row_map.shape[1]))

    def repermute_scaled(
        self, row_map: jax.Array, leaf: jax.Array, topk_weights: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        wide = sum_dtype(leaf.dtype)
        row_map = jnp.where(row_map < factors.shape[0], row_map, -1)
        choice = invert(row_map, factors.shape[0])
        rows = take(leaf, jnp.where(choice < 0, -1, choice // row_map.shape[1])).astype(wide)
        scaled = rows * over_row(take(topk_weights.reshape(-1), choice), rows)
        # What lies where no row goes is not read: it need not be finite.
        is_read = (choice >= 0).reshape(-1, *[1] * (rows.ndim - 1))
        products = jnp.where(is_read, factors, 0).astype(wide) * rows
        dots = jnp.sum(products, axis=tuple(range(1, rows.ndim)))
        return scaled.astype(leaf.dtype), take(dots, row_map).astype(jnp.float32)

    def unpermute(
        self,
        y: jax.Array,
        row_map: jax.Array,
        topk_weights: jax.Array | None,
        bias: jax.Array | None,
        topk_idx: jax.Array | None,
        out_dtype: DTypeLike,
    ) -> jax.Array:
        wide = sum_dtype(y.dtype)
        is_row = (row_map >= 0) & (row_map < y.shape[0])
        is_broken = ~is_row & (row_map != -1)
        ids = None
        if bias is not None and topk_idx is not None:
            ids = routed_experts(topk_idx, bias.shape[0])
            is_broken |= is_row & (ids < 0)
        total: Any = 0.0
        for k in range(row_map.shape[1]):
            term = take(y, jnp.where(is_row[:, k], row_map[:, k], -1)).astype(wide)
            if bias is not None and ids is not None:
                term += take(bias, jnp.where(is_row[:, k], ids[:, k], -1)).astype(wide)
            if topk_weights is not None:
                used = jnp.where(is_row[:, k], topk_weights[:, k], 0)
                term *= over_row(used, term)
            total = total + term
        is_broken = jnp.any(is_broken, axis=1).reshape(-1, *[1] * (y.ndim - 1))
        return jnp.where(is_broken, jnp.nan, total).astype(out_dtype)
