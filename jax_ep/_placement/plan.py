"""Plans of redundant experts: the rank that computes each row of a hot expert.

R ranks, E logical experts, L = E / R experts at home on a rank, N physical experts a rank, P = R * N. A plan
is a function of the counts of all ranks, so every rank computes the same one. docs/balance.md describes the
method and its sources.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._extension import Implementation
from jax_ep._jax.ffi_call import Attribute, Result, call
from jax_ep._jax.sharding import vary_alike
from jax_ep._rows.counts import MOST, sum_of_counts

Instances = Literal["even", "local", "least_loaded"]

INT = jnp.int32

LOAD_ROUNDS = 8
"""After these, lognormal loads (sigma 1.5) of 8 ranks were within 2 to 6 % of the mean."""


class ExpertPlan(NamedTuple):
    """Instances of the experts and the rows that each computes: the same on every rank."""

    physical_to_logical: jax.Array  # [P] logical expert of each physical one, -1 an empty place
    quotas: jax.Array  # [P] rows that each physical expert computes
    order: jax.Array  # [P] physical experts by logical expert, then rank; empty places last
    ends: jax.Array  # [P] entry i: how many of this rank's choices go to the physical experts order[: i + 1]


class _State(NamedTuple):
    """A plan in the making."""

    rows: jax.Array  # [E] rows that stay at home
    load: jax.Array  # [R]
    experts: jax.Array  # [R, S] of the places in use, in the order of their first rows; otherwise -1
    place_rows: jax.Array  # [R, S]
    blocked: jax.Array  # bool [E] no rank can take rows of this expert
    donor: jax.Array  # the rank that fills `receiver`, which still needs `need` rows
    receiver: jax.Array
    need: jax.Array


def plan_experts(
    implementation: Implementation,
    counts: jax.Array,
    source: jax.Array,
    num_places: int,
    tolerance: int,
    min_rows: int,
) -> ExpertPlan:
    """Plans where rows are computed: the same bits with both implementations.

    Args:
      implementation: "ffi" or "xla".
      counts: int32 [R, E] rows that each rank has for each logical expert.
      source: int32 scalar, the rank of `ends`.
      num_places: S redundant experts a rank. With S = L every rank can be filled exactly.
      tolerance: thousandths of the mean by which a rank may exceed it.
      min_rows: the fewest rows that are worth a move.
    """
    plan = _plan_by_handler if implementation == "ffi" else _plan_by_xla
    return plan(counts, source, num_places, tolerance, min_rows)


def _plan_by_handler(
    counts: jax.Array, source: jax.Array, num_places: int, tolerance: int, min_rows: int
) -> ExpertPlan:
    ranks, experts = counts.shape
    attributes: dict[str, Attribute] = {
        "num_redundant_experts": np.int64(num_places),
        "tolerance": np.int64(tolerance),
        "min_rows": np.int64(min_rows),
    }
    results: list[Result] = [((experts + ranks * num_places,), INT)] * len(ExpertPlan._fields)
    return ExpertPlan(*call("balance", [counts, source[None]], results, (), **attributes))


def _plan_by_xla(
    counts: jax.Array, source: jax.Array, num_places: int, tolerance: int, min_rows: int
) -> ExpertPlan:
    """Plans in `jax.lax`, as ffi/core/balance.h does."""
    ranks, experts = counts.shape
    local = experts // ranks
    counts = jnp.maximum(counts, 0)
    rows = sum_of_counts(counts, axis=0)
    # If the total does not fit in int32, nothing moves.
    quotient, rest = sum_of_counts(rows // ranks), jnp.sum(rows % ranks, dtype=INT)
    fits = quotient <= (MOST - rest) // ranks
    mean = quotient + (rest + ranks - 1) // ranks
    target = mean + mean // 1000 * tolerance + mean % 1000 * tolerance // 1000
    target = jnp.where(fits, target, MOST)
    state = _State(
        rows=rows,
        load=sum_of_counts(rows.reshape(ranks, local), axis=1),
        experts=jnp.full((ranks, num_places), -1, INT),
        place_rows=jnp.zeros((ranks, num_places), INT),
        blocked=jnp.zeros((experts,), jnp.bool_),
        donor=jnp.zeros((), INT),
        receiver=jnp.zeros((), INT),
        need=jnp.zeros((), INT),
    )
    state, target, source = vary_alike((state, target, source))
    least = max(min_rows, 1)
    if num_places == local:
        goes_on = lambda now: (now.need > 0) | (jnp.max(now.load) - target >= least)
        step = lambda now: _fill(now, target)
    else:
        goes_on = lambda now: jnp.any(_is_donor(now, target))
        step = lambda now: _spread(now, target, least)
    state = jax.lax.while_loop(goes_on, step, state)
    key = jnp.where(state.experts < 0, experts, state.experts)
    by_expert = jnp.argsort(key, axis=1, stable=True)
    places, place_rows = (
        jnp.take_along_axis(array, by_expert, axis=1) for array in (state.experts, state.place_rows)
    )
    home = jnp.arange(experts, dtype=INT).reshape(ranks, local)
    physical_to_logical = jnp.concatenate([home + jnp.zeros_like(places[:, :1]), places], axis=1).reshape(-1)
    quotas = jnp.concatenate([state.rows.reshape(ranks, local), place_rows], axis=1).reshape(-1)
    order = _by_logical_expert(physical_to_logical, experts)
    ends = _divide(counts, source, physical_to_logical, quotas, order)
    return ExpertPlan(physical_to_logical, quotas, order, ends)


def _move(state: _State, expert: jax.Array, receiver: jax.Array, number: jax.Array) -> _State:
    """Moves rows of an expert, if any, from its home to a place of another rank."""
    home = expert // (state.rows.shape[0] // state.load.shape[0])
    held = state.experts[receiver] == expert
    place = jnp.where(jnp.any(held), jnp.argmax(held), jnp.argmax(state.experts[receiver] < 0))
    named = jnp.where(number > 0, expert, state.experts[receiver, place])
    return state._replace(
        rows=state.rows.at[expert].add(-number),
        load=state.load.at[home].add(-number).at[receiver].add(number),
        experts=state.experts.at[receiver, place].set(named),
        place_rows=state.place_rows.at[receiver, place].add(number),
    )


def _fill(state: _State, target: jax.Array) -> _State:
    """Fills the emptiest rank from the fullest one, the largest expert first."""
    local = state.rows.shape[0] // state.load.shape[0]
    begins = state.need == 0
    donor = jnp.where(begins, jnp.argmax(state.load).astype(INT), state.donor)
    receiver = jnp.where(begins, jnp.argmin(state.load).astype(INT), state.receiver)
    need = jnp.where(begins, target - state.load[receiver], state.need)
    home = jnp.arange(state.rows.shape[0], dtype=INT) // local == donor
    expert = jnp.argmax(jnp.where(home, state.rows, -1)).astype(INT)
    number = jnp.minimum(need, state.rows[expert])
    state = _move(state, expert, receiver, number)
    return state._replace(donor=donor, receiver=receiver, need=need - number)


def _is_donor(state: _State, target: jax.Array) -> jax.Array:
    """Returns bool [R]: ranks that have too many rows, and an expert that is not blocked."""
    is_open = jnp.any(~state.blocked.reshape(state.load.shape[0], -1), axis=1)
    return (state.load > target) & is_open


def _spread(state: _State, target: jax.Array, least: int) -> _State:
    """Moves rows of the largest expert of the fullest rank to the emptiest rank that has a place for them.

    Otherwise by a relay: a rank without room takes them, and as many rows of one of its own experts go to a
    place that holds that expert already. Otherwise blocks the expert.
    """
    local = state.rows.shape[0] // state.load.shape[0]
    donor = jnp.argmax(jnp.where(_is_donor(state, target), state.load, -1)).astype(INT)
    at_home = jnp.arange(state.rows.shape[0], dtype=INT) // local == donor
    expert = jnp.argmax(jnp.where(at_home & ~state.blocked, state.rows, -1)).astype(INT)
    amount = jnp.minimum(state.load[donor] - target, state.rows[expert])
    takes = jnp.any((state.experts == expert) | (state.experts < 0), axis=1)
    room = target - state.load
    receiver = jnp.argmax(jnp.where(takes, jnp.maximum(room, 0), 0)).astype(INT)
    number = jnp.where(takes[receiver], jnp.clip(room[receiver], 0, amount), 0)
    number = jnp.where(number >= least, number, 0)
    # The relay.
    hosted = jnp.maximum(state.experts, 0)
    homes = hosted // local
    fits = (state.experts >= 0) & (homes != donor) & takes[homes]
    relayed = jnp.minimum(jnp.minimum(amount, room[:, None]), state.rows[hosted])
    relayed = jnp.where(fits, relayed, 0)
    best = jnp.argmax(relayed)
    passed = relayed.reshape(-1)[best]
    relays = (number == 0) & (passed >= least)
    relay_expert = hosted.reshape(-1)[best]
    places = state.experts.shape[1]
    state = _move(state, relay_expert, (best // places).astype(INT), jnp.where(relays, passed, 0))
    number = jnp.where(relays, passed, number)
    receiver = jnp.where(relays, relay_expert // local, receiver)
    state = _move(state, expert, receiver, number)
    return state._replace(blocked=state.blocked.at[expert].set(state.blocked[expert] | (number == 0)))


def plan_of_map(
    counts: jax.Array, source: jax.Array, physical_to_logical: jax.Array, instances: Instances
) -> ExpertPlan:
    """Returns the plan of a given placement [P]: instances of an expert divide its rows, of counts [R, E].

    "even": each instance gets the same share, first of the rows of its own rank. "local": all rows of a rank
    stay there if it has an instance, and the others are divided evenly. "least_loaded": instances on ranks
    with less load get larger shares.
    """
    ranks, experts = counts.shape
    order = _by_logical_expert(physical_to_logical, experts)
    is_used = physical_to_logical >= 0
    logical = jnp.where(is_used, physical_to_logical, experts)
    number = jnp.zeros_like(logical, shape=(experts + 1,)).at[logical].add(1)  # instances of each expert
    first = jnp.cumsum(number, dtype=INT) - number
    position = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=INT))
    index = position - first[logical]  # of each physical expert among those of its expert
    divisor = jnp.maximum(number, 1)[logical]
    if instances != "local":
        if instances == "even":
            rows = _of_experts(jnp.sum(counts, axis=0, dtype=INT), logical)
            quotas = jnp.where(is_used, rows // divisor + (index < rows % divisor).astype(INT), 0)
        else:
            hosts = jnp.arange(logical.shape[0], dtype=INT) // (logical.shape[0] // ranks)
            has_instance = jnp.zeros_like(is_used, shape=(experts + 1, ranks)).at[logical, hosts].set(True)
            by_rank = _by_load(jnp.sum(counts, axis=0, dtype=INT), has_instance[:experts])
            quotas = jnp.where(is_used, by_rank[jnp.minimum(logical, experts - 1), hosts], 0)
        ends = _divide(counts, source, physical_to_logical, quotas, order)
        return ExpertPlan(physical_to_logical, quotas, order, ends)
    sources = jnp.arange(ranks, dtype=INT)[:, None]
    is_here = sources == (jnp.arange(logical.shape[0], dtype=INT) // (logical.shape[0] // ranks))[None]
    num_here = jnp.zeros_like(logical, shape=(ranks, experts + 1))
    num_here = num_here.at[:, logical].add((is_here & is_used[None]).astype(INT))
    rows = _of_experts(counts, logical)
    # The remainders of different ranks begin at different instances.
    turn = jax.lax.rem(index[None] + sources, divisor[None])
    shares = rows // divisor[None] + (turn < rows % divisor[None]).astype(INT)
    shares = jnp.where(num_here[:, logical] > 0, jnp.where(is_here, rows, 0), shares)
    shares = jnp.where(is_used[None], shares, 0)
    ends = jnp.cumsum(shares[source, order], dtype=INT)
    return ExpertPlan(physical_to_logical, jnp.sum(shares, axis=0, dtype=INT), order, ends)


def is_first(experts: jax.Array) -> jax.Array:
    """Returns bool [..., N]: no earlier entry along the last axis is the same expert."""
    first = jnp.argmax(experts[..., :, None] == experts[..., None, :], axis=-1).astype(INT)
    return first == jax.lax.broadcasted_iota(INT, experts.shape, experts.ndim - 1)


def _by_load(rows: jax.Array, has_instance: jax.Array) -> jax.Array:
    """Divides rows [E] among instances, such that ranks get about the same number. Returns int32 [E, R].

    In each round shares are multiplied by the square of mean / load of their rank. The sums are over dense
    arrays, so that they have the same bits on every rank.
    """
    share = has_instance.astype(jnp.float32)
    mean = jnp.maximum(jnp.sum(rows).astype(jnp.float32) / has_instance.shape[1], 1)

    def normalized(share: jax.Array) -> jax.Array:
        return share / jnp.maximum(jnp.sum(share, axis=1, keepdims=True), np.float32(1e-30))

    def shift(_: jax.Array, share: jax.Array) -> jax.Array:
        load = jnp.sum(rows[:, None].astype(jnp.float32) * share, axis=0, keepdims=True)
        return normalized(share * (mean / jnp.maximum(load, mean / 16)) ** 2)

    share = jax.lax.fori_loop(0, LOAD_ROUNDS, shift, normalized(share))
    ends = jnp.round(jnp.cumsum(share, axis=1) * rows[:, None].astype(jnp.float32)).astype(INT)
    number = jnp.cumsum(has_instance.astype(INT), axis=1)
    ends = jnp.where(number == number[:, -1:], rows[:, None], jnp.minimum(ends, rows[:, None]))
    return jnp.diff(ends, axis=1, prepend=jnp.zeros_like(ends[:, :1]))


def _of_experts(counts: jax.Array, logical: jax.Array) -> jax.Array:
    """Returns the counts [..., E] of each physical expert's logical one, 0 for an empty place."""
    padded = jnp.concatenate([counts, jnp.zeros_like(counts[..., :1])], axis=-1)
    return jnp.take(padded, logical, axis=-1)


def _by_logical_expert(physical_to_logical: jax.Array, num_experts: int) -> jax.Array:
    key = jnp.where(physical_to_logical < 0, num_experts, physical_to_logical)
    return jnp.argsort(key, stable=True).astype(INT)


def _divide(
    counts: jax.Array,
    source: jax.Array,
    physical_to_logical: jax.Array,
    quotas: jax.Array,
    order: jax.Array,
) -> jax.Array:
    """Returns `ends` of a source.

    Rows go to the instance on their own rank first, as far as its quota allows. The remaining rows of
    an expert, in the order of source ranks, fill what is left of its instances' quotas, in the order of
    ranks.
    """
    ranks, experts = counts.shape
    logical = physical_to_logical[order]
    logical = jnp.where(logical < 0, experts, logical)
    quotas = quotas[order]
    hosts = order // (order.shape[0] // ranks)
    is_here = jnp.arange(ranks, dtype=INT)[:, None] == hosts[None]
    at_source = jnp.where(is_here, jnp.minimum(_of_experts(counts, logical), quotas[None]), 0)
    at_source_of = jnp.zeros_like(counts, shape=(ranks, experts + 1)).at[:, logical].add(at_source)
    rows = jnp.pad(counts, ((0, 0), (0, 1))) - at_source_of  # [R, E + 1]
    row_begin = jnp.cumsum(rows, axis=0, dtype=INT) - rows
    left = quotas - jnp.sum(at_source, axis=0, dtype=INT)
    per_expert = jnp.sum(rows, axis=0, dtype=INT)
    begin = jnp.cumsum(left, dtype=INT) - left - (jnp.cumsum(per_expert, dtype=INT) - per_expert)[logical]
    row_begin, rows = row_begin[source, logical], rows[source, logical]
    overlap = jnp.minimum(row_begin + rows, begin + left) - jnp.maximum(row_begin, begin)
    return jnp.cumsum(at_source[source] + jnp.maximum(overlap, 0), dtype=INT)


def physical_ids(plan: ExpertPlan, positions: jax.Array) -> jax.Array:
    """Returns the physical experts [T, K] of this rank's choices.

    Args:
      plan: the plan.
      positions: [T, K] the position of each choice among those of this rank, sorted by logical expert.
        -1: unused.
    """
    instance = jnp.searchsorted(plan.ends, positions, side="right", method="scan_unrolled").astype(INT)
    # Rows of an expert without an instance are after all ends of a given placement.
    is_sent = (positions >= 0) & (instance < plan.ends.shape[0])
    return jnp.where(is_sent, jnp.take(plan.order, instance, mode="clip"), -1)


def loads(quotas: jax.Array, num_ranks: int) -> jax.Array:
    """Returns [R]: the rows of each rank."""
    return jnp.sum(quotas.reshape(num_ranks, -1), axis=1, dtype=INT)


def as_thousandths(tolerance: float) -> int:
    """Returns a tolerance, a fraction of the mean, in the unit of the plan."""
    return round(float(tolerance) * 1000)
