"""The protocol of backends, which execute the actions of one rank, and their operands and results.

`Ffi` (ffi.py) and `Xla` (xla.py) are such backends, made for the ranks of a group. `TwoHops` (two_hops.py)
wraps two of them, and `Stream` (stream.py) one. `choose` (choice.py) chooses the backend of an op, once. A
new option of an op is a field of `Push` or `Pull`.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.typing import DTypeLike

from jax_ep._group.ranks import Ranks
from jax_ep._jax.ffi_call import Call
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._transport.attendance import ALL_RANKS, Attendance, AttendanceResult
from jax_ep._transport.routing import Handle, Routing

Leaves = tuple[jax.Array, ...]


class Packing(enum.IntEnum):
    """Conversion of rows while they travel. Quantize in ffi/core/params.h has the same numbers."""

    NONE = 0
    FP8 = 1
    FP8_ROUNDED = 2  # with scales rounded up to powers of two


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Push:
    """The operands of a push: T tokens with K choices, C rows of the receive buffer."""

    leaves: Leaves  # [T, ...] each
    weights: jax.Array | None = None  # [T, K]
    row_weights: jax.Array | None = None
    """[C] by expert, without `weights`: each row is multiplied by its weight where it arrives."""
    factors: Leaves = ()
    """[C, ...], one for each leaf; needs `row_weights`. The push then returns, in place of weights, the dot
    products [C] of the rows, before they are scaled, with the factors."""
    packing: Packing = dataclasses.field(default=Packing.NONE, metadata={"static": True})
    """Only `route` packs rows. The only leaf then arrives as two: values and scales."""
    beside: Call[Any] | None = None
    """A product that `route` of `Ffi` computes at the same time on GPUs: `Routed.beside`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pull:
    """The operands of a pull: T tokens with K choices, C rows of the receive buffer."""

    rows: Leaves  # [C, ...] each
    row_weights: jax.Array | None = None  # [C] by expert: each row is multiplied by its weight
    biases: Leaves = ()  # [T, ...], which are added to the sums
    weights: jax.Array | None = None
    """By rank [C, K], by expert [C], which return to their tokens: the gradient of the weights of a push."""
    adds_in_place: bool = dataclasses.field(default=False, metadata={"static": True})
    """True if the result may overwrite the array of the only bias. Kernels then skip tokens without rows."""
    packing: Packing = dataclasses.field(default=Packing.NONE, metadata={"static": True})
    """The form in which each rank's part of a sum travels. If it is FP8, there are no `weights`."""


class Routed(NamedTuple):
    """Results of `route`."""

    rows: Leaves  # [C, ...] each
    weights: jax.Array | None  # by rank [C, K], by expert [C]
    topk_idx: jax.Array | None  # by rank [C, K]
    tokens_per_expert: jax.Array  # [L]
    group_sizes: jax.Array | None  # by expert [L]
    num_tokens: jax.Array  # [1]
    num_dropped: jax.Array  # [1]
    attended: AttendanceResult
    handle: Handle
    beside: Any = None  # what `Push.beside` computes, if it was computed


class LayoutCounts(NamedTuple):
    """Results of `layout`."""

    num_tokens_per_rank: jax.Array  # [R]
    num_tokens_per_domain: jax.Array  # [R / ranks_per_domain]
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
    """The actions that move rows between the ranks of a group: route, push, pull and all_gather.

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
        self, routing: Routing, topk_idx: jax.Array, sent: Push, attendance: Attendance = ALL_RANKS
    ) -> Routed:
        """Computes a handle, and pushes along it."""
        ...

    def all_gather(self, numbers: jax.Array) -> jax.Array:
        """Returns the int32 numbers [n] of all ranks: [R, n]."""
        ...

    def place(
        self, routing: Routing, domains: jax.Array, sent_rows: jax.Array, place_rows: jax.Array
    ) -> Handle:
        """Makes the handle of a routing of order "placed", along which rows go where `sent_rows` [T, R] says.

        `domains` bool [T, domains]: the token goes to the domain. If a token has no row at rank d, its entry
        is -1.
        `place_rows` [places]: how many rows arrive in each place of this rank, the first ones of the place. A
        push clears the others.
        """
        ...

    def push(self, handle: Handle, sent: Push) -> tuple[Leaves, jax.Array | None]:
        """Sends rows [T, ...] to [C, ...], and weights [T, K] to [C, K] by rank, [C] by expert."""
        ...

    def pull(
        self, handle: Handle, pulled: Pull, attendance: Attendance = ALL_RANKS
    ) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
        """Sums each token's rows, times their weights, and biases to [T, ...]. Returns weights as [T, K]."""
        ...


class LocalBackend(Protocol):
    """The ops of one rank, without communication. C input rows, P rows of the permuted array."""

    keeps_bits: ClassVar[bool]

    def layout(
        self, topk_idx: jax.Array, num_experts: int, num_ranks: int, ranks_per_domain: int
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
        out_dtype: DTypeLike,
    ) -> jax.Array: ...


class DomainBackend(Backend, Protocol):
    """A backend that `TwoHops` can wrap."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that it was made for."""
        ...

    @property
    def local(self) -> LocalBackend:
        """The ops of one rank, by the same implementation."""
        ...

    def between_domains(self, blocks: jax.Array) -> jax.Array:
        """Hop 1: sends block d of [domains, ...] to the rank that has the same index in domain d."""
        ...
