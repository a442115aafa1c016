"""Calls of this package's FFI handlers: implementation="ffi".

Nothing else calls the targets of ops. `xla.py` has the same functions from `jax.lax`, with the same arguments
and results, except for `gather`, which the benchmark measures the links with, on GPUs only.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _extension
from jax_ep._group.ranks import Ranks
from jax_ep._jax.ffi_call import Result, call, or_scalar
from jax_ep._jax.platform import on_platform
from jax_ep._rows.fp8 import BLOCK, FP8, QuantizedArray, quantize_blocks
from jax_ep._rows.quantize import quantize_by_kernel
from jax_ep._transport import collectives
from jax_ep._transport.attendance import EVERYBODY, Attendance, Attended
from jax_ep._transport.backend import LayoutCounts, Leaves, Packing, Permutation, Routed
from jax_ep._transport.collectives import mesh_position
from jax_ep._transport.routing import ORDERS, Handle, Routing, placed_handle

INT = jnp.int32


def _routing_attributes(
    routing: Routing, masks: bool = False, packing: Packing = Packing.NONE
) -> dict[str, Any]:
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


def _position(ranks: Ranks, arrays: Any) -> jax.Array:
    return on_platform(mesh_position(ranks, arrays), ranks.platform, ranks.name)


def _handle_arrays(handle: Handle) -> list[jax.Array]:
    received = or_scalar(handle.received_rows, INT)
    return [handle.topk_idx, handle.sent_rows, handle.rank_prefix_matrix, handle.expert_counts, received]


def _rows_like(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], rows: int) -> list[Result]:
    return [((rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]


def goes_through_arena(
    routing: Routing, leaves: Sequence[jax.Array], packing: Packing = Packing.NONE
) -> bool:
    """Returns whether `route` sends these rows through the arena, as for few tokens on GPUs."""
    module = _extension.extension()
    if routing.ranks.platform != "gpu" or module is None:
        return False
    parts = leaves if packing is Packing.NONE else _as_fp8(*leaves)
    row_bytes = sum(-(-math.prod(part.shape[1:]) * _bits(part) // 128) * 16 for part in parts)
    sizes = (routing.num_ranks, routing.num_tokens, routing.top_k, routing.num_experts)
    return module.fits_arena(routing.ranks.key, False, routing.has_row_per_choice, sizes, row_bytes)


def _bits(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return jax.dtypes.itemsize_bits(array.dtype)


def _as_fp8(x: jax.Array) -> list[jax.ShapeDtypeStruct]:
    scales = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return [jax.ShapeDtypeStruct(x.shape, FP8), jax.ShapeDtypeStruct(scales, jnp.float32)]


def _arrived_weights(routing: Routing, present: bool) -> Result:
    by_rank = (routing.capacity, routing.top_k)
    shape = (routing.capacity,) if routing.has_row_per_choice else by_rank
    return (shape if present else (0,)), jnp.float32


def _attended(routing: Routing, attendance: Attendance) -> dict[str, Result]:
    ranks = routing.num_ranks
    return {
        "active_ranks": ((ranks if attendance.may_miss else 0,), INT),
        "wait_us": ((ranks if attendance.measures else 0,), jnp.float32),
    }


def _as_attended(attendance: Attendance, named: dict[str, jax.Array]) -> Attended:
    return Attended(
        named["active_ranks"] if attendance.may_miss else None,
        named["wait_us"] if attendance.measures else None,
    )


def _call_named(
    target: str,
    operands: Sequence[Any],
    results: dict[str, Result],
    rows: Sequence[Result],
    attributes: dict[str, Any],
    aliases: Sequence[tuple[int, int]] = (),
) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Calls a handler. Returns its results by name, and the rows, which come last."""
    arrays = call(target, operands, [*results.values(), *rows], aliases, **attributes)
    return dict(zip(results, arrays, strict=False)), arrays[len(results) :]


def _scratch(tokens: int, num_experts: int, num_ranks: int, extra: int = 0) -> Result:
    """Room for the kernels' counts of each chunk of tokens, as ffi/core/index.h lays it out."""
    module = _extension.extension()
    assert module is not None  # or no handler would be called
    chunks = -(-tokens // module.build_info()["tokens_per_chunk"])
    return (chunks * (num_experts + num_ranks) + extra,), INT


def _push(
    handle: Handle,
    topk_weights: jax.Array | None,
    row_weights: jax.Array | None,
    leaves: Sequence[jax.Array],
    factors: Sequence[jax.Array],
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the weights, or dot products, that arrive, and the rows."""
    routing = handle.routing
    weighs = topk_weights is not None or row_weights is not None
    operands = [*_handle_arrays(handle), or_scalar(topk_weights), or_scalar(row_weights), *leaves, *factors]
    weights, *moved = call(
        "push",
        [_position(routing.ranks, operands), *operands],
        [_arrived_weights(routing, weighs), *_rows_like(leaves, routing.capacity)],
        **_routing_attributes(routing),
    )
    return weights, moved


def gather(ranks: Ranks, x: jax.Array) -> jax.Array:
    """All ranks' rows on every rank, by plain copies over the links: a ceiling to compare with. GPUs only."""
    shape = (ranks.size * x.shape[0], *x.shape[1:])
    options = {"group": ranks.key, "num_ranks": np.int64(ranks.size)}
    (out,) = call("gather", [_position(ranks, x), x], [(shape, x.dtype)], **options)
    return out


@dataclasses.dataclass(frozen=True)
class Ffi:
    """Backend "ffi": this package's handlers, on CPUs and on GPUs."""

    keeps_bits: ClassVar[bool] = True

    def packs_fp8(self, routing: Routing, x: jax.Array) -> bool:
        has_kernels = routing.ranks.platform == "gpu" and _extension.extension() is not None
        return has_kernels and _bits(x) != 64

    def quantize(self, rows: jax.Array, round_scale: bool, floor: float) -> QuantizedArray:
        convert = quantize_by_kernel if _extension.runs_kernels("ffi") else quantize_blocks
        return convert(rows, (1, BLOCK), round_scale, floor)

    def layout(
        self, topk_idx: jax.Array, num_experts: int, num_ranks: int, ranks_per_node: int
    ) -> LayoutCounts:
        results = [
            ((num_ranks,), INT),
            ((num_ranks // ranks_per_node,), INT),
            ((num_experts,), INT),
            ((topk_idx.shape[0], num_ranks), jnp.bool_),
        ]
        return LayoutCounts(*call("layout", [topk_idx], results, ranks_per_node=np.int64(ranks_per_node)))

    def route(
        self,
        routing: Routing,
        leaves: Sequence[jax.Array],
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        attendance: Attendance = EVERYBODY,
        packing: Packing = Packing.NONE,
    ) -> Routed:
        """With a packing the only leaf arrives as two: values and scales."""
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
            "weights": _arrived_weights(routing, topk_weights is not None),
            "arrived_idx": ((routing.capacity, k) if by_rank else (0,), INT),
            "tokens_per_expert": ((experts,), INT),
            "group_sizes": ((0,) if by_rank else (experts,), INT),
            "num_tokens": ((1,), INT),
            "num_dropped": ((1,), INT),
            "scratch": _scratch(tokens, routing.num_experts, ranks),
            **_attended(routing, attendance),
        }
        operands = [topk_idx, or_scalar(topk_weights), or_scalar(attendance.active_ranks, INT), *leaves]
        named, rows = _call_named(
            "route",
            [_position(routing.ranks, operands), *operands],
            results,
            _rows_like(leaves if packing is Packing.NONE else _as_fp8(*leaves), routing.capacity),
            _routing_attributes(routing, attendance.masks, packing),
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
            attended=_as_attended(attendance, named),
            handle=handle,
        )

    def gather(self, routing: Routing, numbers: jax.Array) -> jax.Array:
        """Sends one row to every rank: for few numbers that is faster than a collective."""
        ranks = routing.num_ranks
        row_to_each = dataclasses.replace(
            routing,
            order="rank",
            num_tokens=1,
            top_k=ranks,
            num_experts=ranks,
            capacity=ranks,
            expert_alignment=1,
            host_rows=0,
        )
        ids = jnp.arange(ranks, dtype=INT)[None]
        return self.route(row_to_each, (numbers[None],), ids, None).rows[0]

    def place(self, routing: Routing, hosts: jax.Array, sent_rows: jax.Array, slot_rows: jax.Array) -> Handle:
        return placed_handle(routing, hosts, sent_rows, slot_rows)

    def push(
        self, handle: Handle, leaves: Sequence[jax.Array], topk_weights: jax.Array | None
    ) -> tuple[Leaves, jax.Array | None]:
        weights, moved = _push(handle, topk_weights, None, leaves, ())
        return tuple(moved), None if topk_weights is None else weights

    def push_scaled(
        self,
        handle: Handle,
        leaves: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        row_weights: jax.Array,
    ) -> tuple[Leaves, jax.Array]:
        scaled: list[jax.Array] = list(leaves)
        all_dots: Any = 0
        # A call takes leaves of one dtype, which they nearly always are.
        for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
            places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            alike, factors_alike = [leaves[i] for i in places], [factors[i] for i in places]
            dots, moved = _push(handle, None, row_weights, alike, factors_alike)
            all_dots = all_dots + dots
            for i, rows in zip(places, moved, strict=True):
                scaled[i] = rows
        return tuple(scaled), all_dots

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
        routing = handle.routing
        returned = (0,) if arrived_weights is None else (routing.num_tokens, routing.top_k)
        # By expert the kernels first sum each token's rows where they lie, unless a rank is alone.
        several = routing.top_k > 1 and routing.num_ranks > 1
        folds = routing.has_row_per_choice and several and routing.ranks.platform == "gpu"
        partial_sums = routing.num_ranks * routing.num_tokens if folds else 0
        operands = [
            *_handle_arrays(handle),
            or_scalar(row_weights),
            or_scalar(arrived_weights),
            or_scalar(attendance.active_ranks, INT),
            *rows,
            *biases,
        ]
        results = {"topk_weights": (returned, jnp.float32), **_attended(routing, attendance)}
        named, sums = _call_named(
            "pull",
            [_position(routing.ranks, operands), *operands],
            results,
            [*_rows_like(rows, routing.num_tokens), *_rows_like(rows, partial_sums)],
            _routing_attributes(routing, attendance.masks),
            aliases=[(len(operands), len(results))] if adds_in_place else [],
        )
        returned_weights = None if arrived_weights is None else named["topk_weights"]
        return tuple(sums[: len(rows)]), returned_weights, _as_attended(attendance, named)

    def permute(
        self,
        leaves: Sequence[jax.Array],
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        num_local_experts: int,
        expert_alignment: int,
        capacity: int,
    ) -> Permutation:
        results: dict[str, Result] = {
            "row_map": (topk_idx.shape, INT),
            "row_weights": ((0,) if topk_weights is None else (capacity,), jnp.float32),
            "group_sizes": ((num_local_experts,), INT),
            "tokens_per_expert": ((num_local_experts,), INT),
            "num_dropped": ((1,), INT),
            "scratch": _scratch(topk_idx.shape[0], num_local_experts, 1, extra=topk_idx.size),
        }
        attributes = {
            "num_experts": np.int64(num_local_experts),
            "capacity": np.int64(capacity),
            "alignment": np.int64(expert_alignment),
        }
        operands = [topk_idx, or_scalar(topk_weights), *leaves]
        named, rows = _call_named("permute", operands, results, _rows_like(leaves, capacity), attributes)
        return Permutation(
            rows=tuple(rows),
            row_map=named["row_map"],
            row_weights=None if topk_weights is None else named["row_weights"],
            group_sizes=named["group_sizes"],
            tokens_per_expert=named["tokens_per_expert"],
            num_dropped=named["num_dropped"],
        )

    def repermute(self, row_map: jax.Array, leaf: jax.Array, num_permuted: int) -> jax.Array:
        results = [*_rows_like([leaf], num_permuted), ((0,), jnp.float32), ((num_permuted,), jnp.uint8)]
        return call("repermute", [row_map, leaf, or_scalar(None), or_scalar(None)], results)[0]

    def repermute_scaled(
        self, row_map: jax.Array, leaf: jax.Array, topk_weights: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        num_permuted = factors.shape[0]
        results = [
            *_rows_like([leaf], num_permuted),
            (row_map.shape, jnp.float32),
            ((num_permuted,), jnp.uint8),
        ]
        scaled, dots, _ = call("repermute", [row_map, leaf, topk_weights, factors], results)
        return scaled, dots

    def unpermute(
        self,
        y: jax.Array,
        row_map: jax.Array,
        topk_weights: jax.Array | None,
        bias: jax.Array | None,
        topk_idx: jax.Array | None,
        out_dtype: Any,
    ) -> jax.Array:
        operands = [
            y,
            row_map,
            or_scalar(topk_weights),
            or_scalar(bias),
            row_map if topk_idx is None else topk_idx,
        ]
        (out,) = call("unpermute", operands, [((row_map.shape[0], *y.shape[1:]), out_dtype)])
        return out

    def between_hosts(self, ranks: Ranks, blocks: jax.Array) -> jax.Array:
        """Hop 1, by puts of a kernel over NCCL's device API where the group has rails."""
        within = ranks.within
        if within is None or ranks.rails is None:
            return collectives.between_hosts(ranks, blocks)
        options = {"group": within.key, "rails": ranks.rails, "num_ranks": np.int64(within.size)}
        (out,) = call(
            "rail_hop", [_position(ranks, blocks), blocks], [(blocks.shape, blocks.dtype)], **options
        )
        return out
