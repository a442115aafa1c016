"""What dispatch returns: the rows that arrived at a rank, and what can be asked of them."""

import dataclasses
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_ep._jax.sharding import align_axes
from jax_ep._ops.arguments import OpArguments
from jax_ep._ops.statistics import DispatchStatistics
from jax_ep._rows.indexing import invert
from jax_ep._transport.attendance import Attendance
from jax_ep._transport.backend import Pull, Push
from jax_ep._transport.push_pull import pull, push, push_attended
from jax_ep._transport.routing import Handle, in_buffers, row_experts

Rows = TypeVar("Rows")


class RowSources(NamedTuple):
    """Source ranks and tokens of rows. C rows of capacity, or [L, C] of padded experts.

    Attributes:
      rank: int32 [C] source rank of each row, -1 in padding and tail.
      token: int32 [C] index of the row's token on that rank, -1 in padding and tail.
    """

    rank: jax.Array
    token: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchedByRank(Generic[Rows]):
    """Rows that arrived at this rank, one per token. C rows of capacity, K choices, L local experts.

    Attributes:
      x: [C, ...] rows, an array or pytree as passed in, by source rank, then token; zero in the tail. A
        `QuantizedArray` with quantize="fp8".
      topk_idx: int32 [C, K] local ids of the experts here that the token chose, -1 elsewhere and in the tail.
      topk_weights: float32 [C, K] weights of these choices, 0 where the id is -1; None if no weights were
        passed.
      tokens_per_expert: int32 [L] kept (row, k) pairs of each expert.
      num_tokens: int32 [1] rows kept at this rank.
      num_dropped: int32 [1] rows dropped because the buffer of this rank was full.
      num_invalid: int32 [1] ids of this rank's tokens that are neither -1 nor an expert, such as ids counted
        from 1.
      handle: destinations of all rows, for `combine` and `redispatch`.
      active_ranks: int32 [R] 1 for each rank that took part, as seen by this rank; None unless `active_ranks`
        or on_timeout="mask" was passed.
      statistics: the statistics that were passed plus those of this dispatch; None if none were passed.
    """

    x: Rows
    topk_idx: jax.Array
    topk_weights: jax.Array | None
    tokens_per_expert: jax.Array
    num_tokens: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    handle: Handle
    active_ranks: jax.Array | None
    statistics: DispatchStatistics | None

    def row_sources(self) -> RowSources:
        """Returns the source rank and token of each row. It communicates, as a `redispatch` does.

        Ranks that took no part in the dispatch take none in this.
        """
        check = OpArguments("row_sources")
        handle, backend = check.open_handle(self.handle, None)
        group = handle.routing.group
        number = jnp.arange(1, handle.routing.num_tokens + 1, dtype=jnp.int32)  # 0 where no row comes
        rank = jnp.full_like(number, jax.lax.axis_index(group.axis_name) + 1)
        attendance = Attendance.check(check, self.active_ranks, "raise", group)
        operands = (handle, Push((rank, number)), attendance)
        handle, sent, attendance = align_axes(operands, handle.routing.ranks.axes)
        if attendance.may_miss:
            arrived = push_attended(backend, handle, sent, attendance)[0]
        else:
            arrived = push(backend, handle, sent)[0]
        return RowSources(*(array - 1 for array in arrived))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchedByExpert(Generic[Rows]):
    """Rows that arrived at this rank, one per choice. C rows of capacity, L local experts.

    With order="expert_padded" buffers are [L, C, ...] instead of [C, ...]: C rows for each expert.
    On GPUs empty rows of x may hold anything, including NaN. A dispatch clears them only if x or
    topk_weights are differentiated, and never with quantize="fp8". `is_row` is the mask of the other rows,
    and `row_weights` are 0 in empty ones.

    Attributes:
      x: [C, ...] rows: an array, or a pytree of the same structure as the x that was passed. They are sorted
        by local expert, then source rank, then token, then k. Padding and tail are zero (empty rows of
        padded experts: see above). A `QuantizedArray` with quantize="fp8".
      row_weights: float32 [C] weight of each row's choice, 0 in padding and tail; None if no weights were
        passed.
      group_sizes: int32 [L] rows of each expert's block, padding included, as `jax.lax.ragged_dot` takes
        them; of padded experts the rows that are filled, which come first.
      tokens_per_expert: int32 [L] kept rows of each expert, without padding.
      num_tokens: int32 [1] rows kept at this rank, without padding: a token counts once for each of its
        choices.
      num_dropped: int32 [1] rows dropped because the buffer of this rank was full.
      num_invalid: int32 [1] ids of this rank's tokens that are neither -1 nor an expert, such as ids counted
        from 1.
      handle: destinations of all rows, for `combine` and `redispatch`.
      active_ranks: int32 [R] 1 for each rank that took part, as seen by this rank; None unless `active_ranks`
        or on_timeout="mask" was passed.
      statistics: the statistics that were passed plus those of this dispatch; None if none were passed.
    """

    x: Rows
    row_weights: jax.Array | None
    group_sizes: jax.Array
    tokens_per_expert: jax.Array
    num_tokens: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    handle: Handle
    active_ranks: jax.Array | None
    statistics: DispatchStatistics | None

    def row_experts(self) -> jax.Array:
        """Returns int32 [C] or [L, C]: the local expert of each row, -1 in padding and tail.

        Each call computes it, from one rank's shard. Call it inside the shard_map of the dispatch.
        """
        handle = OpArguments("row_experts").handle(self.handle)
        return in_buffers(handle.routing, row_experts(handle))

    def is_row(self) -> jax.Array:
        """Returns bool [C] or [L, C]: which rows hold a token, not padding or tail."""
        return self.row_experts() >= 0

    def row_sources(self) -> RowSources:
        """Returns the source rank and token of each row, from the handle alone.

        Call it inside the shard_map of the dispatch.
        """
        handle = OpArguments("row_sources").handle(self.handle)
        assert handle.received_rows is not None  # by expert
        choice = invert(handle.received_rows, handle.routing.capacity)
        per_rank = max(handle.routing.num_tokens * handle.routing.top_k, 1)
        rank = jnp.where(choice < 0, -1, choice // per_rank)
        token = jnp.where(choice < 0, -1, choice % per_rank // handle.routing.top_k)
        return RowSources(*in_buffers(handle.routing, (rank, token)))

    def to_topk(self, values: ArrayLike) -> jax.Array:
        """Sends a value of each row back to the choice that the row stands for.

        Args:
          values: floating [C] or [L, C], such as weights that the experts computed. Differentiable.

        Returns:
          float32 [T, K], 0 where a choice is unused or was dropped. It communicates with all ranks, as a
          `combine` without `active_ranks` does.
        """
        check = OpArguments("to_topk")
        handle, backend = check.open_handle(self.handle, None)
        routing = handle.routing
        values = check.weights("values", values, routing.buffer, f"[{routing.axes}]")
        handle, values = align_axes((handle, values.reshape(routing.capacity)), routing.ranks.axes)
        _, returned = pull(backend, handle, Pull((), weights=values))
        assert returned is not None
        return returned

    def dropped_per_expert(self) -> jax.Array:
        """Returns int32 [L]: rows of each expert that were dropped because the buffer here was full.

        Rows dropped between domains (`domain_capacity`) are not among them; `num_dropped` counts both.
        """
        return self.handle.expert_counts - self.tokens_per_expert
