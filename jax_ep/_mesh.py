"""The mesh of a group, and those of its axes that the ranks lie along."""

from collections.abc import Hashable
from typing import Any

import jax


def named_axes(mesh: Any, axis_name: Any) -> tuple[Any, ...]:
    """The axes that a group is to have, in their order. Raises what `Group` says."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise TypeError(
            "Group: mesh must be a jax.sharding.Mesh, with devices; got an AbstractMesh, which has none. "
            "Under jit JAX shows no other, so make the group outside of jit and hand it to the model: "
            "jax_ep.Group(jax.sharding.get_mesh(), axis_name), where jax.set_mesh has set the mesh"
        )
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"Group: mesh must be a jax.sharding.Mesh, with devices; got {type(mesh).__name__}")
    if mesh.empty:
        raise ValueError(
            "Group: mesh must be a jax.sharding.Mesh, with devices; got an empty one, as "
            "jax.sharding.get_mesh() gives it where jax.set_mesh has set none"
        )
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    missing = [axis for axis in axes if not isinstance(axis, Hashable) or axis not in mesh.axis_names]
    if missing or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"Group: axis_name must name axes of the mesh, each once; got {axis_name!r}, "
            f"the mesh has {mesh.axis_names}"
        )
    return axes
