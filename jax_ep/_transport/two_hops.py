"""Groups that span domains: rows go once to each domain that needs them, and from there to their ranks.

Hop 1 sends a token's row, with its ids and the destinations of its rows, to the rank of the same index on
each domain that has one of its experts. The source has computed these destinations, so hop 2 is a push along
a handle among the ranks of a domain. Rows arrive where a single hop would put them, in the order of their
sources, not of the ranks that relay them. A pull goes the same way back: a domain sums a token's rows, and
one sum travels.

Of few tokens, all choices travel beside the rows, in one exchange. Then each rank computes the destinations,
or hop 2 is a dispatch of its own.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp

from jax_ep._rows.dtypes import sum_dtype
from jax_ep._rows.fp8 import FLOOR, QuantizedArray, as_bits, dequantize_fp8, from_bits
from jax_ep._rows.indexing import routed_experts, take
from jax_ep._transport import hop_1
from jax_ep._transport.attendance import ALL_RANKS, Attendance, AttendanceResult
from jax_ep._transport.backend import DomainBackend, Leaves, Packing, Pull, Push, Routed
from jax_ep._transport.collectives import domain, rank
from jax_ep._transport.destinations import (
    AllDestinations,
    Destinations,
    destinations_by_choices,
    destinations_by_counts,
)
from jax_ep._transport.routing import Handle, Routing, domains_of, owners


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


class Relayed(NamedTuple):
    """The choices and destinations of n tokens that hop 1 brings to a domain."""

    ids: jax.Array  # [n, K] numbered within the domain, -1 on others or unused
    rows: jax.Array  # [n, K] by expert, [n, ranks of a domain] by rank; -1 none or dropped

    @classmethod
    def of(cls, routing: Routing, ids: jax.Array, rows: jax.Array) -> "Relayed":
        """Numbers the ids of all experts within this rank's domain."""
        here = domain(routing.ranks)
        is_here = domains_of(routing, ids) == here
        ids = jnp.where(is_here, ids - here * routing.within.num_experts, -1)
        return cls(ids, jnp.where(is_here, rows, -1) if routing.has_row_per_choice else rows)


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
        # There are three ways. Few tokens travel in one exchange with the choices of all, and then by a
        # dispatch within the domain, or along a handle that each rank computes from the choices. Before many
        # tokens, the counts of the choices and the destinations travel.
        ids = routed_experts(topk_idx, routing.num_experts)
        relay = self._relay_by_counts
        if hop_1.makes_one_exchange(routing, (sent.leaves, sent.weights)):
            if _can_dispatch_within(routing):
                return self._dispatch_within(routing, ids, sent, attendance)
            relay = self._relay_by_choices
        destinations, handle, relayed = relay(routing, ids, sent)
        assert handle.within is not None
        counts = (
            destinations.group_sizes,
            destinations.num_tokens,
            destinations.num_dropped,
            attendance.as_attended(routing.num_ranks),
            handle,
        )
        if destinations.tokens_per_expert is not None:
            moved, arrived_weights = self.inner.push(handle.within, relayed)
            return Routed(moved, arrived_weights, None, destinations.tokens_per_expert, *counts)
        # By rank the ids go with the rows.
        rows_with_ids = (*relayed.leaves, handle.within.topk_idx)
        moved, arrived_weights = self.inner.push(handle.within, Push(rows_with_ids, relayed.weights))
        arrived_idx = _local_ids(routing, moved[-1], destinations.num_tokens)
        layout = self.inner.local.layout(arrived_idx, routing.num_local_experts, 1, 1)
        return Routed(moved[:-1], arrived_weights, arrived_idx, layout.num_tokens_per_expert, *counts)

    def _dispatch_within(
        self, routing: Routing, ids: jax.Array, sent: Push, attendance: Attendance
    ) -> Routed:
        """Makes one exchange between domains, and a dispatch among the ranks of each."""
        choices, relayed = self._exchange_with_choices(routing, ids, ids, sent)
        domains, here = routing.num_domains, domain(routing.ranks)
        within = dataclasses.replace(routing.within, num_experts=routing.num_experts)
        # A choice of an expert by a token of domain d is one of the d-th part of its block.
        parts = (choices - here * routing.within.num_experts) * domains
        parts = parts + jnp.arange(domains, dtype=jnp.int32)[:, None, None]
        parts = jnp.where(domains_of(routing, choices) == here, parts, -1)
        arrived = self.inner.route(within, parts.reshape(-1, routing.top_k), relayed)
        whole = lambda counts: jnp.sum(counts.reshape(-1, domains), axis=1, dtype=jnp.int32)
        # Compiled programs that do not use the other arrays of the handle do not compute them. In those that
        # do, the ranks exchange the choices after the dispatch.
        choices, _ = jax.lax.optimization_barrier((choices, arrived.num_tokens))
        choices = self._gather_in_domain(choices).reshape(-1, *ids.shape)
        destinations = destinations_by_choices(self.inner.local, routing, choices)
        of_this_rank = destinations.of_this_rank._replace(expert_counts=whole(arrived.handle.expert_counts))
        received = _received_rows(routing, destinations)
        handle = _outer_handle(routing, ids, of_this_rank, received, arrived.handle)
        assert arrived.group_sizes is not None
        return arrived._replace(
            tokens_per_expert=whole(arrived.tokens_per_expert),
            group_sizes=whole(arrived.group_sizes),
            attended=attendance.as_attended(routing.num_ranks),
            handle=handle,
        )

    def _relay_by_choices(
        self, routing: Routing, ids_before_drops: jax.Array, sent: Push
    ) -> tuple[Destinations, Handle, Push]:
        """Makes the handle, and sends the tokens of a dispatch through hop 1, in one exchange.

        The choices travel with them, and each rank computes the destinations of all rows.
        """
        ids = hop_1.without_dropped(routing, ids_before_drops)
        choices, relayed = self._exchange_with_choices(routing, ids, ids_before_drops, sent)
        choices = self._gather_in_domain(choices).reshape(-1, *ids.shape)
        destinations = destinations_by_choices(self.inner.local, routing, choices)
        # The handle has this rank's own choices. Those that arrive are -1 after a failed exchange, and with
        # them a combine would find nothing to take back, and return zeros.
        return destinations.of_this_rank, _handle_by_choices(routing, ids, destinations), relayed

    def _exchange_with_choices(
        self, routing: Routing, ids: jax.Array, ids_before_drops: jax.Array, sent: Push
    ) -> tuple[jax.Array, Push]:
        """Sends the choices of all tokens to all domains, and each token to those that it chose.

        Returns the choices [domains, T, K], before drops, and the tokens [domains * rows of a block, ...].
        """
        tokens = hop_1.tokens_of_blocks(routing, ids)
        choices = jnp.broadcast_to(ids_before_drops, (routing.num_domains, *ids.shape))
        blocks = jax.tree.map(lambda array: take(array, tokens), (sent.leaves, sent.weights))
        choices, blocks = hop_1.exchange_at_once(self.outer, (choices, blocks))
        leaves, weights = hop_1.rows_of_blocks(blocks)
        return choices, Push(leaves, weights)

    def _relay_by_counts(
        self, routing: Routing, ids_before_drops: jax.Array, sent: Push
    ) -> tuple[Destinations, Handle, Push]:
        """Makes the handle, and sends the tokens of a dispatch through hop 1.

        All ranks exchange their counts, and the destinations travel with the tokens.
        """
        ids = hop_1.without_dropped(routing, ids_before_drops)
        destinations = destinations_by_counts(
            self.inner.local, routing, ids, ids_before_drops, self.all_gather
        )
        # One communicating kernel at a time: two may not fit on a GPU, and would then wait for each other.
        destinations, leaves = jax.lax.optimization_barrier((destinations, sent.leaves))
        relayed, weights = self._send_destinations(routing, ids, destinations, sent.weights)
        rows = hop_1.send_to_domains(self.outer, routing, ids, leaves)
        (relayed, weights), rows = jax.lax.optimization_barrier(((relayed, weights), rows))
        return destinations, self._handle_by_counts(routing, ids, destinations, relayed), Push(rows, weights)

    def _send_destinations(
        self,
        routing: Routing,
        ids: jax.Array,
        destinations: Destinations,
        topk_weights: jax.Array | None = None,
    ) -> tuple[Relayed, jax.Array | None]:
        """Sends ids, destinations and weights of this rank's tokens in hop 1. Returns those that arrive."""
        domains = routing.num_domains
        tokens, sent_rows = hop_1.tokens_of_blocks(routing, ids), destinations.sent_rows
        if routing.has_row_per_choice:
            rows = _take_or_none(sent_rows, tokens)
        else:  # those of a domain's ranks only
            numbers = jnp.arange(domains, dtype=jnp.int32)[:, None]
            entries = jnp.where(tokens < 0, -1, tokens * domains + numbers)
            rows = _take_or_none(sent_rows.reshape(-1, routing.ranks.ranks_per_domain), entries)
        weights = None if topk_weights is None else take(topk_weights, tokens)
        blocks = hop_1.exchange_at_once(self.outer, (_take_or_none(ids, tokens), rows, weights))
        arrived_ids, arrived_rows, weights = hop_1.rows_of_blocks(blocks)
        return Relayed.of(routing, arrived_ids, arrived_rows), weights

    def _handle_by_counts(
        self, routing: Routing, ids: jax.Array, destinations: Destinations, relayed: Relayed
    ) -> Handle:
        received, received_within = None, None
        if routing.has_row_per_choice:
            received = self.all_to_all(_by_owner(routing, ids, destinations.sent_rows))
            received = received.reshape(-1, routing.top_k)
            received_within = all_to_all_within(self.inner, _by_owner(routing.within, *relayed))
            received_within = received_within.reshape(-1, routing.top_k)
        return _make_handle(routing, ids, destinations, relayed, received, received_within)

    def all_gather(self, numbers: jax.Array) -> jax.Array:
        domains = self.outer.ranks.num_domains
        received = self.outer.between_domains(jnp.broadcast_to(numbers, (domains, *numbers.shape)))
        return self._gather_in_domain(received)

    def _gather_in_domain(self, received: jax.Array) -> jax.Array:
        """Returns the numbers [domains, ...] that hop 1 brought to the ranks of this domain: [R, n]."""
        domains, per_domain = self.outer.ranks.num_domains, self.outer.ranks.ranks_per_domain
        gathered = self.inner.all_gather(received.reshape(-1))
        return gathered.reshape(per_domain, domains, -1).swapaxes(0, 1).reshape(per_domain * domains, -1)

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
        relayed, _ = self._send_destinations(routing, ids, destinations)
        return self._handle_by_counts(routing, ids, destinations, relayed)

    def push(self, handle: Handle, sent: Push) -> tuple[Leaves, jax.Array | None]:
        leaves, weights = hop_1.send_to_domains(
            self.outer, handle.routing, handle.topk_idx, (sent.leaves, sent.weights)
        )
        in_domain = dataclasses.replace(sent, leaves=leaves, weights=weights)
        return self.inner.push(_inner_handle(handle), in_domain)

    def pull(
        self, handle: Handle, pulled: Pull, attendance: Attendance = ALL_RANKS
    ) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
        in_domain = dataclasses.replace(pulled, biases=(), adds_in_place=False, packing=Packing.NONE)
        partials, returned, _ = self.inner.pull(_inner_handle(handle), in_domain)
        packed = tuple(self._pack(partial, pulled.packing) for partial in partials)
        of_domains = hop_1.take_back(self.outer, handle, (packed, returned))
        sums = []
        for i, partial in enumerate(partials):
            wide = sum_dtype(partial.dtype)
            total: Any = 0.0
            for parts, _ in of_domains:
                total = total + _unpack(parts[i]).astype(wide)
            for bias in pulled.biases:
                total = total + bias.astype(wide)
            sums.append(total.astype(partial.dtype))
        weights = None
        if returned is not None:
            domains = domains_of(handle.routing, handle.topk_idx)
            weights = jnp.zeros_like(returned, shape=domains.shape)
            for number, (_, part) in enumerate(of_domains):
                weights = jnp.where(domains == number, cast("jax.Array", part), weights)
        return tuple(sums), weights, AttendanceResult()

    def _pack(self, sums: jax.Array, packing: Packing) -> jax.Array | QuantizedArray:
        if packing is Packing.NONE:
            return sums
        return as_bits(self.quantize(sums, packing is Packing.FP8_ROUNDED, FLOOR))


def _unpack(sums: jax.Array | QuantizedArray) -> jax.Array:
    return dequantize_fp8(from_bits(sums), jnp.float32) if isinstance(sums, QuantizedArray) else sums


def _inner_handle(handle: Handle) -> Handle:
    """Returns the handle of hop 2."""
    assert handle.within is not None
    return handle.within


def _make_handle(
    routing: Routing,
    ids: jax.Array,
    destinations: Destinations,
    relayed: Relayed,
    received: jax.Array | None,
    received_within: jax.Array | None,
) -> Handle:
    """Makes the handle of both hops. The last two arguments are the `received_rows` of both."""
    within, domains = routing.within, routing.num_domains
    shape = (domains, within.num_ranks)
    between = destinations.rows_between.reshape(*shape, *shape)
    between = jnp.sum(jnp.take(between, domain(routing.ranks), axis=2), axis=0, dtype=jnp.int32)
    prefix = jnp.cumsum(between, axis=0, dtype=jnp.int32)
    counts = destinations.expert_counts
    inner = Handle(relayed.ids, relayed.rows, prefix, counts, received_within, None, within)
    return _outer_handle(routing, ids, destinations, received, inner)


def _outer_handle(
    routing: Routing,
    ids: jax.Array,
    destinations: Destinations,
    received: jax.Array | None,
    within: Handle,
) -> Handle:
    prefix = jnp.cumsum(destinations.rows_between, axis=0, dtype=jnp.int32)
    counts = destinations.expert_counts
    return Handle(ids, destinations.sent_rows, prefix, counts, received, within, routing)


def _handle_by_choices(routing: Routing, my_ids: jax.Array, destinations: AllDestinations) -> Handle:
    """Makes the handle of both hops from this rank's choices, and what it knows of all ranks' tokens."""
    me, here = rank(routing.ranks), domain(routing.ranks)
    per_domain = routing.ranks.ranks_per_domain
    shape = (routing.num_domains, per_domain)
    ids, rows = destinations.ids, destinations.sent_rows
    if not routing.has_row_per_choice:  # those of this domain's ranks
        rows = jax.lax.dynamic_slice_in_dim(rows, here * per_domain, per_domain, axis=2)
    # The tokens that each rank sends to this domain.
    tokens = jax.vmap(lambda of_rank: hop_1.tokens_of_blocks(routing, of_rank))(ids)
    tokens = jnp.take(tokens, here, axis=1)
    ids_here, rows_here = (jax.vmap(_take_or_none)(array, tokens) for array in (ids, rows))
    to_domain = Relayed.of(routing, ids_here, rows_here)
    by_relay = lambda array: array.reshape(*shape, -1, array.shape[-1]).swapaxes(0, 1)
    received_within = None
    if routing.has_row_per_choice:
        is_mine = owners(routing.within, to_domain.ids) == me % per_domain
        received_within = by_relay(jnp.where(is_mine, to_domain.rows, -1)).reshape(-1, routing.top_k)
    # Those that this rank relays.
    relayed = Relayed(
        *(jax.lax.collapse(jnp.take(by_relay(array), me % per_domain, axis=0), 0, 2) for array in to_domain)
    )
    received = _received_rows(routing, destinations)
    return _make_handle(routing, my_ids, destinations.of_this_rank, relayed, received, received_within)


def _received_rows(routing: Routing, destinations: AllDestinations) -> jax.Array | None:
    """Returns `Handle.received_rows`."""
    if not routing.has_row_per_choice:
        return None
    is_mine = owners(routing, destinations.ids) == rank(routing.ranks)
    return jnp.where(is_mine, destinations.sent_rows, -1).reshape(-1, routing.top_k)


def _can_dispatch_within(routing: Routing) -> bool:
    """Returns whether a dispatch within a domain can put rows where a single hop would.

    It orders an expert's rows by the ranks that relay them. So each expert counts as several, one for the
    tokens of each domain. Their blocks must follow one another without padding, and hop 1 may drop no token,
    because it would not be counted.
    """
    is_dense = routing.order == "expert" and routing.expert_alignment == 1
    return is_dense and routing.domain_rows == routing.num_tokens


def _take_or_none(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns array[rows], -1 where a row is -1."""
    return jnp.where(rows[..., None] < 0, -1, take(array, rows))


def _by_owner(routing: Routing, ids: jax.Array, sent_rows: jax.Array) -> jax.Array:
    """Returns [R, T * K]: the rows of this rank's choices at each rank, -1 for choices of other ranks."""
    number = jnp.arange(routing.num_ranks, dtype=jnp.int32)[:, None, None]
    rows = jnp.where(owners(routing, ids)[None] == number, sent_rows[None], -1)
    return rows.reshape(routing.num_ranks, -1)


def _local_ids(routing: Routing, ids: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Returns, by rank, [C, K]: the local id of each choice that came with a row, -1 on other ranks."""
    first = rank(routing.within.ranks) * routing.num_local_experts
    is_here = (ids >= first) & (ids < first + routing.num_local_experts)
    is_row = jnp.arange(routing.capacity, dtype=jnp.int32)[:, None] < num_tokens[None]
    return jnp.where(is_here & is_row, ids - first, -1)
