"""Replicas of experts' weights: pieces of arrays that travel as rows, as a plan places them.

A push along a handle that this module makes. So its gradient is the pull along the same handle: it sums the
gradients of all instances at the expert's home, in float32, in the order of the ranks. Redundant experts lie
beside the home experts, which are not copied, and the gradients of home experts are summed where they lie.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._checks import PyTree
from jax_ep._group.group import Group, ranks_of
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.vmap import with_vmap_rule
from jax_ep._placement.plan import is_first
from jax_ep._rows.dtypes import is_differentiable
from jax_ep._rows.weights import PhysicalWeights
from jax_ep._transport.backend import Backend, Leaves, Pull, Push
from jax_ep._transport.collectives import rank
from jax_ep._transport.push_pull import push
from jax_ep._transport.routing import Handle, Routing, for_backward

# The most bytes of a piece, if an array can be cut so. Pieces of 32 KB took 1.4 times as long, and those of
# 256 KB as long.
PIECE_BYTES = 128 * 1024
# Pieces are copied in bulk if they are multiples of this.
PIECE_ALIGNMENT = 16


def num_pieces(elements: int, bits: int) -> int:
    """Returns into how many rows an expert's array is cut, of `elements` elements of `bits` bits.

    The fewest that are short enough and can be copied in bulk. 1 if there is no such number.
    """
    if elements * bits <= 8 * PIECE_BYTES:
        return 1
    least = -(-elements * bits // (8 * PIECE_BYTES))
    small = [d for d in range(1, math.isqrt(elements) + 1) if elements % d == 0]
    divisors = [*small, *(elements // d for d in reversed(small))]
    return next((d for d in divisors if d >= least and can_cut(elements, bits, d)), 1)


def can_cut(elements: int, bits: int, pieces: int) -> bool:
    """Returns whether an expert's array can be cut into so many pieces that are copied in bulk."""
    return elements % pieces == 0 and (elements // pieces * bits) % (8 * PIECE_ALIGNMENT) == 0


class Destinations(NamedTuple):
    """Destinations of this rank's experts. L home experts, N physical experts a rank."""

    instance: jax.Array  # [L, R] index, among the N experts of a rank, of its instance of an expert; or -1
    is_filled: jax.Array  # bool [N] an expert arrives in this place of this rank


def destinations_of(group: Group, physical_to_logical: jax.Array, num_experts: int) -> Destinations:
    """Returns where the instances of this rank's experts are. physical_to_logical [P]."""
    num_ranks, local, me = group.size, num_experts // group.size, rank(ranks_of(group)).astype(jnp.int32)
    hosted = physical_to_logical.reshape(num_ranks, -1)
    my_experts = me * local + jnp.arange(local, dtype=jnp.int32)
    is_mine = hosted[None] == my_experts[:, None, None]  # [L, R, N]
    instance = jnp.argmax(is_mine, axis=2).astype(jnp.int32)
    hosted_here = jnp.take(hosted, me, axis=0)
    is_filled = (hosted_here >= 0) & (hosted_here < num_experts) & is_first(hosted_here)
    return Destinations(jnp.where(jnp.any(is_mine, axis=2), instance, -1), is_filled)


def routing_of(group: Group, num_experts: int, num_instances: int, pieces: int) -> Routing:
    """Returns the routing of experts that are cut into pieces: each piece is a token."""
    domains = group.size // group.ranks_per_domain
    tokens = num_experts // group.size * pieces
    return Routing(
        ranks=ranks_of(group),
        order="placed",
        num_tokens=tokens,
        top_k=domains,
        num_experts=group.size,
        capacity=num_instances // group.size * pieces,
        expert_alignment=pieces,
        domain_rows=tokens if domains > 1 else 0,
    )


def send_placed(
    backend: Backend, routing: Routing, destinations: Destinations, pieces: int, leaves: Leaves
) -> Leaves:
    """Sends arrays [L, ...] of this rank's experts to all their instances of a given map.

    Returns those here: [N, ...].
    """
    handle = _handle(backend, routing, destinations, pieces)
    moved, _ = push(backend, handle, Push(_cut(routing, leaves)))
    return _whole(routing, moved, leaves)


def send_replicas(
    backend: Backend, routing: Routing, destinations: Destinations, pieces: int, leaves: Leaves
) -> list[PhysicalWeights]:
    """Sends arrays [L, ...] of this rank's experts to places of other ranks. Returns them, and those here."""
    handle = _handle(backend, routing, destinations, pieces)
    push_all = with_vmap_rule(
        functools.partial(_push_replicas, backend), functools.partial(_push_replicas_of_batch, backend)
    )
    return list(map(PhysicalWeights, *push_all(handle, leaves)))


@custom_vjp(0)
def _push_replicas(backend: Backend, handle: Handle, leaves: Leaves) -> tuple[Leaves, Leaves]:
    """Returns arrays [L, ...] and those of the places [S, ...]. One pull sums the gradients of both."""
    moved, _ = push(backend, handle, Push(_cut(handle.routing, leaves)))
    return leaves, _whole(handle.routing, moved, leaves)


def _push_replicas_forward(
    backend: Backend, handle: Handle, leaves: Leaves
) -> tuple[tuple[Leaves, Leaves], Handle]:
    # Without a call of _push_replicas JAX sees that the leaves are returned, and a scan does not store them.
    moved, _ = push(backend, handle, Push(_cut(handle.routing, leaves)))
    return (leaves, _whole(handle.routing, moved, leaves)), for_backward(handle)


def _push_replicas_backward(
    backend: Backend, handle: Handle, cotangents: tuple[Leaves, Leaves]
) -> tuple[None, tuple[jax.Array | None, ...]]:
    sums = [
        _pull_replicas(backend, handle, home, moved) if is_differentiable(home.dtype) else None
        for home, moved in zip(*cotangents, strict=True)
    ]
    return None, tuple(sums)


_push_replicas.defvjp(_push_replicas_forward, _push_replicas_backward)


def _push_replicas_of_batch(
    backend: Backend, is_batched: tuple[PyTree, tuple[bool, ...]], handle: Handle, leaves: Leaves
) -> tuple[tuple[Leaves, Leaves], object]:
    """Does what `_push_replicas` does for each element of a batch.

    Arrays that are the same for the whole batch stay so, and JAX adds the gradients of their replicas. A
    custom VJP cannot return such arrays: JAX before 0.12 counts their cotangents once for each element, and
    later versions raise ValueError.
    """
    handle_axes, leaf_axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
    if all(axis == 0 for axis in leaf_axes):
        call = functools.partial(_push_replicas, backend)
        results = jax.vmap(call, (handle_axes, leaf_axes))(handle, leaves)
        return results, jax.tree.map(lambda _: True, results)

    def push_one(handle: Handle, leaves: Leaves) -> Leaves:
        moved, _ = push(backend, handle, Push(_cut(handle.routing, leaves)))
        return _whole(handle.routing, moved, leaves)

    moved = jax.vmap(push_one, (handle_axes, leaf_axes))(handle, leaves)
    return (leaves, moved), (is_batched[1], (True,) * len(moved))


@custom_vjp(0)
def _pull_replicas(backend: Backend, handle: Handle, home: jax.Array, moved: jax.Array) -> jax.Array:
    """Returns an array [L, ...] plus the sums of its replicas [S, ...]: the transpose of `_push_replicas`."""
    rows = moved.reshape(handle.routing.capacity, -1)
    biases = _cut(handle.routing, (home,))
    sums, _, _ = backend.pull(handle, Pull((rows,), biases=biases, adds_in_place=True))
    return sums[0].reshape(home.shape)


def _pull_replicas_forward(
    backend: Backend, handle: Handle, home: jax.Array, moved: jax.Array
) -> tuple[jax.Array, Handle]:
    return _pull_replicas(backend, handle, home, moved), for_backward(handle)


def _pull_replicas_backward(
    backend: Backend, handle: Handle, cotangent: jax.Array
) -> tuple[None, jax.Array, jax.Array]:
    (home,), (moved,) = _push_replicas(backend, handle, (cotangent,))
    return None, home, moved


_pull_replicas.defvjp(_pull_replicas_forward, _pull_replicas_backward)


def _handle(backend: Backend, routing: Routing, destinations: Destinations, pieces: int) -> Handle:
    instance = destinations.instance[:, None]
    piece = jnp.arange(pieces, dtype=jnp.int32)[None, :, None]
    rows = jnp.where(instance < 0, -1, instance * pieces + piece).reshape(-1, routing.num_ranks)
    domains = jnp.any(rows.reshape(rows.shape[0], routing.num_domains, -1) >= 0, axis=2)
    return backend.place(
        routing, domains, rows, jnp.where(destinations.is_filled, pieces, 0).astype(jnp.int32)
    )


def _cut(routing: Routing, leaves: Leaves) -> Leaves:
    """Returns arrays [L, ...] as pieces [T, ...]."""
    return tuple(leaf.reshape(routing.num_tokens, -1) for leaf in leaves)


def _whole(routing: Routing, moved: Leaves, leaves: Leaves) -> Leaves:
    """Returns pieces as arrays of experts, of the shapes that the leaves [L, ...] have for an expert."""
    pieces = routing.num_tokens // leaves[0].shape[0]
    pairs = zip(moved, leaves, strict=True)
    return tuple(rows.reshape(routing.capacity // pieces, *leaf.shape[1:]) for rows, leaf in pairs)
