"""FP8 with a scale for each block of elements: quantization and its inverse."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep import _checks
from jax_ep._checks import Arguments
from jax_ep._jax.sharding import Entry, axes_of
from jax_ep._rows.weights import home_of

Arrays = TypeVar("Arrays", tuple[jax.Array], tuple[jax.Array, jax.Array])
Tree = TypeVar("Tree")

FP8 = jnp.float8_e4m3fn


SCALE = np.float32(1 / 448)
"""448 is the largest number of FP8 (e4m3). A factor, for XLA may or may not round a quotient right."""


FLOOR = 1e-4
"""Least value of the largest magnitude in a block, so that no scale is 0."""


BLOCK = 128
"""Elements along a dimension that share a scale in what kernels take."""


COTANGENT_FLOOR = 1e-30
"""FLOOR for cotangents, which may be very small."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """An array in FP8: each element is its value times the scale of its block.

    Attributes:
      values: float8_e4m3fn [..., H].
      scales: float32 [..., H / block]. A block of `quantize_fp8(x, block=(m, n))` is m x n elements of the
        last two dimensions: [..., M / m, N / n].
      carrier: zeros [..., H] in a wider dtype, or None. The gradient of what is computed with the array is
        that of the carrier, which is not FP8. `dispatch(quantize="fp8")` makes it for `gated_mlp`.
    """

    values: jax.Array
    scales: jax.Array
    carrier: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape


def quantize_blocks(x: jax.Array, block: tuple[int, int], round_scale: bool, floor: float) -> QuantizedArray:
    """Returns x in FP8. The largest magnitude of a block counts as `floor` at least: no scale is 0."""
    rows, columns = block

    def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = _in_blocks(x.astype(jnp.float32), rows, columns)
        # Of bits without the sign, which are ordered like magnitudes, with NaN above all: XLA:CPU (jax 0.10)
        # may lose a NaN in the maximum of many floats.
        bits = jax.lax.bitcast_convert_type(parts, jnp.int32) & 0x7FFFFFFF
        largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=(-3, -1)), jnp.float32)
        scales = jnp.maximum(largest, floor) * SCALE
        if round_scale:
            scales = _next_power_of_two(scales)
        factors, scales = (
            jnp.where(jnp.isfinite(largest), array, jnp.nan) for array in (_reciprocal(scales), scales)
        )
        values = (parts * factors[..., :, None, :, None]).reshape(x.shape).astype(FP8)
        # XLA:GPU drops a conversion to FP8 whose result is converted back (xla_allow_excess_precision; seen
        # with jax 0.11.2).
        return jax.lax.optimization_barrier((values, scales if x.ndim > 1 else scales[0]))

    per_block = (rows, columns) if x.ndim > 1 else (columns,)
    blocks = (
        *x.shape[: -len(per_block)],
        *(n // size for n, size in zip(x.shape[-2:], per_block, strict=True)),
    )
    return QuantizedArray(*without_gradients("quantize_fp8", quantize, (x,), x, x.shape, blocks))


def dequantize_fp8(q: QuantizedArray, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """Returns the numbers of q in a floating dtype: value times scale in float32, rounded once.

    Args:
      q: values [..., M, N] and scales [..., M / m, N / n], of blocks of any size.
      dtype: of the result, bfloat16 by default.

    Raises:
      TypeError: q is no QuantizedArray, dtype is not floating, or a gradient was asked for.
      ValueError: the shapes of its values and scales do not fit each other.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"dequantize_fp8: q must be a QuantizedArray, got {type(q).__name__}")
    check = Arguments("dequantize_fp8")
    dtype = check.floating_dtype("dtype", dtype)
    rows, columns = block_of(check, q)

    def dequantize(values: jax.Array, scales: jax.Array) -> tuple[jax.Array]:
        scales = scales if values.ndim > 1 else scales[None]
        parts = _in_blocks(values.astype(jnp.float32), rows, columns)
        return ((parts * scales[..., :, None, :, None]).reshape(values.shape).astype(dtype),)

    operands = q.values, q.scales
    (wide,) = without_gradients("dequantize_fp8", dequantize, operands, q.values, q.shape)
    return wide


def without_gradients(
    name: str,
    function: Callable[..., Arrays],
    operands: tuple[jax.Array, ...],
    like: jax.Array,
    *shapes: tuple[int, ...],
) -> Arrays:
    """Returns function(*operands). A gradient is an error, because it would pass through FP8.

    Under Explicit sharding JAX cannot infer how blocks are sharded, so they get the sharding of the elements
    of `like`. `shapes` are those of the results.
    """
    error = (
        f"{name} has no gradient, because it would be rounded to FP8; pass jax.lax.stop_gradient(...) of its "
        "argument, or define the gradient yourself (jax.custom_vjp). To train with rows that travel as "
        "FP8, use quantize='fp8_dequantize' of jax_ep.dispatch or jax_ep.moe"
    )

    def backward(saved: None, cotangents: object) -> NoReturn:
        raise TypeError(error)

    fixed = jax.custom_vjp(function)
    fixed.defvjp(lambda *operands: (function(*operands), None), backward)
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if not explicit:
        return fixed(*operands)
    spec = jax.typeof(like).sharding.spec
    specs = tuple(jax.sharding.PartitionSpec(*_fitting(spec, shape)) for shape in shapes)
    automatic: Any = jax.sharding.auto_axes(fixed, axes=explicit, out_sharding=specs)
    return automatic(*operands)


def _fitting(spec: jax.sharding.PartitionSpec, shape: tuple[int, ...]) -> list[Entry]:
    """Returns a spec for an array of blocks, without axes that do not divide its dimensions."""
    mesh = jax.sharding.get_abstract_mesh()
    entries = [*spec, *[None] * len(shape)][: len(shape)]
    sizes = [math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in entries]
    return [entry if n % size == 0 else None for entry, n, size in zip(entries, shape, sizes, strict=True)]


def block_of(check: Arguments, q: QuantizedArray) -> tuple[int, int]:
    """Returns the rows and columns of q's blocks."""
    if not all(hasattr(part, "dtype") for part in (q.values, q.scales)):
        kinds = [type(part).__name__ for part in (q.values, q.scales)]
        raise TypeError(f"{check.op}: a QuantizedArray must hold two arrays, got {kinds[0]} and {kinds[1]}")
    values, scales = q.values.shape, q.scales.shape
    fits = len(values) == len(scales) > 0 and values[:-2] == scales[:-2]
    fits = fits and q.values.dtype == FP8 and q.scales.dtype == jnp.float32
    sizes = [_ratio(v, s) for v, s in zip(values[-2:], scales[-2:], strict=False)]
    if not fits or None in sizes:
        raise ValueError(
            f"{check.op}: a QuantizedArray must have values float8_e4m3fn [..., M, N] and scales float32 "
            f"[..., M / m, N / n]; got {_checks.shape_text(q.values)} and {_checks.shape_text(q.scales)}"
        )
    check.on_device("the values of a QuantizedArray", home_of(q.values))
    check.on_device("the scales of a QuantizedArray", home_of(q.scales))
    rows, columns = [1, *sizes][-2:]
    return rows, columns


def _ratio(size: int, blocks: int) -> int | None:
    """Returns the elements in a block, or None if that is not an integer."""
    if size == blocks:
        return 1
    return size // blocks if blocks > 0 and size % blocks == 0 else None


def _reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x in float32, rounded to nearest, for numbers from 2^-120 to 2^120.

    On GPUs XLA's quotients may be off in the last two bits. They are corrected here, so that the values have
    the same bits everywhere. With x = m * 2^(e - 23), the quotient 2^47 / m is an integer of 24 bits, and its
    remainder is computed in int32, where 2^47 is 0.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    m = (bits & 0x7FFFFF) | 0x800000
    q = (np.float32(2.0**47) / m.astype(jnp.float32)).astype(jnp.int32)
    lacks = -(q * m)
    for halves in (1, 3):
        q += (2 * lacks > halves * m).astype(jnp.int32) - (2 * lacks < -halves * m).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(((253 - (bits >> 23)) << 23) + (q - 0x800000), jnp.float32)


def _next_power_of_two(x: jax.Array) -> jax.Array:
    """Returns the least power of two that is not below a positive x."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)


def _in_blocks(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Reshapes [..., M, N] to [..., M / rows, rows, N / columns, columns]."""
    height = x.shape[-2] if x.ndim > 1 else 1
    return x.reshape(*x.shape[:-2], height // rows, rows, x.shape[-1] // columns, columns)


def as_bits(tree: Tree) -> Tree:
    """Returns a pytree with uint8 in place of FP8.

    If a policy of `jax.checkpoint` keeps float8 arrays, JAX turns their largest numbers into NaN. So none
    crosses the boundary of a function with a custom gradient.
    """
    return _bitcast(tree, FP8, jnp.dtype(jnp.uint8))


def from_bits(tree: Tree) -> Tree:
    """Returns a pytree of `as_bits` as it was."""
    return _bitcast(tree, jnp.dtype(jnp.uint8), FP8)


def _bitcast(tree: Tree, old: DTypeLike, new: DTypeLike) -> Tree:
    return jax.tree.map(lambda a: jax.lax.bitcast_convert_type(a, new) if a.dtype == old else a, tree)
