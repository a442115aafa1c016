"""Backend "xla": the ops by `jax.lax` alone.

It runs wherever JAX runs, also on several processes, and dispatches the same bits. It is written to be read
and compared with, not to be fast: every rank gathers all tokens and computes the whole routing. JAX's own
rules differentiate all of it, so gradients can be checked against it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_ep._group.ranks import Ranks
from jax_ep._jax.sharding import vary_alike
from jax_ep._rows.dtypes import sum_dtype, sum_of_all
from jax_ep._rows.fp8 import BLOCK, QuantizedArray, quantize_blocks
from jax_ep._rows.indexing import invert, routed_experts, take
from jax_ep._transport import collectives
from jax_ep._transport.attendance import EVERYBODY, Attendance, Attended
from jax_ep._transport.backend import LayoutCounts, Packing, Permutation, Routed
from jax_ep._transport.collectives import exchange, gather, rank
from jax_ep._transport.routing import (
    Handle,
    Routing,
    block_sizes,
    fill_of_blocks,
    flat_real_rows,
    placed_handle,
)


def _count_pairs(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 [N, E]: how often token n chose expert e. ids [N, K] are routed experts."""
    counts = jnp.zeros((ids.shape[0], num_experts), jnp.int32)
    counts = vary_alike(counts, jax.typeof(ids).manual_axis_type.varying)
    token = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return counts.at[token, jnp.where(ids < 0, num_experts, ids)].add(1, mode="drop")


def _by_expert(
    pairs: jax.Array, ids: jax.Array, num_ranks: int, capacity: int, blocks: jax.Array, slots: int | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the row of each choice [N, K] at its receiver, and the start of each expert's block [E].

    pairs [N, E] and ids [N, K] are those of all ranks' tokens, by source rank. `blocks` [E] are the rows of
    each expert's block, which all equal `slots` if that is given.
    """
    blocks = blocks.reshape(num_ranks, -1)
    starts = (jnp.cumsum(blocks, axis=1) - blocks).reshape(-1).astype(jnp.int32)
    rows = starts[None] + jnp.cumsum(pairs, axis=0, dtype=jnp.int32) - pairs
    rows = jnp.take_along_axis(rows, jnp.maximum(ids, 0), axis=1)
    earlier = jnp.tril(jnp.ones((ids.shape[-1],) * 2, bool), k=-1)  # choices of the same token
    rows += jnp.sum((ids[:, :, None] == ids[:, None, :]) & earlier[None], axis=-1, dtype=jnp.int32)
    end = capacity if slots is None else (ids % blocks.shape[1] + 1) * slots
    return jnp.where((ids >= 0) & (rows < end), rows, -1), starts


def _rows_here(handle: Handle) -> tuple[jax.Array, jax.Array]:
    """Returns the rows at this rank of all ranks' tokens, and their ids [R * T, K].

    Rows are [R * T] by rank and [R * T, K] by expert, -1 if there is none.
    """
    routing = handle.routing
    ids = gather(routing.ranks, handle.topk_idx).reshape(-1, routing.top_k)
    rows = gather(routing.ranks, handle.sent_rows).reshape(-1, routing.rows_per_token)
    if not routing.has_row_per_choice:
        return jnp.take(rows, rank(routing.ranks), axis=1), ids
    here = (ids >= 0) & (ids // routing.num_local_experts == rank(routing.ranks))
    return jnp.where(here, rows, -1), ids


def _send_back(routing: Routing, held: jax.Array) -> jax.Array:
    """Returns [R, T, ...]: each rank's part for this rank's tokens. held [R * T, ...] is by source rank."""
    held = held.reshape(routing.num_ranks, routing.num_tokens, *held.shape[1:])
    return exchange(routing.ranks, held)


def _over_row(factors: jax.Array, rows: jax.Array) -> jax.Array:
    """Reshapes one factor per row so that it multiplies rows."""
    return factors.astype(rows.dtype).reshape(factors.shape + (1,) * (rows.ndim - factors.ndim))


@dataclasses.dataclass(frozen=True)
class Xla:
    """Backend "xla": `jax.lax` alone."""

    keeps_bits: ClassVar[bool] = False

    def packs_fp8(self, routing: Routing, x: jax.Array) -> bool:
        return False

    def quantize(self, rows: jax.Array, round_scale: bool, floor: float) -> QuantizedArray:
        return quantize_blocks(rows, (1, BLOCK), round_scale, floor)

    def layout(
        self, topk_idx: jax.Array, num_experts: int, num_ranks: int, ranks_per_node: int
    ) -> LayoutCounts:
        pairs = _count_pairs(routed_experts(topk_idx, num_experts), num_experts)
        in_rank = jnp.any(pairs.reshape(-1, num_ranks, num_experts // num_ranks) > 0, axis=-1)
        in_node = jnp.any(in_rank.reshape(-1, num_ranks // ranks_per_node, ranks_per_node), axis=-1)
        return LayoutCounts(
            jnp.sum(in_rank, axis=0, dtype=jnp.int32),
            jnp.sum(in_node, axis=0, dtype=jnp.int32),
            jnp.sum(pairs, axis=0, dtype=jnp.int32),
            in_rank,
        )

    def route(
        self,
        routing: Routing,
        leaves: Sequence[jax.Array],
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        attendance: Attendance = EVERYBODY,
        packing: Packing = Packing.NONE,
    ) -> Routed:
        assert packing is Packing.NONE
        ranks, experts, capacity = routing.num_ranks, routing.num_local_experts, routing.capacity
        me = rank(routing.ranks)
        my_ids = routed_experts(topk_idx, routing.num_experts)
        active = attendance.peers_of(me)
        if active is not None:
            my_ids = jnp.where(active[my_ids // experts] > 0, my_ids, -1)
        ids = gather(routing.ranks, my_ids).reshape(-1, routing.top_k)
        pairs = _count_pairs(ids, routing.num_experts)
        in_rank = jnp.any(pairs.reshape(-1, ranks, experts) > 0, axis=-1).astype(jnp.int32)
        my_pairs = jax.lax.dynamic_slice_in_dim(pairs, me * experts, experts, axis=1)
        expert_counts = jnp.sum(my_pairs, axis=0, dtype=jnp.int32)
        if not routing.has_row_per_choice:
            sent = in_rank
            rows = jnp.cumsum(in_rank, axis=0, dtype=jnp.int32) - in_rank
            rows = jnp.where((in_rank > 0) & (rows < capacity), rows, -1)
            kept_here = jnp.take(rows, me, axis=1) >= 0
            tokens_per_expert = jnp.sum(jnp.where(kept_here[:, None], my_pairs, 0), axis=0, dtype=jnp.int32)
            group_sizes = None
        else:
            sent = jnp.sum(pairs.reshape(-1, ranks, experts), axis=-1, dtype=jnp.int32)
            blocks = block_sizes(routing, jnp.sum(pairs, axis=0, dtype=jnp.int32))
            rows, _ = _by_expert(pairs, ids, ranks, capacity, blocks, routing.slots)
            tokens_per_expert, group_sizes = fill_of_blocks(routing, expert_counts)
        prefix = jnp.cumsum(jnp.sum(sent.reshape(ranks, -1, ranks), axis=1), axis=0, dtype=jnp.int32)
        arrived = jax.lax.dynamic_slice_in_dim(prefix[-1], me, 1)
        if not routing.has_row_per_choice:
            num_tokens = jnp.minimum(arrived, capacity)
        else:
            num_tokens = jnp.sum(tokens_per_expert, keepdims=True, dtype=jnp.int32)
        my_rows = jax.lax.dynamic_slice_in_dim(rows, me * routing.num_tokens, routing.num_tokens)
        received_rows = None
        if routing.has_row_per_choice:
            received_rows = jnp.where((ids >= 0) & (ids // experts == me), rows, -1)
        handle = Handle(my_ids, my_rows, prefix, expert_counts, received_rows, None, routing)
        moved, weights = self.push(handle, leaves, topk_weights)
        arrived_idx = None
        if not routing.has_row_per_choice:
            source = invert(jnp.take(rows, me, axis=1), capacity)
            arrived_idx = jnp.where(source[:, None] < 0, -1, take(ids, source))
            arrived_idx = jnp.where(
                (arrived_idx >= 0) & (arrived_idx // experts == me), arrived_idx - me * experts, -1
            )
        counts = (tokens_per_expert, group_sizes, num_tokens, arrived - num_tokens)
        return Routed(moved, weights, arrived_idx, *counts, attendance.as_attended(ranks), handle)

    def gather(self, routing: Routing, numbers: jax.Array) -> jax.Array:
        return gather(routing.ranks, numbers)

    def place(self, routing: Routing, hosts: jax.Array, sent_rows: jax.Array, slot_rows: jax.Array) -> Handle:
        return placed_handle(routing, hosts, sent_rows, slot_rows)

    def push(
        self, handle: Handle, leaves: Sequence[jax.Array], topk_weights: jax.Array | None
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        routing = handle.routing
        rows, ids = _rows_here(handle)
        choice = invert(rows, routing.capacity)
        token = jnp.where(choice < 0, -1, choice // routing.top_k) if routing.has_row_per_choice else choice
        moved = []
        for leaf in leaves:
            everyone = jax.lax.collapse(gather(routing.ranks, leaf), 0, 2)
            moved.append(take(everyone, token))
        if topk_weights is None:
            return tuple(moved), None
        weights = gather(routing.ranks, topk_weights).reshape(-1, routing.top_k)
        if routing.has_row_per_choice:
            return tuple(moved), take(weights.reshape(-1), choice)
        here = (ids >= 0) & (ids // routing.num_local_experts == rank(routing.ranks))
        return tuple(moved), take(jnp.where(here, weights, 0), token)

    def push_scaled(
        self,
        handle: Handle,
        leaves: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        row_weights: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        sent, _ = self.push(handle, leaves, None)
        scaled, dots = [], []
        for row, factor in zip(sent, factors, strict=True):
            wide = sum_dtype(row.dtype)
            token, other, weight = (
                flat_real_rows(handle, array, wide) for array in (row, factor, row_weights)
            )
            dots.append(jnp.sum(other * token, axis=1))
            scaled.append((weight * token).astype(row.dtype).reshape(row.shape))
        return tuple(scaled), sum_of_all(dots).astype(jnp.float32)

    def pull(
        self,
        handle: Handle,
        rows: Sequence[jax.Array],
        row_weights: jax.Array | None,
        biases: Sequence[jax.Array],
        arrived_weights: jax.Array | None,
        attendance: Attendance = EVERYBODY,
        adds_in_place: bool = False,
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None, Attended]:
        routing = handle.routing
        here, ids = _rows_here(handle)
        active = attendance.peers_of(rank(routing.ranks))
        if active is not None:
            active = jnp.repeat(active, routing.num_tokens)  # of the rank of each token
            active = active.reshape(-1, *[1] * (here.ndim - 1))
            here = jnp.where(active > 0, here, -1)
        choices = [here[:, k] for k in range(routing.top_k)] if routing.has_row_per_choice else [here]
        sums = []
        for leaf in rows:
            wide = sum_dtype(leaf.dtype)
            partial: Any = 0.0
            for choice in choices:
                term = take(leaf, choice).astype(wide)
                if row_weights is not None:
                    term *= _over_row(take(row_weights, choice), term)
                partial = partial + term
            total: Any = 0.0
            returned = _send_back(routing, partial)
            for part in returned:
                total = total + part
            for bias in biases:
                total = total + bias.astype(wide)
            sums.append(total.astype(leaf.dtype))
        attended = attendance.as_attended(routing.num_ranks)
        if arrived_weights is None:
            return tuple(sums), None, attended
        returned = take(arrived_weights, here)
        if not routing.has_row_per_choice:
            is_local = (ids >= 0) & (ids // routing.num_local_experts == rank(routing.ranks))
            returned = jnp.where(is_local, returned, 0)
        return tuple(sums), jnp.sum(_send_back(routing, returned), axis=0), attended

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
        pairs = _count_pairs(ids, num_local_experts)
        counts = jnp.sum(pairs, axis=0, dtype=jnp.int32)
        blocks = -(-counts // expert_alignment) * expert_alignment
        row_map, starts = _by_expert(pairs, ids, 1, capacity, blocks, None)
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
        scaled = rows * _over_row(take(topk_weights.reshape(-1), choice), rows)
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
        out_dtype: Any,
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
                term *= _over_row(used, term)
            total = total + term
        is_broken = jnp.any(is_broken, axis=1).reshape(-1, *[1] * (y.ndim - 1))
        return jnp.where(is_broken, jnp.nan, total).astype(out_dtype)

    def between_hosts(self, ranks: Ranks, blocks: jax.Array) -> jax.Array:
        return collectives.between_hosts(ranks, blocks)
