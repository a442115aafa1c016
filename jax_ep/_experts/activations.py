"""Activations of gated experts, and their gradients."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ep._rows.dtypes import sum_dtype

Activation = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gated:
    """The operands of an activation and of its gradient. Rows lie group by group."""

    z: jax.Array  # [C, 2F] gate and up
    row_weights: jax.Array | None  # [C] by which the activated rows are multiplied
    group_sizes: jax.Array  # [L]
    activation: Activation = dataclasses.field(metadata={"static": True})
    needs_wide_d_z: bool = dataclasses.field(default=False, metadata={"static": True})
    """The gradients must have the cotangent of z as it is, too, not only in FP8."""


def _silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _gelu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate) * up


def _clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    # The gradient passes at the limits, as in PyTorch. That of jnp.clip would be halved there, and a bfloat16
    # is often equal to a limit.
    gate = jnp.where(gate > 7.0, 7.0, gate)
    up = jnp.where(jnp.abs(up) > 7.0, 7.0 * jnp.sign(up), up)
    return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS: dict[str, Activation] = {"silu": _silu, "gelu": _gelu, "clipped": _clipped}

OF_KERNELS = (_silu, _gelu, _clipped)
"""Those that kernels compute, in the order of Activation in ffi/core/params.h."""


def activate(gated: Gated) -> jax.Array:
    """Returns the activation [C, F], times the row weights."""
    z = gated.z
    gate, up = jnp.split(z.astype(sum_dtype(z.dtype)), 2, axis=1)
    return weighted(gated.activation(gate, up), gated.row_weights).astype(z.dtype)


def activation_gradients(gated: Gated, d_hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the activated rows, and the cotangents of z and the row weights."""
    run = lambda z, weights: activate(dataclasses.replace(gated, z=z, row_weights=weights))
    hidden, backward = jax.vjp(run, gated.z, gated.row_weights)
    return hidden, *backward(d_hidden.astype(hidden.dtype))


def weighted(rows: jax.Array, row_weights: jax.Array | None) -> jax.Array:
    """Returns the rows, times the row weights if there are any."""
    return rows if row_weights is None else rows * row_weights[:, None].astype(rows.dtype)
