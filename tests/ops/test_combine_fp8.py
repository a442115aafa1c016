"""Sums whose parts travel as FP8: compared with a float32 sum of parts that NumPy rounds."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    BF16,
    ROUTINGS,
    TOLERANCE,
    assert_close,
    floats,
    more_on_gpus,
    pairwise,
    ranks,
    routing,
    same_bits,
)
from devices import most_ranks
from jax import export
from jax.sharding import PartitionSpec as P
from processes import num_processes

import jax_ep
import jax_ep.export

pytestmark = [pytest.mark.processes, pytest.mark.moves_rows]

R, T, K, E, H = min(most_ranks(), 4), 24, 4, 16, 256
IMPLEMENTATIONS = ["ffi", "xla"]
ORDERS = ["rank", "expert", "expert_padded"]
CAPACITIES = {"rank": 70, "expert": 150, "expert_padded": None}


def exact_rows(shape, dtype, seed=1):
    """Returns small integers, whose sums, also if weighted by powers of two, are exact in float32."""
    return np.random.default_rng(seed).integers(-100, 101, shape).astype(dtype)


def received_by(ids, order, capacity=None):
    tokens = np.zeros((*ids.shape[:2], 1))
    return oracle.dispatch(tokens, ids, None, E, order, capacity)


@functools.lru_cache(64)
def compiled(num_ranks, per_domain, order, capacity, implementation, options):
    """Returns a combine of rows, their weights and biases, along the handle of a dispatch."""
    on = ranks(num_ranks, per_domain)

    def shard(ids, y, row_weights, biases):
        by = {"num_experts": E, "implementation": implementation, "order": order, "capacity": capacity}
        handle = jax_ep.dispatch(jnp.zeros((len(ids), 1)), ids, group=on.group, **by).handle
        if order == "expert_padded":
            shape = (E // num_ranks, -1)
            y = y.reshape(*shape, *y.shape[1:])
            row_weights = None if row_weights is None else row_weights.reshape(shape)
        given = {"row_weights": row_weights, "bias": biases or None, "implementation": implementation}
        return jax_ep.combine(y, handle, **given, **dict(options))

    return jax.jit(on.map(shard))


def combined(
    ids, y, row_weights, biases, order, implementation, *, capacity=None, per_domain=None, **options
):
    program = compiled(len(ids), per_domain, order, capacity, implementation, tuple(options.items()))
    return ranks(len(ids), per_domain).apply(program, ids, y, row_weights, biases)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("order", "dtype", "kind", "round_scale", "implementation"),
    pairwise(
        ORDERS,
        [BF16, np.dtype(np.float16), np.dtype(np.float32)],
        ["random", "one_rank", "sprinkled"],
        [False, True],
        IMPLEMENTATIONS,
    ),
    ids=str,
)
def test_sums_are_those_of_rounded_parts(order, dtype, kind, round_scale, implementation):
    """The parts have the oracle's bits. With rounded scales so have the sums, which are then exact."""
    ids = routing(kind, R, T, K, E)
    capacity = CAPACITIES[order]
    received = received_by(ids, order, capacity)
    rows = len(received[0].sources)
    y = exact_rows((R, rows, H), dtype) * np.exp2(np.arange(H) // 128 * 3 - 6).astype(dtype)
    weights = None
    if order != "rank":
        weights = np.exp2(np.round(floats((R, rows), seed=5)))
    unused = np.array([[source is None for source in one.sources] for one in received])
    y[unused] = np.nan  # padding, tail and dropped rows are never read
    options = {"quantize": "fp8", "round_scale": round_scale, "capacity": capacity}
    got = combined(ids, y, weights, (), order, implementation, **options)
    as_fp8 = functools.partial(oracle.round_to_fp8, round_scale=round_scale)
    want = oracle.combine(y, received, T, weights, as_fp8=as_fp8)
    assert got.dtype == dtype
    if round_scale or kind == "one_rank":  # no rounding, or only that of a product of a value and its scale
        np.testing.assert_array_equal(got, want.astype(dtype))
    else:
        assert_close(got, want)
    exact = oracle.combine(y, received, T, weights)
    assert (got.astype(np.float32) != exact.astype(dtype)).any()


@pytest.mark.one_jax
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_every_routing_on_every_number_of_ranks(kind, order, num_ranks):
    """A rank that is alone rounds its sums, too."""
    ids = routing(kind, num_ranks, 11, K, E)
    received = received_by(ids, order)
    y = exact_rows((num_ranks, len(received[0].sources), 128), BF16)
    bias = (exact_rows((num_ranks, 11, 128), np.float32, seed=2),)
    as_fp8 = functools.partial(oracle.round_to_fp8, round_scale=True)
    want = oracle.combine(y, received, 11, None, bias, as_fp8=as_fp8)
    for implementation in IMPLEMENTATIONS:
        options = {"quantize": "fp8", "round_scale": True}
        got = combined(ids, y, None, bias, order, implementation, **options)
        np.testing.assert_array_equal(got, want.astype(BF16))


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(BF16, 7168), (BF16, 1152), (np.dtype(np.float16), 1152), (np.dtype(np.float32), 640)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1100, 100, 3] if jax.default_backend() == "gpu" else [40])
def test_long_rows(tokens, dtype, width, order):
    """On GPUs of many tokens; through slots, which take 100 of these rows; and as lines."""
    ids = routing("uniform", R, tokens, K, E)
    capacity = (14 if order == "rank" else 40) * R * tokens // 20
    received = received_by(ids, order, capacity)
    y = exact_rows((R, capacity, width), dtype)
    weights = None if order == "rank" else np.exp2(np.round(floats((R, capacity), seed=5)))
    got = combined(ids, y, weights, (), order, "ffi", capacity=capacity, quantize="fp8", round_scale=True)
    as_fp8 = functools.partial(oracle.round_to_fp8, round_scale=True)
    want = oracle.combine(y, received, tokens, weights, as_fp8=as_fp8)
    np.testing.assert_array_equal(got, want.astype(dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_that_are_not_finite_are_nan(implementation):
    ids = routing("one_rank", R, T, K, E)
    received = received_by(ids, "rank")
    y = exact_rows((R, len(received[0].sources), H), np.float32)
    y[0, 0, 3], y[0, 1, 200] = np.nan, -np.inf
    got = combined(ids, y, None, (), "rank", implementation, quantize="fp8")
    np.testing.assert_array_equal(np.isnan(got[0, 0]), np.arange(H) < 128)
    np.testing.assert_array_equal(np.isnan(got[0, 1]), np.arange(H) >= 128)
    assert np.isfinite(got[1:]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("quantize_gradient", [None, "fp8"])
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_gradients_are_those_without_it(order, quantize_gradient, implementation):
    on, ids = ranks(R), routing("random", R, T, K, E)
    capacity = CAPACITIES[order]
    y, d_out = floats((R, capacity, H)), floats((R, T, H), seed=4)
    weights, bias = floats((R, capacity), seed=2), floats((R, T, H), seed=3)

    def shard(ids, y, weights, bias, d_out):
        by = {"num_experts": E, "implementation": implementation, "order": order, "capacity": capacity}
        handle = jax_ep.dispatch(jnp.zeros((T, 1)), ids, group=on.group, **by).handle

        def gradients(quantize):
            def summed(y, weights, bias):
                options = {"quantize": quantize, "quantize_gradient": quantize_gradient}
                row_weights = None if order == "rank" else weights
                return jax_ep.combine(
                    y, handle, row_weights=row_weights, bias=bias, implementation=implementation, **options
                )

            return jax.vjp(summed, y, weights, bias)[1](d_out)

        return gradients("fp8"), gradients(None)

    got, want = on.run(shard, ids, y, weights, bias, d_out)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert got[0].any()


def _vmapped(combine, y):
    return jax.vmap(combine)(jnp.stack([y, 2 * y]))[0]


def _scanned(combine, y):
    _, sums = jax.lax.scan(lambda carry, rows: (carry, combine(rows)), 0, jnp.stack([y, 2 * y]))
    return sums[0]


def _rematerialized(combine, y):
    sums, transpose = jax.vjp(jax.checkpoint(combine), y)
    return sums + 0 * jnp.sum(transpose(jnp.ones_like(sums))[0]).astype(sums.dtype)


TRANSFORMS = {"vmap": _vmapped, "scan": _scanned, "checkpoint": _rematerialized}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_keep_sums(transform, implementation):
    on, ids = ranks(R), routing("random", R, T, K, E)
    y = floats((R, CAPACITIES["expert"], H)).astype(BF16)

    def shard(ids, y):
        by = {"num_experts": E, "implementation": implementation, "capacity": CAPACITIES["expert"]}
        handle = jax_ep.dispatch(jnp.zeros((T, 1)), ids, group=on.group, **by).handle
        combine = lambda y: jax_ep.combine(y, handle, quantize="fp8", implementation=implementation)
        return combine(y), TRANSFORMS[transform](combine, y)

    want, got = on.run(shard, ids, y)
    assert same_bits(got, want)


@pytest.mark.skipif(num_processes() > 1, reason="exports what jax.jit returns in one process")
def test_exported_program_has_the_same_sums():
    on, ids = ranks(R), routing("random", R, T, K, E)
    y = floats((R, CAPACITIES["rank"], H)).astype(BF16)

    def shard(ids, y):
        by = {"num_experts": E, "order": "rank", "capacity": CAPACITIES["rank"]}
        handle = jax_ep.dispatch(jnp.zeros((T, 1)), ids, group=on.group, **by).handle
        return jax_ep.combine(y, handle, quantize="fp8")

    program = jax.jit(on.map(shard))
    flat = [array.reshape(-1, *array.shape[2:]) for array in (ids, y)]
    flat = jax.device_put(flat, jax.NamedSharding(on.mesh, P("ep")))
    exported = export.export(program, disabled_checks=jax_ep.export.disabled_checks())(*flat)
    again = export.deserialize(exported.serialize())
    assert same_bits(jax.jit(again.call)(*flat), program(*flat))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layers_send_their_sums_as_fp8(implementation):
    """With an expert function, and with GatedExperts, whose combine is part of one gradient."""
    on, ids, F = ranks(R), routing("uniform", R, T, K, E), 128
    x, weights = floats((R, T, H)), floats((R, T, K), seed=2)
    up = floats((R, E // R, H, 2, F), seed=3) / 16
    down = floats((R, E // R, F, H), seed=4) / 16

    def shard(x, ids, weights, up, down):
        up, down = up.reshape(-1, H, 2, F), down.reshape(-1, F, H)
        options = {"group": on.group, "implementation": implementation}
        experts = jax_ep.GatedExperts(up, down)
        run = lambda sent: jax_ep.gated_mlp(sent.x, up, down, sent.group_sizes)
        sent = jax_ep.dispatch(x, ids, weights, num_experts=E, **options)
        by = {"row_weights": sent.row_weights, "implementation": implementation}
        want = jax_ep.combine(run(sent), sent.handle, quantize="fp8", **by)
        layer = functools.partial(jax_ep.moe, quantize_sums="fp8", **options)
        of_function = layer(x, ids, weights, run, num_experts=E)
        loss = lambda layer, x: jnp.sum(layer(x, ids, weights, experts) ** 2)
        plain = functools.partial(jax_ep.moe, **options)
        gradients = [jax.grad(functools.partial(loss, one))(x) for one in (layer, plain)]
        return want, of_function, layer(x, ids, weights, experts), gradients

    want, of_function, of_experts, (got, plain) = on.run(shard, x, ids, weights, up, down)
    assert same_bits(of_function, want)
    np.testing.assert_allclose(of_experts, want, rtol=1e-5, atol=0.05)  # products may differ in the last bit
    assert 0 < np.linalg.norm(got - plain) < 0.1 * np.linalg.norm(plain)


def test_started_combine_has_the_same_sums():
    on, ids = ranks(R), routing("random", R, T, K, E)
    y = floats((R, CAPACITIES["expert"], H)).astype(BF16)

    def shard(ids, y):
        by = {"num_experts": E, "capacity": CAPACITIES["expert"]}
        handle = jax_ep.dispatch(jnp.zeros((T, 1)), ids, group=on.group, **by).handle
        one = jax_ep.combine(y, handle, quantize="fp8")
        # One after the other: two ops of few tokens must not overlap on GPUs (docs/howto/overlap.md).
        y, one = jax.lax.optimization_barrier((y, one))
        return one, jax_ep.combine_start(y, handle, quantize="fp8").done()

    one, started = on.run(shard, ids, y)
    assert np.isfinite(one.astype(np.float32)).all()  # if an op failed, both might be filled alike
    assert same_bits(one, started)


@pytest.mark.skipif("JAX_EP_NO_ARENA" in os.environ, reason="GPUs leave out ranks through the arena alone")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_ranks_that_are_left_out(on_timeout, implementation):
    if R < 2:
        pytest.skip("needs 2 ranks")
    active = np.arange(R) != R - 1
    ids = oracle.mask_inactive(routing("uniform", R, T, K, E), E, active)
    received = received_by(ids, "rank")
    y = exact_rows((R, len(received[0].sources), H), BF16)
    options = {"quantize": "fp8", "round_scale": True, "active_ranks": tuple(active.tolist())}
    options["on_timeout"] = on_timeout
    got, attended = combined(ids, y, None, (), "rank", implementation, **options)
    as_fp8 = functools.partial(oracle.round_to_fp8, round_scale=True)
    want = oracle.combine(y, received, T, active=active, as_fp8=as_fp8)
    np.testing.assert_array_equal(got, want.astype(BF16))
    np.testing.assert_array_equal(attended, np.tile(active.astype(np.int32), (R, 1)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_hosts_send_their_parts_as_fp8(order, implementation):
    if R < 4:
        pytest.skip("needs 4 ranks")
    ids = routing("random", R, T, K, E)
    received = received_by(ids, order)
    y = exact_rows((R, len(received[0].sources), H), BF16)
    options = {"quantize": "fp8", "round_scale": True, "per_domain": 2}
    got = combined(ids, y, None, (), order, implementation, **options)
    as_fp8 = functools.partial(oracle.round_to_fp8, round_scale=True)
    want = oracle.combine(y, received, T, per_domain=2, as_fp8=as_fp8)
    np.testing.assert_array_equal(got, want.astype(BF16))


@pytest.mark.parametrize(
    ("order", "weighted"), more_on_gpus([("expert", True)], [("expert", False), ("rank", False)])
)
def test_error_of_normal_rows(order, weighted):
    """The figure of docs/howto/fp8.md."""
    ids = routing("uniform", R, 64, 8, E)
    received = received_by(ids, order)
    y = floats((R, len(received[0].sources), 1024))
    weights = np.abs(floats((R, y.shape[1]), seed=3)) if weighted else None
    got = combined(ids, y, weights, (), order, "ffi", quantize="fp8")
    want = oracle.combine(y, received, 64, weights)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0.024 < error < 0.028
    assert abs(np.vdot(got, want) / np.vdot(want, want) - 1) < 1e-3  # no bias
    assert TOLERANCE[np.dtype(BF16)] < error


ERRORS = {
    "another option": (
        lambda y: (y, {"quantize": "fp8_dequantize"}),
        ValueError,
        "quantize must be None or 'fp8', got 'fp8_dequantize'",
    ),
    "a pytree": (
        lambda y: ((y, y), {"quantize": "fp8"}),
        ValueError,
        "quantize needs y to be one array, not a pytree",
    ),
    "narrow rows": (
        lambda y: (y[:, :100], {"quantize": "fp8"}),
        ValueError,
        r"quantize needs rows whose last dimension is a multiple of 128, got float32\[70, 100\]; pad them",
    ),
    "rows without a dimension": (
        lambda y: (y[:, 0], {"quantize": "fp8"}),
        ValueError,
        "quantize needs rows whose last dimension is a multiple of 128",
    ),
    "float64": (
        lambda y: (y.astype(jnp.float64), {"quantize": "fp8"}),
        TypeError,
        "quantize needs rows of float16, bfloat16 or float32, got float64",
    ),
    "rounded scales of nothing": (
        lambda y: (y, {"round_scale": True}),
        ValueError,
        "round_scale needs quantize, because sums that are not quantized have no scales",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_rejects_unquantizable_sums(name):
    make, error, text = ERRORS[name]
    on = ranks(R)

    def shard(ids, y):
        by = {"num_experts": E, "order": "rank", "capacity": CAPACITIES["rank"]}
        handle = jax_ep.dispatch(jnp.zeros((T, 1)), ids, group=on.group, **by).handle
        rows, options = make(y)
        return jax_ep.combine(rows, handle, **options)

    shapes = [
        jax.ShapeDtypeStruct((R * T, K), jnp.int32),
        jax.ShapeDtypeStruct((R * CAPACITIES["rank"], H), jnp.float32),
    ]
    with jax.enable_x64(name == "float64"), pytest.raises(error, match="combine: " + text):
        jax.eval_shape(on.map(shard), *shapes)


def test_layer_rejects_unquantizable_sums():
    on = ranks(R)

    def shard(x, ids, weights):
        options = {"group": on.group, "num_experts": E, "quantize_sums": "fp8"}
        return jax_ep.moe(x, ids, weights, lambda sent: sent.x[:, :100], **options)

    shapes = [
        jax.ShapeDtypeStruct((R * T, n), dtype) for n, dtype in ((H, "float32"), (K, "int32"), (K, "float32"))
    ]
    with pytest.raises(ValueError, match="moe: quantize_sums needs rows whose last dimension"):
        jax.eval_shape(jax.shard_map(shard, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep")), *shapes)
