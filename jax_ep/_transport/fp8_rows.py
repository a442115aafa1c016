"""Rows that travel as FP8, and who packs them: XLA, or the kernel that sends them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep import _checks, checkpoint_names
from jax_ep._checks import Arguments, PyTree, TreeDef
from jax_ep._jax.custom_vjp import custom_vjp, without_gradient
from jax_ep._jax.ffi_call import Call
from jax_ep._jax.sharding import vary_alike
from jax_ep._rows.checkpoint import name_all
from jax_ep._rows.dtypes import is_differentiable
from jax_ep._rows.fp8 import BLOCK, COTANGENT_FLOOR, FLOOR, QuantizedArray, dequantize_fp8
from jax_ep._rows.quantize import KERNEL_DTYPES
from jax_ep._transport.attendance import Attendance
from jax_ep._transport.backend import Backend, Leaves, Packing, Pull, Push, Routed
from jax_ep._transport.payload import Payload
from jax_ep._transport.push_pull import (
    Moved,
    Pulled,
    attach,
    name_indices,
    pull,
    pull_forward,
    push,
    route,
    without_packing,
)
from jax_ep._transport.routing import Handle, Routing, flat_real_rows, in_buffers

Quantize = Literal["fp8", "fp8_dequantize"]


def check_quantize(check: Arguments, quantize: object, round_scale: bool, x: PyTree, leaves: Leaves) -> None:
    """Checks how a dispatch of x, which has these leaves, is to quantize."""
    if quantize is None:
        if round_scale:
            raise ValueError(
                f"{check.op}: round_scale needs quantize, because rows that are not quantized have no scales"
            )
        return
    if not isinstance(quantize, str) or quantize not in ("fp8", "fp8_dequantize"):
        raise ValueError(f"{check.op}: quantize must be None, 'fp8' or 'fp8_dequantize', got {quantize!r}")
    if isinstance(x, QuantizedArray):
        raise ValueError(
            f"{check.op}: quantize={quantize!r} is for x that is not quantized, and a QuantizedArray travels "
            "as it is; leave quantize out"
        )
    if not jax.tree_util.all_leaves([x]) or not leaves:
        raise ValueError(f"{check.op}: quantize={quantize!r} needs x to be one array, not a pytree")
    (x,) = leaves
    if not is_differentiable(x.dtype):
        raise TypeError(
            f"{check.op}: quantize={quantize!r} needs floating rows of 16 bits or more, got "
            f"{_checks.shape_text(x)}"
        )
    _check_blocks(f"{check.op}: quantize={quantize!r}", x)


def check_quantize_sums(
    check: Arguments,
    name: str,
    quantize: object,
    round_scale: bool,
    tree: TreeDef,
    leaves: Sequence[jax.Array],
) -> Packing:
    """Checks the option `name` of a combine of these leaves. Returns the form in which its sums travel."""
    option = f"{check.op}: {name}"
    if quantize is None:
        if round_scale:
            raise ValueError(
                f"{check.op}: round_scale needs {name}, because sums that are not quantized have no scales"
            )
        return Packing.NONE
    if not isinstance(quantize, str) or quantize != "fp8":
        raise ValueError(f"{option} must be None or 'fp8', got {quantize!r}")
    if not jax.tree_util.treedef_is_leaf(tree):
        raise ValueError(f"{option} needs y to be one array, not a pytree")
    for rows in leaves:
        if rows.dtype not in KERNEL_DTYPES:
            raise TypeError(
                f"{option} needs rows of float16, bfloat16 or float32, got {_checks.shape_text(rows)}; cast "
                "them, or leave it out"
            )
    _check_blocks(option, *leaves)
    return Packing.FP8_ROUNDED if round_scale else Packing.FP8


def check_quantize_gradient(
    check: Arguments, quantize: object, tree: TreeDef, leaves: Sequence[jax.Array]
) -> None:
    """Checks that the cotangents of a combine of these leaves can travel as FP8."""
    if not isinstance(quantize, str) or quantize != "fp8":
        raise ValueError(f"{check.op}: quantize_gradient must be None or 'fp8', got {quantize!r}")
    if not jax.tree_util.treedef_is_leaf(tree):
        raise ValueError(f"{check.op}: quantize_gradient needs y to be one array, not a pytree")
    _check_blocks(f"{check.op}: quantize_gradient", *leaves)


def _check_blocks(option: str, rows: jax.Array) -> None:
    if rows.ndim < 2 or rows.shape[-1] % BLOCK:
        raise ValueError(
            f"{option} needs rows whose last dimension is a multiple of {BLOCK}, got "
            f"{_checks.shape_text(rows)}; pad them with zeros"
        )


def send_fp8(
    backend: Backend,
    routing: Routing,
    payload: Payload,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    attendance: Attendance,
    quantize: Quantize,
    round_scale: bool,
    beside: Call[Any] | None = None,
) -> tuple[jax.Array | QuantizedArray, Routed]:
    """Does what `send` does, with rows that travel as FP8, and arrive as `quantize` specifies."""
    (x,) = payload.leaves
    if backend.packs_fp8(routing, x):
        packing = Packing.FP8_ROUNDED if round_scale else Packing.FP8
        packed_sent = Push(payload.leaves, topk_weights, packing=packing, beside=beside)
        routed = _route_as_fp8(backend, routing, topk_idx, packed_sent, attendance)
    else:
        packed_sent = Push(_pack(backend, x, round_scale), topk_weights, beside=beside)
        routed = route(backend, routing, topk_idx, packed_sent, attendance)
    sent = Push(payload.leaves, topk_weights)
    packed = _unpack(name_all(routed.rows, checkpoint_names.rows))
    if quantize == "fp8":
        carrier, _ = vary_alike([jnp.zeros(packed.shape, x.dtype), x])
        out = attach(backend, routed._replace(rows=(carrier,)), sent, attendance)
        error = (
            f"{payload.op}: rows of quantize='fp8' have a gradient only in gated_mlp(quantize='fp8'), "
            "because elsewhere the gradient would also have to be FP8; use quantize='fp8_dequantize' to "
            "train, or pass jax.lax.stop_gradient(x)"
        )
        packed = without_gradient(error, x, packed)
        return in_buffers(routing, dataclasses.replace(packed, carrier=out.rows[0])), out
    # If the weights are also kept under their name, the rows are unpacked again without a route.
    wide = dequantize_fp8(packed, x.dtype)
    named = routed._replace(rows=(wide,), weights=name_all(routed.weights, checkpoint_names.weights))
    out = attach(backend, named, sent, attendance)
    return in_buffers(routing, out.rows[0]), out


def _route_as_fp8(
    backend: Backend, routing: Routing, topk_idx: jax.Array, sent: Push, attendance: Attendance
) -> Routed:
    """Routes rows that the kernel packs while it sends them."""
    routed = backend.route(routing, topk_idx, jax.lax.stop_gradient(sent), attendance)
    values, scales = routed.rows
    scales = jax.lax.bitcast_convert_type(scales, jnp.int32)
    return name_indices(routed)._replace(rows=(values, scales))


def _pack(backend: Backend, x: jax.Array, round_scale: bool, floor: float = FLOOR) -> Leaves:
    """Returns what is sent: the values, and the scales as integers, which have no gradients."""
    q = backend.quantize(jax.lax.stop_gradient(x), round_scale, floor)
    return q.values, jax.lax.bitcast_convert_type(q.scales, jnp.int32)


def _unpack(rows: Leaves) -> QuantizedArray:
    values, scales = rows
    return QuantizedArray(values, jax.lax.bitcast_convert_type(scales, jnp.float32))


def pull_with_fp8_gradient(backend: Backend, handle: Handle, pulled: Pull) -> Moved:
    """Does what `pull` does with one leaf, whose cotangent travels as FP8."""
    return _pull_with_fp8_gradient(backend, *without_packing(handle, pulled))


@custom_vjp(0, 1)
def _pull_with_fp8_gradient(backend: Backend, packing: Packing, handle: Handle, pulled: Pull) -> Moved:
    return pull(backend, handle, dataclasses.replace(pulled, packing=packing))


def pull_backward_as_fp8(backend: Backend, saved: Pulled, cotangents: Moved) -> tuple[None, Pull]:
    """Computes what `pull_backward` does, of one leaf without weights to return, by rows in FP8."""
    handle, _, _ = saved
    moved = push(backend, handle, cotangents_sent_as_fp8(backend, cotangents))
    return None, cotangents_of_fp8(saved, cotangents, moved)


def cotangents_sent_as_fp8(backend: Backend, cotangents: Moved) -> Push:
    ((cotangent,), _) = cotangents
    return Push(_pack(backend, cotangent, False, COTANGENT_FLOOR))


def cotangents_of_fp8(saved: Pulled, cotangents: Moved, moved: Moved) -> Pull:
    """Returns the cotangents of a pull's operands, of which `moved` arrived by `cotangents_sent_as_fp8`."""
    handle, scaled, biases = saved
    ((cotangent,), _), (sent, _) = cotangents, moved
    d_biases = tuple(cotangent.astype(bias.dtype) for bias in biases)
    if scaled is None:
        return Pull((dequantize_fp8(_unpack(sent), cotangent.dtype),), None, d_biases)
    (rows,), row_weights = scaled
    wide = dequantize_fp8(_unpack(sent), jnp.float32)
    arrived, others, weights = (
        flat_real_rows(handle, array, jnp.float32) for array in (wide, rows, row_weights)
    )
    d_rows = (arrived * weights).astype(rows.dtype).reshape(rows.shape)
    d_row_weights = jnp.sum(arrived * others, axis=1).astype(row_weights.dtype)
    return Pull((d_rows,), d_row_weights, d_biases)


def _pull_with_fp8_gradient_backward(
    backend: Backend, packing: Packing, saved: Pulled, cotangents: Moved
) -> tuple[None, Pull]:
    return pull_backward_as_fp8(backend, saved, cotangents)


_pull_with_fp8_gradient.defvjp(pull_forward, _pull_with_fp8_gradient_backward)
