"""permute and unpermute: rank order to expert order and back, on one device."""

import dataclasses
import functools
import math
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_ep import _checks
from jax_ep._checks import Arguments
from jax_ep._extension import Implementation
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.sharding import align_axes
from jax_ep._ops.arguments import count_invalid
from jax_ep._rows.dtypes import SUMMED, is_differentiable, sum_dtype
from jax_ep._rows.indexing import routed_experts
from jax_ep._transport import debug
from jax_ep._transport.backend import Leaves, LocalBackend, Permutation
from jax_ep._transport.choice import choose_local
from jax_ep._transport.payload import Payload, move_bits
from jax_ep._transport.routing import worst_case_capacity

Rows = TypeVar("Rows")
# The backend, the experts, the alignment and the capacity of a permutation.
Statics = tuple[LocalBackend, int, int, int]
# The operands of an unpermute: y, row_map, weights, bias and ids.
Operands = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Permuted(Generic[Rows]):
    """Rows by expert, then by row, then by k. P rows, L experts; C rows and K choices came in.

    Attributes:
      x: [P, ...] rows, an array or pytree as passed in; zero in padding and tail.
      row_map: int32 [C, K]: the row of each (row, k), -1 none or dropped.
      group_sizes: int32 [L] rows of each expert's block, padding included, clipped to P.
      tokens_per_expert: int32 [L] rows of each expert, without padding, clipped to P.
      row_weights: float32 [P] weight of each row's choice, zero in padding and tail; None if no weights were
        passed.
      num_dropped: int32 [1] (row, k) pairs that found no place.
      num_invalid: int32 [1] ids that are neither -1 nor an expert. They are unused, like -1.
    """

    x: Rows
    row_map: jax.Array
    group_sizes: jax.Array
    tokens_per_expert: jax.Array
    row_weights: jax.Array | None
    num_dropped: jax.Array
    num_invalid: jax.Array


def permute(
    x: Rows,
    topk_idx: ArrayLike,
    *,
    num_local_experts: int,
    topk_weights: ArrayLike | None = None,
    expert_alignment: int = 1,
    capacity: int | None = None,
    implementation: Implementation | None = None,
) -> Permuted[Rows]:
    """Brings rows into expert order, one copy for each choice of a row. Local.

    Args:
      x: [C, ...] array or pytree of such arrays, of any dtype, moved bit for bit. Floating leaves of 16
        bits or more are differentiable; a gradient of complex ones is an error.
      topk_idx: int32 or int64 [C, K] local expert ids, as a rank-order dispatch returns them.
      num_local_experts: L.
      topk_weights: floating [C, K] of 16 bits or more, or None. Differentiable.
      expert_alignment: each expert's block starts at a multiple of it; padding rows are zero.
      capacity: P, rows of the result; None means the worst case of distinct ids. Rows past it are dropped,
        and `num_dropped` counts them. At least expert_alignment.
      implementation: None, "ffi" or "xla".

    Raises:
      ValueError: an argument is out of range or does not fit the others.
      TypeError: a leaf of x is of a kind that cannot be moved.
    """
    choose_local(implementation)  # raises before the other checks
    check = Arguments("permute")
    ids = check.topk_idx(topk_idx)
    payload = Payload.check(check, "x", x, ids.shape[:1], "C", "of topk_idx")
    experts = check.at_least_one("num_local_experts", num_local_experts, _checks.MOST_EXPERTS)
    alignment = check.at_least_one("expert_alignment", expert_alignment)
    worst = worst_case_capacity("expert", ids.shape[0], ids.shape[1], experts, alignment)
    capacity = check.capacity(capacity, worst, alignment)
    weights = None
    if topk_weights is not None:
        weights = check.weights("topk_weights", topk_weights, ids.shape, "[C, K]")
    payload, ids, weights = align_axes((payload, ids, weights))
    with jax.named_scope("jax_ep.permute"):
        backend = choose_local(implementation, is_empty=not (ids.shape[0] and capacity))
        statics = (backend, experts, alignment, capacity)
        out = _permute(statics, payload.leaves, ids, weights)
        rows = payload.rebuild(out.rows)

    def find() -> list[debug.Finding]:
        dropped = debug.dropped_choices(capacity, out.num_dropped, out.tokens_per_expert)
        return [debug.invalid_ids(ids, experts), dropped]

    out = debug.check("permute", out._replace(rows=()), find)
    return Permuted(
        x=rows,
        row_map=out.row_map,
        group_sizes=out.group_sizes,
        tokens_per_expert=out.tokens_per_expert,
        row_weights=out.row_weights,
        num_dropped=out.num_dropped,
        num_invalid=count_invalid(ids, experts),
    )


@custom_vjp(0)
def _permute(
    statics: Statics,
    leaves: Leaves,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
) -> Permutation:
    backend, *sizes = statics
    move = lambda bits: backend.permute(bits, topk_idx, topk_weights, *sizes)
    return Permutation(*move_bits(backend, move, leaves))


def _permute_forward(
    statics: Statics, leaves: Leaves, topk_idx: jax.Array, topk_weights: jax.Array | None
) -> tuple[Permutation, jax.Array]:
    out = _permute(statics, leaves, topk_idx, topk_weights)
    return out, out.row_map


def _permute_backward(
    statics: Statics, row_map: jax.Array, cotangents: Permutation
) -> tuple[tuple[jax.Array | None, ...], None, jax.Array | None]:
    gradients = tuple(
        _unpermute(statics[0], row.dtype, row, row_map, None, None, None)
        if is_differentiable(row.dtype)
        else None
        for row in cotangents.rows
    )
    weights = cotangents.row_weights
    return gradients, None, None if weights is None else _at_rows(weights, row_map)


_permute.defvjp(_permute_forward, _permute_backward)


def _at_rows(values: jax.Array, row_map: jax.Array) -> jax.Array:
    """Returns [C, K]: the value [P] of each (row, k), 0 if it has no row."""
    rows = jnp.where(row_map < 0, values.shape[0], row_map)  # which is out of bounds
    return values.at[rows].get(mode="fill", fill_value=0)


def _flat(rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Reshapes [n, ...] to [n, m] of another dtype."""
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:])).astype(dtype)


@custom_vjp(0, 1)
def _repermute(backend: LocalBackend, num_permuted: int, leaf: jax.Array, row_map: jax.Array) -> jax.Array:
    move = lambda bits: ((backend.repermute(row_map, bits[0], num_permuted),),)
    ((moved,),) = move_bits(backend, move, (leaf,))
    return moved


def _repermute_forward(
    backend: LocalBackend, num_permuted: int, leaf: jax.Array, row_map: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _repermute(backend, num_permuted, leaf, row_map), row_map


def _repermute_backward(
    backend: LocalBackend, num_permuted: int, row_map: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    return _unpermute(backend, cotangent.dtype, cotangent, row_map, None, None, None), None


_repermute.defvjp(_repermute_forward, _repermute_backward)


@custom_vjp(0)
def _repermute_scaled(
    backend: LocalBackend,
    row_map: jax.Array,
    leaf: jax.Array,
    topk_weights: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    return backend.repermute_scaled(row_map, leaf, topk_weights, factors)


def _repermute_scaled_forward(
    backend: LocalBackend, row_map: jax.Array, leaf: jax.Array, topk_weights: jax.Array, factors: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    operands = row_map, leaf, topk_weights, factors
    return _repermute_scaled(backend, *operands), operands


def _repermute_scaled_backward(
    backend: LocalBackend, operands: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[None, jax.Array, jax.Array, jax.Array]:
    """Uses the same two functions: scaled rows are linear in rows and weights, dot products in both rows."""
    row_map, leaf, weights, factors = operands
    scaled, dots = cotangents
    of_scaled = _unpermute(backend, leaf.dtype, scaled, row_map, weights, None, None)
    of_dots = _unpermute(backend, leaf.dtype, factors, row_map, dots, None, None)
    d_factors, d_weights = _repermute_scaled(backend, row_map, leaf, dots, scaled)
    return None, of_scaled + of_dots, d_weights, d_factors


_repermute_scaled.defvjp(_repermute_scaled_forward, _repermute_scaled_backward)


def unpermute(
    y: ArrayLike,
    row_map: ArrayLike,
    *,
    topk_weights: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    topk_idx: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Brings rows back from expert order: the weighted sum of each row's copies. Local.

    For each row the sum over k, in that order, of weight * (y row + bias of its expert), in float32
    (of float64 rows in float64), rounded once.

    Args:
      y: floating [P, ...] rows in expert order. Differentiable.
      row_map: int32 [C, K], as `permute` returned it; -1 is skipped. A sum with an entry below -1, or from P
        on, is NaN.
      topk_weights: floating [C, K] of 16 bits or more; None means 1. Differentiable.
      bias: floating [L, ...], one row an expert; needs topk_idx. Differentiable.
      topk_idx: int32 or int64 [C, K], as passed to `permute`. With a bias, a sum with a row whose id is no
        expert is NaN.
      out_dtype: a floating dtype; None means y's.
      implementation: None, "ffi" or "xla".

    Returns:
      [C, ...].

    Raises:
      ValueError: shapes do not fit, or a bias came without topk_idx.
      TypeError: y is several arrays, y, bias or out_dtype is not floating, or y or bias is FP8.
    """
    check = Arguments("unpermute")
    if isinstance(y, tuple | list) and any(hasattr(part, "dtype") for part in y):
        raise TypeError(f"{check.op}: y must be one array, got {type(y).__name__}; call it for each array")
    choose_local(implementation)  # raises before the other checks
    y, row_map = check.array("y", y), check.array("row_map", row_map)
    if y.ndim < 1:
        raise ValueError(f"{check.op}: y must be [P, ...], got {_checks.shape_text(y)}")
    if row_map.ndim != 2 or row_map.dtype != jnp.int32 or row_map.shape[1] < 1:
        raise ValueError(
            f"{check.op}: row_map must be int32 [C, K] as permute returned it, got "
            f"{_checks.shape_text(row_map)}"
        )
    check.floating("y", [y])
    out_dtype = check.floating_dtype("out_dtype", y.dtype if out_dtype is None else out_dtype)
    find = lambda checked=row_map, num_rows=y.shape[0]: [debug.rows_beyond(checked, num_rows)]
    row_map = debug.check(check.op, row_map, find)
    weights = None
    if topk_weights is not None:
        weights = check.weights("topk_weights", topk_weights, row_map.shape, "[C, K]")
    ids = None
    if topk_idx is not None:
        ids = check.topk_idx(topk_idx)
        if ids.shape != row_map.shape:
            raise ValueError(
                f"{check.op}: topk_idx must have the shape of row_map {list(row_map.shape)}, "
                f"got {_checks.shape_text(ids)}"
            )
    if bias is not None:
        bias = check.array("bias", bias)
        check.floating("bias", [bias])
        if ids is None:
            raise ValueError(f"{check.op}: bias needs topk_idx [C, K] to know the expert of each row")
        if bias.ndim < 1 or bias.shape[0] < 1 or bias.shape[1:] != y.shape[1:]:
            raise ValueError(
                f"{check.op}: bias must be [L, ...] with the row shape of y {list(y.shape[1:])}, "
                f"got {_checks.shape_text(bias)}"
            )
    summed = out_dtype if out_dtype in SUMMED else jnp.dtype(jnp.float32)
    operands = align_axes((y, row_map, weights, bias, ids))
    with jax.named_scope("jax_ep.unpermute"):
        backend = choose_local(implementation, is_empty=not (row_map.shape[0] and y.shape[0]))
        return _unpermute(backend, summed, *operands).astype(out_dtype)


@custom_vjp(0, 1)
def _unpermute(
    backend: LocalBackend,
    out_dtype: np.dtype,
    y: jax.Array,
    row_map: jax.Array,
    topk_weights: jax.Array | None,
    bias: jax.Array | None,
    topk_idx: jax.Array | None,
) -> jax.Array:
    return backend.unpermute(y, row_map, topk_weights, bias, topk_idx, out_dtype)


def _unpermute_forward(
    backend: LocalBackend,
    out_dtype: np.dtype,
    y: jax.Array,
    row_map: jax.Array,
    weights: jax.Array | None,
    bias: jax.Array | None,
    ids: jax.Array | None,
) -> tuple[jax.Array, Operands]:
    out = _unpermute(backend, out_dtype, y, row_map, weights, bias, ids)
    # Only the gradient of the weights needs the rows. Otherwise their number and dtype suffice.
    kept = y if weights is not None or y.ndim == 1 else y[:, :0]
    return out, (kept, row_map, weights, bias, ids)


def _unpermute_backward(
    backend: LocalBackend, out_dtype: np.dtype, residuals: Operands, cotangent: jax.Array
) -> tuple[jax.Array, None, jax.Array | None, jax.Array | None, None]:
    """Computes, for (row c, k) at row p: d y[p] = w * cotangent[c], d w = <y[p] + bias, cotangent[c]>."""
    y, row_map, weights, bias, ids = residuals
    wide = sum_dtype(y.dtype)
    num_permuted = y.shape[0]
    if weights is None:
        d_y, d_weights = _repermute(backend, num_permuted, cotangent, row_map), None
    else:
        both = y.dtype if cotangent.dtype == y.dtype else wide
        d_y, d_weights = _repermute_scaled(backend, row_map, cotangent.astype(both), weights, y.astype(both))
    d_y = d_y.astype(y.dtype)
    d_bias = None
    if bias is not None:
        assert ids is not None
        experts = bias.shape[0]
        used = (row_map >= 0) & (row_map < num_permuted)
        chosen = jnp.where(used, routed_experts(ids, experts), -1)
        is_chosen = jax.nn.one_hot(chosen, experts, dtype=bool)  # [C, K, L], none where -1
        # Sums that no row went into need not have a finite cotangent. (Those of others must: one that is not
        # finite spoils the gradient of each expert's bias.)
        flat = jnp.where(jnp.any(chosen >= 0, axis=1)[:, None], _flat(cotangent, wide), 0)
        product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        if d_weights is not None:  # what other experts' biases would give need not be finite
            with_each = product("ch,lh->cl", flat, _flat(bias, wide))
            d_weights += jnp.sum(jnp.where(is_chosen, with_each[:, None], 0), axis=-1).astype(jnp.float32)
        scaled = jnp.where(is_chosen, 1 if weights is None else weights.astype(wide)[..., None], 0)
        d_bias = product("ckl,ch->lh", scaled.astype(wide), flat).astype(bias.dtype).reshape(bias.shape)
    return d_y, None, d_weights, d_bias, None


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)
