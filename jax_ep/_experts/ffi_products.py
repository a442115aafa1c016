"""Calls of the handlers of products, and of activations in FP8 whose results they read. GPUs only."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._experts.engine import Product
from jax_ep._jax.ffi_call import Result, call, or_scalar
from jax_ep._rows.fp8 import BLOCK, FLOOR, FP8
from jax_ep._rows.weights import PhysicalWeights, home_of, redundant_of

INT = jnp.int32


def grouped_dot(
    product: Product,
    num_sms: int,
    precision: jax.lax.Precision,
    num_redundant: int,
    rows: jax.Array,
    others: Any,
    group_sizes: jax.Array,
    first_row: jax.Array | None = None,
) -> Any:
    if product is Product.WEIGHTS:
        shapes = _matrices(group_sizes, num_redundant, (rows.shape[1], others.shape[1]))
    else:
        shapes = [(rows.shape[0], others.shape[2 if product is Product.ROWS else 1]), (0,)]
    redundant = or_scalar(redundant_of(others), rows.dtype)
    *matrices, _ = call(
        "grouped_dot",
        [rows, home_of(others), redundant, group_sizes, or_scalar(first_row, INT)],
        [*((shape, rows.dtype) for shape in shapes), _scratch(group_sizes)],
        product=np.int64(product),
        allow_tf32=np.int64(precision is not jax.lax.Precision.HIGHEST),
        num_sms=np.int64(num_sms),
    )
    return PhysicalWeights(*matrices) if num_redundant else matrices[0]


def grouped_dot_fp8(
    rows: jax.Array,
    row_scales: jax.Array,
    matrices: jax.Array | PhysicalWeights,
    matrix_scales: jax.Array | PhysicalWeights,
    group_sizes: jax.Array,
    num_sms: int,
) -> jax.Array:
    """Multiplies rows [C, M] by matrices that are stored transposed [L, N, M]. Returns bfloat16."""
    home = [home_of(matrices), home_of(matrix_scales)]
    redundant = [or_scalar(redundant_of(matrices), FP8), or_scalar(redundant_of(matrix_scales))]
    operands = [rows, row_scales, *home, *redundant, group_sizes]
    return _fp8_product("grouped_dot_fp8", operands, [(rows.shape[0], matrices.shape[1])], num_sms)[0]


def grouped_dot_fp8_weights(
    rows: jax.Array,
    row_scales: jax.Array,
    others: jax.Array,
    other_scales: jax.Array,
    group_sizes: jax.Array,
    num_sms: int,
    num_redundant: int,
) -> Any:
    """Multiplies rows that are stored transposed, [M, C] and [N, C]. Returns bfloat16 matrices [L, M, N]."""
    operands = [rows, row_scales, others, other_scales, group_sizes]
    shapes = _matrices(group_sizes, num_redundant, (rows.shape[0], others.shape[0]))
    matrices = _fp8_product("grouped_dot_fp8_weights", operands, shapes, num_sms)
    return PhysicalWeights(*matrices) if num_redundant else matrices[0]


def _matrices(group_sizes: jax.Array, num_redundant: int, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """Returns the shapes of the matrices of home experts, and of redundant ones."""
    return [(group_sizes.size - num_redundant, *shape), (num_redundant, *shape) if num_redundant else (0,)]


def _fp8_product(
    target: str, operands: list[jax.Array], shapes: list[tuple[int, ...]], num_sms: int
) -> list[jax.Array]:
    results: list[Result] = [*((shape, jnp.bfloat16) for shape in shapes), _scratch(operands[-1])]
    return call(target, operands, results, num_sms=np.int64(num_sms))[:-1]


def quantize_gated(
    activation: int, z: jax.Array, group_sizes: jax.Array, round_scale: bool
) -> list[jax.Array]:
    """Converts the activation of z [C, 2F] to FP8. Returns values [C, F] and scales."""
    rows = z.shape[0], z.shape[1] // 2
    return _quantize_gated(activation, [z, or_scalar(None), group_sizes], _scaled(rows), round_scale, FLOOR)


def quantize_gated_gradients(
    activation: int,
    z: jax.Array,
    d_hidden: jax.Array,
    group_sizes: jax.Array,
    round_scale: bool,
    floor: float,
    columns: int,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Converts the activation and its gradient to FP8. Each result is values and scales.

    Returns the activation transposed [F, columns], and the cotangent of z as it lies, and transposed.
    """
    width = d_hidden.shape[1]
    results = [
        *_scaled_columns(width, columns),
        *_scaled(z.shape),
        *_scaled_columns(2 * width, columns),
    ]
    made = _quantize_gated(activation, [z, d_hidden, group_sizes], results, round_scale, floor)
    return made[:2], made[2:4], made[4:]


def _quantize_gated(
    activation: int, operands: list[jax.Array], results: list[Result], round_scale: bool, floor: float
) -> list[jax.Array]:
    attributes = {"round_scale": np.int64(round_scale), "floor": np.float32(floor)}
    return call("quantize_gated", operands, results, activation=np.int64(activation), **attributes)


def _scaled(shape: tuple[int, ...]) -> list[Result]:
    return [(shape, FP8), ((shape[0], shape[1] // BLOCK), jnp.float32)]


def _scaled_columns(width: int, columns: int) -> list[Result]:
    return [((width, columns), FP8), ((columns // BLOCK, width), jnp.float32)]


def _scratch(group_sizes: jax.Array) -> Result:
    """Returns the scratch memory of a product: GroupedDotScratchBytes in ffi/core/params.h."""
    return ((128 << 10) + 80 * group_sizes.size,), jnp.uint8
