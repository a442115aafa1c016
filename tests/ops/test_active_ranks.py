"""Ranks that take no part: active_ranks of dispatch and combine, in combination with everything else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import assert_close, dequantize, floats, pairwise, ranks, routing, same_bits, weights_of
from cases import quantize as quantize_fp8
from devices import most_ranks
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.one_jax

R, T, K, E, H = min(most_ranks(), 4), 6, 3, 8, 512
L = E // R
ON_GPU = jax.default_backend() == "gpu"
ORDERS = [("rank", None), ("rank", 4), ("expert", None), ("expert", 7), ("expert_padded", None)]
# Of each rank: in the dispatch, and in the combine after it.
PATTERNS = [
    ([1, 1, 1, 1], [1, 1, 1, 1]),
    ([1, 0, 1, 1], [1, 0, 1, 1]),
    ([1, 1, 1, 0], [0, 1, 1, 0]),
    ([1, 1, 1, 1], [1, 1, 0, 1]),
    ([0, 0, 1, 0], [0, 0, 1, 0]),
    ([0, 0, 0, 0], [1, 1, 1, 1]),
]
VALID = np.array([T, 0, 4, 2], np.int32)[:R]
IDS = routing("sprinkled", R, T, K, E, seed=4)
IDS[..., 0] = np.arange(R * T).reshape(R, T) % E  # something comes from and goes to each rank


def as_users_pass(pattern):
    return np.array(pattern[:R], np.int32)


def compile(shard, count):
    """Runs shard(group, *arrays) with shards [..] of `count` arrays [R, ...] and whole arrays after them."""
    on = ranks(R)

    def call(*arrays):
        split = [np.asarray(array).reshape(-1, *array.shape[2:]) for array in arrays[:count]]
        out = jax.device_get(run(*split, *arrays[count:]))
        return jax.tree.map(lambda array: array.reshape(R, -1, *array.shape[1:]), out)

    def specs(arrays):
        return tuple(P("ep") if i < count else P() for i in range(len(arrays)))

    @jax.jit
    def run(*arrays):
        one = functools.partial(shard, on.group)
        return jax.shard_map(one, mesh=on.mesh, in_specs=specs(arrays), out_specs=P("ep"))(*arrays)

    return call


@pytest.mark.parametrize(
    ("ordered", "weighted", "partly_valid", "quantize", "implementation"),
    pairwise(
        ORDERS,
        [False, True],
        [False, True],
        [None, "fp8", "fp8_dequantize"] if ON_GPU else [None, "fp8"],
        ["ffi", "xla"],
    )
    + ([] if ON_GPU else [(ORDERS[3], True, True, "fp8_dequantize", "ffi")]),
)
def test_both_ways(ordered, weighted, partly_valid, quantize, implementation):
    order, capacity = ordered
    x, weights = floats((R, T, H)), floats((R, T, K), seed=2)
    rows_here = len(oracle.dispatch(x, IDS, None, E, order, capacity)[0].x)
    y = floats((R, rows_here, 32), seed=3)

    def shard(group, x, ids, weights, y, valid, active, active_later):
        sent = jax_ep.dispatch(
            x,
            ids,
            weights if weighted else None,
            group=group,
            num_experts=E,
            order=order,
            capacity=capacity,
            quantize=quantize,
            num_valid_tokens=valid if partly_valid else None,
            active_ranks=active,
            implementation=implementation,
        )
        y = y.reshape(*sent.handle.routing.buffer, -1)
        row_weights = weights_of(sent) if weighted and order != "rank" else None
        later = {"active_ranks": active_later, "implementation": implementation}
        return sent, jax_ep.combine(y, sent.handle, row_weights=row_weights, **later)

    run = compile(shard, 5)
    for patterns in PATTERNS:
        active, later = map(as_users_pass, patterns)
        sent, (sums, after) = run(x, IDS, weights, y, VALID[:, None], active, later)
        ids = oracle.mask_inactive(IDS, E, active, VALID if partly_valid else None)
        want = oracle.dispatch(x, ids, weights if weighted else None, E, order, capacity)
        check_dispatch(sent, want, ids, order, active, quantize)
        row_weights = None
        if weighted and order != "rank":
            row_weights = np.stack([received.weights for received in want])
        expected = oracle.combine(y, want, T, row_weights, active=later)
        assert_close(sums, expected, terms=K)
        for rank in np.flatnonzero(later == 0):
            assert not sums[rank].any()
        np.testing.assert_array_equal(after, np.tile(later, (R, 1)))


@pytest.mark.parametrize(
    ("ordered", "implementation"),
    [*((ordered, "ffi") for ordered in ORDERS), *((ORDERS[i], "xla") for i in (1, 3, 4))],
)
def test_redispatch_leaves_out_missing_ranks(ordered, implementation):
    """Rows lie where the dispatch put them, those of ranks that are missing now are zero."""
    order, capacity = ordered
    x, weights = floats((R, T, H)), floats((R, T, K), seed=2)
    by = {"implementation": implementation}

    def shard(group, x, ids, weights, active, later):
        first = {"order": order, "capacity": capacity, "active_ranks": active, **by}
        sent = jax_ep.dispatch(x, ids, group=group, num_experts=E, **first)
        *_, everybody = jax_ep.redispatch(x, sent.handle, on_timeout="mask", **by)
        return *jax_ep.redispatch(x, sent.handle, topk_weights=weights, active_ranks=later, **by), everybody

    run = compile(shard, 3)
    for patterns in PATTERNS:
        active, later = map(as_users_pass, patterns)
        rows, arrived, after, everybody = run(x, IDS, weights, active, later)
        assert everybody.all()
        np.testing.assert_array_equal(after, np.tile(later, (R, 1)))
        ids = oracle.mask_inactive(IDS, E, active)
        for rank, want in enumerate(oracle.dispatch(x, ids, weights, E, order, capacity)):
            comes = [source is not None and bool(later[source[0]] and later[rank]) for source in want.sources]
            got = rows[rank].reshape(want.x.shape), arrived[rank].reshape(want.weights.shape)
            for array, expected in zip(got, (want.x, want.weights), strict=True):
                np.testing.assert_array_equal(array[comes], expected[comes])
                assert not array[np.logical_not(comes)].any()


def check_dispatch(sent, want, ids, order, active, quantize):
    np.testing.assert_array_equal(sent.active_ranks, np.tile(active, (R, 1)))
    np.testing.assert_array_equal(sent.handle.topk_idx, ids)
    prefix = oracle.rank_prefix_matrix(ids, E, order)
    for rank in np.flatnonzero(active):
        np.testing.assert_array_equal(sent.handle.rank_prefix_matrix[rank], prefix)
    assert (sent.num_tokens[active == 0] == 0).all()
    sent_rows, received_rows = rows_of(want, order)
    np.testing.assert_array_equal(sent.handle.sent_rows, sent_rows)
    if order != "rank":
        np.testing.assert_array_equal(sent.handle.received_rows, received_rows)
    for rank, expected in enumerate(want):
        rows = expected.x
        is_row = np.array([source is not None for source in expected.sources])
        # Empty slots of padded experts hold anything.
        told = is_row if order == "expert_padded" else slice(None)
        packed = None if quantize is None else jax.device_get(quantize_fp8(rows))
        if quantize != "fp8":
            wide = rows if packed is None else jax.device_get(dequantize(packed, dtype=rows.dtype))
            assert same_bits(sent.x[rank].reshape(rows.shape)[told], wide[told])
        else:
            scales = np.where(is_row[:, None], packed.scales, 0)
            assert same_bits(sent.x.values[rank].reshape(rows.shape)[told], packed.values[told])
            assert same_bits(sent.x.scales[rank].reshape(scales.shape)[told], scales[told])
        for name in ("tokens_per_expert", "num_tokens", "num_dropped"):
            np.testing.assert_array_equal(getattr(sent, name)[rank], getattr(expected, name))
        if order == "rank":
            np.testing.assert_array_equal(sent.topk_idx[rank], expected.topk_idx)
        else:
            np.testing.assert_array_equal(sent.group_sizes[rank], expected.group_sizes)
        weights = weights_of(sent)
        if expected.weights is None:
            assert weights is None
        else:
            np.testing.assert_array_equal(weights[rank].reshape(expected.weights.shape), expected.weights)


def rows_of(want, order):
    """What the handles of all ranks say of each row."""
    sent_rows = np.full((R, T, R if order == "rank" else K), -1, np.int32)
    received_rows = np.full((R, R * T, K), -1, np.int32)
    for rank, received in enumerate(want):
        for row, source in enumerate(received.sources):
            if source is not None:
                s, t, k = source
                sent_rows[s, t, rank if order == "rank" else k] = row
                received_rows[rank, s * T + t, k] = row
    return sent_rows, received_rows


def sent_by(group, x, ids, **options):
    return jax_ep.dispatch(x, ids, group=group, num_experts=E, **options)


@pytest.mark.parametrize("order", ["rank", "expert", "expert_padded"])
def test_a_row_of_another_dispatch_is_not_read_by_a_rank_that_left(order, implementation):
    """The handle still names rows of the rank that is marked 0 in the combine; they are NaN there."""

    def shard(group, x, ids, active):
        sent = sent_by(group, x, ids, order=order, implementation=implementation)
        gone = active[jax.lax.axis_index("ep")] == 0
        y = jnp.where(gone, jnp.nan, sent.x)
        return jax_ep.combine(y, sent.handle, active_ranks=active, implementation=implementation)

    active = as_users_pass([0, 1, 1, 1])
    sums, _ = compile(shard, 2)(floats((R, T, H)), IDS, active)
    assert np.isfinite(sums).all()
    assert not sums[0].any()
    assert R == 1 or sums[1:].any()


@pytest.mark.parametrize(
    ("given", "implementation"),
    [
        *((given, "ffi") for given in ([True] * R, np.ones(R, np.int8), jnp.ones(R, jnp.uint32), None)),
        (None, "xla"),
    ],
)
def test_what_says_that_all_take_part(given, implementation):
    """Bools and integers of any width, and on_timeout="mask" alone; rows and sums are the plain ones."""
    x = floats((R, T, H))
    options = {"on_timeout": "mask"} if given is None else {"active_ranks": given}

    def shard(group, x, ids):
        plain = sent_by(group, x, ids, implementation=implementation)
        sent = sent_by(group, x, ids, implementation=implementation, **options)
        sums = jax_ep.combine(plain.x, plain.handle, bias=x, implementation=implementation)
        same = jax_ep.combine(sent.x, sent.handle, bias=x, implementation=implementation, **options)
        assert plain.active_ranks is None
        assert isinstance(sums, jax.Array)
        return (plain.x, plain.handle, sums), (sent.x, sent.handle, same[0]), (sent.active_ranks, same[1])

    plain, masked, attended = compile(shard, 2)(x, IDS)
    jax.tree.map(np.testing.assert_array_equal, plain, masked)
    for after in attended:
        assert after.dtype == np.int32
        np.testing.assert_array_equal(after, np.ones((R, R)))


def test_a_rank_that_takes_no_part_need_not_call(implementation):
    """Nobody waits for it; with a fresh Group it takes part again. (The collectives of "xla" wait.)"""
    if implementation == "xla":
        pytest.skip("waits for every rank")
    if R < 2:
        pytest.skip("needs another rank")
    x, mesh = floats((R, T, H)), ranks(R).mesh

    def shard(group, x, ids, active):
        def call():
            sent = sent_by(group, x, ids, active_ranks=active, implementation=implementation)
            return jax_ep.combine(sent.x, sent.handle, active_ranks=active, implementation=implementation)[0]

        return jax.lax.cond(active[jax.lax.axis_index("ep")] == 1, call, lambda: jnp.full_like(x, 7))

    def run(active):
        mapped = jax.shard_map(
            functools.partial(shard, jax_ep.Group(mesh, "ep")),
            mesh=mesh,
            in_specs=(P("ep"), P("ep"), P()),
            out_specs=P("ep"),
            check_vma=False,
        )
        sums = np.asarray(jax.jit(mapped)(x.reshape(-1, H), IDS.reshape(-1, K), active)).reshape(R, T, H)
        choices = (oracle.mask_inactive(IDS, E, active) >= 0).sum(axis=-1, keepdims=True)
        assert_close(sums[active == 1], (x * choices)[active == 1], terms=K)
        assert (sums[active == 0] == 7).all()

    run(as_users_pass([1, 0, 1, 1]))
    run(as_users_pass([1, 1, 1, 1]))


@pytest.mark.parametrize("op", ["dispatch", "weights", "fp8_dequantize", "combine", "bias"])
@pytest.mark.parametrize("options", [{"active_ranks": [1] * R}, {"on_timeout": "mask"}])
def test_no_gradient(op, options, implementation):
    def shard(group, x, ids):
        on_timeout = {} if op in ("combine", "bias") else options
        weights = x[:, :K] if op == "weights" else None
        quantize = "fp8_dequantize" if op == "fp8_dequantize" else None
        fixed = jax.lax.stop_gradient(x) if op in ("weights", "bias") else x
        sent = jax_ep.dispatch(
            fixed,
            ids,
            weights,
            group=group,
            num_experts=E,
            quantize=quantize,
            implementation=implementation,
            **on_timeout,
        )
        out = sent.x if op != "weights" else sent.row_weights
        if op in ("combine", "bias"):
            bias = x if op == "bias" else None
            out, _ = jax_ep.combine(out, sent.handle, bias=bias, implementation=implementation, **options)
        return out

    on = ranks(R)
    run = jax.shard_map(
        functools.partial(shard, on.group), mesh=on.mesh, in_specs=(P("ep"), P("ep")), out_specs=P("ep")
    )
    name = "combine" if op in ("combine", "bias") else "dispatch"
    with pytest.raises(
        TypeError, match=f"^{name}: with active_ranks or on_timeout='mask' it has no gradient"
    ):
        jax.jit(jax.grad(lambda x: jnp.sum(run(x, IDS.reshape(-1, K)))))(floats((R * T, H)))


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"active_ranks": np.ones(R + 1, np.int32)},
            ValueError,
            rf"bools \[R\] = \[{R}\], .* int32\[{R + 1}\]",
        ),
        ({"active_ranks": np.ones((1, R), bool)}, ValueError, rf"one for each rank, got bool\[1, {R}\]"),
        ({"active_ranks": np.ones(R, np.float32)}, ValueError, rf"got float32\[{R}\]"),
        ({"active_ranks": list(range(1, R + 1))}, ValueError, r"not their numbers, got \[1, 2"),
        ({"active_ranks": "all"}, TypeError, "active_ranks must be an array that JAX can hold, got str"),
        ({"on_timeout": "skip"}, ValueError, "on_timeout must be 'raise' or 'mask', got 'skip'"),
        ({"on_timeout": None}, ValueError, "on_timeout must be 'raise' or 'mask', got None"),
    ],
)
def test_wrong_arguments(op, options, error, text):
    if R == 1 and "numbers" in text:
        pytest.skip("the one number is a 1")

    def shard(group, x, ids):
        sent = sent_by(group, x, ids, **(options if op == "dispatch" else {}))
        return jax_ep.combine(sent.x, sent.handle, **(options if op == "combine" else {}))

    with pytest.raises(error, match=f"^{op}: .*{text}"):
        compile(shard, 2)(floats((R, T, H)), IDS)
