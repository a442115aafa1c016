"""Reference implementations of the ops, in NumPy loops.

Arguments are those of all ranks: x [R, T, ...], topk_idx [R, T, K]. Results are lists with one entry per
rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


def routed(topk_idx: np.ndarray, num_experts: int) -> np.ndarray:
    """Returns int32 ids of one rank's tokens [T, K], -1 where unused or out of range."""
    return np.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, -1).astype(np.int32)


def layout(topk_idx: np.ndarray, num_experts: int, num_ranks: int, ranks_per_domain: int = 1) -> tuple:
    """Returns the counts of one rank's tokens per rank, per domain, per expert, and is_token_in_rank."""
    experts_per_rank = num_experts // num_ranks
    in_rank = np.zeros((len(topk_idx), num_ranks), bool)
    per_expert = np.zeros(num_experts, np.int32)
    per_domain = np.zeros(num_ranks // ranks_per_domain, np.int32)
    for t, token in enumerate(routed(topk_idx, num_experts)):
        for expert in token[token >= 0]:
            per_expert[expert] += 1
            in_rank[t, expert // experts_per_rank] = True
        for domain in {rank // ranks_per_domain for rank in np.flatnonzero(in_rank[t])}:
            per_domain[domain] += 1
    return in_rank.sum(axis=0).astype(np.int32), per_domain, per_expert, in_rank


def mask_inactive(topk_idx: np.ndarray, num_experts: int, active: Any, num_valid: Any = None) -> np.ndarray:
    """Returns ids [R, T, K], -1 if the token's or the expert's rank is inactive, or t >= num_valid[rank]."""
    num_ranks, num_tokens, _ = topk_idx.shape
    ids = np.stack([routed(one, num_experts) for one in topk_idx])
    for rank, tokens in enumerate(ids):
        for t in range(num_tokens):
            for k, expert in enumerate(tokens[t]):
                owner = expert // (num_experts // num_ranks)
                if not active[rank] or not active[owner] or (num_valid is not None and t >= num_valid[rank]):
                    tokens[t, k] = -1
    return ids


def dropped_by_hop_1(ids: np.ndarray, experts: int, per_domain: int, domain_rows: int) -> np.ndarray:
    """Returns ids [R, T, K], -1 where a domain keeps only the first domain_rows tokens of each rank."""
    kept = np.stack([routed(one, experts) for one in ids])
    domain_of = np.where(kept < 0, -1, kept // (experts // (len(ids) // per_domain)))
    for rank, tokens in enumerate(kept):
        for domain in range(len(ids) // per_domain):
            sent = 0
            for t in range(len(tokens)):
                to_domain = domain_of[rank, t] == domain
                if to_domain.any() and sent >= domain_rows:
                    tokens[t, to_domain] = -1
                sent += to_domain.any()
    return kept


@dataclasses.dataclass
class Received:
    """The results of a dispatch on one rank, and the source of each row."""

    x: np.ndarray
    topk_idx: np.ndarray | None
    weights: np.ndarray | None  # by rank [C, K], by expert [C]
    tokens_per_expert: np.ndarray
    group_sizes: np.ndarray | None
    num_tokens: np.ndarray
    num_dropped: np.ndarray
    sources: list[tuple[int, int, int] | None]  # of each row: rank, token, k (by rank k = -1)


def worst_case(order: str, rows: int, top_k: int, local: int, alignment: int = 1) -> int:
    if order == "rank":
        return rows
    return alignment * ((rows * min(top_k, local) + local * (alignment - 1)) // alignment)


def row_list(ids: np.ndarray, order: str, local: int, rank: int, alignment: int) -> tuple[list, list]:
    """Returns the rows (source, token, k) that arrive at a rank if none is dropped, and None for padding.

    Also returns (begin, end of its rows, end of the block) of each expert. ids [R, T, K] are routed. With
    order "expert_padded", `alignment` is the size of each block, in which all rows of the expert must fit.
    """
    rows: list = []
    blocks: list = []
    if order == "rank":
        is_here = ((ids >= 0) & (ids // local == rank)).any(axis=-1)
        return [(s, t, -1) for s, t in np.argwhere(is_here).tolist()], blocks
    for expert in range(rank * local, (rank + 1) * local):
        begin = len(rows)
        rows.extend(map(tuple, np.argwhere(ids == expert).tolist()))
        end = len(rows)
        assert order != "expert_padded" or end - begin <= alignment
        rows.extend([None] * (begin + alignment - end if order == "expert_padded" else -end % alignment))
        blocks.append((begin, end, len(rows)))
    return rows, blocks


def dispatch(
    x: np.ndarray,
    topk_idx: np.ndarray,
    topk_weights: np.ndarray | None,
    num_experts: int,
    order: str,
    capacity: int | None = None,
    alignment: int = 1,
) -> list[Received]:
    num_ranks, num_tokens, top_k = topk_idx.shape
    local = num_experts // num_ranks
    if order == "expert_padded":
        alignment = num_ranks * num_tokens
        capacity = local * alignment
    if capacity is None:
        capacity = worst_case(order, num_ranks * num_tokens, top_k, local, alignment)
    ids = np.stack([routed(one, num_experts) for one in topk_idx])
    out = []
    for rank in range(num_ranks):
        rows, blocks = row_list(ids, order, local, rank, alignment)
        kept, dropped = rows[:capacity], rows[capacity:]
        received = Received(
            x=np.zeros((capacity, *x.shape[2:]), x.dtype),
            topk_idx=np.full((capacity, top_k), -1, np.int32) if order == "rank" else None,
            weights=None,
            tokens_per_expert=np.zeros(local, np.int32),
            group_sizes=None,
            num_tokens=np.array([sum(row is not None for row in kept)], np.int32),
            num_dropped=np.array([sum(row is not None for row in dropped)], np.int32),
            sources=kept + [None] * (capacity - len(kept)),
        )
        if topk_weights is not None:
            shape = (capacity, top_k) if order == "rank" else (capacity,)
            received.weights = np.zeros(shape, np.float32)
        for c, row in enumerate(kept):
            if row is None:
                continue
            s, t, k = row
            received.x[c] = x[s, t]
            if order != "rank":
                received.tokens_per_expert[ids[s, t, k] - rank * local] += 1
                if topk_weights is not None:
                    received.weights[c] = topk_weights[s, t, k]
                continue
            for j, expert in enumerate(ids[s, t]):
                if expert >= 0 and expert // local == rank:
                    received.topk_idx[c, j] = expert - rank * local
                    received.tokens_per_expert[expert - rank * local] += 1
                    if topk_weights is not None:
                        received.weights[c, j] = topk_weights[s, t, j]
        if order == "expert":
            sizes = [min(end, capacity) - min(begin, capacity) for begin, _, end in blocks]
            received.group_sizes = np.array(sizes, np.int32)
        if order == "expert_padded":
            received.group_sizes = np.array([end - begin for begin, end, _ in blocks], np.int32)
        out.append(received)
    return out


def rank_prefix_matrix(topk_idx: np.ndarray, num_experts: int, order: str) -> np.ndarray:
    """Returns [R, R]: [s, d] is the number of rows that ranks 0..s send to rank d, before drops."""
    num_ranks = len(topk_idx)
    local = num_experts // num_ranks
    ids = np.stack([routed(one, num_experts) for one in topk_idx])
    matrix = np.zeros((num_ranks, num_ranks), np.int32)
    for d in range(num_ranks):
        for row in row_list(ids, "rank" if order == "rank" else "expert", local, d, 1)[0]:
            matrix[row[0] :, d] += 1
    return matrix


def combine(
    y: np.ndarray,
    received: list[Received],
    num_tokens: int,
    row_weights: np.ndarray | None = None,
    biases: tuple[np.ndarray, ...] = (),
    folds: bool = False,
    active: Any = None,
    per_domain: int | None = None,
    as_fp8: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """[R, T, ...] sums of y [R, C, ...] in float32 and in the stated order, not yet rounded.

    `folds`: a rank that holds several rows of a token sends their sum, rounded to y's dtype. With
    `per_domain` ranks in each domain, a domain sends the sum of its ranks, rounded to y's dtype, and domains
    are added in order. Nothing comes from ranks, and goes to ranks, that are not `active` [R]. as_fp8(parts)
    rounds the parts that travel: those of ranks, or with `per_domain` those of domains. `received` lists the
    rows of a rank by expert, so those of a token are first sorted by k, which is the documented order.
    """
    num_ranks = len(received)
    wide = np.float64 if y.dtype == np.float64 else np.float32
    out = np.zeros((num_ranks, num_tokens, *y.shape[2:]), wide)
    total = np.zeros_like(out)
    for rank in range(num_ranks):
        by_token: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for c, source in enumerate(received[rank].sources):
            if source is not None and (active is None or (active[rank] and active[source[0]])):
                s, t, k = source
                by_token.setdefault((s, t), []).append((k, c))
        for (s, t), rows in by_token.items():
            partial: Any = wide(0)
            for _, c in sorted(rows):
                weight = wide(1) if row_weights is None else wide(row_weights[rank, c])
                partial = partial + weight * y[rank, c].astype(wide)
            if folds and len(rows) > 1:
                partial = partial.astype(y.dtype).astype(wide)
            if as_fp8 is not None and per_domain is None:
                partial = as_fp8(partial)
            out[s, t] += partial
        if per_domain is not None and (rank + 1) % per_domain == 0:
            out = out.astype(y.dtype).astype(wide)
            total += out if as_fp8 is None else as_fp8(out)
            out = np.zeros_like(out)
    out = out if per_domain is None else total
    for bias in biases:
        out += bias.astype(wide)
    return out


def round_to_fp8(x: np.ndarray, round_scale: bool) -> np.ndarray:
    """Returns x [..., H] float32 as it arrives if it travels as FP8, with a scale for each 128 elements."""
    blocks = x.reshape(*x.shape[:-1], -1, 128)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scales = np.maximum(largest, np.float32(1e-4)) * np.float32(1 / 448)
    if round_scale:
        fractions, exponents = np.frexp(scales)
        scales = np.ldexp(np.float32(1), exponents - (fractions == 0.5))
    scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
    values = (blocks * (np.float32(1) / scales)).astype(ml_dtypes.float8_e4m3fn)
    return (values.astype(np.float32) * scales).reshape(x.shape)


def permute_rows(topk_idx: np.ndarray, num_local: int, alignment: int, capacity: int) -> np.ndarray:
    """row_map [C, K]: where each (row, k) goes, -1 none or dropped."""
    ids = routed(topk_idx, num_local)
    row_map = np.full(ids.shape, -1, np.int32)
    rows, _ = row_list(ids[None], "expert", num_local, 0, alignment)
    for p, row in enumerate(rows[:capacity]):
        if row is not None:
            row_map[row[1], row[2]] = p
    return row_map


def unpermute(
    y: np.ndarray,
    row_map: np.ndarray,
    weights: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    topk_idx: np.ndarray | None = None,
) -> np.ndarray:
    out = np.zeros((len(row_map), *y.shape[1:]), np.float32)
    for c, rows in enumerate(row_map):
        for k, p in enumerate(rows):
            if p < 0:
                continue
            term = y[p].astype(np.float32)
            if bias is not None:
                term = term + bias[topk_idx[c, k]].astype(np.float32)
            out[c] += term * np.float32(1 if weights is None else weights[c, k])
    return out
