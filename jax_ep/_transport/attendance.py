"""Attendance: which ranks take part in an op that some may miss."""

import dataclasses
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._checks import Arguments
from jax_ep._group.group import Group
from jax_ep._jax.custom_vjp import without_gradient

Tree = TypeVar("Tree")

OnTimeout = Literal["raise", "mask"]


class AttendanceResult(NamedTuple):
    """Ranks that took part in an op, and how long they were waited for."""

    active_ranks: jax.Array | None = None
    """int32 [R], 0 also for ranks that did not come. None if all had to come."""
    wait_us: jax.Array | None = None
    """float32 [R] microseconds until each rank had come, if measured."""

    @property
    def may_miss(self) -> bool:
        """True if ranks may have missed the op."""
        return self.active_ranks is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attendance:
    """Ranks that take part in an op, and what happens if one does not come in time."""

    active_ranks: jax.Array | None = None
    """int32 [R], 0: as if the rank were not there. None: all ranks must come."""
    masks: bool = dataclasses.field(default=False, metadata={"static": True})
    """A rank that does not come in time is left out. Otherwise the op fails."""
    measures: bool = dataclasses.field(default=False, metadata={"static": True})
    """Measure how long each rank is waited for."""
    op: str = dataclasses.field(default="", metadata={"static": True})
    """The name of the op, for errors."""

    @classmethod
    def check(
        cls,
        check: Arguments,
        active_ranks: ArrayLike | None,
        on_timeout: object,
        group: Group,
        measures: bool = False,
    ) -> "Attendance":
        """Checks active_ranks and on_timeout of an op, and returns them as an Attendance."""
        if not isinstance(on_timeout, str) or on_timeout not in ("raise", "mask"):
            raise ValueError(f"{check.op}: on_timeout must be 'raise' or 'mask', got {on_timeout!r}")
        masks, num_ranks = on_timeout == "mask", group.size
        if group.ranks_per_domain < num_ranks and (masks or active_ranks is not None):
            raise ValueError(
                f"{check.op}: active_ranks and on_timeout='mask' need a group whose ranks share a domain, "
                f"because JAX's collectives between domains wait for all ranks, got {group!r}; leave them "
                "out, or choose ranks of one domain"
            )
        if active_ranks is None:
            return cls(jnp.ones((num_ranks,), jnp.int32) if masks else None, masks, measures, check.op)
        flags = check.array("active_ranks", active_ranks)
        kinds = (jnp.integer, jnp.bool_)
        if flags.shape != (num_ranks,) or not any(jnp.issubdtype(flags.dtype, kind) for kind in kinds):
            raise ValueError(
                f"{check.op}: active_ranks must be integers or bools [R] = [{num_ranks}], one for each rank, "
                f"got {_checks.shape_text(flags)}"
            )
        is_known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(active_ranks))
        if is_known and not np.isin(np.asarray(active_ranks), (0, 1)).all():
            raise ValueError(
                f"{check.op}: active_ranks must hold a 1 for each rank that takes part and a 0 for each "
                f"other one, not their numbers, got {np.asarray(active_ranks).tolist()}"
            )
        return cls(flags.astype(bool).astype(jnp.int32), masks, measures, check.op)

    @property
    def may_miss(self) -> bool:
        """True if ranks may miss the op, which then has no gradient."""
        return self.active_ranks is not None

    def peers_of(self, rank: jax.Array) -> jax.Array | None:
        """Returns int32 [R]: 1 for the ranks that exchange rows with this one. None if all do."""
        return None if self.active_ranks is None else self.active_ranks * self.active_ranks[rank]

    def as_attended(self, num_ranks: int) -> AttendanceResult:
        """Returns the result of an op that waits for every rank, however long, and measures nothing."""
        return AttendanceResult(
            self.active_ranks, jnp.zeros((num_ranks,), jnp.float32) if self.measures else None
        )


ALL_RANKS = Attendance()


def refuse_gradient(op: str, sources: object, results: Tree) -> Tree:
    """Returns the results of an op that ranks may miss. Their gradient raises TypeError."""
    error = (
        f"{op}: with active_ranks or on_timeout='mask' it has no gradient, because other ranks may take part "
        "in the backward pass; train without them, or pass jax.lax.stop_gradient of its arguments"
    )
    return without_gradient(error, sources, results)
