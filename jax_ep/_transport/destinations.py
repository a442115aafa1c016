"""Destinations of rows between domains: where a single hop would put them in their receivers' buffers.

They are computed from what all ranks have in common: the counts of their choices, or, of few tokens, the
choices themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._transport.backend import LocalBackend
from jax_ep._transport.collectives import rank
from jax_ep._transport.hop_1 import without_dropped
from jax_ep._transport.routing import Routing, block_sizes, fill_of_blocks, owners


class Destinations(NamedTuple):
    """Destinations of the rows of this rank's tokens, and counts of the rows that this rank receives."""

    sent_rows: jax.Array  # [T, R] by rank, [T, K] by expert; -1 none or dropped
    rows_between: jax.Array  # [R, R] from rank s to rank d, before drops
    expert_counts: jax.Array  # [L]
    tokens_per_expert: jax.Array | None  # [L] by expert; by rank it takes the ids that arrive
    group_sizes: jax.Array | None  # [L] by expert
    num_tokens: jax.Array  # [1]
    num_dropped: jax.Array  # [1]


class AllDestinations(NamedTuple):
    """Destinations of the rows of all ranks' tokens."""

    ids: jax.Array  # [R, T, K] the choices that hop 1 has not dropped
    sent_rows: jax.Array  # [R, T, R] by rank, [R, T, K] by expert
    of_this_rank: Destinations


def destinations_by_counts(
    local: LocalBackend,
    routing: Routing,
    ids: jax.Array,
    ids_before_drops: jax.Array,
    all_gather: Callable[[jax.Array], jax.Array],
) -> Destinations:
    """Computes the destinations of this rank's choices `ids` [T, K], -1 unused.

    `ids_before_drops` are the choices before hop 1 dropped some, or `ids` itself if it dropped none.
    all_gather(numbers) returns the numbers [n] of all ranks [R, n].
    """
    ranks, experts = routing.num_ranks, routing.num_local_experts
    me = rank(routing.ranks)
    layout = local.layout(ids, routing.num_experts, ranks, 1)
    counts = [layout.num_tokens_per_rank, layout.num_tokens_per_expert]
    if ids_before_drops is not ids:
        before_drops = local.layout(ids_before_drops, routing.num_experts, ranks, 1)
        counts.append(
            jnp.sum(before_drops.num_tokens_per_expert.reshape(ranks, experts), axis=1, dtype=jnp.int32)
            if routing.has_row_per_choice
            else before_drops.num_tokens_per_rank
        )
    all_counts = all_gather(jnp.concatenate(counts))
    by_rank, by_expert, *rows_before_drops = jnp.split(
        all_counts, [ranks, ranks + routing.num_experts], axis=1
    )
    earlier = jnp.arange(ranks, dtype=jnp.int32)[:, None] < me
    expert_counts = jnp.sum(by_expert, axis=0, dtype=jnp.int32)
    if routing.has_row_per_choice:
        before = jnp.sum(jnp.where(earlier, by_expert, 0), axis=0, dtype=jnp.int32)
        sent_rows = _rows_by_expert(local, routing, ids, _block_starts(routing, expert_counts) + before)
        rows_between = jnp.sum(by_expert.reshape(ranks, ranks, experts), axis=-1, dtype=jnp.int32)
    else:
        before = jnp.sum(jnp.where(earlier, by_rank, 0), axis=0, dtype=jnp.int32)
        sent_rows = _rows_by_rank(routing, layout.is_token_in_rank, before[None])
        rows_between = by_rank
    before_drops = rows_before_drops[0] if ids_before_drops is not ids else rows_between
    to_me = jnp.sum(jnp.take(before_drops, me, axis=1), keepdims=True, dtype=jnp.int32)
    return _destinations(routing, sent_rows, rows_between, expert_counts, to_me)


def destinations_by_choices(
    local: LocalBackend, routing: Routing, ids_before_drops: jax.Array
) -> AllDestinations:
    """Computes the destinations of the choices [R, T, K] of all ranks, -1 unused, before hop 1 drops some."""
    ranks, me = routing.num_ranks, rank(routing.ranks)
    ids = jax.vmap(lambda of_rank: without_dropped(routing, of_rank))(ids_before_drops)
    flat = ids.reshape(-1, routing.top_k)
    layout = local.layout(flat, routing.num_experts, ranks, 1)
    expert_counts = layout.num_tokens_per_expert
    if routing.has_row_per_choice:
        sent_rows = _rows_by_expert(local, routing, flat, _block_starts(routing, expert_counts))
        numbers = jnp.arange(ranks, dtype=jnp.int32)[None, None]
        is_to_rank = owners(routing, ids).reshape(ranks, -1, 1) == numbers
        rows_between = jnp.sum(is_to_rank, axis=1, dtype=jnp.int32)
        is_to_me = owners(routing, ids_before_drops) == me
    else:
        sent_rows = _rows_by_rank(routing, layout.is_token_in_rank)
        rows_between = jnp.sum(layout.is_token_in_rank.reshape(ranks, -1, ranks), axis=1, dtype=jnp.int32)
        is_to_me = jnp.any(owners(routing, ids_before_drops) == me, axis=-1)
    to_me = jnp.sum(is_to_me, dtype=jnp.int32)[None]
    sent_rows = sent_rows.reshape(ranks, routing.num_tokens, -1)
    mine = jax.lax.dynamic_index_in_dim(sent_rows, me, keepdims=False)
    return AllDestinations(ids, sent_rows, _destinations(routing, mine, rows_between, expert_counts, to_me))


def _destinations(
    routing: Routing,
    sent_rows: jax.Array,
    rows_between: jax.Array,
    expert_counts: jax.Array,
    to_me: jax.Array,
) -> Destinations:
    """Adds the counts of what this rank receives. `to_me` [1]: the rows that were to come, before drops."""
    me, experts = rank(routing.ranks), routing.num_local_experts
    local_counts = jax.lax.dynamic_slice_in_dim(expert_counts, me * experts, experts)
    if routing.has_row_per_choice:
        tokens_per_expert, group_sizes = fill_of_blocks(routing, local_counts)
        num_tokens = jnp.sum(tokens_per_expert, keepdims=True, dtype=jnp.int32)
    else:
        tokens_per_expert, group_sizes = None, None
        num_arriving = jnp.sum(jnp.take(rows_between, me, axis=1), keepdims=True, dtype=jnp.int32)
        num_tokens = jnp.minimum(num_arriving, routing.capacity)
    return Destinations(
        sent_rows, rows_between, local_counts, tokens_per_expert, group_sizes, num_tokens, to_me - num_tokens
    )


def _block_starts(routing: Routing, expert_counts: jax.Array) -> jax.Array:
    """Returns [E]: where the block of each expert begins at its rank."""
    blocks = block_sizes(routing, expert_counts).reshape(routing.num_ranks, -1)
    return (jnp.cumsum(blocks, axis=1, dtype=jnp.int32) - blocks).reshape(-1)


def _rows_by_expert(local: LocalBackend, routing: Routing, ids: jax.Array, first: jax.Array) -> jax.Array:
    """Returns [n, K] of choices [n, K]. `first` [E] is the row of the first choice of each expert."""
    # Order the choices by expert, as if one rank had all. Then shift the rows of each expert to their start
    # at the receiver.
    alone = local.permute((), ids, None, routing.num_experts, 1, ids.size)
    counts = alone.tokens_per_expert
    shift = first - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    rows = alone.row_map + jnp.take(shift, jnp.maximum(ids, 0))
    end = routing.capacity
    if routing.padded_rows is not None:
        end = (ids % routing.num_local_experts + 1) * routing.padded_rows
    return jnp.where((ids >= 0) & (rows < end), rows, -1)


def _rows_by_rank(routing: Routing, is_token_in_rank: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """Returns [n, R] of n tokens. `first` [1, R] is the row of the first of them at each rank."""
    is_sent = is_token_in_rank.astype(jnp.int32)
    rows = first + jnp.cumsum(is_sent, axis=0, dtype=jnp.int32) - is_sent
    return jnp.where((is_sent > 0) & (rows < routing.capacity), rows, -1)
