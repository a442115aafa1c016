"""Groups that span domains: rows go once to each domain that needs them, and from there to their ranks.

Hop 1 sends a token's row, with its ids and the destinations of its rows, to the rank of the same index on
each domain that has one of its experts. The source has computed these destinations, so hop 2 is a push along
a handle among the ranks of a domain. Rows arrive where a single hop would put them, in the order of their
sources, not of the ranks that relay them. A pull goes the same way back: a domain sums a token's rows, and
one sum travels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._rows.dtypes import sum_dtype
from jax_ep._rows.fp8 import FLOOR, QuantizedArray, as_bits, dequantize_fp8, from_bits
from jax_ep._rows.indexing import invert, routed_experts, take
from jax_ep._transport.attendance import ALL_RANKS, Attendance, AttendanceResult
from jax_ep._transport.backend import DomainBackend, Leaves, LocalBackend, Packing, Pull, Push, Routed
from jax_ep._transport.collectives import domain, rank
from jax_ep._transport.routing import Handle, Routing, block_sizes, fill_of_blocks


class Destinations(NamedTuple):
    """Destinations of the rows of this rank's tokens, and counts of the rows that this rank receives."""

    sent_rows: jax.Array  # [T, R] by rank, [T, K] by expert; -1 none or dropped
    rows_between: jax.Array  # [R, R] from rank s to rank d, before drops
    expert_counts: jax.Array  # [L]
    tokens_per_expert: jax.Array | None  # [L] by expert; by rank it takes the ids that arrive
    group_sizes: jax.Array | None  # [L] by expert
    num_tokens: jax.Array  # [1]
    num_dropped: jax.Array  # [1]


def compute_destinations(
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
            _per_rank(routing, before_drops.num_tokens_per_expert)
            if routing.has_row_per_choice
            else before_drops.num_tokens_per_rank
        )
    all_counts = all_gather(jnp.concatenate(counts))
    by_rank, by_expert, *rows_before_drops = jnp.split(
        all_counts, [ranks, ranks + routing.num_experts], axis=1
    )
    earlier = jnp.arange(ranks, dtype=jnp.int32)[:, None] < me
    expert_counts = jnp.sum(by_expert, axis=0, dtype=jnp.int32)
    local_counts = jax.lax.dynamic_slice_in_dim(expert_counts, me * experts, experts)
    if routing.has_row_per_choice:
        before = jnp.sum(jnp.where(earlier, by_expert, 0), axis=0, dtype=jnp.int32)
        blocks = block_sizes(routing, expert_counts).reshape(ranks, experts)
        starts = (jnp.cumsum(blocks, axis=1, dtype=jnp.int32) - blocks).reshape(-1)
        sent_rows = _rows_by_expert(local, routing, ids, starts + before)
        rows_between = jnp.sum(by_expert.reshape(ranks, ranks, experts), axis=-1, dtype=jnp.int32)
        tokens_per_expert, group_sizes = fill_of_blocks(routing, local_counts)
        num_tokens = jnp.sum(tokens_per_expert, keepdims=True, dtype=jnp.int32)
    else:
        before = jnp.sum(jnp.where(earlier, by_rank, 0), axis=0, dtype=jnp.int32)
        is_sent = layout.is_token_in_rank.astype(jnp.int32)
        rows = before[None] + jnp.cumsum(is_sent, axis=0, dtype=jnp.int32) - is_sent
        sent_rows = jnp.where((is_sent > 0) & (rows < routing.capacity), rows, -1)
        rows_between, tokens_per_expert, group_sizes = by_rank, None, None
        num_arriving = jnp.sum(jnp.take(by_rank, me, axis=1), keepdims=True, dtype=jnp.int32)
        num_tokens = jnp.minimum(num_arriving, routing.capacity)
    to_me = jnp.take(rows_before_drops[0] if ids_before_drops is not ids else rows_between, me, axis=1)
    num_dropped = jnp.sum(to_me, keepdims=True, dtype=jnp.int32) - num_tokens
    return Destinations(
        sent_rows, rows_between, local_counts, tokens_per_expert, group_sizes, num_tokens, num_dropped
    )


def _per_rank(routing: Routing, by_expert: jax.Array) -> jax.Array:
    return jnp.sum(by_expert.reshape(routing.num_ranks, -1), axis=1, dtype=jnp.int32)


def _rows_by_expert(local: LocalBackend, routing: Routing, ids: jax.Array, first: jax.Array) -> jax.Array:
    """Returns [T, K]. `first` [E] is the row of this rank's first choice of each expert at its receiver."""
    # Order this rank's choices by expert, as if it were the only rank. Then shift the rows of each expert to
    # their start at the receiver.
    alone = local.permute((), ids, None, routing.num_experts, 1, ids.size)
    counts = alone.tokens_per_expert
    shift = first - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    rows = alone.row_map + jnp.take(shift, jnp.maximum(ids, 0))
    end = routing.capacity
    if routing.padded_rows is not None:
        end = (ids % routing.num_local_experts + 1) * routing.padded_rows
    return jnp.where((ids >= 0) & (rows < end), rows, -1)


def all_to_all_within(inner: DomainBackend, blocks: jax.Array) -> jax.Array:
    """Sends block r of [ranks of a domain, n] to its rank r. Returns those that arrive, by source."""
    size = inner.ranks.size
    # A dispatch by rank of one token to each rank. Rows arrive in the order of their sources.
    one_each = Routing(
        ranks=inner.ranks,
        order="rank",
        num_tokens=size,
        top_k=1,
        num_experts=size,
        capacity=size,
        expert_alignment=1,
    )
    ids = jnp.arange(size, dtype=jnp.int32)[:, None]
    return inner.route(one_each, ids, Push((blocks,))).rows[0]


@dataclasses.dataclass(frozen=True)
class TwoHops:
    """A backend that sends rows to domains first.

    `outer` is the backend of all ranks, which makes hop 1. `inner` is that of the ranks of a domain.
    """

    outer: DomainBackend
    inner: DomainBackend
    keeps_bits: ClassVar[bool] = False

    def packs_fp8(self, routing: Routing, x: jax.Array) -> bool:
        return False

    def quantize(self, rows: jax.Array, round_scale: bool, floor: float) -> QuantizedArray:
        return self.inner.quantize(rows, round_scale, floor)

    def route(
        self, routing: Routing, topk_idx: jax.Array, sent: Push, attendance: Attendance = ALL_RANKS
    ) -> Routed:
        assert sent.packing is Packing.NONE
        ids_before_drops = routed_experts(topk_idx, routing.num_experts)
        ids = without_dropped(routing, ids_before_drops)
        destinations = compute_destinations(self.inner.local, routing, ids, ids_before_drops, self.all_gather)
        # One communicating kernel at a time: two may not fit on a GPU, and would then wait for each other.
        destinations, leaves = jax.lax.optimization_barrier((destinations, sent.leaves))
        metadata = _send_metadata(self.outer, routing, ids, destinations, sent.weights)
        rows = tuple(send_to_domains(self.outer, routing, ids, leaf) for leaf in leaves)
        metadata, rows = jax.lax.optimization_barrier((metadata, rows))
        handle, weights = _make_handle(self, routing, ids, destinations, metadata)
        assert handle.within is not None
        attended = attendance.as_attended(routing.num_ranks)
        counts = (
            destinations.group_sizes,
            destinations.num_tokens,
            destinations.num_dropped,
            attended,
            handle,
        )
        if destinations.tokens_per_expert is not None:
            moved, arrived_weights = self.inner.push(handle.within, Push(rows, weights))
            return Routed(moved, arrived_weights, None, destinations.tokens_per_expert, *counts)
        # By rank the ids go with the rows.
        rows_with_ids = Push((*rows, handle.within.topk_idx), weights)
        moved, arrived_weights = self.inner.push(handle.within, rows_with_ids)
        arrived_idx = _local_ids(routing, moved[-1], destinations.num_tokens)
        layout = self.inner.local.layout(arrived_idx, routing.num_local_experts, 1, 1)
        return Routed(moved[:-1], arrived_weights, arrived_idx, layout.num_tokens_per_expert, *counts)

    def all_gather(self, numbers: jax.Array) -> jax.Array:
        ranks = self.outer.ranks
        domains, per_domain = ranks.num_domains, ranks.ranks_per_domain
        received = self.outer.between_domains(jnp.broadcast_to(numbers, (domains, *numbers.shape)))
        received = all_to_all_within(
            self.inner, jnp.broadcast_to(received.reshape(1, -1), (per_domain, received.size))
        )
        return received.reshape(per_domain, domains, -1).swapaxes(0, 1).reshape(ranks.size, -1)

    def all_to_all(self, blocks: jax.Array) -> jax.Array:
        """Sends block r of [R, n] to rank r. Returns those that arrive, by source."""
        ranks = self.outer.ranks
        domains, per_domain = ranks.num_domains, ranks.ranks_per_domain
        received = self.outer.between_domains(blocks.reshape(domains, -1)).reshape(domains, per_domain, -1)
        received = all_to_all_within(self.inner, received.swapaxes(0, 1).reshape(per_domain, -1))
        return received.reshape(per_domain, domains, -1).swapaxes(0, 1).reshape(blocks.shape)

    def place(
        self, routing: Routing, domains: jax.Array, sent_rows: jax.Array, place_rows: jax.Array
    ) -> Handle:
        # A choice of a token stands for a domain: an expert there.
        per_domain = routing.num_experts // routing.num_domains
        first = per_domain * jnp.arange(routing.num_domains, dtype=jnp.int32)
        ids = jnp.where(domains, jnp.broadcast_to(first[None], domains.shape), -1)
        no_counts = jnp.zeros_like(sent_rows, shape=(routing.num_ranks, routing.num_ranks))
        none = no_counts[0, :1]
        destinations = Destinations(sent_rows, no_counts, place_rows, None, None, none, none)
        metadata = _send_metadata(self.outer, routing, ids, destinations, None)
        return _make_handle(self, routing, ids, destinations, metadata)[0]

    def push(self, handle: Handle, sent: Push) -> tuple[Leaves, jax.Array | None]:
        send = lambda array: send_to_domains(self.outer, handle.routing, handle.topk_idx, array)
        weights = None if sent.weights is None else send(sent.weights)
        in_domain = dataclasses.replace(sent, leaves=tuple(map(send, sent.leaves)), weights=weights)
        return self.inner.push(_inner_handle(handle), in_domain)

    def pull(
        self, handle: Handle, pulled: Pull, attendance: Attendance = ALL_RANKS
    ) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
        in_domain = dataclasses.replace(pulled, biases=(), adds_in_place=False, packing=Packing.NONE)
        partials, returned, _ = self.inner.pull(_inner_handle(handle), in_domain)
        sums = []
        for partial in partials:
            wide = sum_dtype(partial.dtype)
            total: Any = 0.0
            for part in self._take_back_sums(handle, partial, pulled.packing):
                total = total + part.astype(wide)
            for bias in pulled.biases:
                total = total + bias.astype(wide)
            sums.append(total.astype(partial.dtype))
        if returned is None:
            return tuple(sums), None, AttendanceResult()
        domains = _domain_of(handle.routing, handle.topk_idx)
        total = jnp.zeros_like(returned, shape=domains.shape)
        for number, part in enumerate(take_back(self.outer, handle, returned)):
            total = jnp.where(domains == number, part, total)
        return tuple(sums), total, AttendanceResult()

    def _take_back_sums(self, handle: Handle, partial: jax.Array, packing: Packing) -> list[jax.Array]:
        """Returns, for each domain, its part of the sums of this rank's tokens."""
        if packing is Packing.NONE:
            return take_back(self.outer, handle, partial)
        packed = as_bits(self.quantize(partial, packing is Packing.FP8_ROUNDED, FLOOR))
        parts = [take_back(self.outer, handle, array) for array in (packed.values, packed.scales)]
        return [
            dequantize_fp8(from_bits(QuantizedArray(values, scales)), jnp.float32)
            for values, scales in zip(*parts, strict=True)
        ]


def _inner_handle(handle: Handle) -> Handle:
    """Returns the handle of hop 2."""
    assert handle.within is not None
    return handle.within


def _domain_of(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns the domain of each expert, -1 if the choice is unused."""
    return jnp.where(ids < 0, -1, ids // (routing.num_experts // routing.num_domains))


def _hop_1_rows(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns [T, domains]: the index of each token among those sent to a domain, -1 not sent or dropped."""
    numbers = jnp.arange(routing.num_domains, dtype=jnp.int32)[None, None]
    is_sent = jnp.any(_domain_of(routing, ids)[:, :, None] == numbers, axis=1).astype(jnp.int32)
    rows = jnp.cumsum(is_sent, axis=0, dtype=jnp.int32) - is_sent
    return jnp.where((is_sent > 0) & (rows < routing.domain_rows), rows, -1)


def without_dropped(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns the ids [T, K], -1 also for choices on domains whose buffer is full in hop 1."""
    if routing.domain_rows == routing.num_tokens:
        return ids
    rows = jnp.take_along_axis(_hop_1_rows(routing, ids), jnp.maximum(_domain_of(routing, ids), 0), axis=1)
    return jnp.where(rows < 0, -1, ids)


def _senders(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns [domains * rows of hop 1]: its token, as token * domains + domain, -1 if none."""
    rows = _hop_1_rows(routing, ids)
    first = routing.domain_rows * jnp.arange(routing.num_domains, dtype=jnp.int32)
    return invert(jnp.where(rows < 0, -1, first[None] + rows), routing.num_domains * routing.domain_rows)


def _through_hop_1(outer: DomainBackend, routing: Routing, rows: jax.Array) -> jax.Array:
    """Sends rows [domains * rows of hop 1, ...], ordered by destination domain. Returns those that arrive."""
    blocks = rows.reshape(routing.num_domains, routing.domain_rows, *rows.shape[1:])
    return outer.between_domains(blocks).reshape(rows.shape)


def send_to_domains(outer: DomainBackend, routing: Routing, ids: jax.Array, array: jax.Array) -> jax.Array:
    """Sends a payload [T, ...] in hop 1. Returns [domains * rows of hop 1, ...], zero where no token came."""
    senders = _senders(routing, ids)
    return _through_hop_1(outer, routing, take(array, _tokens(routing, senders)))


def take_back(outer: DomainBackend, handle: Handle, rows: jax.Array) -> list[jax.Array]:
    """Returns, for each domain, its rows for this rank's tokens [T, ...], zero where it has none."""
    routing = handle.routing
    blocks = _through_hop_1(outer, routing, rows).reshape(
        routing.num_domains, routing.domain_rows, *rows.shape[1:]
    )
    hop_1_rows = _hop_1_rows(routing, handle.topk_idx)
    return [take(blocks[number], hop_1_rows[:, number]) for number in range(routing.num_domains)]


def _tokens(routing: Routing, senders: jax.Array) -> jax.Array:
    return jnp.where(senders < 0, -1, senders // routing.num_domains)


def _send_metadata(
    outer: DomainBackend,
    routing: Routing,
    ids: jax.Array,
    destinations: Destinations,
    topk_weights: jax.Array | None,
) -> jax.Array:
    """Sends ids, destinations and the bits of weights of each token in hop 1. Returns -1 where none came."""
    senders = _senders(routing, ids)
    tokens = _tokens(routing, senders)
    if routing.has_row_per_choice:
        sent_rows = take(destinations.sent_rows, tokens)
    else:  # those of a domain's ranks only
        sent_rows = take(destinations.sent_rows.reshape(-1, routing.ranks.ranks_per_domain), senders)
    integers = [take(ids, tokens), sent_rows]
    if topk_weights is not None:
        integers.append(take(jax.lax.bitcast_convert_type(topk_weights, jnp.int32), tokens))
    metadata = jnp.concatenate(integers, axis=1)
    return _through_hop_1(outer, routing, jnp.where(senders[:, None] < 0, -1, metadata))


def _make_handle(
    hops: TwoHops, routing: Routing, ids: jax.Array, destinations: Destinations, metadata: jax.Array
) -> tuple[Handle, jax.Array | None]:
    """Returns the handle of both hops, and the weights of the tokens of hop 2, if any were sent."""
    sizes = (routing.top_k, routing.within.rows_per_token)
    global_ids, rows, bits = jnp.split(metadata, [sizes[0], sum(sizes)], axis=1)
    is_here = _domain_of(routing, global_ids) == domain(routing.ranks)
    within_ids = jnp.where(is_here, global_ids - domain(routing.ranks) * routing.within.num_experts, -1)
    if routing.has_row_per_choice:
        rows = jnp.where(is_here, rows, -1)
    weights = jax.lax.bitcast_convert_type(bits, jnp.float32) if bits.shape[1] else None
    within = _make_inner_handle(hops.inner, routing, within_ids, rows, destinations)
    prefix = jnp.cumsum(destinations.rows_between, axis=0, dtype=jnp.int32)
    received = None
    if routing.has_row_per_choice:
        received = hops.all_to_all(_by_owner(routing, ids, destinations.sent_rows))
        received = received.reshape(-1, routing.top_k)
    handle = Handle(
        ids, destinations.sent_rows, prefix, destinations.expert_counts, received, within, routing
    )
    return handle, weights


def _make_inner_handle(
    inner: DomainBackend, routing: Routing, ids: jax.Array, rows: jax.Array, destinations: Destinations
) -> Handle:
    """Makes the handle of hop 2."""
    within, domains = routing.within, routing.num_domains
    per_domain = within.num_ranks
    between = destinations.rows_between.reshape(domains, per_domain, domains, per_domain)
    between = jnp.sum(jnp.take(between, domain(routing.ranks), axis=2), axis=0, dtype=jnp.int32)
    prefix = jnp.cumsum(between, axis=0, dtype=jnp.int32)
    received = None
    if routing.has_row_per_choice:
        received = all_to_all_within(inner, _by_owner(within, ids, rows))
        received = received.reshape(-1, routing.top_k)
    return Handle(ids, rows, prefix, destinations.expert_counts, received, None, within)


def _by_owner(routing: Routing, ids: jax.Array, sent_rows: jax.Array) -> jax.Array:
    """Returns [R, T * K]: the rows of this rank's choices at each rank, -1 for choices of other ranks."""
    number = jnp.arange(routing.num_ranks, dtype=jnp.int32)[:, None, None]
    owners = jnp.where(ids < 0, -1, ids // routing.num_local_experts)
    rows = jnp.where(owners[None] == number, sent_rows[None], -1)
    return rows.reshape(routing.num_ranks, -1)


def _local_ids(routing: Routing, ids: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Returns, by rank, [C, K]: the local id of each choice that came with a row, -1 on other ranks."""
    first = rank(routing.within.ranks) * routing.num_local_experts
    is_here = (ids >= first) & (ids < first + routing.num_local_experts)
    is_row = jnp.arange(routing.capacity, dtype=jnp.int32)[:, None] < num_tokens[None]
    return jnp.where(is_here & is_row, ids - first, -1)
