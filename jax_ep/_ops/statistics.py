"""Statistics over dispatches: which experts are busy, and which ranks are slow."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep import _checks
from jax_ep._group.group import Group
from jax_ep._jax.sharding import vary_alike
from jax_ep._ops.arguments import OpArguments
from jax_ep._transport.backend import Routed
from jax_ep._transport.routing import Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchStatistics:
    """Sums over dispatches of one rank. L experts on this rank, R ranks.

    They have no gradients, and do not change the gradients of a dispatch. Outside of `shard_map`,
    sharded over the group's axis as they come out, the arrays are [E] and [R * R]: one row of [R, R] is what
    one rank waited for the others.

    Attributes:
      tokens_per_expert: int32 [L] kept rows of each local expert (by rank: kept (row, k) pairs). It wraps
        around at 2^31.
      wait_us: float32 [R] microseconds from the beginning of the op on this rank until each rank had come to
        it; 0 for ranks that were there before. Always 0 with implementation="xla", and where ranks span
        domains.
    """

    tokens_per_expert: jax.Array
    wait_us: jax.Array

    @classmethod
    def zeros(cls, group: Group, num_experts: int) -> "DispatchStatistics":
        """Returns one rank's shard of zeros. Made inside `shard_map`, a scan can carry them.

        Raises:
          ValueError: num_experts is no positive multiple of the number of ranks.
        """
        check = OpArguments("DispatchStatistics.zeros")
        check.require_group(group)
        experts = check.num_experts(num_experts, group.size)
        zeros = cls(jnp.zeros((experts // group.size,), jnp.int32), jnp.zeros((group.size,), jnp.float32))
        # What a dispatch adds may vary over other axes too, and a scan carries one type only.
        return vary_alike(zeros, jax.sharding.get_abstract_mesh().manual_axes)


def check_statistics(check: OpArguments, value: object, routing: Routing) -> None:
    if not isinstance(value, DispatchStatistics):
        raise TypeError(
            f"{check.op}: statistics must be the DispatchStatistics of an earlier dispatch, or "
            f"DispatchStatistics.zeros(group, num_experts) to begin with, got {type(value).__name__}"
        )
    for name, axis, size, dtype in (
        ("tokens_per_expert", "L", routing.num_local_experts, jnp.int32),
        ("wait_us", "R", routing.num_ranks, jnp.float32),
    ):
        array = check.array(f"statistics.{name}", getattr(value, name))
        if array.shape != (size,) or array.dtype != dtype:
            raise ValueError(
                f"{check.op}: statistics.{name} must be {jnp.dtype(dtype).name} [{axis}] = [{size}] on each "
                f"rank, got {_checks.shape_text(array)}; begin with DispatchStatistics.zeros(group, "
                "num_experts), and let it leave and enter shard_map sharded over the group's axis"
            )


def add_to(statistics: DispatchStatistics, routed: Routed) -> DispatchStatistics:
    """Adds the counts and waiting times of one dispatch to the statistics."""
    assert routed.attended.wait_us is not None  # it was asked for
    return DispatchStatistics(
        statistics.tokens_per_expert + routed.tokens_per_expert,
        jax.lax.stop_gradient(statistics.wait_us) + routed.attended.wait_us,
    )
