"""The rows of several chunks, brought together by expert."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def joint_index(sizes: Sequence[jax.Array], num_rows: int) -> tuple[jax.Array, jax.Array]:
    """For each of the joint rows [num_rows] its chunk, and its row there.

    `sizes` are the group sizes [L] of each chunk. Joint rows lie by expert, then chunk. Past the last of them
    the answer means nothing, and may be out of bounds.
    """
    of_chunks = jnp.stack(sizes)  # [N, L]
    starts = jnp.cumsum(of_chunks, axis=1) - of_chunks
    segments = of_chunks.T.reshape(-1)  # by expert, then chunk
    ends = jnp.cumsum(segments, dtype=jnp.int32)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    segment = jnp.sum(ends[None] <= row[:, None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, segments.size - 1)
    chunk, expert = segment % len(sizes), segment // len(sizes)
    return chunk, row - (ends - segments)[segment] + starts[chunk, expert]


def joint_rows(chunks: Sequence[jax.Array], index: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The rows [C, n] of all chunks as joint rows."""
    chunk, row = index
    joint = None
    for number, rows in enumerate(chunks):
        # Where another chunk's row is wanted, row 0 is read again and again: that costs no traffic.
        mine = chunk == number
        found = jnp.take(rows, jnp.where(mine, row, 0), axis=0, mode="clip")
        joint = found if joint is None else jnp.where(mine[:, None], found, joint)
    assert joint is not None
    return joint
