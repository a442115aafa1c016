"""Routings for measurements, and the number of rows that they send."""

import math

import numpy as np

from jax_ep.bench.shapes import Shape

ROUTINGS = ("uniform", "lognormal 0.6", "lognormal 1.5", "zipf", "one expert", "one rank")
SHARE_OF_ONE_EXPERT = 0.6


def route(kind: str, shape: Shape, ranks: int, seed: int = 0) -> np.ndarray:
    """Returns a random topk_idx int32 [ranks * T, K]. The choices of a token are different experts.

    "uniform": all experts are equally likely. "lognormal S": the logarithms of their likelihoods are normal
    with standard deviation S. "zipf": expert e, counted from 1, is 1 / e times as likely as the first expert.
    "one expert": 60 % of the tokens choose expert 0, and otherwise all are equally likely. "one rank": all
    choices are experts of rank 0; if it has too few, the rest are -1.
    """
    rng = np.random.default_rng(seed)
    log_likelihood = np.zeros(shape.experts)
    if kind.startswith("lognormal"):
        log_likelihood = rng.normal(0, float(kind.split()[1]), shape.experts)
    if kind == "zipf":
        log_likelihood = -np.log(np.arange(1, shape.experts + 1))
    if kind == "one rank":
        log_likelihood[shape.experts // ranks :] = -np.inf
    # With Gumbel noise the k largest scores are k draws without replacement.
    scores = log_likelihood + rng.gumbel(size=(ranks * shape.tokens, shape.experts))
    if kind == "one expert":
        scores[:, 0] = np.where(rng.random(len(scores)) < SHARE_OF_ONE_EXPERT, np.inf, -np.inf)
    ids = np.argsort(-scores, axis=1)[:, : shape.top_k].astype(np.int32)
    return np.where(np.isneginf(np.take_along_axis(scores, ids, axis=1)), -1, ids).astype(np.int32)


def bytes_received(ids: np.ndarray, shape: Shape, ranks: int, order: str) -> tuple[int, int]:
    """Returns the bytes of bfloat16 rows that a rank receives: all bytes, and those that must cross a link.

    Both are maxima over the ranks. In every order, one row must cross a link for each token of another rank
    that has an expert at the receiver.
    """
    owner = np.where(ids < 0, -1, ids // (shape.experts // ranks))
    sources = np.repeat(np.arange(ranks), shape.tokens)
    total = wire = 0
    for rank in range(ranks):
        hits = owner == rank
        has_expert = hits.any(axis=1)
        total = max(total, int((has_expert if order == "rank" else hits).sum()))
        wire = max(wire, int(has_expert[sources != rank].sum()))
    return total * shape.hidden * 2, wire * shape.hidden * 2


def capacity_of(factor: float | None, shape: Shape, ranks: int, order: str) -> int | None:
    """Returns the rows of a receive buffer: `factor` times the rows of a uniform routing.

    Returns None, the worst case, if `factor` is None. Padded experts always have room for the worst case.
    """
    if factor is None or order == "expert_padded":
        return None
    rows = shape.tokens * shape.top_k
    if order == "rank":
        rows = ranks * shape.tokens * _hit_probability(shape, shape.experts // ranks)
    return max(1, round(factor * rows))


def domain_rows_of(factor: float | None, shape: Shape, domains: int) -> int:
    """Returns the rows that a rank can receive from each domain: `factor` times those of a uniform routing.

    Returns the number of tokens, the worst case, if `factor` is None.
    """
    if factor is None:
        return shape.tokens
    rows = shape.tokens * _hit_probability(shape, shape.experts // domains)
    return min(shape.tokens, max(1, round(factor * rows)))


def _hit_probability(shape: Shape, experts: int) -> float:
    """Returns the probability that a token chooses any of this many experts under uniform routing."""
    misses = math.comb(shape.experts - experts, shape.top_k)
    return 1 - misses / math.comb(shape.experts, shape.top_k)


def rows_of_hops(ids: np.ndarray, shape: Shape, ranks: int, per_domain: int) -> tuple[int, int]:
    """Returns the rows that a rank receives in hop 1 from other domains, and in hop 2 from other ranks.

    Both are maxima over the ranks.
    """
    owner = np.where(ids < 0, -1, ids // (shape.experts // ranks))
    sources = np.repeat(np.arange(ranks), shape.tokens)
    between = within = 0
    for rank in range(ranks):
        domain, index = divmod(rank, per_domain)
        comes_to_domain = (np.where(owner < 0, -1, owner // per_domain) == domain).any(axis=1)
        # Hop 1 connects ranks with the same index on their domains.
        same_index, other_domain = sources % per_domain == index, sources // per_domain != domain
        between = max(between, int((comes_to_domain & same_index & other_domain).sum()))
        within = max(within, int(((owner == rank).any(axis=1) & ~same_index).sum()))
    return between, within
