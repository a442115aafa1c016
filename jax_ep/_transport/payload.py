"""A payload's leaves on the wire and back: narrow dtypes, bit patterns, dtypes of sums."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._transport.backend import Backend, Leaves, LocalBackend

# What the handlers sum. Sums in other floats are rounded to them from float32.
SUMMED = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def as_reals(array: jax.Array) -> jax.Array:
    """Returns complex numbers [...] as their real and imaginary parts [..., 2]; other arrays as they are."""
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array
    return jnp.stack([jnp.real(array), jnp.imag(array)], axis=-1)


def from_reals(array: jax.Array, dtype: Any) -> jax.Array:
    """Undoes `as_reals` of an array of the dtype."""
    return jax.lax.complex(array[..., 0], array[..., 1]) if array.dtype != dtype else array


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which rows of a dtype are summed."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def sum_of_all(terms: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of arrays of one shape, in the widest dtype among them."""
    widest = jnp.float64 if any(term.dtype == jnp.float64 for term in terms) else jnp.float32
    return functools.reduce(operator.add, [term.astype(widest) for term in terms])


def bits_of(dtype: Any) -> Any:
    """Returns the dtype of unsigned integers that are as wide as a dtype."""
    return jnp.dtype(f"uint{jax.dtypes.itemsize_bits(dtype)}")


def is_differentiable(dtype: Any) -> bool:
    """Returns whether a payload of this dtype has gradients: it must be floating, of 16 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def move_bits(backend: Backend | LocalBackend, move: Any, leaves: Leaves) -> Any:
    """Calls move(leaves), whose first result is the moved leaves, so that they arrive bit for bit.

    Complex numbers travel as their two parts, and elements narrower than a byte as whole bytes. XLA may
    change the bits of a NaN. If it moves the rows, floats travel as integers of their width.
    """
    reals = [as_reals(leaf) for leaf in leaves]
    carriers = [_carrier(not backend.keeps_bits, real.dtype) for real in reals]
    sent = [
        _with_bits(real, bits).astype(carrier) for real, (bits, carrier) in zip(reals, carriers, strict=True)
    ]
    moved, *rest = move(tuple(sent))
    rows = [
        _with_bits(row.astype(bits), real.dtype)
        for row, real, (bits, _) in zip(moved, reals, carriers, strict=True)
    ]
    return (tuple(from_reals(row, leaf.dtype) for row, leaf in zip(rows, leaves, strict=True)), *rest)


def _carrier(by_xla: bool, dtype: Any) -> tuple[Any, Any]:
    """Returns a dtype with the bits of another one, and the dtype of whole bytes that carries these bits."""
    size, bits = jax.dtypes.itemsize_bits(dtype), dtype
    if jnp.issubdtype(dtype, jnp.floating) and (size < 8 or by_xla):
        bits = bits_of(dtype)
    return bits, jnp.dtype(jnp.int8) if size < 8 else bits


def keep_bits(kept: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the kept rows bit for bit, and zeros for the others. XLA may change a NaN that it selects."""
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        return from_reals(keep_bits(kept[..., None], as_reals(rows)), rows.dtype)
    bits = bits_of(rows.dtype) if jnp.issubdtype(rows.dtype, jnp.floating) else rows.dtype
    found = _with_bits(rows, bits)
    return _with_bits(jnp.where(kept, found, jnp.zeros_like(found)), rows.dtype)


def _with_bits(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
