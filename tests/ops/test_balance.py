"""Plans of redundant experts: against an oracle, what always holds of them, and how ids follow them."""

import dataclasses
import functools

import balance_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks, routing
from devices import most_ranks
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jax_ep

R, T, K, L = most_ranks(), 24, 3, 4
E = R * L


@functools.partial(
    jax.jit, static_argnames=("num_redundant_experts", "tolerance", "min_rows", "implementation")
)
def planned(counts, **options):
    return jax_ep.plan_redundant_experts(counts, **options)


def popular(kind, num_ranks, num_experts, rows, seed=0):
    """Counts int32 [R, E] of rows whose experts are drawn from a popularity."""
    rng = np.random.default_rng(seed)
    weight = np.ones(num_experts)
    if kind == "hot":
        weight[rng.integers(num_experts)] = 3 * num_experts
    elif kind == "incast":
        weight[num_experts // num_ranks :] = 0
    elif kind == "nothing":
        rows = 0
    else:
        weight = rng.lognormal(0, kind, num_experts)
    return rng.multinomial(rows, weight / weight.sum(), size=num_ranks).astype(np.int32)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("num_ranks", "local", "places", "implementation"),
    [
        *((*sizes, "ffi") for sizes in ((1, 4, 1), (3, 1, 1), (4, 4, 4), (8, 4, 2), (16, 8, 3))),
        *((*sizes, "xla") for sizes in ((3, 1, 1), (8, 4, 2))),
    ],
)
def test_plan_equals_that_of_the_oracle(num_ranks, local, places, implementation):
    for seed, kind in enumerate([0.6, 1.5, 1.5, 2.5, "hot", "incast", "nothing"]):
        counts = popular(kind, num_ranks, num_ranks * local, 37 * 10 ** (seed % 3), seed)
        for tolerance, min_rows in ((0.02, 1), (0, 20)):
            options = {"num_redundant_experts": places, "tolerance": tolerance, "min_rows": min_rows}
            got = planned(counts, **options, implementation=implementation)
            want = balance_oracle.plan(counts, places, round(1000 * tolerance), min_rows)
            np.testing.assert_array_equal(got.physical_to_logical, want.physical_to_logical)
            np.testing.assert_array_equal(got.rows_per_expert, want.quotas)
            np.testing.assert_array_equal(got.loads_after, want.loads(num_ranks))


@st.composite
def counts_and_places(draw):
    num_ranks, local = draw(st.sampled_from([(2, 2), (3, 4), (8, 2)]))
    number = st.integers(0, 400) | st.just(0)
    rows = draw(st.lists(number, min_size=num_ranks**2 * local, max_size=num_ranks**2 * local))
    return np.asarray(rows, np.int32).reshape(num_ranks, -1), draw(st.integers(1, local))


@pytest.mark.one_jax
@settings(max_examples=60)
@given(counts_and_places(), st.sampled_from([0.0, 0.02]))
@example((np.full((2, 4), 2**27, np.int32), 1), 0.02)
def test_every_plan_is_valid(drawn, tolerance):
    counts, places = drawn
    num_ranks, num_experts = counts.shape
    local, total = num_experts // num_ranks, counts.sum(axis=0)
    plan = planned(counts, num_redundant_experts=places, tolerance=tolerance)
    logical = np.asarray(plan.physical_to_logical).reshape(num_ranks, -1)
    rows = np.asarray(plan.rows_per_expert).reshape(num_ranks, -1)
    assert (rows >= 0).all()
    assert (rows[logical < 0] == 0).all()
    np.testing.assert_array_equal(np.bincount(logical[logical >= 0], rows[logical >= 0], num_experts), total)
    np.testing.assert_array_equal(logical[:, :local], np.arange(num_experts).reshape(num_ranks, local))
    for hosted in logical:
        used = hosted[hosted >= 0]
        assert len(set(used)) == len(used)
        assert (hosted[: len(used)] >= 0).all()
    before, after = total.reshape(num_ranks, -1).sum(axis=1), rows.sum(axis=1)
    np.testing.assert_array_equal(plan.loads_before, before)
    np.testing.assert_array_equal(plan.loads_after, after)
    mean = -(-int(total.sum()) // num_ranks)
    most = mean + int(mean * 1000) * round(1000 * tolerance) // 10**6
    assert after.max() <= max(most, before.max())
    if places == local:
        assert after.max() <= most
    if before.max() <= most:
        np.testing.assert_array_equal(rows[:, :local].reshape(-1), total)


@pytest.mark.one_jax
@pytest.mark.parametrize("sigma", [0.6, 1.5])
@pytest.mark.parametrize("num_ranks", [4, 8, 64])
def test_two_places_balance_a_skewed_router(num_ranks, sigma):
    """At most 3 % above the mean, so nothing is dropped at a capacity of 1.05 T K."""
    for seed in range(10):
        counts = popular(sigma, num_ranks, 256, 4096 * 8, seed)
        after = np.asarray(planned(counts, num_redundant_experts=2).loads_after)
        assert after.max() <= 1.03 * after.mean()


@pytest.mark.one_jax
def test_a_place_for_every_expert_balances_any_router():
    for kind in ("hot", "incast", 2.5):
        counts = popular(kind, 8, 32, 1000)
        after = planned(counts, num_redundant_experts=4, tolerance=0.0).loads_after
        np.testing.assert_array_equal(after, [1000] * 8)


def shard_balance(ids, **options):
    """Runs balance on all ranks. Returns the plans, arrays [R, ...]."""
    compiled = balancing if "placement" not in options else balancing.__wrapped__
    return ranks(R).apply(compiled(**options), ids)


@functools.cache
def balancing(**options):
    """Returns a program that tests of other routings share."""
    on = ranks(R)
    if "placement" not in options:
        options["num_experts"] = E
    return jax.jit(on.map(lambda ids: jax_ep.balance(ids, group=on.group, **options)))


def placement_of(physical_to_logical):
    flat = np.reshape(physical_to_logical, -1)
    return jax_ep.Placement.from_map(flat, num_logical_experts=E, num_ranks=R)


@pytest.mark.one_jax
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "places"),
    [("zipf", 0), ("zipf", 1), ("zipf", L), ("sprinkled", L), ("one_rank", L), ("unused", 1)],
)
def test_ids_follow_the_plan(kind, places, implementation):
    """Each choice goes to an instance of its expert, as many as the plan says, in the order of the ranks."""
    ids = routing(kind, R, T, K, E)
    plan = shard_balance(ids, num_redundant_experts=places, tolerance=0.0, implementation=implementation)
    used = (ids >= 0) & (ids < E)
    counts = np.stack([np.bincount(ids[r][used[r]], minlength=E) for r in range(R)]).astype(np.int32)
    want = balance_oracle.plan(counts, places)
    for r in range(R):
        np.testing.assert_array_equal(plan.physical_to_logical[r], want.physical_to_logical)
        np.testing.assert_array_equal(plan.rows_per_expert[r], want.quotas)
        np.testing.assert_array_equal(plan.loads_after[r], want.loads(R))
        used_places = want.physical_to_logical.reshape(R, -1)[:, L:] >= 0
        one = jax.tree.map(lambda array, r=r: jnp.asarray(array[r]), plan)
        assert one.num_replicas == used_places.sum()
        assert one.num_moved == want.quotas.reshape(R, -1)[:, L:].sum()
        assert (plan.topk_idx[r][~used[r]] == -1).all()
        by_expert = np.argsort(np.where(used[r], ids[r], E).reshape(-1), kind="stable")[: used[r].sum()]
        np.testing.assert_array_equal(
            plan.topk_idx[r].reshape(-1)[by_expert],
            want.order[np.searchsorted(want.ends[r], np.arange(len(by_expert)), side="right")],
        )


@pytest.mark.one_jax
@pytest.mark.processes
@pytest.mark.parametrize("instances", ["even", "local", "least_loaded"])
def test_given_placement(instances, implementation):
    """Two instances of each expert of even number: at home, and on the next rank."""
    ids = routing("zipf", R, T, K, E)
    home = np.arange(E, dtype=np.int32).reshape(R, L)
    placement = np.concatenate([home, np.roll(home[:, ::2], 1, axis=0)], axis=1)
    if R == 1:
        placement = np.concatenate([home, np.full((1, 2), -1, np.int32)], axis=1)
    given = placement_of(placement)
    plan = shard_balance(ids, placement=given, instances=instances, implementation=implementation)
    logical = np.append(placement.reshape(-1), -1)[plan.topk_idx]
    np.testing.assert_array_equal(logical, ids)
    got = np.bincount(plan.topk_idx.reshape(-1), minlength=placement.size).reshape(R, -1)
    np.testing.assert_array_equal(plan.rows_per_expert[0].reshape(R, -1), got)
    if instances == "local":
        for r in range(R):
            is_here = np.isin(ids[r], placement[r])
            assert (plan.topk_idx[r][is_here] // placement.shape[1] == r).all()
    elif instances == "even":
        assert all(np.ptp(got[placement == e]) <= 1 for e in range(E))
    elif R == 8:
        even = shard_balance(ids, placement=given).loads_after[0]
        assert plan.loads_after[0].max() < 0.8 * even.max()


@pytest.mark.skipif(R < 4, reason="needs 4 ranks")
@pytest.mark.processes
@pytest.mark.parametrize("gone", [[], [1], [1, 2], [r for r in range(R) if r != 2]], ids=str)
def test_given_placement_without_ranks_that_are_gone(gone, implementation):
    """Two instances of each expert, at home and on the next rank: rows go to those on active ranks."""
    ids = routing("zipf", R, T, K, E)
    home = np.arange(E, dtype=np.int32).reshape(R, L)
    placement = np.concatenate([home, np.roll(home, 1, axis=0)], axis=1)
    active = ~np.isin(np.arange(R), gone)
    given = placement_of(placement)

    def shard(ids):
        options = {"placement": given, "instances": "local", "implementation": implementation}
        return jax_ep.balance(ids, group=ranks(R).group, active_ranks=active, **options)

    plan = ranks(R).run(shard, ids)
    physical = plan.topk_idx
    hosts = np.where(physical < 0, -1, physical // (2 * L))
    is_served = active[ids // L] | active[(ids // L + 1) % R]
    np.testing.assert_array_equal(physical >= 0, is_served)
    np.testing.assert_array_equal(placement.reshape(-1)[physical[is_served]], ids[is_served])
    assert active[hosts[is_served]].all()
    np.testing.assert_array_equal(plan.num_unplaced, (~is_served).sum(axis=(1, 2))[:, None])
    np.testing.assert_array_equal(plan.physical_to_logical, np.tile(placement.reshape(-1), (R, 1)))
    for r in range(R):
        is_here = np.isin(ids[r], placement[r]) & active[r]
        assert (hosts[r][is_here] == r).all()
        for expert in np.unique(ids[r]):
            two = [expert // L, (expert // L + 1) % R]
            if active[two].all() and r not in two:
                assert np.ptp([np.sum(hosts[r][ids[r] == expert] == host) for host in two]) <= 1
    with pytest.raises(AttributeError, match="not with active_ranks"):
        _ = jax.tree.map(lambda array: jnp.asarray(array[0]), plan).rows_per_expert


@pytest.mark.parametrize("debug", ["", "1"])
def test_living_instances_are_found_without_the_other_ranks(debug, monkeypatch):
    monkeypatch.setenv("JAX_EP_DEBUG", debug)
    given, on = placement_of(np.arange(E)), ranks(R)
    options = {"placement": given, "instances": "local", "active_ranks": jnp.ones(R, jnp.int32)}
    program = jax.jit(
        on.map(lambda ids: jax_ep.balance(ids, group=on.group, implementation="xla", **options))
    )
    text = program.lower(jax.ShapeDtypeStruct((R * T, K), jnp.int32)).as_text()
    assert "all_gather" not in text
    assert "all_reduce" not in text


@pytest.mark.processes
def test_valid_tokens_and_vmap():
    ids = np.stack([routing("zipf", R, T, K, E, seed) for seed in (0, 1)], axis=1)  # [R, 2, T, K]
    on = ranks(R)
    options = {"group": on.group, "num_experts": E, "num_redundant_experts": 2, "num_valid_tokens": 5}
    run = lambda ids: jax.vmap(lambda one: jax_ep.balance(one, **options))(ids)
    got = on.run(run, ids)
    for b in (0, 1):
        masked = np.where(np.arange(T)[:, None] < 5, ids[:, b], -1)
        want = shard_balance(masked, num_redundant_experts=2)
        np.testing.assert_array_equal(got.topk_idx[:, b], want.topk_idx)
        np.testing.assert_array_equal(got.loads_after[:, b], want.loads_after)


def test_capacity_holds_the_padding_of_each_expert():
    def capacity(num_tokens, *arguments, **options):
        """Returns that of six physical experts a rank, top-1."""
        found = []

        def run(ids):
            plan = jax_ep.balance(ids, group=ranks(R).group, num_experts=E, num_redundant_experts=2)
            found.append(plan.capacity(*arguments, **options))
            return plan

        jax.eval_shape(ranks(R).map(run), jax.ShapeDtypeStruct((R * num_tokens, 1), np.int32))
        return found[0]

    assert capacity(1000) == 1050
    assert capacity(1000, 8, slack=0.0) == 1048  # 1000 + 6 * 7 in blocks of 8
    assert capacity(0, 8, slack=0.0) == 48
    assert capacity(0) == 1


@pytest.mark.parametrize(
    ("physical_to_logical", "text"),
    [
        (np.repeat(np.arange(E), 2), "each rank distinct logical experts"),
        (np.zeros(E, np.int32), "every logical expert needs an instance"),
        (np.arange(E, dtype=np.float32), r"must be int32 \[P\]"),
        (np.arange(E - R, dtype=np.int32), "at least num_logical_experts"),
    ],
)
def test_rejects_wrong_maps(physical_to_logical, text):
    with pytest.raises(ValueError, match=f"Placement.from_map: .*{text}"):
        placement_of(physical_to_logical)


def test_placement_is_a_pytree_with_static_numbers():
    placement = jax.jit(lambda placement: placement)(placement_of([*range(E), *[-7] * R]))
    assert placement.physical_to_logical.tolist() == [*range(E), *[-1] * R]
    numbers = placement.num_experts, placement.num_local_experts, placement.num_logical_experts
    assert (*numbers, placement.num_ranks, placement.num_redundant_experts) == (E + R, L + 1, E, R, None)


def test_placement_names_what_it_lacks():
    placement = placement_of(np.arange(E))
    for name in ("topk_idx", "num_invalid", "num_unplaced"):
        with pytest.raises(
            AttributeError, match=r"has no tokens; jax_ep.balance\(topk_idx, placement=...\) adds"
        ):
            getattr(placement, name)
    for name in ("rows_per_expert", "loads_before", "loads_after", "num_moved"):
        with pytest.raises(AttributeError, match=r"without numbers of rows; jax_ep.balance"):
            getattr(placement, name)


def test_balance_and_replicate_take_a_plan_from_counts():
    """The plan of a step's own counts gives its placement and its weights."""
    ids = routing("zipf", R, T, K, E)
    counts = np.stack([np.bincount(one.reshape(-1), minlength=E) for one in ids]).astype(np.int32)
    from_counts = planned(counts, num_redundant_experts=2)
    w, group = np.arange(E, dtype=np.float32).reshape(R, L), ranks(R).group
    got, step = ranks(R).run(
        lambda ids, w: (
            jax_ep.replicate(w, from_counts, group=group),
            jax_ep.balance(ids, group=group, placement=from_counts),
        ),
        ids,
        w,
    )
    logical = np.asarray(from_counts.physical_to_logical).reshape(R, -1)
    np.testing.assert_array_equal(step.physical_to_logical, np.tile(logical.reshape(-1), (R, 1)))
    np.testing.assert_array_equal(np.append(logical, -1)[step.topk_idx], ids)
    np.testing.assert_array_equal(got.home, w)
    np.testing.assert_array_equal(got.redundant, np.maximum(logical[:, L:], 0))


GOOD = {"num_redundant_experts": 1}
REJECTED = [
    ({}, "pass either num_experts and num_redundant_experts, .* and num_redundant_experts=None"),
    ({"num_redundant_experts": 1, "placement": placement_of(np.arange(E))}, "pass either num_experts and"),
    ({"placement": np.arange(E)}, "placement must be a Placement, .* got ndarray"),
    ({"num_redundant_experts": L + 1}, f"from 0 to the {L} experts of a rank"),
    (GOOD | {"tolerance": 2.0}, "a fraction of the mean load, from 0 to 1, got 2.0"),
    (GOOD | {"min_rows": -1}, "min_rows must be an int of at least 1, got -1"),
    ({"placement": placement_of(np.arange(E)), "tolerance": 0.0}, "tolerance and min_rows are of plans"),
    (
        {"placement": placement_of(np.arange(E)), "instances": "least"},
        "must be 'even', 'local' or 'least_loaded'",
    ),
    (
        {"placement": placement_of(np.arange(E)), "active_ranks": (1,) * R},
        "active_ranks needs a given placement and instances='local'",
    ),
    (GOOD | {"active_ranks": (1,) * R}, "active_ranks needs a given placement"),
]


@pytest.mark.parametrize(("options", "text"), REJECTED)
def test_rejects_wrong_options(options, text):
    error = TypeError if "must be a Placement" in text else ValueError
    with pytest.raises(error, match=text):
        shard_balance(routing("uniform", R, T, K, E), **options)


@pytest.mark.parametrize("op", ["balance", "replicate"])
@pytest.mark.parametrize(
    "parts",
    [lambda a: jnp.tile(a, R + 1), lambda a: jnp.stack([a, a]), lambda a: a[:-1], lambda a: a[:0]],
    ids=["joined", "stacked", "a part", "none"],
)
def test_rejects_placements_that_are_not_whole(op, parts):
    whole = placement_of(np.arange(E))
    placement = dataclasses.replace(whole, physical_to_logical=parts(whole.physical_to_logical))
    on = ranks(R)

    def call(ids):
        if op == "balance":
            return jax_ep.balance(ids, group=on.group, placement=placement).topk_idx
        return jax_ep.replicate(jnp.ones((L, 8)), placement, group=on.group)

    with pytest.raises(ValueError, match=rf"^{op}: placement.physical_to_logical must be int32 \[{E}\]"):
        on.run(call, routing("uniform", R, T, K, E))


def test_numbers_of_a_placement_that_left_shard_map():
    """Each rank's copy lies after the other's, and has numbers of its own."""
    on, ids = ranks(R), routing("zipf", R, T, K, E)

    def step(ids):
        plan = jax_ep.balance(ids[0], group=on.group, num_experts=E, num_redundant_experts=1)
        return plan, plan.num_moved, plan.num_replicas

    spec = jax.sharding.PartitionSpec(on.mesh.axis_names)
    plan, moved, replicas = jax.jit(jax.shard_map(step, mesh=on.mesh, in_specs=spec, out_specs=spec))(ids)
    np.testing.assert_array_equal(plan.num_moved, moved)
    np.testing.assert_array_equal(plan.num_replicas, replicas)


def test_rejects_wrong_counts():
    with pytest.raises(ValueError, match=r"counts must be int32 \[R, E\], got float32\[2, 4\]"):
        jax_ep.plan_redundant_experts(jnp.ones((2, 4)), num_redundant_experts=1)
    many = jnp.full((2, 4), 2**28, jnp.int32)
    with pytest.raises(ValueError, match=r"must sum to less than 2\*\*31, got 2147483648"):
        jax_ep.plan_redundant_experts(many, num_redundant_experts=1)


@pytest.mark.one_jax
@pytest.mark.parametrize("places", [1, 2])
def test_nothing_moves_if_the_total_is_too_large(places, implementation):
    counts = np.full((2, 4), 2**28, np.int32) + np.arange(4, dtype=np.int32) * 10**7
    plan = planned(counts, num_redundant_experts=places, implementation=implementation)
    np.testing.assert_array_equal(plan.loads_after, plan.loads_before)
