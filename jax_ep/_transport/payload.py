"""The rows of an op: a pytree as users pass it, its leaves, and their bits on the wire."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._checks import Arguments, PyTree, TreeDef
from jax_ep._jax.custom_vjp import without_gradient
from jax_ep._rows.dtypes import as_reals, bits_of, from_reals
from jax_ep._transport.backend import Backend, Leaves, LocalBackend

Row = TypeVar("Row")
Rest = TypeVarTuple("Rest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Payload:
    """The rows that an op moves. Between `check` and `rebuild` only its leaves are used."""

    leaves: Leaves
    tree: TreeDef = dataclasses.field(metadata={"static": True})
    op: str = dataclasses.field(metadata={"static": True})
    """The name of the op, for errors."""

    @classmethod
    def check(
        cls, check: Arguments, name: str, x: PyTree, first: tuple[int, ...], axes: str, source: str
    ) -> "Payload":
        """Checks the argument `name` of an op. Every array begins with the dimensions `first`.

        Error messages call these dimensions `axes`, and give `source` as the place that they come from.
        """
        leaves, tree = jax.tree.flatten(x)
        return cls(tuple(check.leaf(name, leaf, first, axes, source) for leaf in leaves), tree, check.op)

    def rebuild(self, rows: Sequence[Row], finish: Callable[[Row], object] = lambda row: row) -> PyTree:
        """Returns finish(row) of each moved row, in the pytree that users passed.

        A gradient through rows of complex leaves raises TypeError.
        """
        moved = [
            finish(_refuse_complex_gradient(self.op, *pair)) for pair in zip(self.leaves, rows, strict=True)
        ]
        return jax.tree.unflatten(self.tree, moved)


def _refuse_complex_gradient(op: str, leaf: jax.Array, row: Row) -> Row:
    """Returns a row. If its leaf is complex, a gradient through it raises TypeError."""
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return row
    error = (
        f"{op}: complex rows have no gradient, got {jax.typeof(leaf)}; pass their real and imaginary "
        "parts as two leaves (jnp.real, jnp.imag), or jax.lax.stop_gradient of them"
    )
    # A gradient of other leaves must not raise it.
    return without_gradient(error, leaf, jax.lax.stop_gradient(row))


def move_bits(
    backend: Backend | LocalBackend,
    move: Callable[[Leaves], tuple[Sequence[jax.Array], *Rest]],
    leaves: Leaves,
) -> tuple[Leaves, *Rest]:
    """Calls move(leaves), whose first result is the moved leaves, so that they arrive bit for bit.

    Complex numbers travel as their two parts, and elements narrower than a byte as whole bytes. XLA may
    change the bits of a NaN. If it moves the rows, floats travel as integers of their width.
    """
    moved, *rest = move(tuple(_to_wire(backend, leaf) for leaf in leaves))
    rows = (_from_wire(backend, row, leaf.dtype) for row, leaf in zip(moved, leaves, strict=True))
    return cast("tuple[Leaves, *Rest]", (tuple(rows), *rest))


def _to_wire(backend: Backend | LocalBackend, leaf: jax.Array) -> jax.Array:
    real = as_reals(leaf)
    bits, carrier = _carrier(not backend.keeps_bits, real.dtype)
    return _with_bits(real, bits).astype(carrier)


def _from_wire(backend: Backend | LocalBackend, row: jax.Array, dtype: np.dtype) -> jax.Array:
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    real = jnp.finfo(dtype).dtype if is_complex else dtype
    bits, _ = _carrier(not backend.keeps_bits, real)
    return from_reals(_with_bits(row.astype(bits), real), dtype)


def _carrier(by_xla: bool, dtype: np.dtype) -> tuple[np.dtype, np.dtype]:
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
    rows_as_bits = _with_bits(rows, bits)
    return _with_bits(jnp.where(kept, rows_as_bits, jnp.zeros_like(rows_as_bits)), rows.dtype)


def _with_bits(array: jax.Array, dtype: np.dtype) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
