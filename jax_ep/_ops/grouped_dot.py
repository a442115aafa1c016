"""grouped_dot: each expert's rows times that expert's matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_ep import _checks, _extension
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.sharding import axes_of, vary_alike
from jax_ep._jax.vmap import vmap_by_loop
from jax_ep._transport import ffi, xla
from jax_ep._transport.backend import Product
from jax_ep._transport.dtypes import is_differentiable
from jax_ep._transport.fp8 import BLOCK, QuantizedArray, block_of, dequantize_fp8

_NO_GRADIENT = (
    "grouped_dot: FP8 operands have no gradient, for it would have to be FP8 too; differentiate a product of "
    "bfloat16 operands, or define the gradient yourself (jax.custom_vjp)"
)


def grouped_dot(rows: Any, w: Any, group_sizes: Any, *, num_sms: int | None = None) -> jax.Array:
    """Multiplies each expert's rows by that expert's matrix, as `expert_fn` of `jax_ep.moe` does.

    It is like `jax.lax.ragged_dot`. On NVIDIA GPUs, where XLA multiplies all rows by every matrix for that
    and for its gradient, it uses kernels of this package, on tensor cores (float32 rows as tf32). On GPUs of
    compute capability 9.0 they are CUTLASS's for float16 and bfloat16 if both widths are multiples of 8, and
    for FP8: these are the fast ones.

    Args:
      rows: floating [C, M]; the rows of expert l follow those of expert l - 1. Or a `QuantizedArray` with a
        scale for each 128 elements of a row [C, M / 128], as `quantize_fp8(x)` makes it.
      w: [L, M, N] a matrix for each expert, of the dtype of rows. Or a `QuantizedArray` with a scale
        for each 128 x 128 elements [L, M / 128, N / 128], as `quantize_fp8(w, block=(128, 128))` makes it.
        Tensor cores read FP8 matrices transposed: kept as [L, N, M], and handed over as
        `jax.tree.map(lambda a: a.swapaxes(1, 2), kept)` under `jax.jit`, they are not copied.
      group_sizes: int32 [L] rows of each expert, their sum at most C.
      num_sms: how many SMs of a GPU CUTLASS's kernels take at most, forward and backward, at least 2, so that
        communication can run beside them; other kernels do not heed it. None: all.

    Returns:
      [C, N] in the dtype of rows, bfloat16 of FP8; zero in rows past the sum. Products are summed in float32
      (float64 rows: in float64). Differentiable in rows and w that are not FP8, in reverse mode. Under
      `jax.vmap` the products run one after another.

    Raises:
      ValueError: the shapes do not fit each other, or num_sms is less than 2 or more than any GPU has.
      TypeError: rows and w are not floating, or differ in dtype, or only one is quantized, or they are
        FP8 without scales; a gradient of FP8 operands was asked for.
    """
    num_sms = _checks.most_sms("grouped_dot", num_sms) or 0
    group_sizes = _checks.array("grouped_dot", "group_sizes", group_sizes)
    if isinstance(rows, QuantizedArray) or isinstance(w, QuantizedArray):
        rows, w = _both_quantized(rows, w)
        _check_shapes(rows.values, w.values, group_sizes)
        if not rows.values.size or not w.values.size:
            nothing = jnp.zeros((rows.shape[0], w.shape[2]), jnp.bfloat16)
            return vary_alike([nothing, rows.values, w.values])[0]
        _check_blocks(rows, w)
        operands = [rows.values, w.values, rows.scales, w.scales, group_sizes]
        return _fp8_product(num_sms, *vary_alike(operands))
    rows, w = (
        _checks.array("grouped_dot", "rows", rows),
        _checks.array("grouped_dot", "w", w),
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
    _check_shapes(rows, w, group_sizes)
    return _product(Product.ROWS, num_sms, *vary_alike([rows, w, group_sizes]))


def _check_shapes(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> None:
    fits = rows.ndim == 2 and w.ndim == 3 and rows.shape[1] == w.shape[1]
    if fits and group_sizes.ndim == 1 and w.shape[0] > group_sizes.shape[0] > 0:
        raise ValueError(
            f"grouped_dot: w must have a matrix for each of the {group_sizes.shape[0]} experts of this "
            f"rank, got {w.shape[0]}; shard the experts' axis over the group (shard_map's in_specs)"
        )
    if not fits or group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            "grouped_dot: rows [C, M], w [L, M, N] and group_sizes int32 [L] must fit; got "
            f"{', '.join(map(_checks.shape_text, (rows, w, group_sizes)))}"
        )
    if not isinstance(group_sizes, Tracer) and group_sizes.is_fully_addressable:
        sizes = np.asarray(group_sizes)
        if (sizes < 0).any() or sizes.sum(dtype=np.int64) > rows.shape[0]:
            raise ValueError(
                f"grouped_dot: group_sizes must be numbers of rows, of which there are {rows.shape[0]}, got "
                f"{sizes.tolist()}"
            )


def _both_quantized(rows: Any, w: Any) -> tuple[QuantizedArray, QuantizedArray]:
    if not (isinstance(rows, QuantizedArray) and isinstance(w, QuantizedArray)):
        raise TypeError(
            "grouped_dot: rows and w must both be quantized, or neither; got "
            f"{type(rows).__name__} and {type(w).__name__} (jax_ep.quantize_fp8 quantizes)"
        )
    return jax.tree.map(jnp.asarray, (rows, w))


def _check_blocks(rows: QuantizedArray, w: QuantizedArray) -> None:
    of_rows, of_w = block_of("grouped_dot", rows), block_of("grouped_dot", w)
    if of_rows != (1, BLOCK) or of_w != (BLOCK, BLOCK):
        raise ValueError(
            "grouped_dot: FP8 rows must have scales of 1 x 128 elements and w of 128 x 128, got "
            f"{of_rows[0]} x {of_rows[1]} and {of_w[0]} x {of_w[1]}; quantize them with "
            "quantize_fp8(x) and quantize_fp8(w, block=(128, 128))"
        )


_KERNEL_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


@custom_vjp(0, 1)
def _product(
    product: Product, num_sms: int, rows: jax.Array, others: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Computes a product.

    Each product is linear in both operands, and its gradients are the two others, so gradients of any order
    are products of these kinds.
    """

    def one(rows: jax.Array, others: jax.Array, group_sizes: jax.Array) -> jax.Array:
        if _on_gpu() and rows.dtype in _KERNEL_DTYPES:
            return ffi.grouped_dot(product, rows, others, group_sizes, num_sms)
        return xla.grouped_dot(product, rows, others, group_sizes)

    return _sharded(product, one, rows, others, group_sizes)


def _product_fwd(
    product: Product, num_sms: int, rows: jax.Array, others: jax.Array, group_sizes: jax.Array
) -> Any:
    return _product(product, num_sms, rows, others, group_sizes), (rows, others, group_sizes)


def _product_bwd(product: Product, num_sms: int, saved: tuple[jax.Array, ...], cotangent: jax.Array) -> Any:
    rows, others, group_sizes = saved
    # The product, and its operands, that is the gradient of each operand.
    gradients = {
        Product.ROWS: (
            (Product.ROWS_TRANSPOSED, cotangent, others),
            (Product.WEIGHTS, rows, cotangent),
        ),
        Product.ROWS_TRANSPOSED: (
            (Product.ROWS, cotangent, others),
            (Product.WEIGHTS, cotangent, rows),
        ),
        Product.WEIGHTS: (
            (Product.ROWS_TRANSPOSED, others, cotangent),
            (Product.ROWS, rows, cotangent),
        ),
    }
    d_rows, d_others = (
        _product(kind, num_sms, left, right, group_sizes) for kind, left, right in gradients[product]
    )
    if jax.sharding.get_abstract_mesh().explicit_axes:
        d_rows = jax.sharding.reshard(d_rows, jax.typeof(rows).sharding.spec)
        d_others = jax.sharding.reshard(d_others, jax.typeof(others).sharding.spec)
    return d_rows, d_others, np.zeros(group_sizes.shape, jax.dtypes.float0)


_product.defvjp(_product_fwd, _product_bwd)


@custom_vjp(0)
def _fp8_product(num_sms: int, *operands: jax.Array) -> jax.Array:
    """Multiplies values [C, M] and [L, M, N] with scales [C, M / 128] and [L, M / 128, N / 128]."""

    def one(
        rows: jax.Array, matrices: jax.Array, scales: jax.Array, matrix_scales: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        if _on_gpu() and _extension.has_fp8_products():
            transposed = matrices.swapaxes(1, 2), matrix_scales.swapaxes(1, 2)
            return ffi.grouped_dot_fp8(rows, scales, *transposed, sizes, num_sms)
        wide = (
            dequantize_fp8(QuantizedArray(*pair), jnp.float32)
            for pair in ((rows, scales), (matrices, matrix_scales))
        )
        product: jax.Array = _product(Product.ROWS, num_sms, *wide, sizes)
        return product.astype(jnp.bfloat16)

    return _sharded(Product.ROWS, one, *operands)


def _fp8_product_fwd(num_sms: int, *operands: jax.Array) -> Any:
    return _fp8_product(num_sms, *operands), None


def _fp8_product_bwd(num_sms: int, saved: None, cotangent: jax.Array) -> Any:
    raise TypeError(_NO_GRADIENT)


_fp8_product.defvjp(_fp8_product_fwd, _fp8_product_bwd)


def _sharded(product: Product, function: Any, *operands: jax.Array) -> jax.Array:
    """Returns function(*operands). The first two operands are those of the product.

    Under Explicit sharding JAX cannot infer how the result of a ragged dot or a custom call is sharded, so it
    gets the sharding of the operands' other dimensions. XLA's ragged dots have no rule for batches other than
    of rows.
    """

    @vmap_by_loop
    def call(*operands: jax.Array) -> jax.Array:
        explicit = jax.sharding.get_abstract_mesh().explicit_axes
        if not explicit:
            return function(*operands)
        own, other = ((*jax.typeof(array).sharding.spec, *[None] * array.ndim) for array in operands[:2])
        spec = {
            Product.ROWS: [own[0], other[2]],
            Product.ROWS_TRANSPOSED: [own[0], other[1]],
            Product.WEIGHTS: [None, own[1], other[1]],
        }[product]
        if axes_of(spec[-1]) & axes_of(spec[-2]):  # a mesh axis shards one dimension
            spec[-1] = None
        result = jax.sharding.PartitionSpec(*spec)
        automatic: Any = jax.sharding.auto_axes(function, axes=explicit, out_sharding=result)
        return automatic(*operands)

    return call(*operands)


def _on_gpu() -> bool:
    """Returns whether the program is for GPUs that this package's kernels can run on."""
    platform = _extension.current_platform()
    return platform in ("gpu", "cuda") and not _extension.reason_against_ffi("gpu")
