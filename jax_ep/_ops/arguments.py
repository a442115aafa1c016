"""Checks of arguments that need a Group, a Routing or a Handle."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType
from jax.typing import ArrayLike

from jax_ep._checks import Arguments, clamped, shape_text
from jax_ep._extension import warn_once
from jax_ep._group.group import Group, ranks_of, require_open
from jax_ep._placement.placement import Placement
from jax_ep._rows.weights import Matrices, PhysicalWeights
from jax_ep._transport import debug
from jax_ep._transport.backend import Backend
from jax_ep._transport.choice import Asynchronous, choose
from jax_ep._transport.routing import Handle


class OpArguments(Arguments):
    """Checks of arguments that need a Group, a Routing or a Handle, besides those of arrays and numbers."""

    def valid_tokens(self, count: ArrayLike, ids: jax.Array) -> jax.Array:
        """Returns the ids [T, K], -1 for tokens from `count` on."""
        array = self.array("num_valid_tokens", count)
        if array.size != 1 or array.ndim > 1 or not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(
                f"{self.op}: num_valid_tokens must be this rank's number of tokens, an integer scalar or "
                f"[1], got {shape_text(array)}; shard an array of all ranks' numbers over the group's axis"
            )
        if not isinstance(count, Tracer):
            number = int(np.asarray(count).reshape(()))
            if not 0 <= number <= ids.shape[0]:
                raise ValueError(
                    f"{self.op}: num_valid_tokens must be from 0 to T = {ids.shape[0]}, got {number}"
                )
        tokens = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        number = clamped(array.reshape(()), 0, ids.shape[0])
        return jnp.where(tokens < number, ids, jnp.asarray(-1, ids.dtype))

    def domain_rows(self, domain_capacity: int | None, group: Group, num_tokens: int) -> int:
        """Returns the rows that a rank takes from each domain in hop 1, at most T. 0 for a single domain."""
        domains = group.size // group.ranks_per_domain
        rows = domains * num_tokens
        if domain_capacity is not None:
            rows = self.at_least_one("domain_capacity", domain_capacity)
        if domains == 1:
            return 0
        if 0 < rows < domains:
            raise ValueError(
                f"{self.op}: domain_capacity counts the rows that a rank takes from all {domains} domains, "
                f"as many from each, so it must be at least {domains}, got {rows}"
            )
        return min(rows // domains, num_tokens)

    def handle(self, value: object) -> Handle:
        """Checks that a handle's arrays fit its routing, and returns it."""
        if not isinstance(value, Handle):
            raise TypeError(
                f"{self.op}: handle must be the Handle that dispatch returned, got {type(value).__name__}"
            )
        routing = value.routing
        if routing.makes_two_hops:
            self.handle(value.within)
        expected = {
            "topk_idx": (routing.num_tokens, routing.top_k),
            "sent_rows": (routing.num_tokens, routing.rows_per_token),
            "rank_prefix_matrix": (routing.num_ranks, routing.num_ranks),
            "expert_counts": (routing.num_local_experts,),
        }
        if routing.has_row_per_choice:
            expected["received_rows"] = (routing.num_ranks * routing.num_tokens, routing.top_k)
        for name, shape in expected.items():
            array = getattr(value, name)
            if array is None or array.shape != shape or array.dtype != jnp.int32:
                got = None if array is None else shape_text(array)
                raise ValueError(
                    f"{self.op}: handle.{name} must be int32 {list(shape)} on each rank, got {got}; pass the "
                    "handle as dispatch returned it, sharded as it came out of shard_map"
                )
            self.on_device(f"handle.{name}", array)
        return value

    def require_group(self, group: object) -> None:
        if not isinstance(group, Group):
            raise TypeError(
                f"{self.op}: group must be a jax_ep.Group, made outside of jit from the mesh: "
                f"jax_ep.Group(mesh, axis_name); got {type(group).__name__}"
            )

    def require_manual(self, group: Group) -> None:
        """Raises ValueError unless the group's axes are bound by a shard_map over a mesh that fits."""
        self.require_group(group)
        require_open(self.op, group)
        axes = ranks_of(group).axes
        try:
            size = jax.lax.axis_size(group.axis_name)
        except NameError:
            raise ValueError(
                f"{self.op} communicates, so it must be called inside jax.shard_map over the axis "
                f"{group.axis_name!r}; {_unbound(group)}"
            ) from None
        mesh = jax.sharding.get_abstract_mesh()
        if not set(axes) <= set(mesh.manual_axes):
            raise ValueError(
                f"{self.op} communicates, so it must be called inside jax.shard_map over the axis "
                f"{group.axis_name!r}; here an axis of that name is bound by something else, jax.vmap for "
                "example"
            )
        if size != group.size:
            raise ValueError(
                f"{self.op}: the axis {group.axis_name!r} of this shard_map has size {size}, but the group "
                f"has {group.size} ranks; make the Group from the mesh of the shard_map"
            )
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        others = tuple(axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1)
        if others:
            warn_once(
                f"jax_ep: this shard_map leaves the mesh axes {others} to automatic sharding. All devices "
                "along them then get the same tokens and do the same work, however the arguments are "
                "sharded; name these axes in its axis_names and in_specs, unless the tokens are the same "
                "along them anyway"
            )

    def placement(self, value: object, group: Group) -> Placement:
        """Checks that a placement is whole, and one of the group's number of ranks, and returns it."""
        if not isinstance(value, Placement):
            raise TypeError(
                f"{self.op}: placement must be a Placement, which jax_ep.balance, plan_redundant_experts and "
                f"Placement.from_map return, got {type(value).__name__}"
            )
        if value.num_ranks != group.size:
            raise ValueError(
                f"{self.op}: placement must be of the {group.size} ranks of the group, got one of "
                f"{value.num_ranks}; make it with num_ranks=group.size"
            )
        hosted = value.physical_to_logical
        if jnp.shape(hosted) != (value.num_experts,):
            raise ValueError(
                f"{self.op}: placement.physical_to_logical must be int32 [{value.num_experts}], the whole "
                f"map on each rank, got {shape_text(jnp.asarray(hosted))}; pass a placement to shard_map "
                "with in_specs=P(), or with the axis with which it left the shard_map of balance, and of "
                "placements that are stacked over layers one layer's"
            )
        return value

    def open_handle(self, value: object, implementation: str | Asynchronous | None) -> tuple[Handle, Backend]:
        """Returns the handle that an op goes along, checked, and the op's backend."""
        checked = self.handle(value)
        if checked.routing.ranks.index_groups is not None:
            raise ValueError(
                f"{self.op}: handle is the handle of hop 2, among the ranks of a domain; pass the handle "
                "dispatch returned, not its `within`"
            )
        self.require_manual(checked.routing.group)
        return checked, choose(checked.routing.group, implementation, is_empty=checked.routing.is_empty)

    def matrices(self, name: str, w: ArrayLike | PhysicalWeights) -> Matrices:
        """Returns the experts' matrices as they come from `replicate`, or as an array."""
        return w if isinstance(w, PhysicalWeights) else self.array(name, w)

    def rows_per_group(self, rows: tuple[int, ...], num_matrices: int) -> int:
        """Returns S of rows [L, S, M], 0 of rows [C, M]. Raises ValueError unless there are L matrices."""
        if len(rows) != 3:
            return 0
        if rows[0] != num_matrices:
            raise ValueError(
                f"{self.op}: rows of three dimensions are those of padded experts [L, C, ...], as "
                "dispatch(order='expert_padded') returns them, so there must be a matrix for each of the "
                f"{rows[0]} experts of rows {list(rows)}, got {num_matrices}; reshape rows that lie expert "
                "by expert to two dimensions"
            )
        return rows[1]

    def group_sizes(
        self, group_sizes: jax.Array, num_matrices: int, num_rows: int, rows_per_group: int = 0
    ) -> jax.Array:
        """Returns group_sizes. Raises ValueError unless there is a number of rows for each matrix.

        If `rows_per_group` is not 0, each expert has that many rows, of which it fills the first ones. Sizes
        that are not known before the program runs are checked in debug mode only.
        """
        if group_sizes.ndim == 1 and group_sizes.shape[0] not in (0, num_matrices):
            raise ValueError(
                f"{self.op}: there must be a matrix for each of the {group_sizes.shape[0]} experts of this "
                f"rank, got {num_matrices}; check that shard_map's in_specs shard the experts' axis over the "
                "group, that num_experts counts the experts of all ranks (with redundant experts: that of "
                "the Placement), and that weights of redundant experts are those that replicate returned, or "
                "moe passed to expert_fn"
            )
        if group_sizes.shape != (num_matrices,) or group_sizes.dtype != jnp.int32:
            raise ValueError(
                f"{self.op}: group_sizes must be int32 [{num_matrices}], a number of rows for each matrix, "
                f"got {shape_text(group_sizes)}"
            )
        if not isinstance(group_sizes, Tracer) and group_sizes.is_fully_addressable:
            sizes = np.asarray(group_sizes)
            if rows_per_group > 0:
                there_are, is_wrong = f"{rows_per_group} for each expert", (sizes > rows_per_group).any()
            else:
                there_are, is_wrong = f"{num_rows}", sizes.sum(dtype=np.int64) > num_rows
            if (sizes < 0).any() or is_wrong:
                raise ValueError(
                    f"{self.op}: group_sizes must be numbers of rows, of which there are {there_are}, got "
                    f"{sizes.tolist()}"
                )
        findings = lambda: [debug.group_sizes(group_sizes, num_rows, rows_per_group)]
        return debug.check(self.op, group_sizes, findings)


def wrong_valid_tokens(count: ArrayLike | None, ids: jax.Array) -> list[debug.Finding]:
    """Returns the finding of debug mode for a `num_valid_tokens`, if any."""
    return [] if count is None else [debug.in_range("num_valid_tokens", jnp.asarray(count), ids.shape[0])]


def count_invalid(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 [1]: how many ids [T, K] are neither an expert nor -1."""
    invalid = (ids < -1) | (ids >= num_experts)
    return jnp.sum(invalid, dtype=jnp.int32).reshape(1)


def _unbound(group: Group) -> str:
    """Returns the text that says which axes of the group no shard_map binds; there is at least one."""
    bound = jax.sharding.get_abstract_mesh().manual_axes
    axes = ranks_of(group).axes
    missing = [axis for axis in axes if axis not in bound]
    if not bound:
        return "no axis is bound here"
    if len(missing) == len(axes):
        bound_names = ", ".join(map(repr, bound))
        return f"this one binds {bound_names}; make the Group from its mesh, with the axis of the experts"
    bound_names, missing_names = (", ".join(map(repr, names)) for names in (bound, missing))
    return (
        f"this one binds {bound_names}, but not {missing_names}; name all of the group's axes in its "
        "axis_names"
    )
