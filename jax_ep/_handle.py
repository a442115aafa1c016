"""What dispatch finds out about a routing, as data: the handle."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep._group import Group

Order = Literal["rank", "expert"]


@dataclasses.dataclass(frozen=True)
class Routing:
    """The static part of a routing: equal on all ranks, known at trace time."""

    group: Group
    order: Order
    num_tokens: int  # T, tokens on this rank
    top_k: int  # K
    num_experts: int  # E, in all
    capacity: int  # C, rows of a receive buffer
    expert_alignment: int

    @property
    def num_ranks(self) -> int:
        return self.group.size

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.group.size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """Where every row of a dispatch lies. A pytree of int32 arrays, made by `dispatch`.

    It is all that `combine` and a repeated `dispatch` need, whichever implementation they use. It
    holds no addresses, so it may be kept, saved for the backward pass or passed through jit.

    R ranks, T tokens a rank, K choices a token, L experts a rank; one rank's shard:
    """

    topk_idx: jax.Array
    """[T, K] expert of each choice, -1 where the choice is unused."""
    token_rows: jax.Array
    """By rank [T, R], by expert [T, K]: the token's row in the receiver's buffer, -1 none or dropped."""
    rank_prefix_matrix: jax.Array
    """[R, R]: [s, d] = rows that ranks 0..s send to rank d, before drops. The same on every rank."""
    expert_counts: jax.Array
    """[L] (token, expert) pairs routed to each expert of this rank, before drops."""
    row_map: jax.Array | None
    """By expert [R * T, K]: the row here of each choice of all ranks' tokens, by source rank, then token;
    -1 none here, or dropped. By rank None."""
    routing: Routing = dataclasses.field(metadata={"static": True})
    """The static part: group, order, T, K, E, C and the expert alignment."""


def flat_real_rows(handle: Handle, rows: jax.Array, dtype: Any) -> jax.Array:
    """An expert-order buffer [C, ...] as [C, n] of another dtype, zero where a row holds no token."""
    flat = rows.reshape(rows.shape[0], -1)
    return jnp.where(real_rows(handle)[:, None], flat, 0).astype(dtype)


def real_rows(handle: Handle) -> jax.Array:
    """Which rows [C] (bool) of an expert-order buffer that hold a token, not padding or tail."""
    alignment = handle.routing.expert_alignment
    blocks = -(-handle.expert_counts // alignment) * alignment
    starts = jnp.cumsum(blocks) - blocks
    row = jnp.arange(handle.routing.capacity, dtype=jnp.int32)
    block = jnp.searchsorted(starts, row, side="right") - 1
    return row < starts[block] + handle.expert_counts[block]
