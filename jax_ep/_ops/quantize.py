"""quantize_fp8 and quantize_weights: conversions to FP8 before products."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._checks import Arguments, integer
from jax_ep._experts.choice import choose_engine
from jax_ep._experts.engine import Options, quantize_physical
from jax_ep._experts.fp8_operands import QuantizedWeights
from jax_ep._extension import Implementation
from jax_ep._jax.custom_vjp import without_gradient
from jax_ep._jax.sharding import merge_dimensions, split_dimension
from jax_ep._ops.arguments import OpArguments
from jax_ep._rows.fp8 import BLOCK, QuantizedArray, as_bits, from_bits
from jax_ep._rows.quantize import KERNEL_DTYPES
from jax_ep._rows.weights import PhysicalWeights

_NO_GRADIENT = (
    "quantize_weights: with gradients=False the result has no gradient in w; leave gradients=False out, or "
    "pass jax.lax.stop_gradient(w)"
)


def quantize_fp8(
    x: ArrayLike,
    *,
    block: int | tuple[int, int] = BLOCK,
    round_scale: bool = False,
    implementation: Implementation | None = None,
) -> QuantizedArray:
    """Quantizes an array to FP8 (e4m3), with a float32 scale for each block.

    A block's scale is its largest magnitude, at least 1e-4, times float32(1 / 448), because 448 is the
    largest number of e4m3. An element times 1 / scale is rounded to nearest, ties to even, so its error is at
    most 2^-4 of its magnitude, or 2^-10 of the scale if that is more. A block that holds a NaN, an infinity
    or a number too large for float32 becomes NaN. (The scheme of DeepSeek-V3, arXiv:2412.19437, section
    3.3.2: 1 x 128 for tokens, 128 x 128 for weights.)

    Args:
      x: floating [..., H], of 16 bits or more.
      block: the elements that share a scale: `n` in a row, or a pair (m, n) of m x n in a matrix, as
        (128, 128) for the weights of `grouped_dot`. They must divide the last dimensions of x.
      round_scale: scales are rounded up to powers of two, which UE8M0 can hold. A number within 1/32 of the
        largest one of x's dtype may then come back as infinity in that dtype.
      implementation: None, "ffi" or "xla". On CPUs all mean XLA's ops, because these kernels are for GPUs.

    Raises:
      ValueError: x has too few dimensions, or the blocks do not divide them.
      TypeError: x is not floating of 16 bits or more, or a gradient was asked for.
    """
    engine = choose_engine(implementation, Options(round_scale=bool(round_scale)))
    check = Arguments("quantize_fp8")
    x = check.array("x", x)
    rows, columns = _pair(block)
    if not _checks.is_float(x.dtype):
        raise TypeError(f"quantize_fp8: x must be floating, got {_checks.shape_text(x)}")
    if jnp.finfo(x.dtype).bits < 16:
        raise TypeError(
            f"quantize_fp8: x must be floating of 16 bits or more, got {_checks.shape_text(x)}, which needs "
            "the scales that it has already; pass jax_ep.dequantize_fp8 of the QuantizedArray"
        )
    least = 1 if rows == 1 else 2
    if x.ndim < least or x.shape[-1] % columns or (x.ndim > 1 and x.shape[-2] % rows):
        raise ValueError(
            f"quantize_fp8: a block of {rows} x {columns} elements must divide the last dimensions of x, got "
            f"{_checks.shape_text(x)}; pad x with zeros, or choose another block"
        )
    return engine.quantize(x, (rows, columns))


def quantize_weights(
    w: ArrayLike | PhysicalWeights,
    *,
    gradients: bool = True,
    round_scale: bool = False,
    implementation: Implementation | None = None,
) -> QuantizedWeights:
    """Quantizes experts' matrices once for many products, as `gated_mlp(quantize="fp8")` takes them.

    Both layouts that a training step reads are made in one pass. Call it once a step, inside `jax.shard_map`
    and outside of a loop over micro-batches. Gradients of what is computed with the result go to w, as if w
    itself had been used. For a server, which needs no gradients, call it once when it loads the weights, with
    `gradients=False`.

    Args:
      w: floating [L, M, N] of at most 32 bits, M and N multiples of 128, or such `PhysicalWeights`. Also
        [L, M, 2, N], the w_up of `gated_mlp`: the arrays of the result then have such a dimension, too.
      gradients: if false, the result holds only what a forward pass reads: 1 byte for each element, and 4 for
        each 128 x 128 elements. Results have the same bits. Differentiating what is computed with it raises
        `TypeError`, also in rows alone, because their gradient reads the other layout. Otherwise it holds w
        and both layouts: 2 bytes for each element, besides w.
      round_scale: if true, scales are rounded up to powers of two.
      implementation: None, "ffi" or "xla". On CPUs all mean XLA's ops, because these kernels are for GPUs.

    Raises:
      ValueError: 128 x 128 blocks do not divide the matrices.
      TypeError: w is not floating, or has 64 bits.
    """
    engine = choose_engine(implementation, Options(round_scale=bool(round_scale)))
    check = OpArguments("quantize_weights")
    w = check.matrices("w", w)
    if w.dtype not in KERNEL_DTYPES:
        raise TypeError(
            f"quantize_weights: w must be floating, of 16 or 32 bits, got {_checks.shape_text(w)}"
        )
    is_gated = w.ndim == 4 and w.shape[2] == 2
    if not (w.ndim == 3 or is_gated) or w.shape[1] % BLOCK or w.shape[-1] % BLOCK:
        raise ValueError(
            "quantize_weights: w must be [L, M, N] or [L, M, 2, N], M and N multiples of 128, got "
            f"{_checks.shape_text(w)}"
        )
    fixed = jax.lax.stop_gradient(w)
    if is_gated:
        fixed = jax.tree.map(lambda array: merge_dimensions(array, 2), fixed)
    kept, transposed = quantize_physical(engine, fixed, kept=gradients)
    if is_gated:
        transposed = jax.tree.map(lambda array: split_dimension(array, 1, 2), transposed)
    if not gradients:
        return QuantizedWeights(from_bits(without_gradient(_NO_GRADIENT, w, as_bits(transposed))))
    if is_gated:
        kept = jax.tree.map(lambda array: split_dimension(array, 2, 2), kept)
    return QuantizedWeights(transposed, kept, w)


def _pair(block: int | tuple[int, int]) -> tuple[int, int]:
    sizes = block if isinstance(block, tuple) else (1, block)
    rows, columns = map(integer, sizes) if len(sizes) == 2 else (None, None)
    if rows is None or columns is None or rows < 1 or columns < 1:
        raise ValueError(f"quantize_fp8: block must be a positive int or a pair of them, got {block!r}")
    return rows, columns
