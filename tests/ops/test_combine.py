"""Combine sums rows: compared with a float32 sum in the stated order, rounded once."""

import functools
import os

import jax
import numpy as np
import oracle
import pytest
from cases import BF16, ROUTINGS, TOLERANCE, assert_close, floats, pairwise, ranks, routing
from devices import most_ranks

import jax_ep

pytestmark = [pytest.mark.processes, pytest.mark.moves_rows]

MANY = most_ranks()


def run(ids, num_experts, y_shape, *args, **options):
    """Dispatches, then combines rows of its own; returns the sums and the oracle's."""
    return run_all(ids, num_experts, [y_shape], *args, **options)[0]


def run_all(
    ids,
    num_experts,
    y_shapes,
    dtype,
    implementation,
    *,
    weighted=False,
    exact=False,
    biases=(),
    poison=True,
    **options,
):
    """Combines rows of each shape along one handle; returns pairs of sums.

    `exact`: weights are powers of two. GPUs round a product and its sum once, the oracle twice, and among
    millions of sums a fold that is rounded to bfloat16 may then be rounded the other way.
    """
    num_ranks, tokens, _ = ids.shape
    on = ranks(num_ranks)
    order = options.setdefault("order", "rank")
    expected = oracle.dispatch(
        np.zeros((num_ranks, tokens, 1)),
        ids,
        None,
        num_experts,
        order,
        options.get("capacity"),
        options.get("expert_alignment", 1),
    )
    capacity = len(expected[0].sources)
    rows = [floats((num_ranks, capacity, *shape), np.float64).astype(dtype) for shape in y_shapes]
    row_weights = floats((num_ranks, capacity), seed=5) if weighted else None
    if exact:
        row_weights = np.exp2(np.round(row_weights))
    if poison:  # padding, tail and dropped rows are never read
        unused = np.array([[source is None for source in one.sources] for one in expected])
        for y in rows:
            y[unused] = np.nan
        if weighted:
            row_weights[unused] = np.nan

    program = compiled(num_ranks, num_experts, implementation, **options)
    got = on.apply(program, ids, rows, row_weights, biases)
    folds = order == "expert" and implementation == "ffi" and jax.default_backend() == "gpu"
    if "JAX_EP_NO_ARENA" in os.environ:
        folds = folds and num_ranks > 1  # from one rank nothing travels
    want = [oracle.combine(y, expected, tokens, row_weights, biases, folds) for y in rows]
    return list(zip(got, want, strict=True))


@functools.lru_cache(64)
def compiled(num_ranks, num_experts, implementation, **options):
    """Returns a combine, along the handle of a dispatch, that tests of other routings share."""
    on = ranks(num_ranks)

    def shard(ids, rows, row_weights, biases):
        x = jax.numpy.zeros((len(ids), 1))
        by = {"num_experts": num_experts, "implementation": implementation}
        handle = jax_ep.dispatch(x, ids, group=on.group, **by, **options).handle
        shared = {"row_weights": row_weights, "bias": biases or None, "implementation": implementation}
        return [jax_ep.combine(y, handle, **shared) for y in rows]

    return jax.jit(on.map(shard))


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_every_routing_on_every_number_of_ranks(kind, order, num_ranks, implementation):
    ids = routing(kind, num_ranks, 11, 4, 16)
    got, expected = run(ids, 16, (5,), BF16, implementation, order=order)
    assert got.dtype == BF16
    assert_close(got, expected)
    if kind == "unused":
        assert not got.astype(np.float32).any()


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize(("dtype", "width"), [(BF16, 4096), (np.dtype(np.float32), 3600)], ids=str)
def test_long_rows_of_many_tokens(dtype, width, order):
    """On GPUs these come through shared memory, those of 14400 bytes in two parts."""
    # Programs for CPUs have no parts, and the oracle takes long.
    tokens = 1100 if jax.default_backend() == "gpu" else 110
    biases = (floats((2, tokens, width), seed=6).astype(dtype),)
    weighted = order == "expert"
    options = {"order": order, "weighted": weighted, "exact": weighted, "biases": biases}
    options["capacity"] = 10 * tokens // 11
    got, expected = run(routing("uniform", 2, tokens, 2, 8), 8, (width,), dtype, "ffi", **options)
    assert_close(got, expected)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sums_of_many_long_rows(num_ranks, order):
    """With JAX_EP_NO_ARENA=1 on GPUs: more rows a sum than shared memory holds at a time."""
    ids = routing("uniform", num_ranks, 40, 12, 16)
    got, expected = run(ids, 16, (7168,), BF16, "ffi", order=order)
    assert_close(got, expected)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_several_arrays_of_long_rows(order):
    on, ids, options = ranks(2), routing("uniform", 2, 300, 3, 8), {"num_experts": 8, "order": order}
    widths = {"a": 1032, "b": 520}

    def shard(ids):
        sent = jax_ep.dispatch(jax.numpy.zeros((300, 1)), ids, group=on.group, capacity=700, **options)
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("ep"))
        rows = {name: jax.random.normal(key, (700, width)) for name, width in widths.items()}
        apart = {name: jax_ep.combine(one, sent.handle) for name, one in rows.items()}
        return jax_ep.combine(rows, sent.handle), apart

    together, apart = on.run(shard, ids)
    for name in widths:
        np.testing.assert_array_equal(together[name], apart[name])
        assert together[name].any()


@pytest.mark.one_jax
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: d.name)
@pytest.mark.parametrize(("order", "implementation"), [("rank", "ffi"), ("expert", "ffi"), ("expert", "xla")])
def test_dtypes_and_row_shapes(dtype, order, implementation):
    ids, shapes = routing("uniform", 4, 7, 3, 8), [(), (1,), (1500,), (3, 4)]
    with jax.enable_x64(dtype == np.float64):
        pairs = run_all(ids, 8, shapes, dtype, implementation, order=order)
    for got, expected in pairs:
        assert got.dtype == dtype
        assert_close(got, expected)


def test_every_float16_is_read_and_written_right():
    """Each bit pattern alone: subnormals, infinities and signed zeros too."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(1, 1, -1)
    x = bits.view(np.float16)
    on = ranks(1)

    def shard(x, ids):
        d = jax_ep.dispatch(x, ids, group=on.group, num_experts=1, order="rank")
        return jax_ep.combine(d.x, d.handle)

    got = on.run(shard, x, np.zeros((1, 1, 1), np.int32))
    np.testing.assert_array_equal(got, x)  # NaN equals NaN, and the sum 0 + -0 is 0


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("dtype", "num_biases", "weighted", "capacity", "implementation"),
    pairwise([BF16, np.float32], [0, 1, 2], [False, True], [None, 30], ["ffi", "xla"]),
)
def test_weights_and_biases(dtype, num_biases, weighted, capacity, implementation):
    ids = routing("sprinkled", MANY, 9, 4, 16)
    biases = tuple(floats((MANY, 9, 5), dtype, seed=20 + i) for i in range(num_biases))
    options = {"order": "expert", "capacity": capacity, "expert_alignment": 4}
    got, expected = run(ids, 16, (5,), dtype, implementation, weighted=weighted, biases=biases, **options)
    assert_close(got, expected, terms=4)


@pytest.mark.one_jax
@pytest.mark.parametrize("capacity", [None, 6])
def test_biases_by_rank(capacity, implementation):
    ids = routing("sprinkled", 4, 9, 4, 16)
    biases = (floats((4, 9, 5), np.float16, seed=3),)  # a dtype of its own
    got, expected = run(ids, 16, (5,), np.float32, implementation, biases=biases, capacity=capacity)
    assert_close(got, expected)


def test_biases_of_a_pytree(implementation):
    ids = routing("sprinkled", 4, 9, 4, 16)
    on, biases = ranks(4), (floats((4, 9, 5), seed=3), floats((4, 9, 2), seed=4))
    by = {"implementation": implementation}

    def shard(ids, x, first, second):
        handle = jax_ep.dispatch(x, ids, group=on.group, num_experts=16, **by).handle
        y = (jax_ep.redispatch(x, handle, **by), jax_ep.redispatch(x[:, :2], handle, **by))
        alone = [
            jax_ep.combine(rows, handle, bias=bias, **by)
            for rows, bias in zip(y, (first, second), strict=True)
        ]
        return (*y, y[0]), jax_ep.combine((*y, y[0]), handle, bias=(first, (second,), None), **by), alone

    _, together, alone = on.run(shard, ids, floats((4, 9, 5)), *biases)
    for got, want in zip(together, alone, strict=False):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(together[2], together[0] - biases[0], rtol=1e-5, atol=1e-5)


def test_the_sum_is_in_float32_and_in_order(implementation):
    """Both ones are rounded away after 2^24, one by one: not in another order, nor in a wider sum."""
    ids = np.tile(np.array([0, 1, 2, 3], np.int32), (4, 1, 1))
    on = ranks(4)
    y = np.array([2.0**24, 1.0, 1.0, 5 - 2.0**24], np.float32)

    def shard(ids, mine):
        options = {"order": "rank", "implementation": implementation}
        d = jax_ep.dispatch(mine, ids, group=on.group, num_experts=4, **options)
        rows = jax.numpy.broadcast_to(mine, d.x.shape)
        return jax_ep.combine(rows, d.handle, implementation=implementation)

    got = on.run(shard, ids, y.reshape(4, 1, 1))
    in_order = np.float32(0)
    for value in y:
        in_order += value
    assert in_order == 5.0
    np.testing.assert_array_equal(got, np.full((4, 1, 1), 5.0))


@pytest.mark.one_jax
def test_rows_at_a_rank_are_added_first_in_the_order_of_k(implementation):
    """By expert: (1 + 0) at rank 0 plus (2^24 - 2^24) at rank 1. In other orders the one is rounded away."""
    ids = np.tile(np.array([2, 0, 3, 1], np.int32), (2, 1, 1))
    on = ranks(2)
    values = np.array([[1.0, 0.0], [2.0**24, -(2.0**24)]], np.float32)

    def shard(ids, values):
        sent = jax_ep.dispatch((), ids, group=on.group, num_experts=4, implementation=implementation)
        rows = values[0, sent.row_experts()][:, None]
        return jax_ep.combine(rows, sent.handle, implementation=implementation)

    got = on.run(shard, ids, values[:, None])
    np.testing.assert_array_equal(got, np.full((2, 1, 1), 1.0))


def test_a_pytree_of_dtypes(implementation):
    ids = routing("uniform", 4, 6, 2, 8)
    on = ranks(4)
    x = {"a": floats((4, 6, 3), BF16), "b": floats((4, 6), np.float32)}

    def shard(x, ids):
        options = {"order": "rank", "implementation": implementation}
        d = jax_ep.dispatch(x, ids, group=on.group, num_experts=8, **options)
        return jax_ep.combine(d.x, d.handle, implementation=implementation)

    got = on.run(shard, x, ids)
    copies = oracle.layout(ids.reshape(-1, 2), 8, 4)[3].sum(axis=1).reshape(4, 6)
    assert got["a"].dtype == BF16
    np.testing.assert_allclose(
        got["a"].astype(np.float32), x["a"].astype(np.float32) * copies[..., None], rtol=2**-8
    )
    np.testing.assert_allclose(got["b"], x["b"] * copies, rtol=1e-6)


def test_weights_travel_back_as_a_leaf_by_rank(implementation):
    """By rank, the received weights combined are the weights sent."""
    ids = routing("sprinkled", MANY, 10, 4, 32)
    on = ranks(MANY)
    weights = floats((MANY, 10, 4))

    def shard(ids, weights):
        options = {"order": "rank", "implementation": implementation}
        d = jax_ep.dispatch(weights, ids, weights, group=on.group, num_experts=32, **options)
        return jax_ep.combine(d.topk_weights, d.handle, implementation=implementation)

    got = on.run(shard, ids, weights)
    used = np.stack([oracle.routed(one, 32) for one in ids]) >= 0
    np.testing.assert_array_equal(got, np.where(used, weights, 0))
