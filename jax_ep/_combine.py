"""combine: the experts' rows back to their tokens, summed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _check
from jax_ep._exchange import Leaves, backend, pull, push, push_weighted, static_arguments
from jax_ep._extension import Implementation
from jax_ep._group import Group
from jax_ep._handle import Handle
from jax_ep._manual import require_manual, vary_alike

# What the handlers sum. Other floats are cast to float32 first, and the sum back.
SUMMED = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def combine(
    y: Any,
    handle: Handle,
    *,
    group: Group,
    topk_weights: Any = None,
    bias: Any = None,
    implementation: str | None = None,
) -> Any:
    """Sums each token's rows and returns them to the token's rank. Call it inside `jax.shard_map`.

    The sum is in float32 (of float64 rows in float64), in a fixed order, rounded once to y's dtype: by
    rank in the order of the ranks; by expert a rank's rows by k, then by rank. (On GPUs, by expert, a
    rank's part of a 16-bit sum is rounded too before it travels.) Padding, tail and dropped rows are never
    read and get zero gradient. A token with no row gives zeros, plus the bias.

    Without weights this is the transpose of `dispatch`, and the gradient of each is the other. Note
    that it then applies no weights: by rank, multiply y by them before.

    Args:
      y: floating [C, ...] array or pytree of such arrays, C the capacity of the dispatch.
      handle: of the dispatch.
      group: the ranks of the dispatch.
      topk_weights: floating [C], as an expert-order dispatch returned them: each row of every leaf is
        multiplied by its weight in float32. Differentiable.
      bias: when y is one array: floating [T, ...], or a tuple of them, added in float32 before the
        rounding. Differentiable.
      implementation: None, "ffi" or "xla".

    Returns:
      [T, ...] of y's structure and dtypes.

    Raises:
      ValueError: shapes do not fit the handle, the handle belongs to another group, weights with a
        rank-order handle, a bias with a pytree, or no shard_map binds the group's axis.
      TypeError: a leaf of y or a bias is not floating.
    """
    require_manual("combine", group)
    chosen = group._resolve(implementation)
    handle = _check.handle("combine", handle, group)
    routing = handle.routing
    leaves, tree = jax.tree.flatten(y)
    leaves = _check.leaves("combine", "y", leaves, routing.capacity, "C", "the capacity of the handle")
    _check.floating("combine", "y", leaves)
    weights = []
    if topk_weights is not None:
        if routing.order == "rank":
            raise ValueError(
                "combine: topk_weights needs a handle of order 'expert'. By rank a row stands for several "
                "experts: multiply y by the weights, or pass them as a leaf of y to take them back"
            )
        weights = [_check.topk_weights("combine", topk_weights, (routing.capacity,), "[C]")]
    biases = _biases(bias, tree, leaves, routing.num_tokens)

    arrays, handle_tree = jax.tree.flatten(handle)
    varied = iter(vary_alike([*arrays, *leaves, *weights, *biases], group._axes))
    handle = jax.tree.unflatten(handle_tree, [next(varied) for _ in arrays])
    leaves = [next(varied) for _ in leaves]
    weights = [next(varied) for _ in weights]
    biases = tuple(_summable(next(varied)) for _ in biases)
    rows = tuple(_summable(leaf) for leaf in leaves)
    with jax.named_scope("jax_ep.combine"):
        if weights or biases:
            sums = _weighted_sum(chosen, handle, rows, weights[0] if weights else None, biases)
        else:
            sums, _ = pull(chosen, handle, rows, None)
    out = [total.astype(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]
    return jax.tree.unflatten(tree, out)


def _summable(array: jax.Array) -> jax.Array:
    return array if array.dtype in SUMMED else array.astype(jnp.float32)


def _biases(bias: Any, tree: Any, leaves: Sequence[jax.Array], num_tokens: int) -> list[jax.Array]:
    if bias is None:
        return []
    if not jax.tree_util.treedef_is_leaf(tree):
        raise ValueError("combine: bias needs y to be one array, not a pytree")
    biases = [jnp.asarray(array) for array in (bias if isinstance(bias, tuple | list) else (bias,))]
    _check.floating("combine", "bias", biases)
    shape = (num_tokens, *leaves[0].shape[1:])
    for array in biases:
        if array.shape != shape:
            raise ValueError(
                f"combine: bias must have the shape of the result {list(shape)}, "
                f"got {_check.shape_text(array)}"
            )
    return biases


@static_arguments(0)
def _weighted_sum(
    implementation: Implementation,
    handle: Handle,
    rows: Leaves,
    weights: jax.Array | None,
    biases: tuple[jax.Array, ...],
) -> Leaves:
    return backend(implementation).combine(handle, rows, weights, biases, None)[0]


def _weighted_sum_forward(
    implementation: Any, handle: Handle, rows: Leaves, weights: Any, biases: Any
) -> Any:
    sums = _weighted_sum(implementation, handle, rows, weights, biases)
    # The rows are needed for the gradient of the weights only.
    residuals = (handle, None if weights is None else (rows, weights), [bias[:0] for bias in biases])
    return sums, residuals


def _weighted_sum_backward(implementation: Implementation, residuals: Any, cotangents: Leaves) -> Any:
    """Row c of token t: d row = weight * cotangent[t], d weight = <row, cotangent[t]>."""
    handle, weighted, biases = residuals
    d_biases = tuple(cotangents[0].astype(bias.dtype) for bias in biases)
    if weighted is None:
        sent, _ = push(implementation, handle, cotangents, None)
        return None, sent, None, d_biases
    rows, weights = weighted
    d_rows, d_weights = push_weighted(implementation, handle, cotangents, rows, weights)
    return None, d_rows, d_weights, d_biases


_weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)
