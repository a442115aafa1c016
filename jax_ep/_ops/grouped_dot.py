"""grouped_dot: each expert's rows times that expert's matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._checks import PyTree
from jax_ep._experts.choice import choose_engine
from jax_ep._experts.engine import Engine, Factors, Options
from jax_ep._experts.fp8_operands import QuantizedWeights
from jax_ep._experts.gated import (
    Fp8,
    Kept,
    Rows,
    cotangent_of,
    once_differentiable,
    quantized_weights,
    sharded_like,
    wide_of,
    without_gradient_if_forward_only,
    without_gradient_of_values,
    without_values,
)
from jax_ep._experts.products import PrecisionName, fp8_product, precision_of, product
from jax_ep._extension import Implementation
from jax_ep._jax.custom_vjp import custom_vjp, without_gradient
from jax_ep._jax.sharding import vary_alike
from jax_ep._ops.arguments import OpArguments
from jax_ep._rows.counts import sum_of_counts
from jax_ep._rows.dtypes import is_differentiable
from jax_ep._rows.fp8 import BLOCK, FP8, QuantizedArray, as_bits, block_of, from_bits
from jax_ep._rows.padded import flat_rows, shaped_like, values_of
from jax_ep._rows.weights import PhysicalWeights, as_array, num_redundant_of
from jax_ep._transport import debug

_CHECK = OpArguments("grouped_dot")
# The rows as they are kept, the rows without values, the matrices and the group sizes.
Saved = tuple[Kept, Rows, QuantizedWeights, jax.Array]

_NO_GRADIENT = (
    "grouped_dot: FP8 operands have no gradient, because it would also have to be FP8; differentiate a "
    "product of bfloat16 operands, use gated_mlp(quantize='fp8'), or define the gradient yourself "
    "(jax.custom_vjp)"
)
_ONE_GRADIENT = (
    "grouped_dot: products of quantize_weights have no second derivative, because the first one is computed "
    "in FP8; take it of weights that are not quantized"
)


def grouped_dot(
    rows: ArrayLike | QuantizedArray,
    w: ArrayLike | PhysicalWeights | QuantizedArray | QuantizedWeights,
    group_sizes: ArrayLike,
    *,
    group_offset: ArrayLike | None = None,
    precision: PrecisionName | jax.lax.Precision | None = None,
    num_sms: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies each expert's rows by that expert's matrix, as `expert_fn` of `jax_ep.moe` does.

    It is like `jax.lax.ragged_dot`. On NVIDIA GPUs, where XLA multiplies all rows by every matrix for that
    and for its gradient, it uses kernels of this package, on tensor cores except in float32 with
    `precision="highest"`. On GPUs of compute capability 9.0, 10.0 and 10.3 the kernels are fast for float16
    and bfloat16 if both widths are multiples of 8, and for FP8.

    Args:
      rows: floating [C, M]; the rows of expert l follow those of expert l - 1. Or [L, C, M]: C rows for each
        expert, of which the first ones are filled, as `dispatch(order="expert_padded")` returns them. Empty
        rows may hold anything. Or a `QuantizedArray` of either, with a scale for each 128 elements of a row
        [..., M / 128], as `quantize_fp8(x)` makes it.
      w: [L, M, N] a matrix for each expert, of the dtype of rows. Or a `QuantizedArray` with a scale
        for each 128 x 128 elements [L, M / 128, N / 128], as `quantize_fp8(w, block=(128, 128))` makes it.
        Or the result of `quantize_weights`, with rows of either kind. It is transposed, as tensor cores read
        FP8 matrices. A `QuantizedArray` is copied for that in each call, unless it is kept as [L, N, M] and
        handed over as `jax.tree.map(lambda a: a.swapaxes(1, 2), kept)` under `jax.jit`. With redundant
        experts `PhysicalWeights`, of such arrays or in a `QuantizedArray`.
      group_sizes: int32 [L] rows of each expert, their sum at most C, which is checked if they are known.
        Otherwise negative sizes count as 0, and experts end where the rows end. With rows [L, C, M] the
        number of filled rows of each expert, at most C.
      group_offset: integer scalar. With it, w has only the matrices of the L experts from this one on, and
        group_sizes is [G], of all experts. Rows of the others give zeros and get no gradient. A matrix of an
        expert below 0 or from G on has no rows. Rows must be [C, M], and operands must not be quantized. It
        is as `group_offset` of `jax.lax.ragged_dot_general`.
      precision: of products of float32 rows, as in `jax.lax.dot`: None | "default" | "high" | "highest", a
        `jax.lax.Precision`, or another of its names. On GPUs "default" and "high" allow tf32, which has 10
        bits of mantissa, and "highest" is float32. None: that of `jax_default_matmul_precision` when the
        product is traced. Its gradients have the same precision. It has no effect on other dtypes, because
        products of 16-bit operands and of FP8 are exact, and their sums are float32.
      num_sms: how many SMs of a GPU the fast kernels take at most, forward and backward, at least 2, so that
        communication can run beside them; other kernels ignore it. None: all.
      implementation: None, "ffi" or "xla". On CPUs all mean XLA's ops, because these kernels are for GPUs.

    Returns:
      [C, N] or [L, C, N] in the dtype of rows, bfloat16 of FP8; zero in rows of no expert, as their gradient
      is. Products are summed in float32 (float64 rows: in float64). Differentiable in rows and w that are not
      FP8, in reverse mode, and with `quantize_weights` in the weights that it was made of, and in rows as in
      `gated_mlp(quantize="fp8")`, but not with gradients=False. Under `jax.vmap` the products run one after
      another.

    Raises:
      ValueError: the shapes do not fit each other, num_sms is less than 2 or more than any GPU has, or
        precision is none of those above.
      TypeError: rows and w are not floating, or differ in dtype, or only one is quantized, or they are
        FP8 without scales; a gradient of FP8 operands was asked for.
    """
    rows = rows if isinstance(rows, QuantizedArray) else _CHECK.array("rows", rows)
    shape = np.shape(values_of(rows))
    is_padded = len(shape) == 3
    num_sms = _CHECK.most_sms(num_sms) or 0
    options = Options(num_sms=num_sms, rows_per_group=shape[1] if is_padded else 0)
    engine = choose_engine(implementation, options)
    precision_of(_CHECK, precision, jnp.float32)
    if is_padded and group_offset is not None:
        raise ValueError(
            f"grouped_dot: group_offset needs rows [C, M], got rows of padded experts {list(shape)}; pass "
            "rows[first : first + L] and group_sizes[first : first + L] of the L experts of w without it"
        )
    return _multiply(engine, rows, w, group_sizes, group_offset, precision)


def _multiply(
    engine: Engine,
    rows: jax.Array | QuantizedArray,
    w: ArrayLike | PhysicalWeights | QuantizedArray | QuantizedWeights,
    group_sizes: ArrayLike,
    group_offset: ArrayLike | None,
    precision: PrecisionName | jax.lax.Precision | None,
) -> jax.Array:
    """Returns the product by an engine for these rows."""
    is_quantized = isinstance(rows, QuantizedArray) or isinstance(w, QuantizedArray | QuantizedWeights)
    if group_offset is not None and is_quantized:
        raise TypeError(
            "grouped_dot: group_offset needs rows and w that are not quantized, got "
            f"{type(rows).__name__} and {type(w).__name__}"
        )
    group_sizes = _CHECK.array("group_sizes", group_sizes)
    if isinstance(w, QuantizedWeights):
        rows, w = _rows_of_quantized_weights(rows), quantized_weights(_CHECK, "w", w)
        group_sizes = _check_shapes(values_of(rows), jax.ShapeDtypeStruct(w.shape, FP8), group_sizes)
        out = _times_quantized(engine, *as_bits(vary_alike((flat_rows(rows), w, group_sizes))))
        out = without_gradient_of_values(_NO_GRADIENT, rows, shaped_like(rows, out))
        return without_gradient_if_forward_only("grouped_dot", (rows, w), out)
    if isinstance(rows, QuantizedArray) or isinstance(w, QuantizedArray):
        rows, w = _both_quantized(rows, w)
        group_sizes = _check_shapes(rows.values, w.values, group_sizes)
        if 0 in (*rows.shape, *w.shape):
            nothing = jnp.zeros((*rows.shape[:-1], w.shape[2]), jnp.bfloat16)
            return vary_alike([nothing, rows.values, w.values])[0]
        _check_blocks(rows, w)
        operands = QuantizedArray(rows.values, rows.scales), QuantizedArray(w.values, w.scales)
        factors = vary_alike(Factors(*operands, group_sizes))
        out = fp8_product(engine, jax.lax.stop_gradient(factors))
        return without_gradient(_NO_GRADIENT, factors, out)
    rows, w = (
        _CHECK.array("rows", rows),
        _CHECK.matrices("w", w),
    )
    if not _checks.is_float(rows.dtype) or rows.dtype != w.dtype:
        raise TypeError(
            f"grouped_dot: rows and w must have one floating dtype, got {rows.dtype} and {w.dtype}"
        )
    if not is_differentiable(rows.dtype):
        raise TypeError(
            f"grouped_dot: rows and w in {rows.dtype} need their scales; pass the QuantizedArrays "
            "whole, not their values, or cast both to a wider dtype"
        )
    engine = engine.with_precision(precision_of(_CHECK, precision, rows.dtype))
    if group_offset is None:
        group_sizes = _check_shapes(rows, w, group_sizes)
        return as_array(product(engine, vary_alike(Factors(rows, w, group_sizes))))
    window, first_row = _window(w.shape[0], group_sizes, group_offset)
    window = _check_shapes(rows, w, window)
    return as_array(product(engine, vary_alike(Factors(rows, w, window, first_row))))


def _window(
    num_matrices: int, group_sizes: jax.Array, group_offset: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Returns the sizes [L] of the groups from an offset on, and the first row of the first of them."""
    offset = _CHECK.array("group_offset", group_offset)
    if offset.shape or not jnp.issubdtype(offset.dtype, jnp.integer) or group_sizes.ndim != 1:
        raise ValueError(
            "grouped_dot: group_offset must be an integer scalar, and group_sizes [G], got "
            f"{_checks.shape_text(offset)} and {_checks.shape_text(group_sizes)}"
        )
    if num_matrices > group_sizes.shape[0]:
        raise ValueError(
            "grouped_dot: with group_offset, group_sizes must be those of all experts, at least of the "
            f"{num_matrices} of w, got {_checks.shape_text(group_sizes)}"
        )
    num_groups = group_sizes.shape[0]
    most = num_groups - num_matrices
    offset = debug.check("grouped_dot", offset, lambda: [debug.in_range("group_offset", offset, most)])
    offset = _checks.clamped(offset, -num_matrices, num_groups)
    first_row = sum_of_counts(jnp.where(jnp.arange(num_groups, dtype=jnp.int32) < offset, group_sizes, 0))
    groups = offset + jnp.arange(num_matrices, dtype=jnp.int32)
    groups = jnp.where(groups < 0, num_groups, groups)  # past the end, as those from num_groups on
    return jnp.take(group_sizes, groups, mode="fill", fill_value=0), first_row


def _check_shapes(
    rows: jax.Array, w: jax.Array | PhysicalWeights | jax.ShapeDtypeStruct, group_sizes: jax.Array
) -> jax.Array:
    if rows.ndim not in (2, 3):
        raise ValueError(
            "grouped_dot: rows must have two dimensions [C, M], or three of padded experts [L, C, M], got "
            f"{_checks.shape_text(rows)}; reshape the leading dimensions into one"
        )
    if w.ndim != 3:
        raise ValueError(
            "grouped_dot: w must have three dimensions [L, M, N], a matrix for each expert, got "
            f"{_checks.shape_text(w)}; "
            + ("pass w[None] for a single matrix" if w.ndim < 3 else "reshape it to three dimensions")
        )
    rows_per_group, width = _CHECK.rows_per_group(rows.shape, w.shape[0]), rows.shape[-1]
    if width != w.shape[1]:
        is_transposed = width == w.shape[2]
        remedy = "w.swapaxes(1, 2)" if is_transposed else "matrices that have a row for each column of rows"
        raise ValueError(
            f"grouped_dot: M of rows [..., M] and of w [L, M, N] must be equal, got {width} in rows "
            f"{_checks.shape_text(rows)} and {w.shape[1]} in w {_checks.shape_text(w)}; pass {remedy}"
        )
    return _CHECK.group_sizes(group_sizes, w.shape[0], rows.shape[0], rows_per_group)


def _both_quantized(rows: object, w: object) -> tuple[QuantizedArray, QuantizedArray]:
    if not (isinstance(rows, QuantizedArray) and isinstance(w, QuantizedArray)):
        raise TypeError(
            "grouped_dot: rows and w must both be quantized, or neither; got "
            f"{type(rows).__name__} and {type(w).__name__} (jax_ep.quantize_fp8 quantizes)"
        )
    return jax.tree.map(jnp.asarray, (rows, w))


def _check_blocks(rows: QuantizedArray, w: QuantizedArray) -> None:
    of_rows, of_w = block_of(_CHECK, rows), block_of(_CHECK, w)
    if of_rows != (1, BLOCK) or of_w != (BLOCK, BLOCK):
        raise ValueError(
            "grouped_dot: FP8 rows must have scales of 1 x 128 elements and w of 128 x 128, got "
            f"{of_rows[0]} x {of_rows[1]} and {of_w[0]} x {of_w[1]}; quantize them with "
            "quantize_fp8(x) and quantize_fp8(w, block=(128, 128))"
        )


def _rows_of_quantized_weights(rows: ArrayLike | QuantizedArray) -> Rows:
    if not isinstance(rows, QuantizedArray):
        return _CHECK.array("rows", rows)
    if block_of(_CHECK, rows) != (1, BLOCK):
        raise ValueError("grouped_dot: FP8 rows must have scales of 1 x 128 elements, as quantize_fp8(x) has")
    return rows


@custom_vjp(0)
def _times_quantized(engine: Engine, rows: Rows, w: QuantizedWeights, group_sizes: jax.Array) -> jax.Array:
    rows, w = from_bits((rows, w))
    out = _fp8(engine).times(rows, w, group_sizes)
    return out if isinstance(rows, QuantizedArray) else out.astype(rows.dtype)


def _times_quantized_fwd(
    engine: Engine, rows: Rows, w: QuantizedWeights, group_sizes: jax.Array
) -> tuple[jax.Array, Saved]:
    return once_differentiable(_ONE_GRADIENT, functools.partial(_forward, engine), rows, w, group_sizes)


def _forward(
    engine: Engine, rows: Rows, w: QuantizedWeights, group_sizes: jax.Array
) -> tuple[jax.Array, Saved]:
    out = _times_quantized(engine, rows, w, group_sizes)
    _, saved_rows = _fp8(engine).prepare(rows, group_sizes)
    return out, (saved_rows, without_values(rows), w, group_sizes)


def _times_quantized_bwd(engine: Engine, saved: Saved, d_out: jax.Array) -> tuple[PyTree, PyTree, None]:
    return once_differentiable(_ONE_GRADIENT, functools.partial(_backward, engine), saved, d_out)


def _backward(engine: Engine, saved: Saved, d_out: jax.Array) -> tuple[PyTree, PyTree, None]:
    saved_rows, rows, w, group_sizes = from_bits(saved)
    fp8 = _fp8(engine)
    num_redundant = num_redundant_of(wide_of(w))
    d_rows, d_columns = fp8.cotangents(d_out.astype(jnp.bfloat16), group_sizes)
    gradients = (
        cotangent_of(rows, sharded_like(saved_rows, fp8.times_transposed(d_rows, w, group_sizes))),
        cotangent_of(w, fp8.weight_gradient(saved_rows, d_columns, group_sizes, num_redundant)),
    )
    return *gradients, None


_times_quantized.defvjp(_times_quantized_fwd, _times_quantized_bwd)


def _fp8(engine: Engine) -> Fp8:
    return Fp8(engine, weight_gradients=False)
