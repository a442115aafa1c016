"""balance: a step's plan of redundant experts, so that every rank gets about as many rows."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_ep import _checks, _extension, checkpoint_names
from jax_ep._checks import Arguments
from jax_ep._extension import Implementation
from jax_ep._group.group import Group, ranks_of, resolve_implementation
from jax_ep._jax.sharding import align_axes, unshard
from jax_ep._ops.arguments import OpArguments, count_invalid, wrong_valid_tokens
from jax_ep._placement.plan import (
    BalancePlan,
    ExpertPlan,
    Instances,
    as_thousandths,
    is_first,
    loads,
    physical_ids,
    plan_experts,
    plan_of_map,
)
from jax_ep._rows.checkpoint import name_all
from jax_ep._rows.counts import sum_of_counts
from jax_ep._rows.indexing import routed_experts
from jax_ep._transport import debug
from jax_ep._transport.choice import choose, choose_local
from jax_ep._transport.collectives import rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RedundantExperts:
    """A plan of redundant experts, made from counts. Physical experts are numbered as in `BalancePlan`.

    Attributes:
      physical_to_logical: int32 [P] logical expert of each physical expert, -1 for an empty slot.
      rows_per_expert: int32 [P] rows that each physical expert gets.
      loads_before: int32 [R] rows that each rank would get if all were computed at home.
      loads_after: int32 [R] rows that each rank gets.
    """

    physical_to_logical: jax.Array
    rows_per_expert: jax.Array
    loads_before: jax.Array
    loads_after: jax.Array


def balanced_capacity(
    num_choices: int, num_local_experts: int, expert_alignment: int = 1, slack: float = 0.05
) -> int:
    """Returns a capacity for balanced rows: (1 + slack) times the mean, and the padding of every expert.

    At least expert_alignment.

    Args:
      num_choices: T * K of a rank, the mean of the rows of the ranks.
      num_local_experts: N = L + S, the physical experts of a rank.
      expert_alignment: that of the dispatch.
      slack: a fraction of the mean, at least 0.

    Raises:
      ValueError: slack is negative.
    """
    if not slack >= 0:
        raise ValueError(
            f"balanced_capacity: slack must be a fraction of the mean, at least 0, got {slack!r}"
        )
    rows = math.ceil(num_choices * (1 + slack)) + num_local_experts * (expert_alignment - 1)
    return max(-(-rows // expert_alignment), 1) * expert_alignment


def balance(
    topk_idx: ArrayLike,
    *,
    group: Group,
    num_experts: int,
    num_redundant_experts: int | None = None,
    tolerance: float = 0.02,
    min_rows: int = 1,
    num_valid_tokens: ArrayLike | None = None,
    physical_to_logical: ArrayLike | None = None,
    instances: Instances = "even",
    implementation: Implementation | None = None,
) -> BalancePlan:
    """Plans which rows of overloaded ranks other ranks compute. Call it inside `jax.shard_map`.

    From the counts of all ranks it chooses which hot experts get a redundant instance on which ranks, and how
    many rows each instance gets, those of its own rank first. `replicate` brings the weights there, and a
    `dispatch` of the plan's ids the rows. The plan depends on nothing but the counts: every rank, every
    backend and every repetition computes the same bits. (Slots and quotas as in UltraEP, exact filling as in
    MoonEP: docs/balance.md.)

    With `physical_to_logical` nothing is planned: the instances of a given placement, as EPLB computes them,
    divide the rows of their expert.

    Args:
      topk_idx: int32 or int64 [T, K] logical experts of this rank's tokens; -1 and ids out of range are
        unused.
      group: the ranks.
      num_experts: E, logical experts in all.
      num_redundant_experts: S, slots a rank for instances of other ranks' experts, from 0 to L. With S = L
        every routing can be balanced; a smaller S bounds memory and copies. What does not fit stays at home.
      tolerance: the fraction of the mean load by which a rank may exceed it: less of it means more replicas.
        It is rounded to thousandths.
      min_rows: the fewest rows for which an expert is replicated, at least 1. With S = L, the fewest rows
        that a rank must have above the target for any to move.
      num_valid_tokens: int32 scalar, at most T: tokens from it on count as unused. None: T.
      physical_to_logical: int32 [P], a given placement, the same on all ranks, P a multiple of R; -1 for
        empty slots. Every expert has an instance, and a rank at most one of it, which is checked if the
        values are known when traced. Otherwise ids out of range and further instances on a rank are empty
        slots, and choices of an expert without an instance count as unused (`num_unplaced`). Excludes
        num_redundant_experts.
      instances: how the instances of a given placement divide rows. "even": each gets the same number.
        "local": rows stay on their own rank if it has an instance; otherwise all get the same number.
        "least_loaded": instances on ranks with fewer rows get more, so that ranks get about the same number.
      implementation: None, "ffi" or "xla".

    Returns:
      `BalancePlan`.

    Raises:
      ValueError: an argument is out of range or does not fit the others, or no shard_map binds the group's
        axis.
    """
    return balance_as(
        OpArguments("balance"),
        topk_idx,
        group=group,
        num_experts=num_experts,
        num_redundant_experts=num_redundant_experts,
        tolerance=tolerance,
        min_rows=min_rows,
        num_valid_tokens=num_valid_tokens,
        physical_to_logical=physical_to_logical,
        instances=instances,
        implementation=implementation,
    )


def balance_as(
    check: OpArguments,
    topk_idx: ArrayLike,
    *,
    group: Group,
    num_experts: int,
    num_redundant_experts: int | None,
    tolerance: float = 0.02,
    min_rows: int = 1,
    num_valid_tokens: ArrayLike | None = None,
    physical_to_logical: ArrayLike | None = None,
    instances: Instances = "even",
    implementation: Implementation | None,
) -> BalancePlan:
    """Does what `balance` does. Errors in its arguments name the op of `check`."""
    check.require_manual(group)
    local = choose_local(resolve_implementation(group, implementation))
    ids = check.topk_idx(topk_idx)
    num_experts = check.num_experts(num_experts, group.size)
    if (num_redundant_experts is None) == (physical_to_logical is None):
        raise ValueError(
            f"{check.op}: pass either num_redundant_experts, to plan for these tokens, or "
            "physical_to_logical, for a given placement; got "
            f"{'neither' if physical_to_logical is None else 'both'}"
        )
    slots = num_redundant_experts or 0
    options = _PlanOptions.check(check, slots, tolerance, min_rows, num_experts, group.size)
    if physical_to_logical is None and instances != "even":
        raise ValueError(
            f"{check.op}: instances divides the rows of a given placement, so it needs physical_to_logical; "
            f"with num_redundant_experts the plan divides them, got {instances!r}"
        )
    placement = None
    if physical_to_logical is not None:
        placement = _placement(check, physical_to_logical, num_experts, group.size)
        if instances not in ("even", "local", "least_loaded"):
            raise ValueError(
                f"{check.op}: instances must be 'even', 'local' or 'least_loaded', got {instances!r}"
            )
    if num_valid_tokens is not None:
        ids = check.valid_tokens(num_valid_tokens, ids)
    given = ids
    ids, placement = align_axes((ids, placement), ranks_of(group).axes)
    num_invalid = count_invalid(ids, num_experts)
    ids = routed_experts(ids, num_experts)
    num_unplaced = jnp.zeros_like(num_invalid)
    if placement is not None:
        is_unplaced = (ids >= 0) & ~_has_instance(ids, placement, num_experts)
        num_unplaced = jnp.sum(is_unplaced, dtype=jnp.int32).reshape(1)
        ids = jnp.where(is_unplaced, -1, ids)
    with jax.named_scope("jax_ep.balance"):
        source = rank(ranks_of(group)).astype(jnp.int32)
        counts = _counts_of_all(group, ids, num_experts, implementation)
        if placement is None:
            plan = options.plan(counts, source, resolve_implementation(group, implementation))
        else:
            plan = plan_of_map(counts, source, placement, instances)
        plan = name_all(plan, checkpoint_names.handle)
        positions = local.permute((), ids, None, num_experts, 1, max(ids.size, 1)).row_map
        physical = name_all(physical_ids(plan, positions), checkpoint_names.handle)

    def find() -> list[debug.Finding]:
        value = physical_to_logical
        wrong = [] if value is None else [debug.holes(jnp.asarray(value), num_experts, group.size)]
        valid = wrong_valid_tokens(num_valid_tokens, ids)
        return [debug.invalid_ids(given, num_experts), *wrong, *valid]

    plan, physical = debug.check("balance", (plan, physical), find, ranks_of(group))
    return BalancePlan(
        topk_idx=physical,
        physical_to_logical=plan.physical_to_logical,
        rows_per_expert=plan.quotas,
        loads_before=loads(jnp.sum(counts, axis=0, dtype=jnp.int32), group.size),
        loads_after=loads(plan.quotas, group.size),
        num_invalid=num_invalid,
        num_unplaced=num_unplaced,
        group=group,
        num_logical_experts=num_experts,
        num_redundant_experts=options.num_slots if placement is None else None,
    )


def plan_redundant_experts(
    counts: ArrayLike,
    *,
    num_redundant_experts: int,
    tolerance: float = 0.02,
    min_rows: int = 1,
    implementation: Implementation | None = None,
) -> RedundantExperts:
    """Plans redundant experts from counts that are known already. Local: no communication, no shard_map.

    `balance` makes the same plan from the ids of a step. From counts of past steps it is a placement for
    steps to come: pass its `physical_to_logical` to `balance`.

    Args:
      counts: int32 [R, E] rows that each rank has for each logical expert; negative ones count as 0. Their
        sum must be less than 2**31: divide the counts of very many steps. It is checked if the values are
        known. Otherwise nothing moves, and rows that do not fit in int32 are 2**31 - 1.
      num_redundant_experts: S, from 0 to L = E / R.
      tolerance: as for `balance`.
      min_rows: as for `balance`.
      implementation: None, "ffi" or "xla".

    Returns:
      `RedundantExperts`.

    Raises:
      ValueError: an argument is out of range or does not fit the others.
    """
    check = Arguments("plan_redundant_experts")
    passed, counts = counts, check.array("counts", counts)
    if counts.ndim != 2 or counts.dtype != jnp.int32 or counts.shape[0] < 1:
        raise ValueError(f"{check.op}: counts must be int32 [R, E], got {_checks.shape_text(counts)}")
    ranks, experts = counts.shape
    check.num_experts(experts, ranks)
    options = _PlanOptions.check(check, num_redundant_experts, tolerance, min_rows, experts, ranks)
    if not isinstance(passed, Tracer):
        known = np.asarray(passed)
        if (total := known.sum(dtype=np.int64)) >= 2**31:
            raise ValueError(
                f"{check.op}: the counts must sum to less than 2**31, got {total}; divide all of them"
            )
        if known.min() < 0:
            raise ValueError(f"{check.op}: the counts must be numbers of rows, at least 0, got {known.min()}")
    given = unshard(counts)
    counts = debug.check(check.op, given, lambda: [debug.not_negative("counts", given)])
    counts = jnp.maximum(counts, 0)
    plan = options.plan(counts, jnp.zeros((), jnp.int32), implementation)
    at_home = sum_of_counts(counts, axis=0)
    rows = at_home if options.num_slots == 0 else plan.quotas
    of_ranks = lambda rows: sum_of_counts(rows.reshape(ranks, -1), axis=1)
    return RedundantExperts(
        physical_to_logical=plan.physical_to_logical,
        rows_per_expert=rows,
        loads_before=of_ranks(at_home),
        loads_after=of_ranks(rows),
    )


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    num_slots: int  # S
    tolerance: int  # thousandths of the mean
    min_rows: int

    @classmethod
    def check(
        cls, check: Arguments, num_slots: Any, tolerance: Any, min_rows: Any, num_experts: int, num_ranks: int
    ) -> "_PlanOptions":
        slots, least, local = _checks.integer(num_slots), _checks.integer(min_rows), num_experts // num_ranks
        if slots is None or not 0 <= slots <= local:
            raise ValueError(
                f"{check.op}: num_redundant_experts must be an int from 0 to the {local} experts of a rank, "
                f"got {num_slots!r}"
            )
        is_number = isinstance(tolerance, int | float | np.floating) and not isinstance(tolerance, bool)
        if not is_number or not 0 <= tolerance <= 1:
            raise ValueError(
                f"{check.op}: tolerance must be a fraction of the mean load, from 0 to 1, got {tolerance!r}"
            )
        if least is None or not 1 <= least <= _checks.MOST_ROWS:
            raise ValueError(f"{check.op}: min_rows must be an int of at least 1, got {min_rows!r}")
        return cls(slots, as_thousandths(tolerance), least)

    def plan(self, counts: jax.Array, source: jax.Array, implementation: Implementation | None) -> ExpertPlan:
        """Plans from counts int32 [R, E]. Without slots every row stays at home."""
        if self.num_slots == 0:
            home = jnp.arange(counts.shape[1], dtype=jnp.int32) + jnp.zeros_like(counts[0])
            return plan_of_map(counts, source, home, "even")
        resolved = _extension.local_implementation(implementation)
        return plan_experts(resolved, counts, source, self.num_slots, self.tolerance, self.min_rows)


def _counts_of_all(
    group: Group, ids: jax.Array, num_experts: int, implementation: Implementation | None
) -> jax.Array:
    """Returns [R, E]: how many choices of each rank fell on each expert."""
    local = choose_local(resolve_implementation(group, implementation))
    counts = local.layout(ids, num_experts, group.size, 1)
    return choose(group, implementation).gather(counts.num_tokens_per_expert)


def _placement(check: Arguments, value: Any, num_experts: int, num_ranks: int) -> jax.Array:
    """Checks a given placement, and returns it as int32 [P]."""
    placement = check.array("physical_to_logical", value)
    is_list = placement.ndim == 1 and placement.dtype == jnp.int32
    if not is_list or placement.shape[0] % num_ranks or placement.shape[0] < num_experts:
        raise ValueError(
            f"{check.op}: physical_to_logical must be int32 [P], the whole placement on each rank, P a "
            f"multiple of the {num_ranks} ranks and at least num_experts = {num_experts}, got "
            f"{_checks.shape_text(placement)}"
        )
    if not isinstance(value, Tracer):
        _check_placement(check, np.asarray(value), num_experts, num_ranks)
        return placement
    hosted = jnp.where((placement >= 0) & (placement < num_experts), placement, -1).reshape(num_ranks, -1)
    return jnp.where(is_first(hosted), hosted, -1).reshape(-1)


def check_placement(physical_to_logical: np.typing.ArrayLike, *, num_experts: int, num_ranks: int) -> None:
    """Checks a placement on the host, before a program that `balance`s along it gets it as an argument.

    Programs cannot check their arguments: choices of an expert without an instance would be dropped, and of
    an expert that is twice on a rank all would go to the first instance.

    Args:
      physical_to_logical: int32 [P] logical expert of each physical one, -1 for empty slots, as for
        `balance`. EPLB calls it `phy2log`.
      num_experts: E, logical experts.
      num_ranks: R.

    Raises:
      ValueError: an expert has no instance, a rank has an expert twice, an id is not below E, or P is no
        multiple of R.
    """
    placement = np.asarray(physical_to_logical)
    _placement(Arguments("check_placement"), placement, num_experts, num_ranks)


def _check_placement(check: Arguments, placement: np.ndarray, num_experts: int, num_ranks: int) -> None:
    missing = np.setdiff1d(np.arange(num_experts), placement)
    if missing.size:
        raise ValueError(
            f"{check.op}: every logical expert needs an instance in physical_to_logical, but "
            f"{missing[:8].tolist()} have none"
        )
    for number, hosted in enumerate(placement.reshape(num_ranks, -1)):
        used = hosted[hosted >= 0]
        if used.size != np.unique(used).size or used.max(initial=0) >= num_experts:
            raise ValueError(
                f"{check.op}: physical_to_logical must give each rank distinct logical experts below "
                f"{num_experts}, and -1 for empty slots; rank {number} has {hosted.tolist()}"
            )


def _has_instance(ids: jax.Array, placement: jax.Array, num_experts: int) -> jax.Array:
    """Returns whether the expert of each id has an instance in a placement."""
    has = jnp.zeros_like(placement, shape=(num_experts,), dtype=jnp.bool_)
    has = has.at[jnp.where(placement < 0, num_experts, placement)].set(True, mode="drop")
    return jnp.take(has, ids, mode="clip")
