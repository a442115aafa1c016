"""Hop 1: blocks of rows between the ranks of the same index on all domains.

A rank sends a block of `domain_rows` rows to each domain, with those of its tokens that have an expert there.
If the blocks have room for all tokens, each token has the row of its number. Otherwise the tokens follow one
another, and those past the end are dropped.
"""

import itertools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_ep._checks import PyTree
from jax_ep._rows.indexing import invert, take
from jax_ep._transport.backend import DomainBackend
from jax_ep._transport.routing import Handle, Routing, domains_of

Tree = TypeVar("Tree")

MOST_BYTES_OF_ONE_EXCHANGE = 32 << 20
"""Most bytes of the arrays that cross the network together. Of few bytes, an exchange takes the network's
latency, however few they are. Of many, the copy that joins the arrays needs memory without being faster."""

MOST_CHOICES_OF_ONE_EXCHANGE = 1 << 16
"""Most choices of all ranks that travel beside the rows of a dispatch. Each rank computes the destinations of
all of them."""


def makes_one_exchange(routing: Routing, payloads: PyTree) -> bool:
    """Returns whether all arrays of a dispatch of payloads [T, ...] cross the network together.

    By rank, a token counts as a choice for each rank, because it has a destination for each.
    """
    columns = max(routing.top_k, routing.rows_per_token)
    of_choices = 4 * routing.num_tokens * routing.top_k
    of_rows = routing.domain_rows * sum(
        _bytes(array) // routing.num_tokens for array in jax.tree.leaves(payloads)
    )
    return (
        routing.num_ranks * routing.num_tokens * columns <= MOST_CHOICES_OF_ONE_EXCHANGE
        and routing.num_domains * (of_choices + of_rows) <= MOST_BYTES_OF_ONE_EXCHANGE
    )


def block_rows(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns [T, domains]: the row of each token in the block of each domain, -1 not sent or dropped."""
    numbers = jnp.arange(routing.num_domains, dtype=jnp.int32)[None, None]
    is_sent = jnp.any(domains_of(routing, ids)[:, :, None] == numbers, axis=1)
    if routing.domain_rows == routing.num_tokens:
        rows = jnp.arange(routing.num_tokens, dtype=jnp.int32)[:, None]
        return jnp.where(is_sent, rows, -1)
    rows = jnp.cumsum(is_sent, axis=0, dtype=jnp.int32) - is_sent.astype(jnp.int32)
    return jnp.where(is_sent & (rows < routing.domain_rows), rows, -1)


def tokens_of_blocks(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns [domains, rows of a block]: the token in each row, -1 if none."""
    rows = block_rows(routing, ids)
    if routing.domain_rows == routing.num_tokens:
        return rows.T
    first = routing.domain_rows * jnp.arange(routing.num_domains, dtype=jnp.int32)
    entries = invert(jnp.where(rows < 0, -1, first[None] + rows), routing.num_domains * routing.domain_rows)
    tokens = jnp.where(entries < 0, -1, entries // routing.num_domains)
    return tokens.reshape(routing.num_domains, routing.domain_rows)


def without_dropped(routing: Routing, ids: jax.Array) -> jax.Array:
    """Returns the ids [T, K], -1 also for choices on domains whose blocks are full."""
    if routing.domain_rows == routing.num_tokens:
        return ids
    rows = jnp.take_along_axis(block_rows(routing, ids), jnp.maximum(domains_of(routing, ids), 0), axis=1)
    return jnp.where(rows < 0, -1, ids)


def send_to_domains(outer: DomainBackend, routing: Routing, ids: jax.Array, arrays: Tree) -> Tree:
    """Sends payloads [T, ...] to the domains of their tokens.

    Returns [domains * rows of a block, ...] of each, zero where no token came.
    """
    tokens = tokens_of_blocks(routing, ids)
    blocks = jax.tree.map(lambda array: take(array, tokens), arrays)
    return rows_of_blocks(_exchange(outer, blocks))


def take_back(outer: DomainBackend, handle: Handle, arrays: Tree) -> list[Tree]:
    """Sends rows [domains * rows of a block, ...] back to the tokens from which they came.

    Returns, for each domain, its rows for this rank's tokens [T, ...], zero where it has none.
    """
    routing = handle.routing
    shape = (routing.num_domains, routing.domain_rows)
    blocks = jax.tree.map(lambda array: array.reshape(*shape, *array.shape[1:]), arrays)
    arrived, rows = _exchange(outer, blocks), block_rows(routing, handle.topk_idx)
    return [
        jax.tree.map(lambda array, d=d: take(array[d], rows[:, d]), arrived)
        for d in range(routing.num_domains)
    ]


def rows_of_blocks(blocks: Tree) -> Tree:
    """Returns the rows [domains * rows of a block, ...] of blocks [domains, rows of a block, ...]."""
    return jax.tree.map(lambda array: jax.lax.collapse(array, 0, 2), blocks)


def exchange_at_once(outer: DomainBackend, blocks: Tree) -> Tree:
    """Sends block d of each array [domains, ...] to domain d, together. Returns the blocks that arrive."""
    arrays, tree = jax.tree.flatten(blocks)
    words = [_as_words(array) for array in arrays]
    moved = outer.between_domains(jnp.concatenate(words, axis=1))
    ends = itertools.accumulate(part.shape[1] for part in words[:-1])
    parts = jnp.split(moved, list(ends), axis=1)
    arrived = [_from_words(part, array) for part, array in zip(parts, arrays, strict=True)]
    return jax.tree.unflatten(tree, arrived)


def _exchange(outer: DomainBackend, blocks: Tree) -> Tree:
    """Sends block d of each array [domains, ...] to domain d, together if they are small."""
    arrays = jax.tree.leaves(blocks)
    if len(arrays) > 1 and sum(map(_bytes, arrays)) <= MOST_BYTES_OF_ONE_EXCHANGE:
        return exchange_at_once(outer, blocks)
    return jax.tree.map(outer.between_domains, blocks)


def _bytes(array: jax.Array) -> int:
    return array.size * array.dtype.itemsize


def _as_words(blocks: jax.Array) -> jax.Array:
    """Returns the bytes of blocks [domains, ...] as int32 words [domains, n], the last of them padded."""
    flat = blocks.reshape(blocks.shape[0], -1)
    padding = -flat.shape[1] * flat.dtype.itemsize % 4 // flat.dtype.itemsize
    return jnp.pad(flat, ((0, 0), (0, padding))).view(jnp.int32)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Returns words [domains, n] as blocks of the shape and dtype of others."""
    return words.view(like.dtype)[:, : math.prod(like.shape[1:])].reshape(like.shape)
