"""Conversion of arrays to FP8 by this package's kernel, to the same bits as `quantize_blocks`. GPUs only."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._jax.ffi_call import Attribute, call, or_scalar
from jax_ep._jax.sharding import is_per_device
from jax_ep._rows.fp8 import BLOCK, FLOOR, FP8, QuantizedArray, quantize_blocks, without_gradients

KERNEL_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


def quantize_by_kernel(
    x: jax.Array, block: tuple[int, int], round_scale: bool, floor: float = FLOOR
) -> QuantizedArray:
    """Returns x [..., M, N] in FP8 with a scale for each block, which has no gradient.

    XLA computes blocks that the kernel does not take. Only blocks of one row take a floor other than FLOOR.
    """
    # XLA cannot divide a kernel's work among devices.
    has_kernel = x.dtype in KERNEL_DTYPES and block in ((1, BLOCK), (BLOCK, BLOCK)) and x.size > 0
    if not (has_kernel and is_per_device()):
        return quantize_blocks(x, block, round_scale, floor)

    def convert(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, columns = block
        if rows == 1:
            flat = x.reshape(-1, x.shape[-1])
            groups = None, 0
            values, scales, *_ = rows_by_kernel(flat, None, groups, round_scale, floor, keeps=True, columns=0)
        else:
            flat = x.reshape(-1, *x.shape[-2:])
            values, scales, _ = matrices_by_kernel(flat, round_scale, keeps=True, transposes=False)
        blocks = x.shape[-2] // rows if x.ndim > 1 else 1
        shape = *x.shape[:-2], *([blocks] if x.ndim > 1 else []), x.shape[-1] // columns
        return values.reshape(x.shape), scales.reshape(shape)

    return QuantizedArray(*without_gradients("quantize_fp8", convert, (x,), x))


def rows_by_kernel(
    x: jax.Array,
    x_scales: jax.Array | None,
    groups: tuple[jax.Array | None, int],
    round_scale: bool,
    floor: float,
    keeps: bool,
    columns: int,
) -> list[jax.Array]:
    """Converts rows [C, M] to FP8: as they lie if it `keeps` them, and transposed if `columns` is not 0.

    `groups` are group_sizes, if there are groups, and `Options.rows_per_group` (jax_ep/_experts/engine.py).
    Returns values, scales, and those of the transpose [M, columns]. What is not asked for is empty.
    """
    num_rows, width = x.shape
    results = [
        ((num_rows, width) if keeps else (0,), FP8),
        ((num_rows, width // BLOCK) if keeps else (0,), jnp.float32),
        ((width, columns) if columns else (0,), FP8),
        ((columns // BLOCK, width) if columns else (0,), jnp.float32),
    ]
    group_sizes, rows_per_group = groups
    operands = [x, or_scalar(x_scales), or_scalar(group_sizes, jnp.int32)]
    return call("quantize", operands, results, (), **_attributes(False, round_scale, floor, rows_per_group))


def matrices_by_kernel(w: jax.Array, round_scale: bool, keeps: bool, transposes: bool) -> list[jax.Array]:
    """Converts matrices [L, M, N] to FP8. Returns values, scales of 128 x 128 elements, values [L, N, M].

    Values that are not asked for are empty.
    """
    groups, height, width = w.shape
    results = [
        (w.shape if keeps else (0,), FP8),
        ((groups, height // BLOCK, width // BLOCK), jnp.float32),
        ((groups, width, height) if transposes else (0,), FP8),
        ((0,), jnp.float32),
    ]
    operands = [w, or_scalar(None), or_scalar(None, jnp.int32)]
    return call("quantize", operands, results, (), **_attributes(True, round_scale, FLOOR))[:3]


def _attributes(
    of_matrices: bool, round_scale: bool, floor: float, rows_per_group: int = 0
) -> dict[str, Attribute]:
    return {
        "of_matrices": np.int64(of_matrices),
        "round_scale": np.int64(round_scale),
        "rows_per_group": np.int64(rows_per_group),
        "floor": np.float32(floor),
    }
