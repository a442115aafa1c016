"""Rows to their experts and back: push and pull, each the other's transpose.

A push differentiates into a pull and a pull into a push, always through the handle of the forward
pass: nothing is routed twice.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _apart, _check, _ffi, _reference
from jax_ep._dtypes import as_reals, bits_of, from_reals, is_differentiable, sum_dtype, sum_of_all
from jax_ep._extension import Implementation
from jax_ep._handle import Handle, Routing, flat_real_rows, for_backward, row_experts
from jax_ep._manual import require_manual
from jax_ep._remat import CHECKPOINT_HANDLE, name_all
from jax_ep._results import Attendance, Leaves, Routed
from jax_ep._reverse_mode import custom_vjp, without_gradient
from jax_ep._two_hops import TwoHops


def backend(implementation: Implementation) -> Any:
    """The module whose functions do the work."""
    return {"ffi": _ffi, "ffi apart": _apart, "xla": _reference}[implementation]


def mover(implementation: Implementation, routing: Routing) -> Any:
    """Whose functions move the rows of a routing."""
    module = backend(implementation)
    return TwoHops(module) if routing.makes_two_hops else module


def for_tokens(
    implementation: Implementation, routing: Routing, requested: str | _apart.Asynchronous | None
) -> Implementation:
    """Where no rank has a token, or room for one, nothing is sent: XLA makes the empty results."""
    if not (routing.num_tokens and routing.capacity):
        return "xla"
    return _apart.if_asynchronous(implementation, routing.group, requested)


def open_handle(
    op: str, value: Any, implementation: str | _apart.Asynchronous | None
) -> tuple[Handle, Implementation]:
    """The handle that an op goes along, checked, and the implementation that its group uses here."""
    handle = _check.handle(op, value)
    group = handle.routing.group
    require_manual(op, group)
    return handle, for_tokens(group._resolve(_apart.plain(implementation)), handle.routing, implementation)


_MISSED = (
    "with active_ranks or on_timeout='mask' it has no gradient, for the ranks that take part in the backward "
    "pass may be others; train without them, or pass jax.lax.stop_gradient of its arguments"
)


def route(
    implementation: Implementation,
    routing: Routing,
    leaves: Leaves,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    attendance: Attendance,
) -> Routed:
    """Finds out where each row goes, and pushes rows [T, ...] and weights [T, K] there, without gradients.

    JAX runs a rule for gradients only where something is differentiated, but what is kept for a backward pass
    may be the experts'. So the handle gets its name here, before it becomes a residual of `attach`. Rows and
    weights get theirs after it, for they are residuals of what comes next.
    """
    fixed, fixed_weights = jax.lax.stop_gradient((leaves, topk_weights))
    rows, weights, *indices = move_bits(
        mover(implementation, routing),
        lambda module, bits: module.route(routing, bits, topk_idx, fixed_weights, attendance),
        fixed,
    )
    return Routed(rows, weights, *name_all(indices, CHECKPOINT_HANDLE))


def attach(
    implementation: Implementation, routed: Routed, leaves: Leaves, topk_weights: jax.Array | None
) -> Routed:
    """The same, its rows and weights with the gradients of a push of `leaves` and `topk_weights`.

    A push that ranks may miss has none.
    """
    arrived = (routed.rows, routed.weights)
    if routed.attended.active_ranks is None:
        rows, weights = _attach(implementation, routed.handle, leaves, topk_weights, *arrived)
    else:
        rows, weights = without_gradient(f"dispatch: {_MISSED}", (leaves, topk_weights), arrived)
    return routed._replace(rows=rows, weights=weights)


@custom_vjp(0)
def _attach(
    implementation: Implementation,
    handle: Handle,
    leaves: Leaves,
    topk_weights: jax.Array | None,
    rows: Leaves,
    weights: jax.Array | None,
) -> tuple[Leaves, jax.Array | None]:
    """The rows and weights that were pushed, with the gradients of that push."""
    return rows, weights


def _attach_forward(
    implementation: Implementation,
    handle: Handle,
    leaves: Leaves,
    topk_weights: Any,
    rows: Leaves,
    weights: Any,
) -> Any:
    if handle.routing.slots is not None:
        # What lies in empty slots may be NaN, which in a gradient of weights would not vanish times zero.
        real = row_experts(handle) >= 0
        rows = tuple(_where_bits(jax.lax.expand_dims(real, range(1, row.ndim)), row) for row in rows)
    return _attach(implementation, handle, leaves, topk_weights, rows, weights), for_backward(handle)


def _attach_backward(implementation: Implementation, handle: Handle, cotangents: Any) -> Any:
    leaves, topk_weights = _pull_cotangents(implementation, handle, *cotangents)
    return None, leaves, topk_weights, None, None


_attach.defvjp(_attach_forward, _attach_backward)


@custom_vjp(0)
def push(
    implementation: Implementation, handle: Handle, leaves: Leaves, topk_weights: jax.Array | None
) -> tuple[Leaves, jax.Array | None]:
    """Sends rows [T, ...] to [C, ...], and weights [T, K] to [C, K] by rank, [C] by expert."""
    move = lambda module, bits: module.push(handle, bits, topk_weights)
    return move_bits(mover(implementation, handle.routing), move, leaves)


def _push_forward(
    implementation: Implementation, handle: Handle, leaves: Leaves, topk_weights: jax.Array | None
) -> Any:
    return push(implementation, handle, leaves, topk_weights), for_backward(handle)


def _push_backward(implementation: Implementation, handle: Handle, cotangents: Any) -> Any:
    return None, *_pull_cotangents(implementation, handle, *cotangents)


push.defvjp(_push_forward, _push_backward)


@custom_vjp(0)
def pull(
    implementation: Implementation, handle: Handle, rows: Leaves, weights: jax.Array | None
) -> tuple[Leaves, jax.Array | None]:
    """Sums each token's rows [C, ...] to [T, ...], and takes the weights back to [T, K]."""
    sums, returned, _ = mover(implementation, handle.routing).pull(handle, rows, None, (), weights)
    return sums, returned


def _pull_forward(
    implementation: Implementation, handle: Handle, rows: Leaves, weights: jax.Array | None
) -> Any:
    return pull(implementation, handle, rows, weights), for_backward(handle)


def _pull_backward(implementation: Implementation, handle: Handle, cotangents: Any) -> Any:
    return None, *push(implementation, handle, *cotangents)


pull.defvjp(_pull_forward, _pull_backward)


@custom_vjp(0)
def pull_scaled(
    implementation: Implementation,
    handle: Handle,
    rows: Leaves,
    row_weights: jax.Array | None,
    biases: Leaves,
) -> Leaves:
    """`pull` of rows that are multiplied by their weights [C] first; biases [T, ...] are added to the sum."""
    return mover(implementation, handle.routing).pull(handle, rows, row_weights, biases, None)[0]


def _pull_scaled_forward(
    implementation: Implementation, handle: Handle, rows: Leaves, row_weights: Any, biases: Leaves
) -> Any:
    sums = pull_scaled(implementation, handle, rows, row_weights, biases)
    # The rows are needed for the gradient of the weights only.
    scaled = None if row_weights is None else (rows, row_weights)
    return sums, (for_backward(handle), scaled, [bias[:0] for bias in biases])


def _pull_scaled_backward(implementation: Implementation, residuals: Any, cotangents: Leaves) -> Any:
    """Row c of token t: d row = weight * cotangent[t], d weight = <row, cotangent[t]>."""
    handle, scaled, biases = residuals
    d_biases = tuple(cotangents[0].astype(bias.dtype) for bias in biases)
    if scaled is None:
        sent, _ = push(implementation, handle, cotangents, None)
        return None, sent, None, d_biases
    rows, row_weights = scaled
    d_rows, d_weights = push_scaled(implementation, handle, cotangents, rows, row_weights)
    return None, d_rows, d_weights, d_biases


pull_scaled.defvjp(_pull_scaled_forward, _pull_scaled_backward)


def pull_attended(
    implementation: Implementation,
    handle: Handle,
    rows: Leaves,
    row_weights: jax.Array | None,
    biases: Leaves,
    attendance: Attendance,
) -> tuple[Leaves, jax.Array | None]:
    """`pull_scaled` that ranks may miss, without gradients; and which ranks took part."""
    sources = (rows, row_weights, biases)
    fixed = jax.lax.stop_gradient(sources)
    sums, _, attended = mover(implementation, handle.routing).pull(handle, *fixed, None, attendance)
    return without_gradient(f"combine: {_MISSED}", sources, sums), attended.active_ranks


@custom_vjp(0)
def push_scaled(
    implementation: Implementation, handle: Handle, leaves: Leaves, factors: Leaves, row_weights: jax.Array
) -> tuple[Leaves, jax.Array]:
    """By expert: pushes rows [T, ...] to [C, ...], each times its weight [C].

    Also gives the dot products [C] of the rows, not scaled, with the factors [C, ...]. Together they are
    the gradient of `pull_scaled`.
    """
    return mover(implementation, handle.routing).push_scaled(handle, leaves, factors, row_weights)


def _push_scaled_forward(
    implementation: Implementation, handle: Handle, leaves: Leaves, factors: Leaves, row_weights: jax.Array
) -> Any:
    out = push_scaled(implementation, handle, leaves, factors, row_weights)
    return out, (for_backward(handle), leaves, factors, row_weights)


def _push_scaled_backward(implementation: Implementation, residuals: Any, cotangents: Any) -> Any:
    handle, leaves, factors, row_weights = residuals
    d_scaled, d_dots = cotangents
    sent, _ = push(implementation, handle, leaves, None)
    d_sent, d_factors, d_weights = [], [], []
    for row, factor, d_row in zip(sent, factors, d_scaled, strict=True):
        wide = sum_dtype(row.dtype)
        token, other, d_token, weight, d_dot = (
            flat_real_rows(handle, array, wide) for array in (row, factor, d_row, row_weights, d_dots)
        )
        d_sent.append((weight * d_token + d_dot * other).astype(row.dtype).reshape(row.shape))
        d_factors.append((d_dot * token).astype(row.dtype).reshape(row.shape))
        d_weights.append(jnp.sum(d_token * token, axis=1))
    d_leaves, _ = pull(implementation, handle, tuple(d_sent), None)
    return None, d_leaves, tuple(d_factors), sum_of_all(d_weights).astype(jnp.float32)


push_scaled.defvjp(_push_scaled_forward, _push_scaled_backward)


def _pull_cotangents(
    implementation: Implementation, handle: Handle, rows: Sequence[Any], weights: jax.Array | None
) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    """`pull` for the cotangents of a push; payloads without gradients get None."""
    summed = [i for i, row in enumerate(rows) if is_differentiable(row.dtype)]
    gradients: list[jax.Array | None] = [None] * len(rows)
    if not summed and weights is None:
        return tuple(gradients), None
    sums, d_weights = pull(implementation, handle, tuple(rows[i] for i in summed), weights)
    for i, total in zip(summed, sums, strict=True):
        gradients[i] = total
    return tuple(gradients), d_weights


def refuse_complex_gradients(op: str, leaves: Leaves, rows: Leaves) -> Leaves:
    """Returns the rows that were made of the leaves. A gradient of complex ones is a TypeError."""

    def refuse(leaf: jax.Array, row: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return row
        error = (
            f"{op}: complex rows have no gradient, got {jax.typeof(leaf)}; pass their real and imaginary "
            "parts as two leaves (jnp.real, jnp.imag), or jax.lax.stop_gradient of them"
        )
        # A gradient of other leaves must not raise it.
        return without_gradient(error, leaf, jax.lax.stop_gradient(row))

    return tuple(refuse(leaf, row) for leaf, row in zip(leaves, rows, strict=True))


def move_bits(module: Any, move: Any, leaves: Leaves) -> Any:
    """Calls move(module, leaves), whose first result are the moved leaves, bit for bit.

    Complex numbers travel as their parts, and what is narrower than a byte as whole bytes. XLA may quiet a
    NaN on its way, so where it moves rows floats travel as integers of their width.
    """
    reals = [as_reals(leaf) for leaf in leaves]
    carriers = [_carrier(module not in (_ffi, _apart), real.dtype) for real in reals]
    sent = [
        _with_bits(real, bits).astype(carrier) for real, (bits, carrier) in zip(reals, carriers, strict=True)
    ]
    moved, *rest = move(module, tuple(sent))
    rows = [
        _with_bits(row.astype(bits), real.dtype)
        for row, real, (bits, _) in zip(moved, reals, carriers, strict=True)
    ]
    return (tuple(from_reals(row, leaf.dtype) for row, leaf in zip(rows, leaves, strict=True)), *rest)


def _carrier(by_xla: bool, dtype: Any) -> tuple[Any, Any]:
    """The dtype that has the bits of another one, and the dtype of whole bytes that carries those."""
    size, bits = jax.dtypes.itemsize_bits(dtype), dtype
    if jnp.issubdtype(dtype, jnp.floating) and (size < 8 or by_xla):
        bits = bits_of(dtype)
    return bits, jnp.dtype(jnp.int8) if size < 8 else bits


def _where_bits(kept: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows bit for bit, and others with no bit set. XLA may quiet a NaN that it selects as a float."""
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        return from_reals(_where_bits(kept[..., None], as_reals(rows)), rows.dtype)
    bits = bits_of(rows.dtype) if jnp.issubdtype(rows.dtype, jnp.floating) else rows.dtype
    found = _with_bits(rows, bits)
    return _with_bits(jnp.where(kept, found, jnp.zeros_like(found)), rows.dtype)


def _with_bits(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
