"""Placement: the logical expert of each physical one, and what a plan or a step adds to it."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._checks import Arguments
from jax_ep._placement.plan import is_first
from jax_ep._transport import debug


class Loads(NamedTuple):
    """The rows of a placement's experts and ranks."""

    rows_per_expert: jax.Array  # [P]
    before: jax.Array  # [R]
    after: jax.Array  # [R]


class StepIds(NamedTuple):
    """The choices of this rank's tokens in a step."""

    topk_idx: jax.Array  # [T, K]
    num_invalid: jax.Array  # [1]
    num_unplaced: jax.Array  # [1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """Physical experts of each rank. A pytree.

    `Placement.from_map` makes it from a given map. `plan_redundant_experts` plans it from counts, and
    adds the rows of experts and ranks. `balance` plans it from the tokens of a step, or takes a given
    placement, and adds the rows of experts and ranks (but not with active_ranks) and the physical ids of the
    tokens. An attribute that was not added raises AttributeError.

    R ranks, T tokens, K choices, E logical experts; N physical experts a rank, P = R * N in all. Rank p // N
    hosts physical expert p. With redundant experts N = L + S: first a rank's L = E / R home experts, then its
    S places. Except for topk_idx, num_invalid and num_unplaced all arrays are the same on every rank. If the
    shard_map of `balance` returns it with `out_specs=P(axis)`, each array is the concatenation of those of
    all ranks.

    Attributes:
      physical_to_logical: int32 [P] logical expert of each physical expert, -1 for an empty place.
      num_experts: P, the number of physical experts: `num_experts` of `dispatch`.
      num_logical_experts: E.
      num_ranks: R.
      num_redundant_experts: S; None for a given map.
    """

    physical_to_logical: jax.Array
    num_experts: int = dataclasses.field(metadata={"static": True})
    num_logical_experts: int = dataclasses.field(metadata={"static": True})
    num_ranks: int = dataclasses.field(metadata={"static": True})
    num_redundant_experts: int | None = dataclasses.field(default=None, metadata={"static": True})
    _loads: Loads | None = None
    _step_ids: StepIds | None = None

    @classmethod
    def from_map(
        cls, physical_to_logical: ArrayLike, *, num_logical_experts: int, num_ranks: int
    ) -> "Placement":
        """Returns the placement of a given map, such as `phy2log` of EPLB.

        Make it outside of `jax.jit`, and pass it to programs as an argument. Then the map is checked.

        Args:
          physical_to_logical: int32 [P] logical expert of each physical one, the same on all ranks, P a
            multiple of R; -1 for empty places. Every expert has an instance, and a rank at most one of it.
            If the map is traced, ids out of range and further instances on a rank are empty places.
          num_logical_experts: E.
          num_ranks: R.

        Raises:
          ValueError: an expert has no instance, a rank has an expert twice, an id is not below E, or P is no
            multiple of R.
        """
        check = Arguments("Placement.from_map")
        ranks = check.at_least_one("num_ranks", num_ranks)
        experts = check.num_experts(num_logical_experts, ranks, name="num_logical_experts")
        hosted = _check_map(check, physical_to_logical, experts, ranks)
        return cls(hosted, hosted.shape[0], experts, ranks)

    @property
    def num_local_experts(self) -> int:
        """N, the physical experts of a rank."""
        return self.num_experts // self.num_ranks

    @property
    def topk_idx(self) -> jax.Array:
        """int32 [T, K] physical expert of each choice, -1 where it is unused. Pass it to `dispatch`."""
        return self._of_step.topk_idx

    @property
    def num_invalid(self) -> jax.Array:
        """int32 [1] ids of this rank's tokens that are neither -1 nor an expert. They count as -1."""
        return self._of_step.num_invalid

    @property
    def num_unplaced(self) -> jax.Array:
        """int32 [1] choices of this rank's tokens whose expert has no instance, or none on an active rank.

        They count as -1.
        """
        return self._of_step.num_unplaced

    @property
    def rows_per_expert(self) -> jax.Array:
        """int32 [P] rows that each physical expert gets."""
        return self._of_counts.rows_per_expert

    @property
    def loads_before(self) -> jax.Array:
        """int32 [R] rows that each rank would get if all were computed at home."""
        return self._of_counts.before

    @property
    def loads_after(self) -> jax.Array:
        """int32 [R] rows that each rank gets."""
        return self._of_counts.after

    @property
    def num_moved(self) -> jax.Array:
        """int32 [1] rows of all ranks that are not computed at their expert's home."""
        rows = self.rows_per_expert.reshape(-1, self.num_experts)
        at_home = jnp.where(self._is_at_home(), rows, 0)
        return jnp.sum(rows, axis=1, dtype=jnp.int32) - jnp.sum(at_home, axis=1, dtype=jnp.int32)

    @property
    def num_replicas(self) -> jax.Array:
        """int32 [1] physical experts of all ranks that are not at their home: weights that are sent."""
        is_used = self.physical_to_logical.reshape(-1, self.num_experts) >= 0
        return jnp.sum(is_used & ~self._is_at_home(), axis=1, dtype=jnp.int32)

    def capacity(self, expert_alignment: int = 1, *, slack: float = 0.05) -> int:
        """Returns a capacity for the balanced rows of a step. Call it inside the shard_map of `balance`.

        It is (1 + slack) times the mean T * K, and the padding of every expert. At least expert_alignment.

        Args:
          expert_alignment: that of the dispatch.
          slack: a fraction of the mean, at least 0.

        Raises:
          ValueError: an argument is out of range.
        """
        check = Arguments("Placement.capacity")
        alignment = check.at_least_one("expert_alignment", expert_alignment)
        if not isinstance(slack, int | float) or not 0 <= slack < math.inf:
            raise ValueError(f"{check.op}: slack must be a fraction of the mean, at least 0, got {slack!r}")
        rows = math.ceil(self.topk_idx.size * (1 + slack)) + self.num_local_experts * (alignment - 1)
        return max(-(-rows // alignment), 1) * alignment

    @property
    def _of_counts(self) -> Loads:
        if self._loads is None:
            raise AttributeError(
                "this Placement is without numbers of rows; jax_ep.balance(topk_idx, placement=...) adds "
                "those of a step, but not with active_ranks, where ranks exchange no counts"
            )
        return self._loads

    @property
    def _of_step(self) -> StepIds:
        if self._step_ids is None:
            raise AttributeError(
                "this Placement has no tokens; jax_ep.balance(topk_idx, placement=...) adds those of a step"
            )
        return self._step_ids

    def _is_at_home(self) -> jax.Array:
        """Returns bool [..., P], of each copy of the map."""
        rank = jnp.arange(self.num_experts, dtype=jnp.int32) // self.num_local_experts
        home = self.physical_to_logical // (self.num_logical_experts // self.num_ranks)
        return home.reshape(-1, self.num_experts) == rank[None]


def _check_map(check: Arguments, value: ArrayLike, num_experts: int, num_ranks: int) -> jax.Array:
    """Checks a given map, and returns it as int32 [P]."""
    given = check.array("physical_to_logical", value)
    if not isinstance(value, Tracer) and given.dtype == jnp.int64:  # a list, with jax_enable_x64
        given = given.astype(jnp.int32)
    is_list = given.ndim == 1 and given.dtype == jnp.int32
    if not is_list or given.shape[0] % num_ranks or given.shape[0] < num_experts:
        raise ValueError(
            f"{check.op}: physical_to_logical must be int32 [P], the whole map on each rank, P a multiple of "
            f"the {num_ranks} ranks and at least num_logical_experts = {num_experts}, got "
            f"{_checks.shape_text(given)}"
        )
    if not isinstance(value, Tracer):
        _check_instances(check, np.asarray(value), num_experts, num_ranks)
        return jnp.maximum(given, -1)
    given = debug.check(check.op, given, lambda: [debug.holes(given, num_experts, num_ranks)])
    hosted = jnp.where((given >= 0) & (given < num_experts), given, -1).reshape(num_ranks, -1)
    return jnp.where(is_first(hosted), hosted, -1).reshape(-1)


def _check_instances(check: Arguments, known: np.ndarray, num_experts: int, num_ranks: int) -> None:
    missing = np.setdiff1d(np.arange(num_experts), known)
    if missing.size:
        raise ValueError(
            f"{check.op}: every logical expert needs an instance in physical_to_logical, but "
            f"{missing[:8].tolist()} have none"
        )
    for number, hosted in enumerate(known.reshape(num_ranks, -1)):
        used = hosted[hosted >= 0]
        if used.size != np.unique(used).size or used.max(initial=0) >= num_experts:
            raise ValueError(
                f"{check.op}: physical_to_logical must give each rank distinct logical experts below "
                f"{num_experts}, and -1 for empty places; rank {number} has {hosted.tolist()}"
            )
