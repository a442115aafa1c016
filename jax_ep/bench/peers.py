"""Round trips with JAX's own collectives, for comparison."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ep.bench.shapes import Shape

AXIS = "ep"


def ragged_all_to_all(shape: Shape, size: int, capacity: int | None = None) -> tuple[Callable, Callable]:
    """Returns a dispatch by expert, and its combine.

    The dispatch sorts the rows by expert, exchanges them, and groups the received rows by expert. The combine
    multiplies them by the weights [T, K], if there are any.
    """
    local = shape.experts // size
    num_sent = shape.tokens * shape.top_k
    if capacity is None:
        capacity = int(num_sent * 1.5)  # a uniform routing sends each rank little more than `num_sent` rows

    def dispatch(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=shape.experts).reshape(size, local)
        all_counts = jax.lax.all_gather(counts, AXIS)  # [source, rank, local expert]
        rank = jax.lax.axis_index(AXIS)
        send_sizes = counts.sum(axis=1)  # rows to each rank
        receive_sizes = all_counts[:, rank].sum(axis=1)  # rows from each rank
        sizes = all_counts.sum(axis=2)
        # First rows of the blocks in this rank's operand and result.
        send_starts = jnp.cumsum(send_sizes) - send_sizes
        receive_starts = jnp.cumsum(receive_sizes) - receive_sizes
        # First rows of this rank's blocks in the results and operands of the other ranks.
        remote_receive_starts = (jnp.cumsum(sizes, axis=0) - sizes)[rank]
        remote_send_starts = (jnp.cumsum(sizes, axis=1) - sizes)[:, rank]
        received = jax.lax.ragged_all_to_all(
            x[order // shape.top_k],
            jnp.zeros((capacity, x.shape[1]), x.dtype),
            send_starts,
            send_sizes,
            remote_receive_starts,
            receive_sizes,
            axis_name=AXIS,
        )
        expert = jnp.repeat(
            jnp.tile(jnp.arange(local), size),
            all_counts[:, rank].reshape(-1),
            total_repeat_length=capacity,
        )
        expert = jnp.where(jnp.arange(capacity) < receive_sizes.sum(), expert, local)
        regroup = jnp.argsort(expert, stable=True)
        state = (order, regroup, receive_starts, receive_sizes, remote_send_starts, send_sizes)
        return received[regroup], state

    def combine(y: jax.Array, state: tuple, weights: jax.Array | None = None) -> jax.Array:
        order, regroup, receive_starts, receive_sizes, remote_send_starts, send_sizes = state
        returned = jax.lax.ragged_all_to_all(
            jnp.zeros_like(y).at[regroup].set(y),
            jnp.zeros((num_sent, y.shape[1]), y.dtype),
            receive_starts,
            receive_sizes,
            remote_send_starts,
            send_sizes,
            axis_name=AXIS,
        )
        rows = jnp.zeros_like(returned).at[order].set(returned)
        rows = rows.reshape(-1, shape.top_k, y.shape[1]).astype(jnp.float32)
        rows = rows if weights is None else rows * weights[:, :, None]
        return rows.sum(axis=1).astype(y.dtype)

    return dispatch, combine


def group_sizes(ids: jax.Array, shape: Shape, size: int) -> jax.Array:
    """Returns int32 [L]: how many rows each expert of this rank receives."""
    counts = jax.lax.psum(jnp.bincount(ids.reshape(-1), length=shape.experts), AXIS)
    return counts.reshape(size, -1)[jax.lax.axis_index(AXIS)]


def all_gather(_: Shape, __: int) -> tuple[Callable, Callable]:
    """Returns a dispatch that sends all tokens to all ranks, and a combine that adds the ranks' sums.

    The ranks do not select the tokens of their experts, so the time is a lower bound.
    """

    def dispatch(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
        # Without the barrier XLA would simplify the pair of collectives.
        return jax.lax.optimization_barrier(jax.lax.all_gather(x, AXIS, tiled=True)), ()

    def combine(y: jax.Array, _: tuple) -> jax.Array:
        return jax.lax.psum_scatter(y, AXIS, tiled=True)

    return dispatch, combine
