"""What the ops need to know of the shard_map around them."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_ep._batch import rejects_sharded_batch
from jax_ep._extension import warn_once
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


def whole(arrays: Tree) -> Tree:
    """Gathers the arrays of a pytree over Explicit axes of the mesh: an op needs all rows, and whole ones.

    Its results are then not sharded over these axes, and gradients have the types that JAX expects.
    A batch of `jax.vmap` cannot be gathered here, so it must not be sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return arrays

    def gather(array: jax.Array) -> jax.Array:
        array = rejects_sharded_batch(array)
        spec = jax.typeof(array).sharding.spec
        return jax.sharding.reshard(array, P(*[None] * array.ndim)) if any(spec) else array

    return jax.tree.map(gather, arrays)


def axes_of(entry: Any) -> set[str]:
    """The mesh axes that one entry of a PartitionSpec names."""
    return set() if entry is None else {entry} if isinstance(entry, str) else set(entry)


def require_group(op: str, group: Any) -> None:
    if not isinstance(group, Group):
        raise TypeError(
            f"{op}: group must be a jax_ep.Group, made outside of jit from the mesh: "
            f"jax_ep.Group(mesh, axis_name); got {type(group).__name__}"
        )


def require_manual(op: str, group: Group) -> None:
    """Raises ValueError unless the group's axes are bound by a shard_map over a mesh that fits."""
    require_group(op, group)
    group._require_open(op)
    try:
        size = jax.lax.axis_size(group.axis_name)
    except NameError:
        raise ValueError(
            f"{op} communicates, so it must be called inside jax.shard_map over the axis "
            f"{group.axis_name!r}; {_unbound(group)}"
        ) from None
    mesh = jax.sharding.get_abstract_mesh()
    if not set(group._axes) <= set(mesh.manual_axes):
        raise ValueError(
            f"{op} communicates, so it must be called inside jax.shard_map over the axis "
            f"{group.axis_name!r}; here an axis of that name is bound by something else, jax.vmap for example"
        )
    if size != group.size:
        raise ValueError(
            f"{op}: the axis {group.axis_name!r} of this shard_map has size {size}, but the group has "
            f"{group.size} ranks; make the Group from the mesh of the shard_map"
        )
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    others = tuple(axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1)
    if others:
        warn_once(
            f"jax_ep: this shard_map leaves the mesh axes {others} to automatic sharding. All devices along "
            "them then get the same tokens and do the same work, however the arguments are sharded; name "
            "these axes in its axis_names and in_specs, unless the tokens are the same along them anyway"
        )


def _unbound(group: Group) -> str:
    """Which axes of the group no shard_map binds, one at least."""
    bound = jax.sharding.get_abstract_mesh().manual_axes
    missing = [axis for axis in group._axes if axis not in bound]
    if len(missing) == len(group._axes):
        return "no such axis is bound here"
    here, others = (", ".join(map(repr, axes)) for axes in (bound, missing))
    return f"this one binds {here}, but not {others}; name all of the group's axes in its axis_names"
