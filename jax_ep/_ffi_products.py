"""Calls of the FFI handlers that multiply experts' rows, on GPUs only."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._call import Result, call


def grouped_dot(
    product: int, rows: jax.Array, others: jax.Array, group_sizes: jax.Array, num_sms: int
) -> jax.Array:
    """`product` is 0: rows times matrices, 1: times their transposes, 2: rows^T times rows; see params.h."""
    if product == 2:
        shape = (*group_sizes.shape, rows.shape[1], others.shape[1])
    else:
        shape = (rows.shape[0], others.shape[2 if product == 0 else 1])
    out, _ = call(
        "grouped_dot",
        [rows, others, group_sizes],
        [(shape, rows.dtype), _products_scratch(group_sizes)],
        product=np.int64(product),
        num_sms=np.int64(num_sms),
    )
    return out


def grouped_dot_fp8(
    rows: jax.Array,
    row_scales: jax.Array,
    matrices: jax.Array,
    matrix_scales: jax.Array,
    group_sizes: jax.Array,
    num_sms: int,
) -> jax.Array:
    """Rows [C, M] times matrices that lie transposed [L, N, M], in bfloat16."""
    out, _ = call(
        "grouped_dot_fp8",
        [rows, row_scales, matrices, matrix_scales, group_sizes],
        [((rows.shape[0], matrices.shape[1]), jnp.bfloat16), _products_scratch(group_sizes)],
        num_sms=np.int64(num_sms),
    )
    return out


def _products_scratch(group_sizes: jax.Array) -> Result:
    """As GroupedDotScratchBytes in ffi/core/params.h."""
    return ((128 << 10) + 80 * group_sizes.size,), jnp.uint8
