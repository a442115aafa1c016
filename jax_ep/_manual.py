"""What the ops need to know of the shard_map around them."""

from collections.abc import Iterable
from typing import TypeVar

import jax

from jax_ep._group import Group

Tree = TypeVar("Tree")


def vary_alike(arrays: Tree, axes: Iterable[str] = ()) -> Tree:
    """Makes all arrays of a pytree vary over the same manual axes: `axes`, and those any of them varies over.

    Under `check_vma=True` the operands of one op must agree in this. Elsewhere nothing changes. A
    replicated array that becomes varying gets its gradient summed over the axes by JAX.
    """

    def varying(array: jax.Array) -> frozenset[str]:
        return jax.typeof(array).manual_axis_type.varying

    union = set(axes).union(*map(varying, jax.tree.leaves(arrays)))

    def vary(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(union - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, arrays)


def require_manual(op: str, group: Group) -> None:
    """Raises ValueError unless the group's axes are bound by a shard_map over a mesh that fits."""
    group._require_open(op)
    try:
        size = jax.lax.axis_size(group.axis_name)
    except NameError:
        raise ValueError(
            f"{op} communicates, so it must be called inside jax.shard_map over the axis "
            f"{group.axis_name!r}; no such axis is bound here"
        ) from None
    if size != group.size:
        raise ValueError(
            f"{op}: the axis {group.axis_name!r} of this shard_map has size {size}, but the group has "
            f"{group.size} ranks; make the Group from the mesh of the shard_map"
        )
