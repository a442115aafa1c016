"""Values that a program gets as arguments and that break a promise: docs/traced_values.md.

No error can be raised for them. Each has the result of the value that stands for it, or NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, ranks, routing, same_bits
from devices import most_ranks

import jax_ep
from jax_ep._ops.arguments import OpArguments
from jax_ep._transport.attendance import Attendance

LEAST, MOST = -(2**31), 2**31 - 1


def spoil_memory(*arrays):
    """Leaves NaN where the next results will probably lie."""
    spoilt = [jnp.full((4, *np.shape(array)), jnp.nan) for array in arrays]
    jax.block_until_ready(spoilt)


def assert_same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))


C, L, WIDE = 300, 3, 128
GROUP_SIZES = {
    "negative": ([-5, 100, 50], [0, 100, 50]),
    "negative after others": ([100, -70, 50], [100, 0, 50]),
    "more than the rows": ([100, 400, 70], [100, 200, 0]),
    "sums that wrap around": ([MOST, MOST, 5], [C, 0, 0]),
    "the extremes": ([100, LEAST, MOST], [100, 0, 200]),
}


@functools.cache
def experts(op):
    """Returns a program of group_sizes: the results and gradients of an op. Compiled once."""
    dtype = "float32" if op == "a window" else "bfloat16"
    rows, w = jnp.asarray(floats((C, WIDE)), dtype), jnp.asarray(floats((L, WIDE, WIDE), seed=2), dtype)
    w_up = jnp.concatenate([w, w[::-1]], axis=2) / 8
    biases = {"b_up": w_up[:, 0], "b_down": w[:, 1], "row_weights": rows[:, 0]}

    def function(sizes, rows, w):
        if op == "gated":
            return jax_ep.gated_mlp(rows, w_up, w, sizes, **biases)
        if op == "gated, FP8":
            return jax_ep.gated_mlp(rows, w_up, w, sizes, quantize="fp8_all")
        return jax_ep.grouped_dot(rows, w, jnp.append(sizes, 20), group_offset=1)

    def run(sizes):
        value, transposed = jax.vjp(functools.partial(function, sizes), rows, w)
        return value, *transposed(jnp.cos(value))

    return jax.jit(run)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    "op", ["gated", *(pytest.param(op, marks=pytest.mark.slow) for op in ("a window", "gated, FP8"))]
)
def test_group_sizes_end_where_the_rows_end(op):
    for broken, right in GROUP_SIZES.values():
        want = experts(op)(jnp.array(right, jnp.int32))
        spoil_memory(*want)
        assert_same(experts(op)(jnp.array(broken, jnp.int32)), want)


def test_a_window_may_lie_outside_of_the_experts():
    sizes, rows, w = np.array([3, 0, 7, 4, 5], np.int32), floats((24, 8)), floats((2, 8, 16))
    expert = np.append(np.repeat(np.arange(5), sizes), [-100] * 5)
    run = jax.jit(lambda offset: jax_ep.grouped_dot(rows, w, sizes, group_offset=offset))
    for offset in (-1, -2, -7, LEAST, 4, 5, 9, MOST):
        within = expert - offset
        is_row = (within >= 0) & (within < 2)
        want = np.where(is_row[:, None], np.einsum("cm,cmn->cn", rows, w[np.where(is_row, within, 0)]), 0)
        np.testing.assert_allclose(run(jnp.int32(offset)), want, rtol=2e-3, atol=2e-2)


def test_a_window_counts_in_int32():
    many, rows, w = np.ones(140, np.int32), floats((140, 8)), floats((2, 8, 16))
    run = jax.jit(lambda offset: jax_ep.grouped_dot(rows, w, many, group_offset=offset))
    got = np.asarray(run(np.int8(100)))
    np.testing.assert_allclose(got[100:102], np.einsum("cm,cmn->cn", rows[100:102], w), rtol=2e-3, atol=2e-2)
    assert not np.delete(got, [100, 101], axis=0).any()


P_ROWS, E = 6, 4
ROW_MAP = np.array([[0, 3], [1, -1], [5, 2], [4, -1]], np.int32)
IDS = np.array([[0, 3], [1, -1], [2, 0], [3, 7]], np.int32)


@pytest.mark.parametrize("biased", [False, True])
def test_unpermute_of_rows_that_are_none_is_nan(biased, implementation):
    y, weights, bias = floats((P_ROWS, 5)), floats((4, 2)), floats((E, 5))

    @jax.jit
    def run(row_map, ids):
        extra = {"bias": bias, "topk_idx": ids} if biased else {}
        return jax_ep.unpermute(y, row_map, topk_weights=weights, implementation=implementation, **extra)

    want = np.asarray(run(ROW_MAP, IDS))
    assert np.isfinite(want).all()
    for row in (P_ROWS, MOST, -2, LEAST):
        broken = ROW_MAP.copy()
        broken[1, 1] = row
        got = np.asarray(run(broken, IDS))
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[[0, 2, 3]], want[[0, 2, 3]])
    for expert in (E, MOST, -1, LEAST) if biased else ():
        broken = IDS.copy()
        broken[2, 0] = expert
        got = np.asarray(run(ROW_MAP, broken))
        assert np.isnan(got[2]).all()
        np.testing.assert_array_equal(got[[0, 1, 3]], want[[0, 1, 3]])


def test_permute_counts_ids_that_are_no_expert(implementation):
    x = floats((4, 5))
    run = jax.jit(
        lambda ids: jax_ep.permute(x, ids, num_local_experts=E, capacity=8, implementation=implementation)
    )
    want = run(np.where(IDS < E, IDS, -1))
    for expert in (E, MOST, -2, LEAST):
        got = run(np.where(IDS < E, IDS, expert).astype(np.int32))
        assert got.num_invalid == 1
        for name in ("x", "row_map", "group_sizes", "tokens_per_expert", "num_dropped"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


@pytest.mark.one_jax
@pytest.mark.parametrize("places", [0, 2])
def test_plans_of_counts_that_are_none(places, implementation):
    plan = jax.jit(
        lambda counts: jax_ep.plan_redundant_experts(
            counts, num_redundant_experts=places, implementation=implementation
        )
    )
    broken = np.array([[40, -3, LEAST, 5], [2, 1, 9, -1]], np.int32)
    assert_same(plan(broken), plan(np.maximum(broken, 0)))
    broken = np.array([[MOST, 1, MOST, 5], [MOST, 1, 9, -1]], np.int32)
    got, total = plan(broken), np.maximum(broken, 0).astype(np.int64).sum(axis=0)
    logical, rows = (np.asarray(a).reshape(2, -1) for a in (got.physical_to_logical, got.rows_per_expert))
    np.testing.assert_array_equal(logical[:, :2], np.arange(4).reshape(2, 2))
    assert (logical[:, 2:] == -1).all()
    np.testing.assert_array_equal(rows[:, :2].reshape(-1), np.minimum(total, MOST))
    for loads in (got.loads_before, got.loads_after):
        np.testing.assert_array_equal(loads, np.minimum(total.reshape(2, 2).sum(axis=1), MOST))


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [
        (np.int32, {-1: 0, LEAST: 0, 5: 4, MOST: 4, 3: 3}),
        (np.int8, {-128: 0, 127: 4}),
        (np.uint32, {2**32 - 1: 4}),
        (np.int64, {2**32 + 3: 4, 2**32: 4, -(2**32): 0, -(2**32) + 3: 0}),
    ],
)
def test_a_number_of_valid_tokens_is_limited(dtype, counts):
    with jax.enable_x64(dtype == np.int64):
        run = jax.jit(lambda count: OpArguments("dispatch").valid_tokens(count, jnp.zeros((4, 1), jnp.int32)))
        for count, want in counts.items():
            got = run(np.asarray(count, dtype))
            np.testing.assert_array_equal(got[:, 0], np.where(np.arange(4) < want, 0, -1))


def test_active_ranks_other_than_0_and_1_take_part():
    on = ranks(most_ranks())
    run = lambda active: Attendance.check(OpArguments("dispatch"), active, "raise", on.group).active_ranks
    broken = np.array([2, 0, -1, LEAST, 7, 0, 1, 3], np.int32)[: on.size]
    np.testing.assert_array_equal(jax.jit(run)(broken), broken != 0)


R = min(most_ranks(), 4)
EXPERTS, PLACES, T, K = 2 * R, 4, 12, 2
BOTH = np.arange(EXPERTS).reshape(R, 2)


def placement_of(*columns):
    return np.stack([np.broadcast_to(column, (R,)) for column in columns], axis=1).astype(np.int32)


NEXT = np.roll(BOTH, 1, axis=0)  # the experts of another rank, if there is one
OTHER = NEXT[:, 0] if R > 1 else np.full(R, -1)
# Each with the placement that stands for it. The first one fills every place, and the others run after it.
PLACEMENTS = {
    "full": (placement_of(*BOTH.T, *NEXT.T), None if R > 1 else placement_of(0, 1, -1, -1)),
    "a hole": (placement_of(BOTH[:, 0], -1, BOTH[:, 1], OTHER), None),
    "holes": (placement_of(-1, BOTH[:, 1], -1, BOTH[:, 0]), None),
    "the last places": (placement_of(-1, -1, *BOTH.T), None),
    "out of range": (
        placement_of(EXPERTS, BOTH[:, 0], MOST, BOTH[:, 1]),
        placement_of(-1, BOTH[:, 0], -1, BOTH[:, 1]),
    ),
    "below -1": (placement_of(LEAST, *BOTH.T, -7), placement_of(-1, *BOTH.T, -1)),
    "twice on a rank": (
        placement_of(BOTH[:, 1], BOTH[:, 1], BOTH[:, 0], BOTH[:, 1]),
        placement_of(BOTH[:, 1], -1, BOTH[:, 0], -1),
    ),
    "without an instance": (placement_of(-1, BOTH[:, 1], -1, -1), None),
}


IMPLEMENTATIONS = [("ffi", None), pytest.param("xla", None, marks=pytest.mark.slow)]
if R == 4:
    IMPLEMENTATIONS.append(pytest.param("ffi", 2, marks=pytest.mark.slow))


@pytest.mark.one_jax
@pytest.mark.moves_rows
@pytest.mark.parametrize(("implementation", "domains"), IMPLEMENTATIONS)
def test_every_placement_has_its_weights(domains, implementation):
    on = ranks(R, domains)
    ids = routing("uniform", R, T, K, EXPERTS)
    # Of several dtypes, and one that is sent in pieces.
    w = [floats((R, 2, 33, 1024)), floats((R, 2, 5), seed=2), floats((R, 2, 3), seed=3).view(np.int32)]
    cotangent = [floats((R, PLACES, *leaf.shape[2:]), seed=4) for leaf in w[:2]]

    def shard(placement, ids, *arrays):
        placement = jax.lax.all_gather(placement, "ep", tiled=True).reshape(-1)
        placement = jax_ep.Placement.from_map(placement, num_logical_experts=EXPERTS, num_ranks=R)
        options = {"group": on.group, "implementation": implementation}
        plan = jax_ep.balance(ids, placement=placement, **options)
        replicate = lambda *w: jax_ep.replicate(w, plan, **options)
        floating, transposed = jax.vjp(replicate, *arrays[:2])
        counts = plan.topk_idx, plan.physical_to_logical, plan.num_unplaced
        return counts, (*floating, *replicate(arrays[2])), transposed(tuple(arrays[3:]))

    program = jax.jit(on.map(shard))
    for name, (placement, meant) in PLACEMENTS.items():
        right = placement if meant is None else meant
        (got_ids, logical, num_unplaced), weights, gradients = on.apply(
            program, placement[:, None], ids, *w, *cotangent
        )
        np.testing.assert_array_equal(logical, np.tile(right.reshape(1, -1), (R, 1)), name)
        is_placed = np.isin(ids, right)
        np.testing.assert_array_equal(np.append(right, -1)[got_ids], np.where(is_placed, ids, -1), name)
        np.testing.assert_array_equal(num_unplaced[:, 0], (~is_placed).sum(axis=(1, 2)), name)
        assert is_placed.all() == (name != "without an instance")
        for got, leaf in zip(weights, w, strict=True):
            want = leaf.reshape(EXPERTS, *leaf.shape[2:])[right]
            assert same_bits(got, np.where((right >= 0).reshape(R, PLACES, *[1] * (leaf.ndim - 2)), want, 0))
        for got, one in zip(gradients, cotangent, strict=True):
            want = np.zeros((EXPERTS, *one.shape[2:]), np.float32)
            np.add.at(want, right[right >= 0], one[right >= 0])
            np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-6, atol=1e-6, err_msg=name)
