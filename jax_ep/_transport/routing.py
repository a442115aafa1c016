"""A routing, where its blocks start, and the handle that records it."""

import dataclasses
import math
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep._group.group import Group
from jax_ep._group.ranks import Ranks

Tree = TypeVar("Tree")

Order = Literal["rank", "expert", "expert_padded"]
ORDERS = ("rank", "expert", "expert_padded", "placed")
"""The orders of Order in ffi/core/index.h. "placed": a token has one row for each rank, as by rank, but the
program makes the handle and puts the row anywhere. The buffer is divided into places of `expert_alignment`
rows."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """Static part of a routing: equal on all ranks, known at trace time."""

    ranks: Ranks
    order: Order | Literal["placed"]
    num_tokens: int  # T, tokens on this rank
    top_k: int  # K
    num_experts: int  # E, in all
    capacity: int  # C, rows of a receive buffer
    expert_alignment: int  # by padded experts, the rows of each expert; placed: of each place
    domain_rows: int = (
        0  # of a group that spans domains, the rows that a rank takes from each domain in hop 1
    )

    @property
    def group(self) -> Group:
        """The group of the ranks. That of hop 2 is the whole group."""
        return self.ranks.group

    @property
    def num_ranks(self) -> int:
        return self.ranks.size

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_domains(self) -> int:
        return self.ranks.num_domains

    @property
    def is_empty(self) -> bool:
        """True if no rank sends anything."""
        return self.num_tokens == 0 or self.capacity == 0

    @property
    def makes_two_hops(self) -> bool:
        """True if rows go to domains first, and from there to ranks."""
        return self.num_domains > 1 and not self.is_empty

    @property
    def within(self) -> "Routing":
        """Routing of hop 2, among the ranks of a domain. Its tokens are the rows that hop 1 delivers."""
        assert self.ranks.within is not None
        return dataclasses.replace(
            self,
            ranks=self.ranks.within,
            num_tokens=self.num_domains * self.domain_rows,
            num_experts=self.num_experts // self.num_domains,
            domain_rows=0,
        )

    @property
    def has_row_per_choice(self) -> bool:
        """True if a token has a row for each of its choices. Otherwise it has one for each of its ranks."""
        return self.order in ("expert", "expert_padded")

    @property
    def padded_rows(self) -> int | None:
        """Rows per expert in the padded order, whose buffers are [L, rows, ...]. Otherwise None."""
        return self.capacity // self.num_local_experts if self.order == "expert_padded" else None

    @property
    def buffer(self) -> tuple[int, ...]:
        """The first dimensions of the buffers that a dispatch returns."""
        return (self.capacity,) if self.padded_rows is None else (self.num_local_experts, self.padded_rows)

    @property
    def axes(self) -> str:
        """The names of these dimensions, for messages."""
        return "C" if self.padded_rows is None else "L, C"

    @property
    def rows_per_token(self) -> int:
        """Columns of `sent_rows`."""
        return self.top_k if self.has_row_per_choice else self.num_ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """Destinations of all rows of a dispatch. A pytree of int32 arrays, made by `dispatch`.

    `combine` and `redispatch` need nothing else, with any implementation. It holds no addresses, so it may be
    kept, saved for the backward pass or passed through jit.

    R ranks, T tokens a rank, K choices a token, L experts a rank; one rank's shard:

    Attributes:
      topk_idx: [T, K] expert of each choice, -1 where the choice is unused.
      sent_rows: By rank [T, R], by expert [T, K]: the token's row in the receiver's buffer, -1 none or
        dropped.
      rank_prefix_matrix: [R, R]: [s, d] = rows that ranks 0..s send to rank d, before drops. The same on
        every rank that takes part.
      expert_counts: [L] choices of all ranks' tokens that fell on each expert of this rank, before drops.
      received_rows: By expert [R * T, K]: the row here of each choice of all ranks' tokens, by source rank,
        then token; -1 none here, or dropped. By rank None.
      within: If the group spans domains, the handle of hop 2, whose tokens are the rows that hop 1 brought.
        In the arrays above, the choices of tokens that hop 1 dropped are unused. Else None.
      routing: The static part: group, order, T, K, E, C, the expert alignment and the rows of hop 1.
      has_weights: True if `dispatch` sent weights, by expert. `combine` must then be given row_weights.
    """

    topk_idx: jax.Array
    sent_rows: jax.Array
    rank_prefix_matrix: jax.Array
    expert_counts: jax.Array
    received_rows: jax.Array | None
    within: "Handle | None"
    routing: Routing = dataclasses.field(metadata={"static": True})
    has_weights: bool = dataclasses.field(default=False, metadata={"static": True})


def placed_handle(
    routing: Routing, domains: jax.Array, sent_rows: jax.Array, place_rows: jax.Array
) -> Handle:
    """Makes the handle of rows that the program places: `Backend.place` within a domain."""
    del domains
    no_ids = jnp.full_like(sent_rows, -1, shape=(routing.num_tokens, routing.top_k))
    no_counts = jnp.zeros_like(sent_rows, shape=(routing.num_ranks, routing.num_ranks))
    return Handle(no_ids, sent_rows, no_counts, place_rows, None, None, routing)


def owners(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns the rank of each expert, -1 if the choice is unused."""
    return jnp.where(ids < 0, -1, ids // routing.num_local_experts)


def domains_of(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns the domain of each expert, -1 if the choice is unused."""
    return jnp.where(ids < 0, -1, ids // (routing.num_experts // routing.num_domains))


def for_backward(handle: Handle) -> Handle:
    """Drops handle fields that the backward pass does not use, so that a scan does not store them.

    Between domains rows follow the handle of hop 2. The outer handle only says which domains tokens go to, so
    its other arrays become empty.
    """
    if handle.within is None:
        return handle
    none = jnp.zeros_like(handle.topk_idx, shape=(0,))
    return dataclasses.replace(handle, sent_rows=none, rank_prefix_matrix=none, received_rows=None)


def block_sizes(routing: Routing, counts: jax.Array) -> jax.Array:
    """Returns the rows of the blocks of experts that have `counts` rows."""
    if routing.padded_rows is not None:
        return jnp.full(counts.shape, routing.padded_rows, counts.dtype)
    return -(-counts // routing.expert_alignment) * routing.expert_alignment


def fill_of_blocks(routing: Routing, expert_counts: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns, by expert, how many rows of each expert [L] a rank keeps, and how many of its block."""
    blocks = block_sizes(routing, expert_counts)
    begin = jnp.cumsum(blocks) - blocks
    clipped = jnp.minimum(begin, routing.capacity)
    end = begin + blocks if routing.padded_rows is not None else routing.capacity
    kept = jnp.minimum(begin + expert_counts, end) - clipped
    if routing.padded_rows is not None:
        return kept, kept
    return kept, jnp.minimum(begin + blocks, routing.capacity) - clipped


def in_buffers(routing: Routing, arrays: Tree) -> Tree:
    """Reshapes buffers [C, ...] to what users see: [L, rows, ...] in the padded order."""
    return jax.tree.map(lambda array: array.reshape(*routing.buffer, *array.shape[1:]), arrays)


def row_experts(handle: Handle) -> jax.Array:
    """Returns, by expert, int32 [C]: the local expert of each row, -1 in padding and tail."""
    blocks = block_sizes(handle.routing, handle.expert_counts)
    starts = jnp.cumsum(blocks) - blocks
    row = jnp.arange(handle.routing.capacity, dtype=jnp.int32)
    block = jnp.searchsorted(starts, row, side="right").astype(jnp.int32) - 1
    return jnp.where(row < starts[block] + handle.expert_counts[block], block, -1)


def flat_real_rows(handle: Handle, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns an expert-order buffer [C, ...] as [C, n] of another dtype, zero if a row holds no token."""
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    return jnp.where(row_experts(handle)[:, None] >= 0, flat, 0).astype(dtype)


def uniform_rows(order: Order, num_ranks: int, num_tokens: int, top_k: int, num_experts: int) -> float:
    """Returns the rows that a uniform routing fills: of a rank, or of an expert in the padded order."""
    if order == "rank":
        return num_tokens * min(top_k, num_ranks)
    choices = num_tokens * top_k
    return choices * num_ranks / num_experts if order == "expert_padded" else choices


def worst_case_capacity(
    order: Order, rows: int, top_k: int, num_local_experts: int, expert_alignment: int
) -> int:
    """Returns the rows that hold any routing of `rows` tokens (R * T) with distinct choices at a receiver."""
    if order == "rank":
        return rows
    if order == "expert_padded":
        return rows * num_local_experts
    padded = rows * min(top_k, num_local_experts) + num_local_experts * (expert_alignment - 1)
    return padded // expert_alignment * expert_alignment
