"""get_dispatch_layout: counts of tokens by rank, domain and expert."""

import dataclasses

import jax
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._extension import Implementation
from jax_ep._jax.sharding import unshard
from jax_ep._ops.arguments import OpArguments, wrong_valid_tokens
from jax_ep._transport import debug
from jax_ep._transport.choice import choose_local


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchLayout:
    """Counts of one rank's tokens. R ranks, E experts, T tokens.

    Attributes:
      num_tokens_per_rank: int32 [R]; a token counts once for a rank, however many of its experts live there.
      num_tokens_per_domain: int32 [R / ranks_per_domain], each token once a domain; None if
        `ranks_per_domain` was not given.
      num_tokens_per_expert: int32 [E].
      is_token_in_rank: bool [T, R].
    """

    num_tokens_per_rank: jax.Array
    num_tokens_per_domain: jax.Array | None
    num_tokens_per_expert: jax.Array
    is_token_in_rank: jax.Array


def get_dispatch_layout(
    topk_idx: ArrayLike,
    *,
    num_experts: int,
    num_ranks: int,
    ranks_per_domain: int | None = None,
    num_valid_tokens: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> DispatchLayout:
    """Counts where tokens go. Local: no communication, needs no shard_map.

    The counts and their names are those of DeepEP's `get_dispatch_layout`.

    Args:
      topk_idx: int32 or int64 [T, K] expert ids; -1 and ids out of range are unused. An id that a token
        repeats counts again for its expert, but not for its rank.
      num_experts: E, a multiple of R.
      num_ranks: R.
      ranks_per_domain: divides R; None if the domains do not matter.
      num_valid_tokens: int32 scalar, at most T: tokens from it on count nowhere. None: T.
      implementation: None, "ffi" or "xla".

    Raises:
      ValueError: an argument is out of range or does not divide as it must.
    """
    check = OpArguments("get_dispatch_layout")
    backend = choose_local(implementation)
    ids = check.topk_idx(topk_idx)
    num_ranks = check.at_least_one("num_ranks", num_ranks, _checks.MOST_EXPERTS)
    num_experts = check.num_experts(num_experts, num_ranks)
    per_domain = 1 if ranks_per_domain is None else check.at_least_one("ranks_per_domain", ranks_per_domain)
    if num_ranks % per_domain != 0:
        raise ValueError(
            f"{check.op}: ranks_per_domain must divide num_ranks = {num_ranks}, got {ranks_per_domain}"
        )
    if num_valid_tokens is not None:
        ids = check.valid_tokens(num_valid_tokens, ids)
    counts = backend.layout(unshard(ids), num_experts, num_ranks, per_domain)

    def find() -> list[debug.Finding]:
        return [debug.invalid_ids(ids, num_experts), *wrong_valid_tokens(num_valid_tokens, ids)]

    counts = debug.check(check.op, counts, find)
    return DispatchLayout(
        counts.num_tokens_per_rank,
        None if ranks_per_domain is None else counts.num_tokens_per_domain,
        counts.num_tokens_per_expert,
        counts.is_token_in_rank,
    )
