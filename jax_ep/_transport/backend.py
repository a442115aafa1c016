"""The protocol of backends, which execute the actions of one rank, and their results.

`Ffi` (ffi.py) and `Xla` (xla.py) are such backends. `TwoHops` (two_hops.py) and `Stream` (stream.py) wrap
one. `choose` (choice.py) chooses the backend of an op, once.
"""

import enum
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax

from jax_ep._group.ranks import Ranks
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._transport.attendance import EVERYBODY, Attendance, Attended
from jax_ep._transport.routing import Handle, Routing

Leaves = tuple[jax.Array, ...]


class Packing(enum.IntEnum):
    """Conversion of rows while `route` sends them. Quantize in ffi/core/params.h has the same numbers."""

    NONE = 0
    FP8 = 1
    FP8_ROUNDED = 2  # with scales rounded up to powers of two


class Routed(NamedTuple):
    """Results of `route`."""

    rows: Leaves  # [C, ...] each
    weights: jax.Array | None  # by rank [C, K], by expert [C]
    topk_idx: jax.Array | None  # by rank [C, K]
    tokens_per_expert: jax.Array  # [L]
    group_sizes: jax.Array | None  # by expert [L]
    num_tokens: jax.Array  # [1]
    num_dropped: jax.Array  # [1]
    attended: Attended
    handle: Handle


class LayoutCounts(NamedTuple):
    """Results of `layout`."""

    num_tokens_per_rank: jax.Array  # [R]
    num_tokens_per_node: jax.Array  # [R / ranks_per_node]
    num_tokens_per_expert: jax.Array  # [E]
    is_token_in_rank: jax.Array  # bool [T, R]


class Permutation(NamedTuple):
    """Results of `permute`."""

    rows: Leaves  # [P, ...] each
    row_map: jax.Array  # [C, K]
    row_weights: jax.Array | None  # [P]
    group_sizes: jax.Array  # [L]
    tokens_per_expert: jax.Array  # [L]
    num_dropped: jax.Array  # [1]


class Backend(Protocol):
    """The actions that move rows between ranks: route, push and pull.

    A backend is hashable, because custom_vjp takes it as an argument that is not differentiated.
    """

    keeps_bits: ClassVar[bool]
    """True if rows arrive bit for bit. Otherwise NaNs may change, unless floats are sent as integers."""

    def packs_fp8(self, routing: Routing, x: jax.Array) -> bool:
        """Returns whether `route` can convert rows like those of x to FP8 while it sends them."""
        ...

    def quantize(self, rows: jax.Array, round_scale: bool, floor: float) -> QuantizedArray:
        """Converts rows to FP8 before they are sent, with scales of 128 elements."""
        ...

    def route(
        self,
        routing: Routing,
        leaves: Sequence[jax.Array],
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        attendance: Attendance = EVERYBODY,
        packing: Packing = Packing.NONE,
    ) -> Routed:
        """Computes a handle, and sends rows [T, ...] and weights [T, K] along it."""
        ...

    def gather(self, routing: Routing, numbers: jax.Array) -> jax.Array:
        """Returns the int32 numbers [n] of all ranks: [R, n]. Uses the group of the routing only."""
        ...

    def place(self, routing: Routing, hosts: jax.Array, sent_rows: jax.Array, slot_rows: jax.Array) -> Handle:
        """Makes the handle of a routing of order "placed", along which rows go where `sent_rows` [T, R] says.

        `hosts` bool [T, hosts]: the token goes to the host. If a token has no row at rank d, its entry is -1.
        `slot_rows` [slots]: how many rows arrive in each slot of this rank, the first ones of the slot. A
        push clears the others.
        """
        ...

    def push(
        self, handle: Handle, leaves: Sequence[jax.Array], topk_weights: jax.Array | None
    ) -> tuple[Leaves, jax.Array | None]:
        """Sends rows [T, ...] to [C, ...], and weights [T, K] to [C, K] by rank, [C] by expert."""
        ...

    def push_scaled(
        self,
        handle: Handle,
        leaves: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        row_weights: jax.Array,
    ) -> tuple[Leaves, jax.Array]:
        """Sends rows [T, ...] to [C, ...], each times its weight [C], by expert.

        Also returns the dot products [C] of the rows, before they are scaled, with the factors [C, ...].
        """
        ...

    def pull(
        self,
        handle: Handle,
        rows: Sequence[jax.Array],
        row_weights: jax.Array | None,
        biases: Sequence[jax.Array],
        arrived_weights: jax.Array | None,
        attendance: Attendance = EVERYBODY,
        adds_in_place: bool = False,
    ) -> tuple[Leaves, jax.Array | None, Attended]:
        """Sums each token's rows [C, ...] times their weights [C], and biases [T, ...], to [T, ...].

        With `adds_in_place` the sums may take the place of the only bias, where tokens without rows cost
        nothing.

        Also sends `arrived_weights` ([C, K] by rank, [C] by expert) back to their tokens: [T, K]. This is the
        gradient of `route` and `push` with respect to topk_weights.
        """
        ...


class LocalBackend(Protocol):
    """The ops of one rank, without communication. C input rows, P rows of the permuted array."""

    keeps_bits: ClassVar[bool]

    def layout(
        self, topk_idx: jax.Array, num_experts: int, num_ranks: int, ranks_per_node: int
    ) -> LayoutCounts: ...

    def permute(
        self,
        leaves: Sequence[jax.Array],
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        num_local_experts: int,
        expert_alignment: int,
        capacity: int,
    ) -> Permutation: ...
    def repermute(self, row_map: jax.Array, leaf: jax.Array, num_permuted: int) -> jax.Array:
        """Copies rows [C, ...] of another array to [P, ...], along the map of a permutation."""
        ...

    def repermute_scaled(
        self, row_map: jax.Array, leaf: jax.Array, topk_weights: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Copies rows [C, ...], times the weight [C, K] of each choice, to the choice's row.

        Also returns the dot products [C, K] of the rows, before they are scaled, with the factors [P, ...] at
        the choices' rows.
        """
        ...

    def unpermute(
        self,
        y: jax.Array,
        row_map: jax.Array,
        topk_weights: jax.Array | None,
        bias: jax.Array | None,
        topk_idx: jax.Array | None,
        out_dtype: Any,
    ) -> jax.Array: ...


class InnerBackend(Backend, LocalBackend, Protocol):
    """A backend that `TwoHops` can wrap."""

    def between_hosts(self, ranks: Ranks, blocks: jax.Array) -> jax.Array:
        """Hop 1: sends block h of [hosts, ...] to the rank that has the same index on host h."""
        ...
