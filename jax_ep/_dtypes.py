"""In which dtypes rows are summed, and which have gradients."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# What the handlers sum. Other floats are cast to float32 first, and the sum back.
SUMMED = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def summable(array: jax.Array) -> jax.Array:
    """The array in a dtype that the handlers sum."""
    return array if array.dtype in SUMMED else array.astype(jnp.float32)


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which rows of a dtype are summed."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def sum_of_all(terms: Sequence[jax.Array]) -> jax.Array:
    """The sum of arrays of one shape, in the widest dtype among them."""
    widest = jnp.float64 if any(term.dtype == jnp.float64 for term in terms) else jnp.float32
    return functools.reduce(operator.add, [term.astype(widest) for term in terms])


def bits_of(dtype: Any) -> Any:
    """The unsigned integers that are as wide as a dtype."""
    return jnp.dtype(f"uint{jax.dtypes.itemsize_bits(dtype)}")


def is_differentiable(dtype: Any) -> bool:
    """Whether a payload of this dtype has gradients: floating, and wide enough to hold one."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16
