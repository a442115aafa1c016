"""What the ops need to know of the shard_map around them."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jax_ep._group import Group


def vary_alike(arrays: Sequence[Any], axes: Iterable[str] = ()) -> list[Any]:
    """Makes all arrays vary over the same manual axes: `axes` and those any of them varies over.

    Under `check_vma=True` the operands of one op must agree in this. Elsewhere nothing changes. A
    replicated array that becomes varying gets its gradient summed over the axes by JAX.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    union = set(axes).union(*varying)
    result = []
    for array, own in zip(arrays, varying, strict=True):
        missing = tuple(sorted(union - own))
        result.append(jax.lax.pcast(array, missing, to="varying") if missing else array)
    return result


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
