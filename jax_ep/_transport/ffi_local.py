"""The handlers of ops without communication: implementation="ffi"."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep import _extension
from jax_ep._jax.ffi_call import Attribute, Result, call, or_scalar
from jax_ep._transport.backend import LayoutCounts, Permutation

INT = jnp.int32


def rows_like(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], rows: int) -> list[Result]:
    """Returns the results that are rows like those of the leaves."""
    return [((rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]


def call_named(
    target: str,
    operands: Sequence[jax.Array],
    results: dict[str, Result],
    rows: Sequence[Result],
    attributes: Mapping[str, Attribute],
) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Calls a handler. Returns its results by name, and the rows, which come last."""
    return by_name(results, call(target, operands, [*results.values(), *rows], (), **attributes))


def by_name(
    results: dict[str, Result], arrays: list[jax.Array]
) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Returns the results of a call by name, and the rows, which come last."""
    return dict(zip(results, arrays, strict=False)), arrays[len(results) :]


def scratch(tokens: int, num_experts: int, num_ranks: int, extra: int = 0) -> Result:
    """Room for the kernels' counts of each chunk of tokens, as ffi/core/index.h lays it out."""
    module = _extension.extension()
    assert module is not None  # or no handler would be called
    chunks = -(-tokens // module.build_info()["tokens_per_chunk"])
    return (chunks * (num_experts + num_ranks) + extra,), INT


@dataclasses.dataclass(frozen=True)
class FfiLocal:
    """Ops of one rank by this package's handlers, on CPUs and on GPUs."""

    keeps_bits: ClassVar[bool] = True

    def layout(
        self, topk_idx: jax.Array, num_experts: int, num_ranks: int, ranks_per_domain: int
    ) -> LayoutCounts:
        results = [
            ((num_ranks,), INT),
            ((num_ranks // ranks_per_domain,), INT),
            ((num_experts,), INT),
            ((topk_idx.shape[0], num_ranks), jnp.bool_),
        ]
        return LayoutCounts(*call("layout", [topk_idx], results, ranks_per_domain=np.int64(ranks_per_domain)))

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
            "scratch": scratch(topk_idx.shape[0], num_local_experts, 1, extra=topk_idx.size),
        }
        attributes = {
            "num_experts": np.int64(num_local_experts),
            "capacity": np.int64(capacity),
            "alignment": np.int64(expert_alignment),
        }
        operands = [topk_idx, or_scalar(topk_weights), *leaves]
        named, rows = call_named("permute", operands, results, rows_like(leaves, capacity), attributes)
        return Permutation(
            rows=tuple(rows),
            row_map=named["row_map"],
            row_weights=None if topk_weights is None else named["row_weights"],
            group_sizes=named["group_sizes"],
            tokens_per_expert=named["tokens_per_expert"],
            num_dropped=named["num_dropped"],
        )

    def repermute(self, row_map: jax.Array, leaf: jax.Array, num_permuted: int) -> jax.Array:
        results = [*rows_like([leaf], num_permuted), ((0,), jnp.float32), ((num_permuted,), jnp.uint8)]
        return call("repermute", [row_map, leaf, or_scalar(None), or_scalar(None)], results)[0]

    def repermute_scaled(
        self, row_map: jax.Array, leaf: jax.Array, topk_weights: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        num_permuted = factors.shape[0]
        results = [
            *rows_like([leaf], num_permuted),
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
        out_dtype: DTypeLike,
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
