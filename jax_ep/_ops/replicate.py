"""replicate: the weights of redundant experts."""

import math

import jax

from jax_ep import checkpoint_names
from jax_ep._checks import PyTree
from jax_ep._extension import Implementation
from jax_ep._group.group import Group, ranks_of
from jax_ep._jax.sharding import align_axes
from jax_ep._ops.arguments import OpArguments
from jax_ep._placement.pieces import (
    can_cut,
    destinations_of,
    num_pieces,
    routing_of,
    send_placed,
    send_replicas,
)
from jax_ep._placement.placement import Placement
from jax_ep._rows.checkpoint import name_all
from jax_ep._rows.weights import PhysicalWeights
from jax_ep._transport.choice import Asynchronous, choose
from jax_ep._transport.payload import Payload


def replicate(
    w: PyTree, placement: Placement, *, group: Group, implementation: Implementation | None = None
) -> PyTree:
    """Returns the weights of all experts that a placement has on this rank. Call it inside `jax.shard_map`.

    Weights travel bit for bit from their home to the ranks that need them. In the backward pass, the
    home rank of an expert adds the gradients of all its instances in float32, in the order of the ranks. With
    redundant experts, the gradient of the home expert comes last. So a repetition gives the same bits.
    Optimizers and checkpoints see only home experts.

    Args:
      w: array [L, ...], or pytree of such arrays, of this rank's home experts, such as a `QuantizedArray`.
        Floating leaves of 16 bits or more are differentiable.
      placement: a `Placement`, the same on all ranks.
      group: the ranks.
      implementation: None, "ffi" or "xla".

    Returns:
      A pytree like w. With redundant experts, each array becomes a `PhysicalWeights`: its `home` is the array
      itself, and its `redundant` [S, ...] holds the weights of the places, zero in empty ones. With S = 0 the
      result is w. With the placement of a map, each array becomes an array [N, ...] of the rank's physical
      experts, in the order of the map, zero in empty places.

    Raises:
      ValueError: a leaf does not begin with L, the placement is of another number of ranks, or no shard_map
        binds the group's axis.
      TypeError: a leaf is of a kind that cannot be sent, or placement is no `Placement`.
    """
    return replicate_as(OpArguments("replicate"), "w", w, placement, group, implementation)


def replicate_as(
    check: OpArguments,
    name: str,
    w: PyTree,
    placement: Placement,
    group: Group,
    implementation: str | Asynchronous | None,
) -> PyTree:
    """Does what `replicate` does. Errors in w name the op of `check` and the argument `name`."""
    check.require_manual(group)
    check.placement(placement, group)
    num_experts = placement.num_logical_experts
    local = num_experts // group.size
    payload = Payload.check(check, name, w, (local,), "L", "the experts of a rank")
    payload, physical_to_logical = align_axes((payload, placement.physical_to_logical), ranks_of(group).axes)
    places = placement.num_redundant_experts
    if places == 0:
        return payload.rebuild(payload.leaves)
    if places is None:
        send, num_instances = send_placed, placement.num_experts
    else:
        send, num_instances = send_replicas, group.size * places
        physical_to_logical = physical_to_logical.reshape(group.size, -1)[:, local:]
    with jax.named_scope("jax_ep.replicate"):
        destinations = destinations_of(group, physical_to_logical, num_experts)
        weights: list[jax.Array | PhysicalWeights] = list(payload.leaves)
        for pieces, alike in _by_pieces(payload.leaves).items():
            routing = routing_of(group, num_experts, num_instances, pieces)
            backend = choose(group, implementation, is_empty=routing.is_empty)
            moved = send(backend, routing, destinations, pieces, tuple(payload.leaves[i] for i in alike))
            for i, leaf in zip(alike, moved, strict=True):
                weights[i] = leaf
        return payload.rebuild(tuple(weights), _named)


def _named(w: PyTree) -> PyTree:
    """Names what was sent for `jax.checkpoint`."""
    if isinstance(w, PhysicalWeights):
        return PhysicalWeights(w.home, name_all(w.redundant, checkpoint_names.replicas))
    return name_all(w, checkpoint_names.replicas)


def _by_pieces(leaves: tuple[jax.Array, ...]) -> dict[int, list[int]]:
    """Returns the leaves, by index, that are cut into the same number of pieces: one push each.

    Smaller leaves are cut like a larger one where they can be, because each push meets the other ranks.
    """
    sizes = [(math.prod(leaf.shape[1:]), jax.dtypes.itemsize_bits(leaf.dtype)) for leaf in leaves]
    least = [num_pieces(*size) for size in sizes]
    grouped: dict[int, list[int]] = {}
    for index in sorted(range(len(leaves)), key=lambda index: -least[index]):
        pieces = next((pieces for pieces in grouped if can_cut(*sizes[index], pieces)), least[index])
        grouped.setdefault(pieces, []).append(index)
    return grouped
