import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from cases import BF16, FP8, ROUTINGS, assert_close, floats, routing, same_bits, tagged_rows

import jax_ep

pytestmark = pytest.mark.moves_rows

# Compiled as a whole: op by op, each primitive would be a program of its own.
permute = jax.jit(
    jax_ep.permute, static_argnames=("num_local_experts", "expert_alignment", "capacity", "implementation")
)
unpermute = jax.jit(jax_ep.unpermute, static_argnames=("out_dtype", "implementation"))


@functools.partial(jax.jit, static_argnames=("out_dtypes", "implementation"))
def gradients(rows, row_map, weights, cotangents, out_dtypes=(None,), **options):
    """Returns the gradients of unpermute in each y of `rows` and in the weights."""

    def one(y, cotangent, out_dtype):
        sums = lambda y, w: jax_ep.unpermute(y, row_map, topk_weights=w, out_dtype=out_dtype, **options)
        return jax.vjp(sums, y, weights)[1](cotangent)

    return list(map(one, rows, cotangents, out_dtypes))


@pytest.mark.one_jax
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("capacity", "alignment"), [(None, 1), (None, 8), (30, 1), (30, 8)])
def test_permute_equals_the_oracle(kind, capacity, alignment, implementation):
    rows, k, experts = 20, 3, 6
    ids = routing(kind, 1, rows, k, experts)[0]
    x, weights = tagged_rows(1, rows, 5, BF16)[0], floats((rows, k))
    got = permute(
        x,
        ids,
        num_local_experts=experts,
        topk_weights=weights,
        expert_alignment=alignment,
        capacity=capacity,
        implementation=implementation,
    )
    want = oracle.dispatch(x[None], ids[None], weights[None], experts, "expert", capacity, alignment)[0]
    assert same_bits(got.x, want.x)
    np.testing.assert_array_equal(got.row_weights, want.weights, "row_weights", strict=True)
    for name in ("group_sizes", "tokens_per_expert", "num_dropped"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name, strict=True)
    row_map = oracle.permute_rows(ids, experts, alignment, len(want.x))
    np.testing.assert_array_equal(got.row_map, row_map, strict=True)


@pytest.mark.one_jax
@pytest.mark.parametrize("dtype", [FP8, ml_dtypes.float8_e5m2, np.int8, np.float16, jnp.int4], ids=str)
def test_permute_moves_any_payload(dtype, implementation):
    ids = routing("sprinkled", 1, 9, 2, 4)[0]
    x = {
        "a": (np.arange(9 * 3).reshape(9, 3) % 7).astype(np.float32).astype(dtype),
        "b": tagged_rows(1, 9, 2, np.int32)[0],
    }
    got = permute(x, ids, num_local_experts=4, implementation=implementation)
    want = oracle.dispatch(x["b"][None], ids[None], None, 4, "expert")[0]
    assert same_bits(got.x["b"], want.x)
    a = np.where(
        [[s is not None] for s in want.sources],
        np.asarray(x["a"], np.float32)[[s[1] if s else 0 for s in want.sources]],
        0,
    )
    np.testing.assert_array_equal(np.asarray(got.x["a"], np.float32), a)


@pytest.mark.parametrize("width", [128, 7168, 8200])
def test_permute_moves_wide_rows(width):
    ids = routing("sprinkled", 1, 70, 3, 16)[0]
    x = tagged_rows(1, 70, width, BF16)
    got = permute(x[0], ids, num_local_experts=16, expert_alignment=8)
    assert same_bits(got.x, oracle.dispatch(x, ids[None], None, 16, "expert", alignment=8)[0].x)


@pytest.mark.one_jax
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_unpermute_equals_the_oracle(weighted, biased, implementation):
    """Of rows and sums of several dtypes."""
    rows, k, experts, capacity = 20, 3, 6, 40
    dtypes = [(BF16, None), (np.float32, None), (BF16, np.float32), (np.float32, BF16), (np.float16, None)]
    ids = routing("sprinkled", 1, rows, k, experts)[0]
    row_map = oracle.permute_rows(ids, experts, 1, capacity)
    weights = np.where(row_map >= 0, floats((rows, k), seed=3), np.nan).astype(np.float32)
    given = [
        (floats((capacity, 7), dtype), floats((experts, 7), dtype, seed=4) if biased else None)
        for dtype, _ in dtypes
    ]
    for y, _ in given:
        y[np.setdiff1d(np.arange(capacity), row_map)] = np.nan  # never read
    shared = {"topk_weights": weights if weighted else None, "implementation": implementation}
    shared |= {"topk_idx": ids} if biased else {}

    @jax.jit
    def run(given):
        return [
            jax_ep.unpermute(y, row_map, bias=bias, out_dtype=out_dtype, **shared)
            for (y, bias), (_, out_dtype) in zip(given, dtypes, strict=True)
        ]

    for got, (y, bias), (dtype, out_dtype) in zip(run(given), given, dtypes, strict=True):
        assert got.dtype == np.dtype(out_dtype or dtype)
        assert_close(got, oracle.unpermute(y, row_map, shared["topk_weights"], bias, ids), terms=4)


def test_unpermute_to_float8_rounds_once(implementation):
    row_map = np.array([[0, 1], [2, -1]], np.int32)
    y = floats((3, 4))
    got = unpermute(y, row_map, out_dtype=FP8, implementation=implementation)
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), oracle.unpermute(y, row_map).astype(FP8).astype(np.float32)
    )


@pytest.mark.one_jax
def test_unpermute_of_permute_counts_the_copies(implementation):
    ids = routing("sprinkled", 1, 12, 4, 8)[0]
    x = floats((12, 5))

    @jax.jit
    def there_and_back(x):
        p = jax_ep.permute(x, ids, num_local_experts=8, implementation=implementation)
        return jax_ep.unpermute(p.x, p.row_map, implementation=implementation)

    back = there_and_back(x)
    copies = (oracle.routed(ids, 8) >= 0).sum(axis=1)
    np.testing.assert_allclose(back, x * copies[:, None], rtol=1e-6)


@pytest.mark.one_jax
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("capacity", [None, 20])
def test_gradients_equal_jax_of_the_reference(biased, capacity):
    """Against JAX's own differentiation of plain gathers and sums."""
    rows, k, experts = 12, 3, 5
    ids = routing("sprinkled", 1, rows, k, experts)[0]
    x, weights, bias, scale = floats((rows, 4)), floats((rows, k)), floats((experts, 4)), floats((4,))
    size = capacity or oracle.worst_case("expert", rows, k, experts)
    row_map = jnp.asarray(oracle.permute_rows(ids, experts, 1, size))
    valid = row_map >= 0

    def plain(x, weights, bias):
        term = jnp.tanh(x[:, None] * scale[None, None])  # each copy of a row, as an expert would see it
        if biased:
            term = term + bias[jnp.maximum(ids, 0) % experts]
        y = jnp.sum(jnp.where(valid, weights, 0)[..., None] * jnp.where(valid[..., None], term, 0), axis=1)
        return jnp.sum(y**2) + jnp.sum(jnp.where(valid, weights, 0) ** 3)

    def ours(x, weights, bias, implementation):
        p = jax_ep.permute(
            x,
            ids,
            num_local_experts=experts,
            topk_weights=weights,
            capacity=capacity,
            implementation=implementation,
        )
        extra = {"bias": bias, "topk_idx": ids} if biased else {}
        y = jax_ep.unpermute(
            jnp.tanh(p.x * scale[None]),
            p.row_map,
            topk_weights=weights,
            implementation=implementation,
            **extra,
        )
        return jnp.sum(y**2) + jnp.sum(p.row_weights**3)

    want = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(x, weights, bias)
    for implementation in ("ffi", "xla"):
        got = jax.jit(jax.grad(ours, argnums=(0, 1, 2)), static_argnums=3)(x, weights, bias, implementation)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_unread_rows_get_zero_gradient_even_if_nan(implementation):
    row_map = np.array([[0, -1], [2, -1]], np.int32)
    y = np.array([[1.0], [np.nan], [3.0], [np.nan]], np.float32)
    weights = np.array([[2.0, np.nan], [3.0, np.nan]], np.float32)
    cotangent = np.ones((2, 1), np.float32)
    ((d_y, d_w),) = gradients([y], row_map, weights, [cotangent], implementation=implementation)
    np.testing.assert_array_equal(d_y, [[2.0], [0.0], [3.0], [0.0]])
    np.testing.assert_array_equal(d_w, [[1.0, 0.0], [3.0, 0.0]])


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("width", "k", "implementation"),
    [(1, 5, "xla"), (7, 32, "ffi"), (128, 5, "ffi"), (128, 32, "xla"), (7168, 5, "ffi")],
)
def test_the_gradient_of_unpermute_equals_the_oracle(width, k, implementation):
    """Of rows and sums of several dtypes."""
    dtypes = (BF16, np.float16, np.float32, BF16, BF16)
    out_dtypes = (None, None, None, np.float32, np.float16)
    rows_in, experts, capacity = 40, 6 if k == 5 else 40, 90 if k == 5 else 1300
    ids = routing("sprinkled", 1, rows_in, k, experts)[0]
    row_map = oracle.permute_rows(ids, experts, 8, capacity)
    row_map[3, 2] = capacity + 5  # names no row
    choices = np.argwhere((row_map >= 0) & (row_map < capacity))
    rows = [floats((capacity, width), dtype) for dtype in dtypes]
    for y in rows:
        y[np.setdiff1d(np.arange(capacity), row_map)] = np.nan  # never read
    weights = floats((rows_in, k), seed=3)
    weights[(row_map < 0) | (row_map >= capacity)] = np.nan
    pairs = zip(dtypes, out_dtypes, strict=True)
    cotangents = [floats((rows_in, width), out_dtype or dtype, seed=5) for dtype, out_dtype in pairs]
    results = gradients(rows, row_map, weights, cotangents, out_dtypes, implementation=implementation)
    for y, cotangent, (d_y, d_weights) in zip(rows, cotangents, results, strict=True):
        want, dots = np.zeros((capacity, width), np.float32), np.zeros((rows_in, k), np.float32)
        for c, choice in choices:
            row = row_map[c, choice]
            want[row] = weights[c, choice] * cotangent[c].astype(np.float32)
            dots[c, choice] = y[row].astype(np.float32) @ cotangent[c].astype(np.float32)
        assert same_bits(d_y, want.astype(y.dtype))
        np.testing.assert_allclose(d_weights, dots, rtol=1e-5, atol=1e-6 * width)


@pytest.mark.one_jax
@pytest.mark.parametrize("width", [3, 4])
def test_the_gradient_of_unpermute_of_float64(width, implementation):
    row_map, weights = np.array([[2, 0], [-1, 3]], np.int32), floats((2, 2))
    with jax.enable_x64(True):
        y, cotangent = (np.random.default_rng(seed).normal(size=(n, width)) for seed, n in ((0, 4), (1, 2)))
        options = {"implementation": implementation}
        ((d_y, d_weights),) = gradients([y], row_map, weights, [cotangent], **options)
        of = lambda c, k: weights.astype(np.float64)[c, k] * cotangent[c]
        want = [of(0, 1), np.zeros(width), of(0, 0), of(1, 1)]
        np.testing.assert_allclose(d_y, want, rtol=1e-15)
        dots = [[y[2] @ cotangent[0], y[0] @ cotangent[0]], [0, y[3] @ cotangent[1]]]
        np.testing.assert_allclose(d_weights, np.float32(dots), rtol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.one_jax), True])
def test_a_gradient_of_the_gradient_of_unpermute(weighted, biased, implementation):
    """Against JAX's own differentiation of plain gathers and sums."""
    rows, k, experts, capacity = 9, 3, 4, 24
    ids = routing("sprinkled", 1, rows, k, experts)[0]
    row_map = jnp.asarray(oracle.permute_rows(ids, experts, 1, capacity))
    y, weights, scale = floats((capacity, 5)), floats((rows, k), seed=1), floats((rows, 5), seed=2)
    bias = jnp.asarray(floats((experts, 5), seed=3))

    def plain(y, w):
        terms = y[jnp.maximum(row_map, 0)] + (bias[jnp.maximum(ids, 0) % experts] if biased else 0)
        taken = jnp.where((row_map >= 0)[..., None], terms, 0)
        return jnp.sum((w[..., None] if weighted else jnp.ones((rows, k, 1))) * taken, axis=1)

    def ours(y, w):
        extra = {"bias": bias, "topk_idx": ids} if biased else {}
        weights = w if weighted else None
        return jax_ep.unpermute(y, row_map, topk_weights=weights, implementation=implementation, **extra)

    def penalty(sums, y, w):
        d_y, d_w = jax.grad(lambda y, w: jnp.sum(scale * jnp.sin(sums(y, w))), argnums=(0, 1))(y, w)
        return jnp.sum(d_y**3) + jnp.sum(jnp.cos(d_w))

    got, want = (
        jax.jit(jax.grad(functools.partial(penalty, sums), argnums=(0, 1)))(y, weights)
        for sums in (ours, plain)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.one_jax
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_bias_that_is_not_finite_stays_with_its_expert(value, implementation):
    y, ids = np.ones((3, 2), np.float32), np.array([[0], [1], [-1]], np.int32)
    bias, row_map = np.ones((3, 2), np.float32), np.array([[0], [1], [-1]], np.int32)
    bias[1:] = value
    extra = {"bias": bias, "topk_idx": ids, "implementation": implementation}
    f = lambda w: jnp.sum(jax_ep.unpermute(y, row_map, topk_weights=w, **extra))
    d_w = jax.jit(jax.grad(f))(np.array([[1], [1], [np.nan]], np.float32))
    np.testing.assert_array_equal(d_w, [[4], [2 + 2 * value], [0]])


def test_the_gradient_of_a_bias_reads_no_cotangent_of_a_sum_without_rows(implementation):
    ids, row_map = np.array([[0], [1], [-1]], np.int32), np.array([[0], [1], [-1]], np.int32)
    extra = {"topk_idx": ids, "implementation": implementation}
    f = lambda bias: jax_ep.unpermute(np.ones((2, 2), np.float32), row_map, bias=bias, **extra)
    cotangent = np.array([[1.0, 2], [3, 4], [np.nan, np.inf]], np.float32)
    (d_bias,) = jax.jit(lambda bias, d: jax.vjp(f, bias)[1](d))(np.zeros((3, 2), np.float32), cotangent)
    np.testing.assert_array_equal(d_bias, [[1, 2], [3, 4], [0, 0]])


def test_the_two_step_way_equals_expert_order():
    """Dispatch by rank, permute, unpermute, combine: the same as by expert (one process, 4 ranks)."""
    from cases import ranks

    on = ranks(4)
    ids = routing("sprinkled", 4, 10, 3, 16)
    x, weights = floats((4, 10, 6)), floats((4, 10, 3))

    def expert(sent):
        return jnp.sin(sent.x) * 2

    def two_steps(x, ids, weights):
        d = jax_ep.dispatch(x, ids, weights, group=on.group, num_experts=16, order="rank")
        p = jax_ep.permute(d.x, d.topk_idx, num_local_experts=4)
        y = jax_ep.unpermute(expert(p), p.row_map, topk_weights=d.topk_weights)
        return jax_ep.combine(y, d.handle)

    def one_step(x, ids, weights):
        return jax_ep.moe(x, ids, weights, expert, group=on.group, num_experts=16)

    np.testing.assert_allclose(
        on.run(two_steps, x, ids, weights), on.run(one_step, x, ids, weights), rtol=1e-5, atol=1e-6
    )
