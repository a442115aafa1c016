"""moe: the complete expert-parallel layer."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Literal, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_ep._checks import PyTree
from jax_ep._extension import Implementation
from jax_ep._group.group import Group
from jax_ep._ops.arguments import OpArguments
from jax_ep._ops.balance import balance_as
from jax_ep._ops.combine import combine_as
from jax_ep._ops.dispatch import dispatch_as
from jax_ep._ops.dispatched import DispatchedByExpert
from jax_ep._ops.gated_experts import (
    GatedExperts,
    combined_rows,
    first_product_of,
    shared_expert,
    with_first_product,
)
from jax_ep._ops.replicate import replicate_as
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._transport.backend import Push
from jax_ep._transport.choice import choose
from jax_ep._transport.fp8_rows import Quantize, check_quantize_gradient, check_quantize_sums
from jax_ep._transport.payload import Payload

Sums = TypeVar("Sums")
ExpertFn = Callable[[DispatchedByExpert[PyTree]], Sums] | Callable[[DispatchedByExpert[PyTree], PyTree], Sums]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """Row counts of one layer at this rank. L experts on this rank, or L + S with redundant ones. R ranks.

    Attributes:
      tokens_per_expert: int32 [L] kept rows of each expert; [L + S] with redundant ones.
      num_tokens: int32 [1] rows kept at this rank: a token counts once for each of its choices.
      num_dropped: int32 [1] rows dropped because the buffer of this rank was full.
      dropped_per_expert: int32 [L] these rows by expert, except those dropped between domains; [L + S] with
        redundant ones.
      num_invalid: int32 [1] ids of this rank's tokens that are neither -1 nor an expert, such as ids counted
        from 1.
      loads_before: int32 [R] rows of each rank if all were computed at home. This and the following fields
        are None without redundant experts. Every rank has the same values, so out_specs of P("ep") join R
        equal copies outside of the shard_map.
      loads_after: int32 [R] rows that each rank got, before drops.
      num_moved: int32 [1] rows of all ranks that were not computed at their expert's home.
      num_replicas: int32 [1] redundant experts of all ranks.
    """

    tokens_per_expert: jax.Array
    num_tokens: jax.Array
    num_dropped: jax.Array
    dropped_per_expert: jax.Array
    num_invalid: jax.Array
    loads_before: jax.Array | None = None
    loads_after: jax.Array | None = None
    num_moved: jax.Array | None = None
    num_replicas: jax.Array | None = None


@overload
def moe(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike,
    expert_fn: ExpertFn[Sums],
    *,
    group: Group,
    num_experts: int | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    quantize_sums: Literal["fp8"] | None = None,
    quantize_gradient: Literal["fp8"] | None = None,
    num_valid_tokens: ArrayLike | None = None,
    num_redundant_experts: int = 0,
    expert_params: PyTree = None,
    experts_apply_weights: bool = False,
    shared: GatedExperts | None = None,
    return_stats: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Sums: ...


@overload
def moe(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike,
    expert_fn: ExpertFn[Sums],
    *,
    group: Group,
    num_experts: int | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    quantize_sums: Literal["fp8"] | None = None,
    quantize_gradient: Literal["fp8"] | None = None,
    num_valid_tokens: ArrayLike | None = None,
    num_redundant_experts: int = 0,
    expert_params: PyTree = None,
    experts_apply_weights: bool = False,
    shared: GatedExperts | None = None,
    return_stats: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[Sums, MoEStats]: ...


def moe(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike,
    expert_fn: ExpertFn[Sums],
    *,
    group: Group,
    num_experts: int | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    domain_capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: Quantize | None = None,
    quantize_sums: Literal["fp8"] | None = None,
    quantize_gradient: Literal["fp8"] | None = None,
    num_valid_tokens: ArrayLike | None = None,
    num_redundant_experts: int = 0,
    expert_params: PyTree = None,
    experts_apply_weights: bool = False,
    shared: GatedExperts | None = None,
    return_stats: bool = False,
    implementation: Implementation | None = None,
) -> Sums | tuple[Sums, MoEStats]:
    """Computes a Mixture-of-Experts layer: sends tokens to experts, runs them, and returns weighted sums.

    Call it inside `jax.shard_map`, with `GatedExperts`, or with an `expert_fn` that closes over this rank's
    expert weights, or has them as `expert_params`. It calls `dispatch`, `expert_fn` and `combine`. Called by
    yourself, `dispatch` and `combine` have more options: other orders, ranks that may be missing, statistics,
    rounded scales.

    With `num_redundant_experts` it first calls `balance` and `replicate`: ranks with few rows compute rows of
    hot experts. If the places suffice, every rank then gets about T * K rows (docs/balance.md).

    Args:
      x: [..., T, H] tokens of this rank. Leading axes, such as a batch, are merged with T. In numbers of rows
        such as T * K, T is the number of all tokens of this rank.
      topk_idx: int32 or int64 [..., T, K] experts of each token, -1 unused.
      topk_weights: floating [..., T, K] of 16 bits or more.
      expert_fn: `GatedExperts`, or a function (sent: DispatchedByExpert) -> floating [C, H'] array, or pytree
        of such arrays. `sent.x` [C, H] holds the rows, sorted by local expert. `jax_ep.grouped_dot(sent.x, w,
        sent.group_sizes)` with w [L, H, H'] multiplies the rows of each expert by its matrix. (On NVIDIA GPUs
        `jax.lax.ragged_dot` is also correct, but multiplies all rows by every matrix.) Values in padding and
        tail rows are ignored. `moe` applies the weights afterwards, unless experts_apply_weights is true.
        With expert_params it is (sent, params), with arrays [L, ...], or with redundant experts a
        `PhysicalWeights` [L + S, ...] in place of each. `grouped_dot` and `gated_mlp` take it as it is, and
        `jnp.asarray(w)` is an array for other functions.
      group: the ranks.
      num_experts: E, in all. None with `GatedExperts`, which knows it.
      capacity: C, rows that this rank can take; None means the worst case of distinct ids, as for
        `dispatch`. With redundant experts None means 1.05 * T * K and the padding of each expert
        (`Placement.capacity`). Further rows are dropped and counted: their experts add nothing to the token.
        At least expert_alignment.
      capacity_factor: in place of a capacity, a multiple of T * K, the rows of a uniform routing, rounded up
        to a multiple of expert_alignment.
      domain_capacity: rows that this rank can receive in the hop between domains, in all, as for `dispatch`.
      expert_alignment: each expert's rows start at a multiple of it.
      quantize: how tokens travel to their experts, as for `dispatch`; to train, "fp8_dequantize", or "fp8" if
        expert_fn passes sent.x to `gated_mlp(..., quantize="fp8")` and uses it nowhere else. None means "fp8"
        for bfloat16 tokens of `GatedExperts(..., quantize="fp8")`.
      quantize_sums: "fp8" sends the sums of the experts' rows back as FP8, as `quantize` of `combine`.
      quantize_gradient: "fp8" sends the cotangent of the sums to the experts as FP8, as for `combine`.
      num_valid_tokens: int32 scalar, at most the number of all tokens. The leading axes are merged in
        row-major order, and tokens from this index on are ignored; their sums are zero. It is not a length
        for each sequence. None: all tokens.
      num_redundant_experts: S, the number of places on each rank for instances of other ranks' hot experts,
        from 0 to L; needs expert_params, or `GatedExperts`. `balance` has more options.
      expert_params: array or pytree of arrays [L, ...], the weights of this rank's home experts.
        Differentiable. None with `GatedExperts`, which has its own.
      experts_apply_weights: if true, expert_fn applies `sent.row_weights` (float32 [C]) itself, as
        `gated_mlp` does with `row_weights`, and `moe` sums the rows that it returns. If it applies them
        before its last product, the backward pass does not need these rows, which saves memory, or under
        `jax.checkpoint` a product. `GatedExperts` applies them there.
      shared: a shared expert, which every token goes to with weight 1: `GatedExperts` of one expert, whose
        w_up is [1, H, 2, F'] and w_down [1, F', H]. Each rank computes it for its own tokens, and its rows
        are added to the sums, in their dtype. Needs `GatedExperts` as expert_fn, whose `overlap` says whether
        the shared expert's products run while rows travel.
      return_stats: also return how many rows came, and how many were dropped.
      implementation: None, "ffi" or "xla": that of communication. The ops that expert_fn calls take their
        own `implementation`.

    Returns:
      [..., T, H'] sums over k of topk_weights[..., k] * expert_k(x), or of expert_k(x) with
      experts_apply_weights, in the dtype of expert_fn's result, plus rows of a shared expert; with
      return_stats `(sums, MoEStats)`.

    Raises:
      ValueError: an argument is out of range or does not fit the others, expert_fn returned another number
        of rows, or no shard_map binds the group's axis.
      TypeError: x, the ids or the weights are no array, expert_fn is neither a function nor `GatedExperts`,
        or what it returned is not floating.
    """
    if isinstance(x, QuantizedArray):
        raise TypeError(
            "moe: x must be an array of tokens, got QuantizedArray; pass the tokens as they are, with "
            "quantize='fp8' or 'fp8_dequantize', or call dispatch, which takes a QuantizedArray, and combine"
        )
    check = OpArguments("moe")
    x = check.array("x", x)
    topk_idx, topk_weights = (
        check.array("topk_idx", topk_idx),
        check.array("topk_weights", topk_weights),
    )
    if topk_idx.dtype == jnp.bool_:
        check.topk_idx(topk_idx)  # a routing map, whose shape does not fit either
    tokens = x.shape[:-1]
    if x.ndim < 2 or topk_idx.shape[:-1] != tokens or topk_weights.shape != topk_idx.shape:
        raise ValueError(
            "moe: x must be [..., T, H], topk_idx and topk_weights [..., T, K], with the same leading axes; "
            f"got {list(x.shape)}, {list(topk_idx.shape)} and {list(topk_weights.shape)}"
        )
    if not callable(expert_fn):
        raise TypeError(
            "moe: expert_fn must be GatedExperts or a function of the dispatched rows, got "
            f"{type(expert_fn).__name__}"
        )
    experts = expert_fn if isinstance(expert_fn, GatedExperts) else None
    if shared is not None:
        _check_shared(shared, experts)
    round_scale = False
    if experts is not None:
        if expert_params is not None:
            raise ValueError("moe: GatedExperts has its weights; leave expert_params out")
        if num_experts is None:
            num_experts = experts.num_experts * group.size
        if quantize is None and experts.quantize is not None and x.dtype == jnp.bfloat16:
            quantize = "fp8"
        round_scale = quantize is not None and experts.round_scale
        if num_redundant_experts:
            expert_params = experts
    if num_experts is None:
        raise ValueError("moe: num_experts must be given with a function; only GatedExperts knows it")
    if num_redundant_experts and expert_params is None:
        raise ValueError(
            "moe: num_redundant_experts needs expert_params, the weights [L, ...] that moe sends to other "
            "ranks; expert_fn then takes (sent, params)"
        )
    if experts is None:
        _check_signature(expert_fn, ("sent",) if expert_params is None else ("sent", "params"))
    x, topk_idx, topk_weights = map(_merge_leading, (x, topk_idx, topk_weights))
    beside = of_shared = None
    if experts is not None and shared is not None:
        if num_valid_tokens is not None:
            check.valid_tokens(num_valid_tokens, topk_idx)  # raises before it is used here
        of_shared = shared_expert(shared, x, num_valid_tokens)
        beside = first_product_of(of_shared, choose(group, implementation), experts.overlap)
    placement = None
    if num_redundant_experts:
        if num_valid_tokens is not None:
            topk_idx = check.valid_tokens(num_valid_tokens, topk_idx)
        placement = balance_as(
            check,
            topk_idx,
            group=group,
            num_experts=num_experts,
            num_redundant_experts=num_redundant_experts,
            implementation=implementation,
        )
        topk_idx, num_experts = placement.topk_idx, placement.num_experts
        expert_params = replicate_as(check, "expert_params", expert_params, placement, group, implementation)
        if capacity is None and capacity_factor is None:
            alignment = check.at_least_one("expert_alignment", expert_alignment)
            capacity = placement.capacity(alignment)
    sent, product = dispatch_as(
        check,
        x,
        topk_idx,
        topk_weights,
        group=group,
        num_experts=num_experts,
        capacity=capacity,
        capacity_factor=capacity_factor,
        domain_capacity=domain_capacity,
        expert_alignment=expert_alignment,
        quantize=quantize,
        round_scale=round_scale,
        num_valid_tokens=None if num_redundant_experts else num_valid_tokens,
        implementation=implementation,
        beside=beside,
    )
    assert isinstance(sent, DispatchedByExpert)
    if expert_params is not None and not num_redundant_experts:
        local = num_experts // group.size
        Payload.check(check, "expert_params", expert_params, (local,), "L", "the experts of a rank")
    if experts is not None:
        if num_redundant_experts:
            assert isinstance(expert_params, GatedExperts)
            experts = expert_params
        packing = check_quantize_sums(
            check, "quantize_sums", quantize_sums, False, jax.tree.structure(x), [x]
        )
        if quantize_gradient is not None:
            check_quantize_gradient(check, quantize_gradient, jax.tree.structure(x), [x])
        _, backend = check.open_handle(sent.handle, implementation)
        source = Push((x,), topk_weights.astype(jnp.float32))
        out = combined_rows(
            experts,
            sent,
            source,
            backend,
            applies_weights=experts_apply_weights,
            packing=packing,
            quantizes_gradient=quantize_gradient is not None,
            shared=None if of_shared is None else with_first_product(of_shared, product),
        )
    else:
        with jax.named_scope("jax_ep.experts"):
            run: Callable[..., PyTree] = expert_fn
            y: PyTree = run(sent) if expert_params is None else run(sent, expert_params)
        _check_result(check, y, sent.handle.routing.capacity)
        leaves, tree = jax.tree.flatten(y)
        check_quantize_sums(check, "quantize_sums", quantize_sums, False, tree, leaves)
        out = combine_as(
            check,
            y,
            sent.handle,
            row_weights=None if experts_apply_weights else sent.row_weights,
            quantize=quantize_sums,
            quantize_gradient=quantize_gradient,
            implementation=implementation,
        )
    out = jax.tree.map(lambda leaf: leaf.reshape(*tokens, *leaf.shape[1:]), out)
    if not return_stats:
        return out
    stats = MoEStats(
        tokens_per_expert=sent.tokens_per_expert,
        num_tokens=sent.num_tokens,
        num_dropped=sent.num_dropped,
        dropped_per_expert=sent.dropped_per_expert(),
        num_invalid=sent.num_invalid if placement is None else placement.num_invalid,
    )
    if placement is not None:
        stats = dataclasses.replace(
            stats,
            loads_before=placement.loads_before,
            loads_after=placement.loads_after,
            num_moved=placement.num_moved,
            num_replicas=placement.num_replicas,
        )
    return out, stats


def _check_shared(shared: object, experts: GatedExperts | None) -> None:
    if not isinstance(shared, GatedExperts) or experts is None:
        raise TypeError(
            "moe: shared must be GatedExperts, and so must be what computes the other experts, got "
            f"{type(shared).__name__} beside {'a function' if experts is None else 'GatedExperts'}; compute "
            "it by yourself, and add it to what moe returns"
        )
    if shared.num_experts != 1:
        raise ValueError(
            f"moe: shared must be one expert, with w_up [1, H, 2, F] and w_down [1, F, H], got "
            f"{shared.num_experts}; several are one whose F is the sum of theirs"
        )


def _check_signature(expert_fn: Callable[..., object], arguments: tuple[str, ...]) -> None:
    """Raises TypeError if a function cannot be called with these arguments."""
    try:
        signature = inspect.signature(expert_fn, follow_wrapped=False)
    except (TypeError, ValueError):  # a callable without one
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(expert_fn, "__name__", type(expert_fn).__name__)
        if_params = "with expert_params " if len(arguments) > 1 else ""
        raise TypeError(
            f"moe: {if_params}expert_fn must take ({', '.join(arguments)}), got {name}{signature}"
        ) from None


def _check_result(check: OpArguments, y: PyTree, rows: int) -> None:
    """Checks the result of expert_fn: a floating array with one row for each row that it was given."""
    returned = "what expert_fn returns"
    leaves = [check.array(returned, leaf) for leaf in jax.tree.leaves(y)]
    if not leaves:
        raise TypeError(f"moe: expert_fn must return the experts' rows, got {y!r}")
    for leaf in leaves:
        if leaf.ndim < 1 or leaf.shape[0] != rows:
            raise ValueError(
                f"moe: expert_fn must return a row for each of the {rows} rows that it was given, "
                f"got an array of shape {list(leaf.shape)}"
            )
    check.floating(returned, leaves)


def _merge_leading(array: jax.Array) -> jax.Array:
    """Reshapes [..., T, n] to [tokens, n]."""
    return array if array.ndim == 2 else jax.lax.collapse(array, 0, array.ndim - 1)
