"""Where the rows of a rank's tokens lie at their receivers, found out from the counts of all ranks alone.

What the handlers of one host do inside of `route`, for groups that span hosts: no rank sees other ranks'
choices, only how many there are of each kind.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._collectives import rank
from jax_ep._handle import Routing, block_sizes, fill_of_blocks


class Places(NamedTuple):
    sent_rows: jax.Array  # [T, R] by rank, [T, K] by expert; -1 none or dropped
    rows_between: jax.Array  # [R, R] from rank s to rank d, before drops
    expert_counts: jax.Array  # [L]
    tokens_per_expert: jax.Array | None  # [L] by expert; by rank it takes the ids that arrive
    group_sizes: jax.Array | None  # [L] by expert
    num_tokens: jax.Array  # [1]
    num_dropped: jax.Array  # [1]


def find_places(
    module: ModuleType,
    routing: Routing,
    ids: jax.Array,
    wanted: jax.Array,
    gather: Callable[[jax.Array], jax.Array],
) -> Places:
    """Of this rank's choices `ids` [T, K], -1 unused; `wanted` are those before hop 1 dropped some.

    `gather` brings the numbers [n] of all ranks [R, n].
    """
    ranks, experts = routing.num_ranks, routing.num_local_experts
    me = rank(routing.group)
    layout = module.layout(ids, routing.num_experts, ranks, 1)
    counts = [layout.num_tokens_per_rank, layout.num_tokens_per_expert]
    if wanted is not ids:
        of_wanted = module.layout(wanted, routing.num_experts, ranks, 1)
        counts.append(
            _per_rank(routing, of_wanted.num_tokens_per_expert)
            if routing.has_row_per_choice
            else of_wanted.num_tokens_per_rank
        )
    everywhere = gather(jnp.concatenate(counts))
    by_rank, by_expert, *of_wanted = jnp.split(everywhere, [ranks, ranks + routing.num_experts], axis=1)
    earlier = jnp.arange(ranks, dtype=jnp.int32)[:, None] < me
    expert_counts = jnp.sum(by_expert, axis=0, dtype=jnp.int32)
    mine = jax.lax.dynamic_slice_in_dim(expert_counts, me * experts, experts)
    if routing.has_row_per_choice:
        before = jnp.sum(jnp.where(earlier, by_expert, 0), axis=0, dtype=jnp.int32)
        blocks = block_sizes(routing, expert_counts).reshape(ranks, experts)
        starts = (jnp.cumsum(blocks, axis=1, dtype=jnp.int32) - blocks).reshape(-1)
        sent_rows = _rows_by_expert(module, routing, ids, starts + before)
        rows_between = jnp.sum(by_expert.reshape(ranks, ranks, experts), axis=-1, dtype=jnp.int32)
        tokens_per_expert, group_sizes = fill_of_blocks(routing, mine)
        num_tokens = jnp.sum(tokens_per_expert, keepdims=True, dtype=jnp.int32)
    else:
        before = jnp.sum(jnp.where(earlier, by_rank, 0), axis=0, dtype=jnp.int32)
        goes = layout.is_token_in_rank.astype(jnp.int32)
        rows = before[None] + jnp.cumsum(goes, axis=0, dtype=jnp.int32) - goes
        sent_rows = jnp.where((goes > 0) & (rows < routing.capacity), rows, -1)
        rows_between, tokens_per_expert, group_sizes = by_rank, None, None
        arrive = jnp.sum(jnp.take(by_rank, me, axis=1), keepdims=True, dtype=jnp.int32)
        num_tokens = jnp.minimum(arrive, routing.capacity)
    to_me = jnp.take(of_wanted[0] if wanted is not ids else rows_between, me, axis=1)
    num_dropped = jnp.sum(to_me, keepdims=True, dtype=jnp.int32) - num_tokens
    return Places(sent_rows, rows_between, mine, tokens_per_expert, group_sizes, num_tokens, num_dropped)


def _per_rank(routing: Routing, by_expert: jax.Array) -> jax.Array:
    return jnp.sum(by_expert.reshape(routing.num_ranks, -1), axis=1, dtype=jnp.int32)


def _rows_by_expert(module: ModuleType, routing: Routing, ids: jax.Array, first: jax.Array) -> jax.Array:
    """[T, K], where `first` [E] is the row of this rank's first choice of each expert at its receiver."""
    # What this rank's choices would be ordered by on one device; from there they shift expert by expert.
    alone = module.permute((), ids, None, routing.num_experts, 1, ids.size)
    counts = alone.tokens_per_expert
    shift = first - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    rows = alone.row_map + jnp.take(shift, jnp.maximum(ids, 0))
    end = routing.capacity
    if routing.slots is not None:
        end = (ids % routing.num_local_experts + 1) * routing.slots
    return jnp.where((ids >= 0) & (rows < end), rows, -1)
