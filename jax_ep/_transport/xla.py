"""Backend "xla": the ops by `jax.lax` alone.

It runs wherever JAX runs, also on several processes, and dispatches the same bits. It is written to be read
and compared with, not to be fast: every rank gathers all tokens and computes the whole routing. JAX's own
rules differentiate all of it, so gradients can be checked against it.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_ep._group.ranks import Ranks
from jax_ep._rows.dtypes import sum_dtype, sum_of_all
from jax_ep._rows.fp8 import (
    BLOCK,
    FLOOR,
    QuantizedArray,
    as_bits,
    dequantize_fp8,
    from_bits,
    quantize_blocks,
)
from jax_ep._rows.indexing import invert, routed_experts, take
from jax_ep._transport import collectives
from jax_ep._transport.attendance import ALL_RANKS, Attendance, AttendanceResult
from jax_ep._transport.backend import Leaves, Packing, Pull, Push, Routed
from jax_ep._transport.collectives import all_gather, exchange, rank
from jax_ep._transport.routing import (
    Handle,
    Routing,
    block_sizes,
    fill_of_blocks,
    flat_real_rows,
    placed_handle,
)
from jax_ep._transport.xla_local import XlaLocal, count_pairs, over_row, rows_by_expert


def _rows_here(handle: Handle) -> tuple[jax.Array, jax.Array]:
    """Returns the rows at this rank of all ranks' tokens, and their ids [R * T, K].

    Rows are [R * T] by rank and [R * T, K] by expert, -1 if there is none.
    """
    routing = handle.routing
    ids = all_gather(routing.ranks, handle.topk_idx).reshape(-1, routing.top_k)
    rows = all_gather(routing.ranks, handle.sent_rows).reshape(-1, routing.rows_per_token)
    if not routing.has_row_per_choice:
        return jnp.take(rows, rank(routing.ranks), axis=1), ids
    is_here = (ids >= 0) & (ids // routing.num_local_experts == rank(routing.ranks))
    return jnp.where(is_here, rows, -1), ids


def _send_back(routing: Routing, held: jax.Array) -> jax.Array:
    """Returns [R, T, ...]: each rank's part for this rank's tokens. held [R * T, ...] is by source rank."""
    held = held.reshape(routing.num_ranks, routing.num_tokens, *held.shape[1:])
    return exchange(routing.ranks, held)


def _send_back_as_fp8(routing: Routing, held: jax.Array, packing: Packing) -> jax.Array:
    """Does what `_send_back` does, with parts that travel as FP8."""
    packed = quantize_blocks(held, (1, BLOCK), packing is Packing.FP8_ROUNDED, FLOOR)
    parts = from_bits(jax.tree.map(lambda leaf: _send_back(routing, leaf), as_bits(packed)))
    return dequantize_fp8(parts, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Xla:
    """Backend "xla": `jax.lax` alone."""

    ranks: Ranks
    keeps_bits: ClassVar[bool] = False

    @property
    def local(self) -> XlaLocal:
        return XlaLocal()

    def packs_fp8(self, routing: Routing, x: jax.Array) -> bool:
        return False

    def quantize(self, rows: jax.Array, round_scale: bool, floor: float) -> QuantizedArray:
        return quantize_blocks(rows, (1, BLOCK), round_scale, floor)

    def route(
        self, routing: Routing, topk_idx: jax.Array, sent: Push, attendance: Attendance = ALL_RANKS
    ) -> Routed:
        assert sent.packing is Packing.NONE
        ranks, experts, capacity = routing.num_ranks, routing.num_local_experts, routing.capacity
        me = rank(self.ranks)
        my_ids = routed_experts(topk_idx, routing.num_experts)
        active = attendance.peers_of(me)
        if active is not None:
            my_ids = jnp.where(active[my_ids // experts] > 0, my_ids, -1)
        ids = all_gather(self.ranks, my_ids).reshape(-1, routing.top_k)
        pairs = count_pairs(ids, routing.num_experts)
        in_rank = jnp.any(pairs.reshape(-1, ranks, experts) > 0, axis=-1).astype(jnp.int32)
        my_pairs = jax.lax.dynamic_slice_in_dim(pairs, me * experts, experts, axis=1)
        expert_counts = jnp.sum(my_pairs, axis=0, dtype=jnp.int32)
        if not routing.has_row_per_choice:
            num_sent = in_rank
            rows = jnp.cumsum(in_rank, axis=0, dtype=jnp.int32) - in_rank
            rows = jnp.where((in_rank > 0) & (rows < capacity), rows, -1)
            kept_here = jnp.take(rows, me, axis=1) >= 0
            tokens_per_expert = jnp.sum(jnp.where(kept_here[:, None], my_pairs, 0), axis=0, dtype=jnp.int32)
            group_sizes = None
        else:
            num_sent = jnp.sum(pairs.reshape(-1, ranks, experts), axis=-1, dtype=jnp.int32)
            blocks = block_sizes(routing, jnp.sum(pairs, axis=0, dtype=jnp.int32))
            rows, _ = rows_by_expert(pairs, ids, ranks, capacity, blocks, routing.padded_rows)
            tokens_per_expert, group_sizes = fill_of_blocks(routing, expert_counts)
        prefix = jnp.cumsum(jnp.sum(num_sent.reshape(ranks, -1, ranks), axis=1), axis=0, dtype=jnp.int32)
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
        moved, weights = self.push(handle, sent)
        arrived_idx = None
        if not routing.has_row_per_choice:
            source = invert(jnp.take(rows, me, axis=1), capacity)
            arrived_idx = jnp.where(source[:, None] < 0, -1, take(ids, source))
            arrived_idx = jnp.where(
                (arrived_idx >= 0) & (arrived_idx // experts == me), arrived_idx - me * experts, -1
            )
        counts = (tokens_per_expert, group_sizes, num_tokens, arrived - num_tokens)
        return Routed(moved, weights, arrived_idx, *counts, attendance.as_attended(ranks), handle)

    def all_gather(self, numbers: jax.Array) -> jax.Array:
        return all_gather(self.ranks, numbers)

    def place(
        self, routing: Routing, domains: jax.Array, sent_rows: jax.Array, place_rows: jax.Array
    ) -> Handle:
        return placed_handle(routing, domains, sent_rows, place_rows)

    def push(self, handle: Handle, sent: Push) -> tuple[Leaves, jax.Array | None]:
        if sent.row_weights is not None:
            moved, _ = self.push(handle, Push(sent.leaves))
            return _scale(handle, moved, sent.factors, sent.row_weights)
        routing = handle.routing
        rows, ids = _rows_here(handle)
        choice = invert(rows, routing.capacity)
        token = jnp.where(choice < 0, -1, choice // routing.top_k) if routing.has_row_per_choice else choice
        moved = []
        for leaf in sent.leaves:
            everyone = jax.lax.collapse(all_gather(self.ranks, leaf), 0, 2)
            moved.append(take(everyone, token))
        if sent.weights is None:
            return tuple(moved), None
        weights = all_gather(self.ranks, sent.weights).reshape(-1, routing.top_k)
        if routing.has_row_per_choice:
            return tuple(moved), take(weights.reshape(-1), choice)
        is_here = (ids >= 0) & (ids // routing.num_local_experts == rank(self.ranks))
        return tuple(moved), take(jnp.where(is_here, weights, 0), token)

    def pull(
        self, handle: Handle, pulled: Pull, attendance: Attendance = ALL_RANKS
    ) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
        routing = handle.routing
        local_rows, ids = _rows_here(handle)
        active = attendance.peers_of(rank(self.ranks))
        if active is not None:
            active = jnp.repeat(active, routing.num_tokens)  # of the rank of each token
            active = active.reshape(-1, *[1] * (local_rows.ndim - 1))
            local_rows = jnp.where(active > 0, local_rows, -1)
        choices = (
            [local_rows[:, k] for k in range(routing.top_k)] if routing.has_row_per_choice else [local_rows]
        )
        sums = []
        for leaf in pulled.rows:
            wide = sum_dtype(leaf.dtype)
            partial: Any = 0.0
            for choice in choices:
                term = take(leaf, choice).astype(wide)
                if pulled.row_weights is not None:
                    term *= over_row(take(pulled.row_weights, choice), term)
                partial = partial + term
            total: Any = 0.0
            if pulled.packing is Packing.NONE:
                parts = _send_back(routing, partial)
            else:
                parts = _send_back_as_fp8(routing, partial, pulled.packing)
            for part in parts:
                total = total + part
            for bias in pulled.biases:
                total = total + bias.astype(wide)
            sums.append(total.astype(leaf.dtype))
        attended = attendance.as_attended(routing.num_ranks)
        if pulled.weights is None:
            return tuple(sums), None, attended
        returned = take(pulled.weights, local_rows)
        if not routing.has_row_per_choice:
            is_local = (ids >= 0) & (ids // routing.num_local_experts == rank(self.ranks))
            returned = jnp.where(is_local, returned, 0)
        return tuple(sums), jnp.sum(_send_back(routing, returned), axis=0), attended

    def between_domains(self, blocks: jax.Array) -> jax.Array:
        return collectives.between_domains(self.ranks, blocks)


def _scale(handle: Handle, rows: Leaves, factors: Leaves, row_weights: jax.Array) -> tuple[Leaves, jax.Array]:
    """Returns rows [C, ...] times their weights [C], and their dot products [C] with the factors."""
    scaled, dots = [], []
    for row, factor in zip(rows, factors, strict=True):
        wide = sum_dtype(row.dtype)
        token, other, weight = (flat_real_rows(handle, array, wide) for array in (row, factor, row_weights))
        dots.append(jnp.sum(other * token, axis=1))
        scaled.append((weight * token).astype(row.dtype).reshape(row.shape))
    return tuple(scaled), sum_of_all(dots).astype(jnp.float32)
