"""Calls of this package's FFI handlers: implementation="ffi".

`xla.py` has the same methods from `jax.lax`, with the same arguments and results. `copy_to_all` is only for
the benchmark, which measures the links with it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _extension
from jax_ep._group.ranks import Ranks
from jax_ep._jax.ffi_call import Attribute, Call, Result, call, or_scalar, run_beside
from jax_ep._jax.platform import on_platform
from jax_ep._rows.fp8 import BLOCK, FP8, QuantizedArray, quantize_blocks
from jax_ep._rows.quantize import quantize_by_kernel
from jax_ep._transport import collectives
from jax_ep._transport.attendance import ALL_RANKS, Attendance, AttendanceResult
from jax_ep._transport.backend import Leaves, Packing, Pull, Push, Routed
from jax_ep._transport.collectives import mesh_position
from jax_ep._transport.ffi_local import INT, FfiLocal, by_name, rows_like, scratch
from jax_ep._transport.routing import ORDERS, Handle, Routing, placed_handle


def _routing_attributes(
    routing: Routing, masks: bool = False, packing: Packing = Packing.NONE
) -> dict[str, Attribute]:
    return {
        "group": routing.ranks.key,
        "order": np.int64(ORDERS.index(routing.order)),
        "num_ranks": np.int64(routing.num_ranks),
        "num_experts": np.int64(routing.num_experts),
        "capacity": np.int64(routing.capacity),
        "alignment": np.int64(routing.expert_alignment),
        "masks": np.int64(masks),
        "quantize": np.int64(packing),
    }


def _position(ranks: Ranks, arrays: object) -> jax.Array:
    return on_platform(mesh_position(ranks, arrays), ranks.platform, ranks.name)


def _handle_arrays(handle: Handle) -> list[jax.Array]:
    received = or_scalar(handle.received_rows, INT)
    return [handle.topk_idx, handle.sent_rows, handle.rank_prefix_matrix, handle.expert_counts, received]


def goes_through_arena(
    routing: Routing, leaves: Sequence[jax.Array], packing: Packing = Packing.NONE
) -> bool:
    """Returns whether `route` sends these rows through the arena, as for few tokens on GPUs."""
    module = _extension.extension()
    if routing.ranks.platform != "gpu" or module is None:
        return False
    parts = leaves if packing is Packing.NONE else _fp8_types(*leaves)
    row_bytes = sum(-(-math.prod(part.shape[1:]) * _bits(part) // 128) * 16 for part in parts)
    sizes = (routing.num_ranks, routing.num_tokens, routing.top_k, routing.num_experts)
    return module.fits_arena(routing.ranks.key, False, routing.has_row_per_choice, sizes, row_bytes)


def _bits(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return jax.dtypes.itemsize_bits(array.dtype)


def _fp8_types(x: jax.Array) -> list[jax.ShapeDtypeStruct]:
    scales = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return [jax.ShapeDtypeStruct(x.shape, FP8), jax.ShapeDtypeStruct(scales, jnp.float32)]


def _weights_type(routing: Routing, present: bool) -> Result:
    by_rank = (routing.capacity, routing.top_k)
    shape = (routing.capacity,) if routing.has_row_per_choice else by_rank
    return (shape if present else (0,)), jnp.float32


def _attendance_types(routing: Routing, attendance: Attendance) -> dict[str, Result]:
    ranks = routing.num_ranks
    return {
        "active_ranks": ((ranks if attendance.may_miss else 0,), INT),
        "wait_us": ((ranks if attendance.measures else 0,), jnp.float32),
    }


def _read_attendance(attendance: Attendance, named: dict[str, jax.Array]) -> AttendanceResult:
    return AttendanceResult(
        named["active_ranks"] if attendance.may_miss else None,
        named["wait_us"] if attendance.measures else None,
    )


def copy_to_all(ranks: Ranks, x: jax.Array) -> jax.Array:
    """Copies all ranks' rows to every rank by plain copies: a ceiling to compare with. GPUs only."""
    shape = (ranks.size * x.shape[0], *x.shape[1:])
    options = {"group": ranks.key, "num_ranks": np.int64(ranks.size)}
    (out,) = call("gather", [_position(ranks, x), x], [(shape, x.dtype)], **options)
    return out


@dataclasses.dataclass(frozen=True)
class Ffi:
    """Backend "ffi": this package's handlers, on CPUs and on GPUs."""

    ranks: Ranks
    keeps_bits: ClassVar[bool] = True

    @property
    def local(self) -> FfiLocal:
        return FfiLocal()

    def packs_fp8(self, routing: Routing, x: jax.Array) -> bool:
        has_kernels = self.ranks.platform == "gpu" and _extension.extension() is not None
        return has_kernels and _bits(x) != 64

    def quantize(self, rows: jax.Array, round_scale: bool, floor: float) -> QuantizedArray:
        convert = quantize_by_kernel if self.ranks.platform == "gpu" else quantize_blocks
        return convert(rows, (1, BLOCK), round_scale, floor)

    def route(
        self, routing: Routing, topk_idx: jax.Array, sent: Push, attendance: Attendance = ALL_RANKS
    ) -> Routed:
        leaves, topk_weights, packing = sent.leaves, sent.weights, sent.packing
        ranks, experts, tokens, k = (
            routing.num_ranks,
            routing.num_local_experts,
            routing.num_tokens,
            routing.top_k,
        )
        by_rank = not routing.has_row_per_choice
        results: dict[str, Result] = {
            "topk_idx": ((tokens, k), INT),
            "sent_rows": ((tokens, routing.rows_per_token), INT),
            "rank_prefix_matrix": ((ranks, ranks), INT),
            "expert_counts": ((experts,), INT),
            "received_rows": ((0 if by_rank else ranks * tokens, k), INT),
            "weights": _weights_type(routing, topk_weights is not None),
            "arrived_idx": ((routing.capacity, k) if by_rank else (0,), INT),
            "tokens_per_expert": ((experts,), INT),
            "group_sizes": ((0,) if by_rank else (experts,), INT),
            "num_tokens": ((1,), INT),
            "num_dropped": ((1,), INT),
            "scratch": scratch(tokens, routing.num_experts, ranks),
            **_attendance_types(routing, attendance),
        }
        operands = [topk_idx, or_scalar(topk_weights), or_scalar(attendance.active_ranks, INT), *leaves]
        arrived = rows_like(leaves if packing is Packing.NONE else _fp8_types(*leaves), routing.capacity)
        route = Call(
            "route",
            [_position(self.ranks, operands), *operands],
            [*results.values(), *arrived],
            _routing_attributes(routing, attendance.masks, packing),
            functools.partial(by_name, results),
        )
        (named, rows), computed = (
            (route.run(), None) if sent.beside is None else run_beside(route, sent.beside)
        )
        handle = Handle(
            topk_idx=named["topk_idx"],
            sent_rows=named["sent_rows"],
            rank_prefix_matrix=named["rank_prefix_matrix"],
            expert_counts=named["expert_counts"],
            received_rows=None if by_rank else named["received_rows"],
            within=None,
            routing=routing,
        )
        return Routed(
            rows=tuple(rows),
            weights=None if topk_weights is None else named["weights"],
            topk_idx=named["arrived_idx"] if by_rank else None,
            tokens_per_expert=named["tokens_per_expert"],
            group_sizes=None if by_rank else named["group_sizes"],
            num_tokens=named["num_tokens"],
            num_dropped=named["num_dropped"],
            attended=_read_attendance(attendance, named),
            handle=handle,
            beside=computed,
        )

    def all_gather(self, numbers: jax.Array) -> jax.Array:
        """Returns the numbers [n] of all ranks, [R, n], by a dispatch of one row to each rank.

        For few numbers this is faster than a collective.
        """
        size = self.ranks.size
        row_to_each = Routing(
            ranks=self.ranks,
            order="rank",
            num_tokens=1,
            top_k=size,
            num_experts=size,
            capacity=size,
            expert_alignment=1,
        )
        ids = jnp.arange(size, dtype=INT)[None]
        return self.route(row_to_each, ids, Push((numbers[None],))).rows[0]

    def place(
        self, routing: Routing, domains: jax.Array, sent_rows: jax.Array, place_rows: jax.Array
    ) -> Handle:
        return placed_handle(routing, domains, sent_rows, place_rows)

    def push(self, handle: Handle, sent: Push) -> tuple[Leaves, jax.Array | None]:
        if sent.row_weights is None:
            return self.push_call(handle, sent).run()
        leaves = sent.leaves
        scaled: list[jax.Array] = list(leaves)
        all_dots: Any = 0
        # A call takes leaves of one dtype, which they nearly always are.
        for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
            places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            alike, factors = (tuple(arrays[i] for i in places) for arrays in (leaves, sent.factors))
            moved, dots = self.push_call(
                handle, dataclasses.replace(sent, leaves=alike, factors=factors)
            ).run()
            all_dots = all_dots + dots
            for i, rows in zip(places, moved, strict=True):
                scaled[i] = rows
        return tuple(scaled), all_dots

    def push_call(self, handle: Handle, sent: Push) -> Call[tuple[Leaves, jax.Array | None]]:
        """Returns the call of a push. If it scales its leaves, all have one dtype."""
        routing = handle.routing
        weighs = sent.weights is not None or sent.row_weights is not None
        weights = [or_scalar(sent.weights), or_scalar(sent.row_weights)]
        operands = [*_handle_arrays(handle), *weights, *sent.leaves, *sent.factors]

        def read(arrays: list[jax.Array]) -> tuple[Leaves, jax.Array | None]:
            weights, *moved = arrays
            return tuple(moved), weights if weighs else None

        return Call(
            "push",
            [_position(self.ranks, operands), *operands],
            [_weights_type(routing, weighs), *rows_like(sent.leaves, routing.capacity)],
            _routing_attributes(routing),
            read,
        )

    def pull(
        self, handle: Handle, pulled: Pull, attendance: Attendance = ALL_RANKS
    ) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
        return self.pull_call(handle, pulled, attendance).run()

    def pull_call(
        self, handle: Handle, pulled: Pull, attendance: Attendance = ALL_RANKS
    ) -> Call[tuple[Leaves, jax.Array | None, AttendanceResult]]:
        rows, arrived_weights = pulled.rows, pulled.weights
        routing = handle.routing
        returned = (0,) if arrived_weights is None else (routing.num_tokens, routing.top_k)
        results = {"topk_weights": (returned, jnp.float32), **_attendance_types(routing, attendance)}
        operands = [
            *_handle_arrays(handle),
            or_scalar(pulled.row_weights),
            or_scalar(arrived_weights),
            or_scalar(attendance.active_ranks, INT),
            *rows,
            *pulled.biases,
        ]

        def read(arrays: list[jax.Array]) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
            named, sums = by_name(results, arrays)
            returned_weights = None if arrived_weights is None else named["topk_weights"]
            return tuple(sums[: len(rows)]), returned_weights, _read_attendance(attendance, named)

        return Call(
            "pull",
            [_position(self.ranks, operands), *operands],
            [
                *results.values(),
                *rows_like(rows, routing.num_tokens),
                *self._partial_sums(routing, pulled),
            ],
            _routing_attributes(routing, attendance.masks, pulled.packing),
            read,
            aliases=[(len(operands), len(results))] if pulled.adds_in_place else [],
        )

    def _partial_sums(self, routing: Routing, pulled: Pull) -> list[Result]:
        """Returns memory for sums of a token's rows at one rank, which GPUs compute before these travel.

        FP8 values [rows, n] and then their scales [rows, n / 128] lie in one array.
        """
        on_gpus, by_choice = self.ranks.platform == "gpu", routing.has_row_per_choice
        of_all_tokens = routing.num_ranks * routing.num_tokens
        if pulled.packing is Packing.NONE:
            several = by_choice and routing.top_k > 1 and routing.num_ranks > 1
            return rows_like(pulled.rows, of_all_tokens if several and on_gpus else 0)
        num_rows = of_all_tokens if by_choice else routing.capacity
        sizes = [num_rows * math.prod(row.shape[1:]) for row in pulled.rows]
        return [((size + 4 * (size // BLOCK) if on_gpus else 0,), jnp.uint8) for size in sizes]

    def between_domains(self, blocks: jax.Array) -> jax.Array:
        """Sends blocks to other domains (hop 1), by puts over NCCL's device API if the group has rails."""
        within = self.ranks.within
        if within is None or self.ranks.rails is None:
            return collectives.between_domains(self.ranks, blocks)
        options = {"group": within.key, "rails": self.ranks.rails, "num_ranks": np.int64(within.size)}
        operands = [_position(self.ranks, blocks), blocks]
        return call("rail_hop", operands, [(blocks.shape, blocks.dtype)], **options)[0]
