"""Weights of a rank's physical experts, of which the redundant ones lie in an array of their own."""

import dataclasses
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PhysicalWeights:
    """Weights of a rank's physical experts: L home and S redundant ones. A pytree.

    They lie in two arrays, so that those of home experts are not copied. `replicate` returns them, and `moe`
    passes them to `expert_fn`. `grouped_dot`, `gated_mlp` and `quantize_weights` take them in place of an
    array [L + S, ...]. `jnp.asarray(w)` is that array, a copy. Functions of `jax.numpy` convert w likewise,
    but those of `jax.lax`, methods, operators and indices need the array. Convert both parts to another dtype
    by `jax.tree.map(lambda a: a.astype(dtype), w)`.

    Attributes:
      home: [L, ...] of the home experts, which `replicate` got.
      redundant: [S, ...] of the redundant experts, zero in empty places.
    """

    home: jax.Array
    redundant: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """(L + S, ...)."""
        return (self.home.shape[0] + self.redundant.shape[0], *self.home.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of both arrays."""
        return self.home.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.home.ndim

    def __jax_array__(self) -> jax.Array:
        return jnp.concatenate([self.home, self.redundant])

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"PhysicalWeights has no attribute {name!r}, {_REMEDY}")


Matrices = jax.Array | PhysicalWeights
"""[L, M, N] matrices of experts."""

_REMEDY = (
    "because its weights lie in two arrays; use jnp.asarray(w), which copies them, or "
    "jax.tree.map(f, w) for each of the two"
)


def _reject_operator(*_: object) -> NoReturn:
    raise TypeError(f"PhysicalWeights has no operators and indices, {_REMEDY}")


for _name in ["add", "sub", "mul", "truediv", "floordiv", "matmul", "pow"]:
    setattr(PhysicalWeights, f"__{_name}__", _reject_operator)
    setattr(PhysicalWeights, f"__r{_name}__", _reject_operator)
for _name in ["neg", "abs", "lt", "le", "gt", "ge", "getitem"]:
    setattr(PhysicalWeights, f"__{_name}__", _reject_operator)


def num_redundant_of(w: Matrices) -> int:
    """Returns S, 0 for an array."""
    return w.redundant.shape[0] if isinstance(w, PhysicalWeights) else 0


def home_of(w: Matrices) -> jax.Array:
    return w.home if isinstance(w, PhysicalWeights) else w


def as_array(w: object) -> jax.Array:
    """Returns what is known to be an array, with its type."""
    assert isinstance(w, jax.Array)
    return w


def redundant_of(w: Matrices) -> jax.Array | None:
    return w.redundant if isinstance(w, PhysicalWeights) else None
