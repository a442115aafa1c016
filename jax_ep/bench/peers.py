"""The ways that JAX itself has to bring rows to their experts and back, for comparison."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ep.bench.shapes import Shape

AXIS = "ep"


def ragged_all_to_all(shape: Shape, size: int) -> tuple[Callable, Callable]:
    """Dispatch by expert and combine: rows sorted by expert, exchanged, regrouped; and the way back."""
    local = shape.experts // size
    sent = shape.tokens * shape.top_k
    capacity = int(sent * 1.5)  # rows a rank can take; uniform routings need little more than `sent`

    def dispatch(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=shape.experts).reshape(size, local)
        everywhere = jax.lax.all_gather(counts, AXIS)  # [source, rank, local expert]
        me = jax.lax.axis_index(AXIS)
        to = counts.sum(axis=1)  # rows for each rank
        of = everywhere[:, me].sum(axis=1)  # rows from each rank
        rows = everywhere.sum(axis=2)
        first_there = (jnp.cumsum(rows, axis=0) - rows)[me]
        first_here = (jnp.cumsum(rows, axis=1) - rows)[:, me]
        starts, arrived = jnp.cumsum(to) - to, jnp.cumsum(of) - of
        received = jax.lax.ragged_all_to_all(
            x[order // shape.top_k],
            jnp.zeros((capacity, x.shape[1]), x.dtype),
            starts,
            to,
            first_there,
            of,
            axis_name=AXIS,
        )
        expert = jnp.repeat(
            jnp.tile(jnp.arange(local), size),
            everywhere[:, me].reshape(-1),
            total_repeat_length=capacity,
        )
        expert = jnp.where(jnp.arange(capacity) < of.sum(), expert, local)
        regroup = jnp.argsort(expert, stable=True)
        return received[regroup], (order, regroup, arrived, of, first_here, to)

    def combine(y: jax.Array, state: tuple) -> jax.Array:
        order, regroup, arrived, of, first_here, to = state
        back = jax.lax.ragged_all_to_all(
            jnp.zeros_like(y).at[regroup].set(y),
            jnp.zeros((sent, y.shape[1]), y.dtype),
            arrived,
            of,
            first_here,
            to,
            axis_name=AXIS,
        )
        rows = jnp.zeros_like(back).at[order].set(back)
        return rows.reshape(-1, shape.top_k, y.shape[1]).astype(jnp.float32).sum(axis=1).astype(y.dtype)

    return dispatch, combine


def all_gather(_: Shape, __: int) -> tuple[Callable, Callable]:
    """All tokens to all ranks, which then would pick theirs; and the partial sums back."""

    def dispatch(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
        # A barrier, for XLA knows the two to cancel.
        return jax.lax.optimization_barrier(jax.lax.all_gather(x, AXIS, tiled=True)), ()

    def combine(y: jax.Array, _: tuple) -> jax.Array:
        return jax.lax.psum_scatter(y, AXIS, tiled=True)

    return dispatch, combine
