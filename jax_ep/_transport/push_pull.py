"""Push and pull, which send rows to their experts and back, and their gradients.

Each is the transpose of the other, so the gradient of a push is a pull, and that of a pull a push. Both use
the handle of the forward pass, so nothing is routed twice.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from jax_ep import checkpoint_names
from jax_ep._checks import PyTree
from jax_ep._jax.custom_vjp import custom_vjp, inlined, nonzero_cotangents, primal_values
from jax_ep._jax.ffi_call import Call
from jax_ep._rows.checkpoint import name_all
from jax_ep._rows.dtypes import is_differentiable, sum_dtype, sum_of_all
from jax_ep._rows.indexing import invert, take
from jax_ep._transport import debug
from jax_ep._transport.attendance import Attendance, AttendanceResult, refuse_gradient
from jax_ep._transport.backend import Backend, Leaves, Packing, Pull, Push, Routed
from jax_ep._transport.collectives import rank
from jax_ep._transport.payload import Payload, keep_bits, move_bits
from jax_ep._transport.routing import (
    Handle,
    Routing,
    flat_real_rows,
    for_backward,
    in_buffers,
    row_experts,
)
from jax_ep._transport.xla import Xla

# Rows and weights that were moved.
Moved = tuple[Leaves, jax.Array | None]
# The handle; the rows and their weights, if row_weights were passed; and for each bias an array without rows.
Pulled = tuple[Handle, tuple[Leaves, jax.Array] | None, list[jax.Array]]


def send(
    backend: Backend,
    routing: Routing,
    payload: Payload,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    attendance: Attendance,
    beside: Call[Any] | None = None,
) -> tuple[PyTree, Routed]:
    """Routes a payload. Returns the rows that arrive, as users get them, and the other results."""
    sent = Push(payload.leaves, topk_weights)
    routed = route(backend, routing, topk_idx, dataclasses.replace(sent, beside=beside), attendance)
    out = attach(backend, routed, sent, attendance)
    return arrived(routing, payload, out.rows), out


def arrived(routing: Routing, payload: Payload, rows: Leaves) -> PyTree:
    """Returns rows [C, ...] as users get them, each with its name for `jax.checkpoint`."""
    return payload.rebuild(rows, lambda row: in_buffers(routing, name_all(row, checkpoint_names.rows)))


def route(
    backend: Backend, routing: Routing, topk_idx: jax.Array, sent: Push, attendance: Attendance
) -> Routed:
    """Computes a handle, and pushes along it, without gradients.

    The handle gets its checkpoint name here, before it becomes a residual of `attach`, because the experts'
    backward pass may need it even if the push itself is not differentiated. Rows and weights get their names
    after `attach`, because they are residuals of the functions that use its results.
    """
    sent = jax.lax.stop_gradient(sent)
    move = lambda bits: backend.route(routing, topk_idx, dataclasses.replace(sent, leaves=bits), attendance)
    routed = name_indices(Routed(*move_bits(backend, move, sent.leaves)))
    return routed._replace(rows=debug.poison_empty_rows(routed.handle, routed.rows))


def name_indices(routed: Routed) -> Routed:
    """Names everything except the rows and weights for `jax.checkpoint`.

    So also what was computed beside them: without it all of the op would be repeated.
    """
    named = name_all(routed._replace(rows=(), weights=None), checkpoint_names.handle)
    return named._replace(rows=routed.rows, weights=routed.weights)


def attach(backend: Backend, routed: Routed, sent: Push, attendance: Attendance) -> Routed:
    """Gives the rows and weights of `routed` the gradients of a push of `sent`.

    A push that ranks may miss has no gradient.
    """
    if attendance.may_miss:
        rows, weights = refuse_gradient(attendance.op, sent, (routed.rows, routed.weights))
    else:
        rows, weights = _attached(backend, routed.handle, sent, routed.rows, routed.weights)
    return routed._replace(rows=rows, weights=weights)


@custom_vjp(0)
def _attach(backend: Backend, handle: Handle, sent: Push, rows: Leaves, weights: jax.Array | None) -> Moved:
    """Returns the rows and weights that were pushed, with the gradients of that push."""
    return rows, weights


def _attach_forward(backend: Backend, *operands: object) -> tuple[Moved, Handle]:
    handle, sent, rows, weights = primal_values(operands)
    if handle.routing.padded_rows is not None:
        # Empty rows may hold NaN, and NaN times zero would spoil the gradient of the experts' matrices.
        real = row_experts(handle) >= 0
        rows = tuple(keep_bits(jax.lax.expand_dims(real, range(1, row.ndim)), row) for row in rows)
    return _attached(backend, handle, sent, rows, weights), for_backward(handle)


def _attach_backward(
    backend: Backend, handle: Handle, cotangents: Moved
) -> tuple[None, Push | None, None, None]:
    moved = nonzero_cotangents(cotangents)
    return None, None if moved is None else _pull_cotangents(backend, handle, *moved), None, None


# Rows whose gradient is computed elsewhere have none here, and nothing is pulled.
_attach.defvjp(_attach_forward, _attach_backward, symbolic_zeros=True)
_attached = inlined(_attach)


@custom_vjp(0)
def push(backend: Backend, handle: Handle, sent: Push) -> Moved:
    """Sends rows [T, ...] to [C, ...], and weights [T, K] to [C, K] by rank, [C] by expert."""
    move = lambda bits: backend.push(handle, dataclasses.replace(sent, leaves=bits))
    return move_bits(backend, move, sent.leaves)


def _push_forward(backend: Backend, handle: Handle, sent: Push) -> tuple[Moved, Handle]:
    return push(backend, handle, sent), for_backward(handle)


def _push_backward(backend: Backend, handle: Handle, cotangents: Moved) -> tuple[None, Push]:
    return None, _pull_cotangents(backend, handle, *cotangents)


push.defvjp(_push_forward, _push_backward)


def push_attended(
    backend: Backend, handle: Handle, sent: Push, attendance: Attendance
) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
    """Does what `push` does, for an op that ranks may miss. Also returns which ranks took part. No gradient.

    The rows are routed again, because rows of missing ranks leave no gap. Then each row moves to its position
    in the handle.
    """
    fixed = jax.lax.stop_gradient(sent)

    def move(bits: Leaves) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
        again = dataclasses.replace(fixed, leaves=bits)
        routed = backend.route(handle.routing, handle.topk_idx, again, attendance)
        rows = _rows_along(handle, routed.handle)
        arrived = None if routed.weights is None else take(routed.weights, rows)
        return tuple(take(row, rows) for row in routed.rows), arrived, routed.attended

    moved, weights, attended = move_bits(Xla(handle.routing.ranks), move, fixed.leaves)  # `take` is XLA's
    return *refuse_gradient(attendance.op, sent, (moved, weights)), attended


def _rows_along(handle: Handle, other: Handle) -> jax.Array:
    """Returns int32 [C]: for each row of a handle, the row of the same token in another handle, or -1.

    The other handle has the same routing, but some ranks are missing.
    """
    capacity = handle.routing.capacity
    if handle.received_rows is not None and other.received_rows is not None:
        choice = invert(handle.received_rows, capacity)
        return jnp.where(choice < 0, -1, other.received_rows.reshape(-1)[choice])
    this_rank = rank(handle.routing.ranks)
    ends, other_ends = (jnp.take(each.rank_prefix_matrix, this_rank, axis=1) for each in (handle, other))
    row = jnp.arange(capacity, dtype=jnp.int32)
    source = jnp.minimum(jnp.searchsorted(ends, row, side="right"), ends.shape[0] - 1)
    row_in_other = row - (ends - other_ends)[source]
    first = jnp.where(source == 0, 0, other_ends[source - 1])
    return jnp.where((row < ends[-1]) & (row_in_other >= first), row_in_other, -1)


def pull(backend: Backend, handle: Handle, pulled: Pull) -> Moved:
    """Returns [T, ...]: sums of each token's rows [C, ...], times row weights if any, plus its biases.

    Also returns `pulled.weights`, if any, to their tokens: [T, K]. The gradient does not depend on the form
    in which sums travel.
    """
    return _pull(backend, *without_packing(handle, pulled))


def without_packing(handle: Handle, pulled: Pull) -> tuple[Packing, Handle, Pull]:
    """Returns the arguments of a function with a gradient. The cotangent of a pull has no packing."""
    return pulled.packing, handle, dataclasses.replace(pulled, packing=Packing.NONE)


@custom_vjp(0, 1)
def _pull(backend: Backend, packing: Packing, handle: Handle, pulled: Pull) -> Moved:
    sums, returned, _ = backend.pull(handle, dataclasses.replace(pulled, packing=packing))
    return sums, returned


def pull_forward(backend: Backend, packing: Packing, handle: Handle, pulled: Pull) -> tuple[Moved, Pulled]:
    # The rows are needed for the gradient of the weights only.
    scaled = None if pulled.row_weights is None else (pulled.rows, pulled.row_weights)
    saved = for_backward(handle), scaled, [bias[:0] for bias in pulled.biases]
    return _pull(backend, packing, handle, pulled), saved


def pull_backward(backend: Backend, saved: Pulled, cotangents: Moved) -> tuple[None, Pull]:
    """Computes, for row c of token t: d row = weight * cotangent[t], d weight = <row, cotangent[t]>."""
    handle, scaled, _ = saved
    sent = cotangents_sent(saved, cotangents)
    if scaled is None:
        return None, cotangents_of(saved, cotangents, push(backend, handle, sent))
    moved = push_scaled(backend, handle, sent.leaves, *scaled)
    return None, cotangents_of(saved, cotangents, moved)


def cotangents_sent(saved: Pulled, cotangents: Moved) -> Push:
    """Returns the push that is the transpose of a pull."""
    _, scaled, _ = saved
    sums, returned = cotangents
    if scaled is None:
        return Push(sums, returned)
    rows, row_weights = scaled
    return Push(sums, row_weights=row_weights, factors=rows)


def cotangents_of(saved: Pulled, cotangents: Moved, moved: Moved) -> Pull:
    """Returns the cotangents of a pull's operands, of which `moved` arrived by `cotangents_sent`."""
    _, scaled, biases = saved
    sums, _ = cotangents
    d_biases = tuple(sums[0].astype(bias.dtype) for bias in biases)
    d_rows, d_weights = moved
    if scaled is None:
        return Pull(d_rows, None, d_biases, d_weights)
    return Pull(d_rows, d_weights, d_biases)


def _pull_backward(backend: Backend, packing: Packing, saved: Pulled, cotangents: Moved) -> tuple[None, Pull]:
    return pull_backward(backend, saved, cotangents)


_pull.defvjp(pull_forward, _pull_backward)


def pull_attended(
    backend: Backend, handle: Handle, pulled: Pull, attendance: Attendance
) -> tuple[Leaves, AttendanceResult]:
    """Does what `pull` does, for an op that ranks may miss. Also returns which took part. No gradient."""
    sums, _, attended = backend.pull(handle, jax.lax.stop_gradient(pulled), attendance)
    return refuse_gradient(attendance.op, pulled, sums), attended


@custom_vjp(0)
def push_scaled(
    backend: Backend, handle: Handle, leaves: Leaves, factors: Leaves, row_weights: jax.Array
) -> tuple[Leaves, jax.Array]:
    """Pushes rows [T, ...] to [C, ...], each times its weight [C], by expert.

    Also returns the dot products [C] of the rows, before they are scaled, with the factors [C, ...]. Together
    they are the gradient of `pull`.
    """
    scaled, dots = backend.push(handle, Push(leaves, row_weights=row_weights, factors=factors))
    assert dots is not None
    return scaled, dots


def _push_scaled_forward(
    backend: Backend, handle: Handle, leaves: Leaves, factors: Leaves, row_weights: jax.Array
) -> tuple[tuple[Leaves, jax.Array], tuple[Handle, Leaves, Leaves, jax.Array]]:
    out = push_scaled(backend, handle, leaves, factors, row_weights)
    return out, (for_backward(handle), leaves, factors, row_weights)


def _push_scaled_backward(
    backend: Backend,
    residuals: tuple[Handle, Leaves, Leaves, jax.Array],
    cotangents: tuple[Leaves, jax.Array],
) -> tuple[None, Leaves, Leaves, jax.Array]:
    handle, leaves, factors, row_weights = residuals
    d_scaled, d_dots = cotangents
    moved, _ = push(backend, handle, Push(leaves))
    d_sent, d_factors, d_weights = [], [], []
    for row, factor, d_row in zip(moved, factors, d_scaled, strict=True):
        wide = sum_dtype(row.dtype)
        token, other, d_token, weight, d_dot = (
            flat_real_rows(handle, array, wide) for array in (row, factor, d_row, row_weights, d_dots)
        )
        d_sent.append((weight * d_token + d_dot * other).astype(row.dtype).reshape(row.shape))
        d_factors.append((d_dot * token).astype(row.dtype).reshape(row.shape))
        d_weights.append(jnp.sum(d_token * token, axis=1))
    d_leaves, _ = pull(backend, handle, Pull(tuple(d_sent)))
    return None, d_leaves, tuple(d_factors), sum_of_all(d_weights).astype(jnp.float32)


push_scaled.defvjp(_push_scaled_forward, _push_scaled_backward)


def _pull_cotangents(backend: Backend, handle: Handle, rows: Leaves, weights: jax.Array | None) -> Push:
    """Pulls the cotangents of a push. Leaves without gradients get None."""
    summed = [i for i, row in enumerate(rows) if is_differentiable(row.dtype)]
    gradients: list[jax.Array | None] = [None] * len(rows)
    if not summed and weights is None:
        return Push(cast(Leaves, tuple(gradients)))
    sums, d_weights = pull(backend, handle, Pull(tuple(rows[i] for i in summed), weights=weights))
    for i, total in zip(summed, sums, strict=True):
        gradients[i] = total
    return Push(cast(Leaves, tuple(gradients)), d_weights)
