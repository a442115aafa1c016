"""dispatch: tokens to the ranks, or the experts, that they chose."""

import dataclasses
from typing import Any

import jax

from jax_ep import _check
from jax_ep._exchange import move_bits, pull_cotangents, push, static_arguments
from jax_ep._extension import Implementation
from jax_ep._group import Group
from jax_ep._handle import Handle, Order, Routing
from jax_ep._manual import require_manual, vary_alike
from jax_ep._remat import CHECKPOINT_HANDLE, CHECKPOINT_ROWS, name_all
from jax_ep._results import Routed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What arrived at this rank. C rows of capacity, K choices, L experts on this rank.

    After a cached dispatch only `x` and `handle` are set.
    """

    x: Any
    """[C, ...] rows, an array or pytree as passed in; zero in padding and tail."""
    topk_idx: jax.Array | None
    """By rank int32 [C, K]: local ids of the experts here, -1 elsewhere and in the tail. By expert None."""
    topk_weights: jax.Array | None
    """float32, by rank [C, K], 0 where the id is -1; by expert [C]. None if no weights were passed."""
    tokens_per_expert: jax.Array | None
    """int32 [L] kept rows of each expert (by rank: kept (row, k) pairs)."""
    group_sizes: jax.Array | None
    """By expert int32 [L]: rows of each block, padding included, as `jax.lax.ragged_dot` takes them."""
    num_tokens: jax.Array | None
    """int32 [1] rows kept at this rank, without padding."""
    num_dropped: jax.Array | None
    """int32 [1] rows dropped at this rank for want of capacity."""
    handle: Handle
    """Where everything went: for `combine` and for further payloads."""


def worst_case_capacity(
    order: Order, rows: int, top_k: int, num_local_experts: int, expert_alignment: int
) -> int:
    """Rows that hold any routing of `rows` tokens (R * T) at one receiver."""
    if order == "rank":
        return rows
    padded = rows * min(top_k, num_local_experts) + num_local_experts * (expert_alignment - 1)
    return padded // expert_alignment * expert_alignment


def dispatch(
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    *,
    group: Group,
    num_experts: int | None = None,
    order: Order = "rank",
    capacity: int | None = None,
    expert_alignment: int = 1,
    handle: Handle | None = None,
    implementation: str | None = None,
) -> Dispatched:
    """Sends each token to the ranks of its experts. Call it inside `jax.shard_map`.

    Shapes are one rank's shard: T tokens on this rank, K choices a token, R ranks, E experts in all,
    L = E / R of them on each rank (expert e on rank e // L).

    Args:
      x: [T, ...] array or pytree of such arrays, of any dtype. Rows are moved bit for bit. Floating
        leaves of 16 bits or more are differentiable.
      topk_idx: int32 or int64 [T, K] expert ids. -1 means unused; so do ids out of range, and an id
        that repeats an earlier one of its token.
      topk_weights: floating [T, K], or None. Differentiable.
      group: the ranks.
      num_experts: E, a multiple of R.
      order: "rank": one row for each (token, rank), by source rank, then token. "expert": one row for
        each (token, expert), by local expert, then source rank, then token.
      capacity: C, rows of the result. None means the worst case: by rank R * T; by expert
        a * floor((R * T * min(K, L) + L * (a - 1)) / a), a the alignment. Rows past C are dropped in the
        stated order and carry no gradient.
      expert_alignment: a; by expert each block starts at a multiple of it. Padding rows are zero.
      handle: the handle of an earlier dispatch: the same routing again for another payload. All
        other routing arguments must then stay at their defaults.
      implementation: None, "ffi" or "xla".

    Raises:
      ValueError: an argument is out of range or does not fit the others, the handle belongs to
        another group or shape, or no shard_map binds the group's axis.
      TypeError: a leaf of x, or the handle, is of a kind that cannot be sent.
    """
    require_manual("dispatch", group)
    chosen = group._resolve(implementation)
    leaves, tree = jax.tree.flatten(x)
    if handle is not None:
        given = (topk_idx, topk_weights, num_experts, capacity)
        if any(argument is not None for argument in given) or order != "rank" or expert_alignment != 1:
            raise ValueError(
                "dispatch: a handle already says how to route; leave topk_idx, topk_weights, num_experts, "
                "order, capacity and expert_alignment at their defaults"
            )
        return _dispatch_again(leaves, tree, _check.handle("dispatch", handle, group), chosen)
    if topk_idx is None or num_experts is None:
        raise ValueError("dispatch: pass topk_idx and num_experts, or the handle of an earlier dispatch")
    if order not in ("rank", "expert"):
        raise ValueError(f"dispatch: order must be 'rank' or 'expert', got {order!r}")
    ids = _check.topk_idx("dispatch", topk_idx)
    num_tokens, top_k = ids.shape
    leaves = _check.leaves("dispatch", "x", leaves, num_tokens, "T", "of topk_idx")
    num_experts = _check.num_experts("dispatch", num_experts, group.size)
    alignment = _check.at_least_one("dispatch", "expert_alignment", expert_alignment)
    if order == "rank" and alignment != 1:
        raise ValueError("dispatch: expert_alignment needs order='expert'; rows by rank are not padded")
    worst = worst_case_capacity(order, group.size * num_tokens, top_k, num_experts // group.size, alignment)
    capacity = _check.at_least_one("dispatch", "capacity", worst if capacity is None else capacity)
    routing = Routing(group, order, num_tokens, top_k, num_experts, capacity, alignment)
    weights = []
    if topk_weights is not None:
        weights = [_check.topk_weights("dispatch", topk_weights, ids.shape, "[T, K]")]
    ids, *varied = vary_alike([ids, *leaves, *weights], group._axes)
    leaves, weights = tuple(varied[: len(leaves)]), varied[len(leaves) :]
    with jax.named_scope("jax_ep.dispatch"):
        out = _route((routing, chosen), leaves, ids, weights[0] if weights else None)
    return Dispatched(
        x=jax.tree.unflatten(tree, out.rows),
        topk_idx=out.topk_idx,
        topk_weights=out.topk_weights,
        tokens_per_expert=out.tokens_per_expert,
        group_sizes=out.group_sizes,
        num_tokens=out.num_tokens,
        num_dropped=out.num_dropped,
        handle=out.handle,
    )


def _dispatch_again(
    leaves: list[Any], tree: Any, handle: Handle, implementation: Implementation
) -> Dispatched:
    group = handle.routing.group
    leaves = _check.leaves("dispatch", "x", leaves, handle.routing.num_tokens, "T", "of the handle")
    arrays, handle_tree = jax.tree.flatten(handle)
    varied = vary_alike([*leaves, *arrays], group._axes)
    handle = jax.tree.unflatten(handle_tree, varied[len(leaves) :])
    with jax.named_scope("jax_ep.dispatch"):
        rows, _ = push(implementation, handle, tuple(varied[: len(leaves)]), None)
    x = jax.tree.unflatten(tree, name_all(rows, CHECKPOINT_ROWS))
    return Dispatched(x, None, None, None, None, None, None, handle)


@static_arguments(0)
def _route(
    how: tuple[Routing, Implementation],
    leaves: tuple[jax.Array, ...],
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
) -> Routed:
    routing, implementation = how
    out = move_bits(
        implementation, lambda module, bits: module.dispatch(routing, bits, topk_idx, topk_weights), leaves
    )
    return Routed(*out)


def _route_forward(how: Any, leaves: Any, topk_idx: jax.Array, topk_weights: Any) -> Any:
    rows, weights, *indices = _route(how, leaves, topk_idx, topk_weights)
    # Named here, so that what the backward pass keeps are the named values.
    out = Routed(
        name_all(rows, CHECKPOINT_ROWS),
        name_all(weights, CHECKPOINT_ROWS),
        *name_all(indices, CHECKPOINT_HANDLE),
    )
    return out, out.handle


def _route_backward(how: tuple[Routing, Implementation], handle: Handle, cotangents: Routed) -> Any:
    rows, weights = pull_cotangents(how[1], handle, cotangents.rows, cotangents.topk_weights)
    return rows, None, weights


_route.defvjp(_route_forward, _route_backward)
