"""Rows to their experts and back: `push` and `pull`, each the other's transpose.

Dispatch differentiates into pull and combine into push, always through the handle of the forward
pass: nothing is counted twice.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _ffi, _reference
from jax_ep._extension import Implementation
from jax_ep._handle import Handle, flat_real_rows

Leaves = tuple[jax.Array, ...]


def backend(implementation: Implementation) -> ModuleType:
    """The module whose functions do the work."""
    return _ffi if implementation == "ffi" else _reference


def static_arguments(*positions: int) -> Callable[[Callable[..., Any]], Any]:
    """`jax.custom_vjp` for a function some of whose arguments are not traced."""
    return functools.partial(jax.custom_vjp, nondiff_argnums=positions)


def is_differentiable(dtype: Any) -> bool:
    """Whether a payload of this dtype has gradients: floating, and wide enough to hold one."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


@static_arguments(0)
def push(
    implementation: Implementation, handle: Handle, leaves: Leaves, topk_weights: jax.Array | None
) -> tuple[Leaves, jax.Array | None]:
    """Sends rows [T, ...] to [C, ...], and weights [T, K] to [C, K] by rank, [C] by expert."""
    return move_bits(implementation, lambda module, bits: module.push(handle, bits, topk_weights), leaves)


def _push_forward(
    implementation: Implementation, handle: Handle, leaves: Leaves, topk_weights: jax.Array | None
) -> Any:
    return push(implementation, handle, leaves, topk_weights), handle


def _push_backward(implementation: Implementation, handle: Handle, cotangents: Any) -> Any:
    return None, *pull_cotangents(implementation, handle, *cotangents)


push.defvjp(_push_forward, _push_backward)


@static_arguments(0)
def pull(
    implementation: Implementation, handle: Handle, rows: Leaves, recv_topk_weights: jax.Array | None
) -> tuple[Leaves, jax.Array | None]:
    """Sums each token's rows [C, ...] to [T, ...], and takes the weights back to [T, K]."""
    return backend(implementation).combine(handle, rows, None, (), recv_topk_weights)


def _pull_forward(
    implementation: Implementation, handle: Handle, rows: Leaves, recv_topk_weights: jax.Array | None
) -> Any:
    return pull(implementation, handle, rows, recv_topk_weights), handle


def _pull_backward(implementation: Implementation, handle: Handle, cotangents: Any) -> Any:
    return None, *push(implementation, handle, *cotangents)


pull.defvjp(_pull_forward, _pull_backward)


@static_arguments(0)
def push_weighted(
    implementation: Implementation, handle: Handle, leaves: Leaves, factors: Leaves, weights: jax.Array
) -> tuple[Leaves, jax.Array]:
    """By expert: pushes rows [T, ...] to [C, ...], each times its weight [C].

    Also gives the dot products [C] of the rows, not weighted, with the factors [C, ...]. Together they are
    the gradient of a weighted pull.
    """
    return backend(implementation).push_weighted(handle, leaves, factors, weights)


def _push_weighted_forward(
    implementation: Implementation, handle: Handle, leaves: Leaves, factors: Leaves, weights: jax.Array
) -> Any:
    out = push_weighted(implementation, handle, leaves, factors, weights)
    return out, (handle, leaves, factors, weights)


def _push_weighted_backward(implementation: Implementation, residuals: Any, cotangents: Any) -> Any:
    handle, leaves, factors, weights = residuals
    d_scaled, d_dots = cotangents
    sent, _ = push(implementation, handle, leaves, None)
    d_sent, d_factors, d_weights = [], [], jnp.zeros((), jnp.float32)
    for row, factor, d_row in zip(sent, factors, d_scaled, strict=True):
        wide = jnp.promote_types(row.dtype, jnp.float32)
        token, other, d_token, weight, d_dot = (
            flat_real_rows(handle, array, wide) for array in (row, factor, d_row, weights, d_dots)
        )
        d_sent.append((weight * d_token + d_dot * other).astype(row.dtype).reshape(row.shape))
        d_factors.append((d_dot * token).astype(row.dtype).reshape(row.shape))
        d_weights = d_weights + jnp.sum(d_token * token, axis=1)
    d_leaves, _ = pull(implementation, handle, tuple(d_sent), None)
    return None, d_leaves, tuple(d_factors), d_weights.astype(jnp.float32)


push_weighted.defvjp(_push_weighted_forward, _push_weighted_backward)


def pull_cotangents(
    implementation: Implementation,
    handle: Handle,
    rows: Sequence[Any],
    recv_topk_weights: jax.Array | None,
) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    """`pull` for the cotangents of a push; payloads without gradients get None."""
    summed = [i for i, row in enumerate(rows) if is_differentiable(row.dtype)]
    gradients: list[jax.Array | None] = [None] * len(rows)
    if not summed and recv_topk_weights is None:
        return tuple(gradients), None
    sums, weights = pull(implementation, handle, tuple(rows[i] for i in summed), recv_topk_weights)
    for i, total in zip(summed, sums, strict=True):
        gradients[i] = total
    return tuple(gradients), weights


def move_bits(implementation: Implementation, move: Any, leaves: Leaves) -> Any:
    """Calls move(module, leaves), whose first result are the moved leaves, bit for bit.

    The handlers copy bytes. XLA may quiet a NaN on its way, so there floats travel as integers.
    """
    module = backend(implementation)
    if module is _ffi:
        return move(module, leaves)
    moved, *rest = move(module, tuple(_as_bits(leaf) for leaf in leaves))
    floats = tuple(_from_bits(row, leaf.dtype) for row, leaf in zip(moved, leaves, strict=True))
    return (floats, *rest)


def _as_bits(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{jnp.finfo(leaf.dtype).bits}"))


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)
