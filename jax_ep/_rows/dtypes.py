"""Dtypes of rows: which have gradients, how they are summed, and which integers hold their bits."""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# What the handlers sum. Sums in other floats are rounded to them from float32.
SUMMED = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def as_reals(array: jax.Array) -> jax.Array:
    """Returns complex numbers [...] as their real and imaginary parts [..., 2]; other arrays as they are."""
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array
    return jnp.stack([jnp.real(array), jnp.imag(array)], axis=-1)


def from_reals(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Undoes `as_reals` of an array of the dtype."""
    return jax.lax.complex(array[..., 0], array[..., 1]) if array.dtype != dtype else array


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which rows of a dtype are summed."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def sum_of_all(terms: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of arrays of one shape, in the widest dtype among them."""
    widest = jnp.float64 if any(term.dtype == jnp.float64 for term in terms) else jnp.float32
    return functools.reduce(operator.add, [term.astype(widest) for term in terms])


def bits_of(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of unsigned integers that are as wide as a dtype."""
    return jnp.dtype(f"uint{jax.dtypes.itemsize_bits(dtype)}")


def is_differentiable(dtype: DTypeLike) -> bool:
    """Returns whether a payload of this dtype has gradients: it must be floating, of 16 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16
