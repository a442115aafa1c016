"""Rows that travel as FP8."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep import _check
from jax_ep._dtypes import is_differentiable
from jax_ep._quantize import BLOCK, QuantizedArray, quantize_fp8
from jax_ep._results import Leaves

Quantize = Literal["fp8", "fp8_dequantize"]


def check_quantize(quantize: Any, tree: Any, leaves: list[jax.Array]) -> None:
    if quantize not in ("fp8", "fp8_dequantize"):
        raise ValueError(f"dispatch: quantize must be None, 'fp8' or 'fp8_dequantize', got {quantize!r}")
    if not jax.tree_util.treedef_is_leaf(tree) or not leaves:
        raise ValueError(f"dispatch: quantize={quantize!r} needs x to be one array, not a pytree")
    (x,) = leaves
    if not is_differentiable(x.dtype):
        raise TypeError(
            f"dispatch: quantize={quantize!r} needs floating rows of 16 bits or more, got "
            f"{_check.shape_text(x)}"
        )
    if x.ndim < 2 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"dispatch: quantize={quantize!r} needs rows whose last dimension is a multiple of {BLOCK}, got "
            f"{_check.shape_text(x)}; pad them with zeros"
        )


def pack(x: jax.Array, round_scale: bool) -> Leaves:
    """What travels: the values, and the scales as integers, which have no gradients."""
    q = quantize_fp8(jax.lax.stop_gradient(x), round_scale=round_scale)
    return q.values, jax.lax.bitcast_convert_type(q.scales, jnp.int32)


def unpack(rows: Leaves) -> QuantizedArray:
    values, scales = rows
    return QuantizedArray(values, jax.lax.bitcast_convert_type(scales, jnp.float32))


@jax.custom_vjp
def without_gradient(x: jax.Array, rows: QuantizedArray) -> QuantizedArray:
    """The rows, which x was made into: x may not be differentiated through them."""
    return rows


def _forward(x: jax.Array, rows: QuantizedArray) -> tuple[QuantizedArray, None]:
    return rows, None


def _backward(saved: None, cotangent: Any) -> Any:
    raise TypeError(
        "dispatch: quantize='fp8' gives rows without a gradient, for it would have to be FP8 too; use "
        "quantize='fp8_dequantize' to train, or pass jax.lax.stop_gradient(x)"
    )


without_gradient.defvjp(_forward, _backward)
