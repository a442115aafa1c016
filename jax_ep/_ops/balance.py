"""balance: a step's placement of experts, so that every rank gets about as many rows."""

import dataclasses

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
from jax_ep._placement.placement import Loads, Placement, StepIds
from jax_ep._placement.plan import (
    ExpertPlan,
    Instances,
    as_thousandths,
    loads,
    physical_ids,
    plan_experts,
    plan_of_map,
)
from jax_ep._rows.checkpoint import name_all
from jax_ep._rows.counts import sum_of_counts
from jax_ep._rows.indexing import routed_experts
from jax_ep._transport import debug
from jax_ep._transport.attendance import Attendance
from jax_ep._transport.choice import choose, choose_local
from jax_ep._transport.collectives import rank


def balance(
    topk_idx: ArrayLike,
    *,
    group: Group,
    num_experts: int | None = None,
    num_redundant_experts: int | None = None,
    tolerance: float = 0.02,
    min_rows: int = 1,
    placement: Placement | None = None,
    instances: Instances = "even",
    active_ranks: ArrayLike | None = None,
    num_valid_tokens: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> Placement:
    """Plans which rows of overloaded ranks other ranks compute. Call it inside `jax.shard_map`.

    From the counts of all ranks it chooses which hot experts get a redundant instance on which ranks, and how
    many rows each instance computes; rows of the instance's own rank come first. `replicate` then sends the
    weights, and a `dispatch` of the placement's ids sends the rows. The plan depends on nothing but the
    counts: every rank, every backend and every repetition computes the same bits. (Places and quotas as in
    UltraEP, exact filling as in MoonEP: docs/balance.md.)

    With `placement` nothing is planned: the instances of that placement, such as one from EPLB, divide the
    rows of their expert.

    Args:
      topk_idx: int32 or int64 [T, K] logical experts of this rank's tokens; -1 and ids out of range are
        unused.
      group: the ranks.
      num_experts: E, logical experts in all.
      num_redundant_experts: S, the number of places on each rank for instances of other ranks' experts, from
        0 to L. With S = L every routing can be balanced; a smaller S bounds memory and copies. What does not
        fit stays at home.
      tolerance: the fraction of the mean load by which a rank may exceed it: less of it means more replicas.
        It is rounded to thousandths.
      min_rows: the fewest rows for which an expert is replicated, at least 1. With S = L, the fewest rows
        that a rank must have above the target for any to move.
      placement: a `Placement`, the same on all ranks, in place of num_experts and num_redundant_experts.
        Choices of an expert without an instance count as unused (`num_unplaced`).
      instances: how the instances of `placement` divide rows. "even": each gets the same number.
        "local": rows stay on their own rank if it has an instance; otherwise all get the same number.
        "least_loaded": instances on ranks with fewer rows get more, so that ranks get about the same number.
      active_ranks: integers or bools [R], this rank's view of the ranks, as a dispatch returns it: instances
        on ranks marked 0 get no rows, and choices of an expert without another one count as unused. Only with
        `placement` and instances="local", and as for `dispatch` only if the ranks share a domain. Nothing is
        exchanged then, so it waits for no rank, and the result has no numbers of rows. None: all take part.
      num_valid_tokens: int32 scalar, at most T: tokens from it on count as unused. None: T.
      implementation: None, "ffi" or "xla".

    Returns:
      `Placement` with the ids of this step.

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
        placement=placement,
        instances=instances,
        active_ranks=active_ranks,
        num_valid_tokens=num_valid_tokens,
        implementation=implementation,
    )


def balance_as(
    check: OpArguments,
    topk_idx: ArrayLike,
    *,
    group: Group,
    num_experts: int | None,
    num_redundant_experts: int | None,
    tolerance: float = 0.02,
    min_rows: int = 1,
    placement: Placement | None = None,
    instances: Instances = "even",
    active_ranks: ArrayLike | None = None,
    num_valid_tokens: ArrayLike | None = None,
    implementation: Implementation | None,
) -> Placement:
    """Does what `balance` does. Errors in its arguments name the op of `check`."""
    check.require_manual(group)
    local = choose_local(resolve_implementation(group, implementation))
    ids = check.topk_idx(topk_idx)
    options, hosted, active = None, None, None
    if active_ranks is not None:
        if placement is None or instances != "local":
            raise ValueError(
                f"{check.op}: active_ranks needs a given placement and instances='local', because other "
                f"plans wait for the counts of all ranks, got {'no' if placement is None else 'a'} placement "
                f"and instances={instances!r}"
            )
        active = Attendance.check(check, active_ranks, "raise", group).active_ranks
    if placement is None:
        options = _options_of_step(
            check, num_experts, num_redundant_experts, tolerance, min_rows, instances, group.size
        )
        num_experts, places = options.num_experts, options.num_places
    else:
        _check_given(
            check, placement, group, num_experts, num_redundant_experts, tolerance, min_rows, instances
        )
        num_experts, hosted = placement.num_logical_experts, placement.physical_to_logical
        places = placement.num_redundant_experts
    if num_valid_tokens is not None:
        ids = check.valid_tokens(num_valid_tokens, ids)
    passed_ids = ids
    ids, hosted, active = align_axes((ids, hosted, active), ranks_of(group).axes)
    living = hosted  # without the instances of ranks that take no part
    if active is not None:
        assert hosted is not None
        living = jnp.where(jnp.repeat(active, hosted.shape[0] // group.size) > 0, hosted, -1)
    num_invalid = count_invalid(ids, num_experts)
    ids = routed_experts(ids, num_experts)
    num_unplaced = jnp.zeros_like(num_invalid)
    if living is not None:
        is_unplaced = (ids >= 0) & ~_has_instance(ids, living, num_experts)
        num_unplaced = jnp.sum(is_unplaced, dtype=jnp.int32).reshape(1)
        ids = jnp.where(is_unplaced, -1, ids)
    with jax.named_scope("jax_ep.balance"):
        source = rank(ranks_of(group)).astype(jnp.int32)
        own = local.layout(ids, num_experts, group.size, 1).num_tokens_per_expert
        if active is None:
            counts = choose(group, implementation).all_gather(own)
        else:  # the division of a rank's own rows depends on no others
            counts = jnp.zeros_like(own, shape=(group.size, num_experts)).at[source].set(own)
        if living is not None:
            plan = plan_of_map(counts, source, living, instances)
        else:
            assert options is not None
            plan = options.plan(counts, source, resolve_implementation(group, implementation))
        plan = name_all(plan, checkpoint_names.handle)
        positions = local.permute((), ids, None, num_experts, 1, max(ids.size, 1)).row_map
        physical = name_all(physical_ids(plan, positions), checkpoint_names.handle)

    def find() -> list[debug.Finding]:
        return [debug.invalid_ids(passed_ids, num_experts), *wrong_valid_tokens(num_valid_tokens, ids)]

    alone = active is not None
    plan, physical = debug.check(check.op, (plan, physical), find, ranks_of(group), alone=alone)
    of_counts = None
    if not alone:
        before = loads(jnp.sum(counts, axis=0, dtype=jnp.int32), group.size)
        of_counts = Loads(plan.quotas, before, loads(plan.quotas, group.size))
    return Placement(
        physical_to_logical=plan.physical_to_logical if hosted is None else hosted,
        num_experts=plan.physical_to_logical.shape[0],
        num_logical_experts=num_experts,
        num_ranks=group.size,
        num_redundant_experts=places,
        _loads=of_counts,
        _step_ids=StepIds(physical, num_invalid, num_unplaced),
    )


def _options_of_step(
    check: OpArguments,
    num_experts: int | None,
    num_redundant_experts: int | None,
    tolerance: float,
    min_rows: int,
    instances: Instances,
    num_ranks: int,
) -> "_PlanOptions":
    """Checks the arguments of a plan for the tokens of a step."""
    if num_experts is None or num_redundant_experts is None:
        raise ValueError(
            f"{check.op}: pass either num_experts and num_redundant_experts, to plan for these tokens, or "
            f"placement; got num_experts={num_experts} and num_redundant_experts={num_redundant_experts}"
        )
    if instances != "even":
        raise ValueError(
            f"{check.op}: instances divides the rows of a given placement, so it needs placement; with "
            f"num_redundant_experts the plan divides them, got {instances!r}"
        )
    return _PlanOptions.check(check, num_experts, num_redundant_experts, tolerance, min_rows, num_ranks)


def _check_given(
    check: OpArguments,
    placement: Placement,
    group: Group,
    num_experts: int | None,
    num_redundant_experts: int | None,
    tolerance: float,
    min_rows: int,
    instances: Instances,
) -> None:
    """Checks a given placement, and the arguments that go with it."""
    check.placement(placement, group)
    if num_experts is not None or num_redundant_experts is not None:
        raise ValueError(
            f"{check.op}: pass either num_experts and num_redundant_experts, to plan for these tokens, or "
            "placement, which has both; got both"
        )
    if (tolerance, min_rows) != (0.02, 1):  # the defaults
        raise ValueError(
            f"{check.op}: tolerance and min_rows are of plans, and placement is not planned, got "
            f"tolerance={tolerance!r} and min_rows={min_rows!r}; omit them"
        )
    if instances not in ("even", "local", "least_loaded"):
        raise ValueError(
            f"{check.op}: instances must be 'even', 'local' or 'least_loaded', got {instances!r}"
        )


def plan_redundant_experts(
    counts: ArrayLike,
    *,
    num_redundant_experts: int,
    tolerance: float = 0.02,
    min_rows: int = 1,
    implementation: Implementation | None = None,
) -> Placement:
    """Plans redundant experts from counts that are known already. Local: no communication, no shard_map.

    `balance` makes the same plan from the ids of a step. From counts of past steps it is a placement for
    steps to come: pass it to `balance` and `replicate`.

    Args:
      counts: int32 [R, E] rows that each rank has for each logical expert; negative ones count as 0. Their
        sum must be less than 2**31: divide the counts of very many steps. If the values are known, a larger
        sum raises ValueError. If they are traced, nothing moves with a larger sum, and numbers of rows that
        do not fit in int32 become 2**31 - 1.
      num_redundant_experts: S, from 0 to L = E / R.
      tolerance: as for `balance`.
      min_rows: as for `balance`.
      implementation: None, "ffi" or "xla".

    Returns:
      `Placement` with the rows of experts and ranks, without tokens.

    Raises:
      ValueError: an argument is out of range or does not fit the others.
    """
    check = Arguments("plan_redundant_experts")
    passed, counts = counts, check.array("counts", counts)
    if counts.ndim != 2 or counts.dtype != jnp.int32 or counts.shape[0] < 1:
        raise ValueError(f"{check.op}: counts must be int32 [R, E], got {_checks.shape_text(counts)}")
    ranks, experts = counts.shape
    options = _PlanOptions.check(check, experts, num_redundant_experts, tolerance, min_rows, ranks)
    if not isinstance(passed, Tracer):
        known = np.asarray(passed)
        if (total := known.sum(dtype=np.int64)) >= 2**31:
            raise ValueError(
                f"{check.op}: the counts must sum to less than 2**31, got {total}; divide all of them"
            )
        if known.min() < 0:
            raise ValueError(f"{check.op}: the counts must be numbers of rows, at least 0, got {known.min()}")
    unsharded = unshard(counts)
    counts = debug.check(check.op, unsharded, lambda: [debug.not_negative("counts", unsharded)])
    counts = jnp.maximum(counts, 0)
    plan = options.plan(counts, jnp.zeros((), jnp.int32), implementation)
    at_home = sum_of_counts(counts, axis=0)
    rows = at_home if options.num_places == 0 else plan.quotas
    of_ranks = lambda rows: sum_of_counts(rows.reshape(ranks, -1), axis=1)
    return Placement(
        physical_to_logical=plan.physical_to_logical,
        num_experts=plan.physical_to_logical.shape[0],
        num_logical_experts=experts,
        num_ranks=ranks,
        num_redundant_experts=options.num_places,
        _loads=Loads(rows, of_ranks(at_home), of_ranks(rows)),
    )


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    num_experts: int  # E
    num_places: int  # S
    tolerance: int  # thousandths of the mean
    min_rows: int

    @classmethod
    def check(
        cls,
        check: Arguments,
        num_experts: int | None,
        num_places: int,
        tolerance: float,
        min_rows: int,
        num_ranks: int,
    ) -> "_PlanOptions":
        num_experts = check.num_experts(num_experts, num_ranks)
        places, least = _checks.integer(num_places), _checks.integer(min_rows)
        local = num_experts // num_ranks
        if places is None or not 0 <= places <= local:
            raise ValueError(
                f"{check.op}: num_redundant_experts must be an int from 0 to the {local} experts of a rank, "
                f"got {num_places!r}"
            )
        is_number = isinstance(tolerance, int | float | np.floating) and not isinstance(tolerance, bool)
        if not is_number or not 0 <= tolerance <= 1:
            raise ValueError(
                f"{check.op}: tolerance must be a fraction of the mean load, from 0 to 1, got {tolerance!r}"
            )
        if least is None or not 1 <= least <= _checks.MOST_ROWS:
            raise ValueError(f"{check.op}: min_rows must be an int of at least 1, got {min_rows!r}")
        return cls(num_experts, places, as_thousandths(tolerance), least)

    def plan(self, counts: jax.Array, source: jax.Array, implementation: Implementation | None) -> ExpertPlan:
        """Plans from counts int32 [R, E]. Without places every row stays at home."""
        if self.num_places == 0:
            home = jnp.arange(counts.shape[1], dtype=jnp.int32) + jnp.zeros_like(counts[0])
            return plan_of_map(counts, source, home, "even")
        resolved = _extension.local_implementation(implementation)
        return plan_experts(resolved, counts, source, self.num_places, self.tolerance, self.min_rows)


def _has_instance(ids: jax.Array, placement: jax.Array, num_experts: int) -> jax.Array:
    """Returns whether the expert of each id has an instance in a placement."""
    has = jnp.zeros_like(placement, shape=(num_experts,), dtype=jnp.bool_)
    has = has.at[jnp.where(placement < 0, num_experts, placement)].set(True, mode="drop")
    return jnp.take(has, ids, mode="clip")
