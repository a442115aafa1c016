"""Routings to measure with."""

import math

import numpy as np

from jax_ep.bench.shapes import Shape

ROUTINGS = ("uniform", "zipf", "one rank")


def route(kind: str, shape: Shape, ranks: int, seed: int = 0) -> np.ndarray:
    """topk_idx int32 [ranks * T, K], each token's choices different.

    "uniform": every expert as likely as others. "zipf": the e-th expert 1 / e times as likely as the first.
    "one rank": all choices among the experts of rank 0; those that find none are -1.
    """
    rng = np.random.default_rng(seed)
    likely = np.zeros(shape.experts)
    if kind == "zipf":
        likely = -np.log(np.arange(1, shape.experts + 1))
    if kind == "one rank":
        likely[shape.experts // ranks :] = -np.inf
    # Gumbel noise: the k largest are k draws without replacement.
    scores = likely + rng.gumbel(size=(ranks * shape.tokens, shape.experts))
    ids = np.argsort(-scores, axis=1)[:, : shape.top_k].astype(np.int32)
    return np.where(np.isneginf(np.take_along_axis(scores, ids, axis=1)), -1, ids).astype(np.int32)


def bytes_received(ids: np.ndarray, shape: Shape, ranks: int, order: str) -> tuple[int, int]:
    """Of bfloat16 rows, by the rank that receives most: all that it gets, and those that must cross a link.

    The latter are one row for each token of another rank that has an expert there, in every order.
    """
    owner = np.where(ids < 0, -1, ids // (shape.experts // ranks))
    sources = np.repeat(np.arange(ranks), shape.tokens)
    total = wire = 0
    for rank in range(ranks):
        hits = owner == rank
        once = hits.any(axis=1)
        total = max(total, int((once if order == "rank" else hits).sum()))
        wire = max(wire, int(once[sources != rank].sum()))
    return total * shape.hidden * 2, wire * shape.hidden * 2


def capacity_of(factor: float | None, shape: Shape, ranks: int, order: str) -> int | None:
    """Rows of a receive buffer: `factor` times those that arrive if every expert is as likely; None: all.

    Padded experts have room for all, whatever the factor.
    """
    if factor is None or order == "expert_padded":
        return None
    rows = shape.tokens * shape.top_k
    if order == "rank":
        elsewhere = math.comb(shape.experts - shape.experts // ranks, shape.top_k)
        rows = ranks * shape.tokens * (1 - elsewhere / math.comb(shape.experts, shape.top_k))
    return max(1, round(factor * rows))


def host_rows_of(factor: float | None, shape: Shape, hosts: int) -> int:
    """Rows that a rank takes from each host: `factor` times those of a uniform routing; None: all."""
    if factor is None:
        return shape.tokens
    elsewhere = math.comb(shape.experts - shape.experts // hosts, shape.top_k)
    expected = shape.tokens * (1 - elsewhere / math.comb(shape.experts, shape.top_k))
    return min(shape.tokens, max(1, round(factor * expected)))


def rows_of_hops(ids: np.ndarray, shape: Shape, ranks: int, per_host: int) -> tuple[int, int]:
    """Rows that the rank that receives most gets in hop 1 from other hosts, and in hop 2 from other ranks."""
    owner = np.where(ids < 0, -1, ids // (shape.experts // ranks))
    sources = np.repeat(np.arange(ranks), shape.tokens)
    between = within = 0
    for rank in range(ranks):
        host, index = divmod(rank, per_host)
        comes = (np.where(owner < 0, -1, owner // per_host) == host).any(axis=1)
        alike, elsewhere = sources % per_host == index, sources // per_host != host
        between = max(between, int((comes & alike & elsewhere).sum()))
        within = max(within, int(((owner == rank).any(axis=1) & ~alike).sum()))
    return between, within
