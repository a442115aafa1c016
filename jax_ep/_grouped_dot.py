"""grouped_dot: each expert's rows times that expert's matrix, in time that grows with the rows alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _check, _extension, _ffi
from jax_ep._manual import vary_alike


def grouped_dot(rows: Any, weights: Any, group_sizes: Any) -> jax.Array:
    """The product that an `expert_fn` of `jax_ep.moe` is made of.

    `jax.lax.ragged_dot`, but for NVIDIA GPUs, where XLA expands that densely, its gradient too: there
    these are kernels of this package, on tensor cores (float32 rows as tf32).

    Args:
      rows: floating [C, M]; the rows of expert l follow those of expert l - 1.
      weights: [L, M, N] a matrix for each expert, of the dtype of rows.
      group_sizes: int32 [L] rows of each expert, their sum at most C.

    Returns:
      [C, N] in the dtype of rows, zero in rows past the sum. Products are summed in float32 (float64
      rows: in float64). Differentiable in rows and weights.

    Raises:
      ValueError: the shapes do not fit each other.
      TypeError: rows and weights are not floating, or differ in dtype.
    """
    rows, weights, group_sizes = jnp.asarray(rows), jnp.asarray(weights), jnp.asarray(group_sizes)
    if not jnp.issubdtype(rows.dtype, jnp.floating) or rows.dtype != weights.dtype:
        raise TypeError(
            "grouped_dot: rows and weights must have one floating dtype, "
            f"got {rows.dtype} and {weights.dtype}"
        )
    fits = rows.ndim == 2 and weights.ndim == 3 and rows.shape[1] == weights.shape[1]
    if not fits or group_sizes.shape != weights.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            "grouped_dot: rows [C, M], weights [L, M, N] and group_sizes int32 [L] must fit; got "
            f"{', '.join(map(_check.shape_text, (rows, weights, group_sizes)))}"
        )
    rows, weights, group_sizes = vary_alike([rows, weights, group_sizes])
    on_gpu = _extension.current_platform() in ("gpu", "cuda")
    if on_gpu and rows.dtype in _KERNEL_DTYPES and not _extension.reason_against_ffi("gpu"):
        return _product(rows, weights, group_sizes)
    return jax.lax.ragged_dot(rows, weights, group_sizes)


_KERNEL_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


@jax.custom_vjp
def _product(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _ffi.grouped_dot(0, rows, weights, group_sizes, (rows.shape[0], weights.shape[2]))


def _product_fwd(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array):
    return _product(rows, weights, group_sizes), (rows, weights, group_sizes)


def _product_bwd(saved: tuple[jax.Array, ...], cotangent: jax.Array):
    rows, weights, group_sizes = saved
    return (
        _ffi.grouped_dot(1, cotangent, weights, group_sizes, rows.shape),
        _ffi.grouped_dot(2, rows, cotangent, group_sizes, weights.shape),
        np.zeros(group_sizes.shape, jax.dtypes.float0),
    )


_product.defvjp(_product_fwd, _product_bwd)
