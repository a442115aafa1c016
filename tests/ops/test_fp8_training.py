"""Training with rows that travel as FP8, and with products in FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, more_on_gpus, quantize, ranks, routing, same_bits
from devices import most_ranks

import jax_ep

pytestmark = pytest.mark.one_jax

R = min(most_ranks(), 4)
SIZES = np.array([130, 0, 62], np.int32)


@functools.partial(jax.jit, static_argnames="round_scale")
def experts_gradients(rows, up, down, cotangent, round_scale=False):
    run = lambda *given: jax_ep.gated_mlp(*given, SIZES, quantize="fp8", round_scale=round_scale)
    out, gradients = jax.vjp(run, rows, up, down)
    return out, gradients(cotangent)


def experts_arrays():
    rows, cotangent = floats((SIZES.sum(), 128)), floats((SIZES.sum(), 128), seed=3)
    given = rows, floats((3, 128, 2, 128), seed=1), floats((3, 128, 128), seed=2), cotangent
    return [jnp.asarray(array, jnp.bfloat16) for array in given]


def test_tiny_cotangents_keep_their_precision():
    """Their scales have a floor far below those of rows."""
    *given, cotangent = experts_arrays()
    _, gradients = experts_gradients(*given, cotangent)
    _, tiny = experts_gradients(*given, cotangent * 2.0**-40)
    for got, want in jax.device_get(list(zip(tiny, gradients, strict=True))):
        np.testing.assert_array_equal(got.astype(np.float32) * 2.0**40, want.astype(np.float32))


def test_round_scale_reaches_rows_and_weights():
    rows, up, down, cotangent = experts_arrays()
    out, _ = experts_gradients(rows, up, down, cotangent, round_scale=True)
    rounded = quantize(rows, round_scale=True)
    quantize_weights = jax.jit(functools.partial(jax_ep.quantize_weights, round_scale=True))
    weights = [quantize_weights(w) for w in (up, down)]
    of_quantized = jax.jit(lambda *given: jax_ep.gated_mlp(*given, SIZES, quantize="fp8", round_scale=True))
    np.testing.assert_array_equal(out, of_quantized(rounded, *weights))
    assert not same_bits(out, experts_gradients(rows, up, down, cotangent)[0])


@functools.cache
def gradients_of_layer(products, quantize, applies_weights, dtype):
    """Returns the gradients of moe in tokens, router weights and both matrices."""
    on, experts, tokens, k, H, F = ranks(R), 2 * R, 40, 2, 256, 128
    x, weights = floats((R * tokens, H), jnp.bfloat16), floats((R * tokens, k), seed=7)
    cotangent = floats(x.shape, seed=8)
    ids = routing("random", R, tokens, k, experts).reshape(-1, k)
    up = (floats((experts, H, 2, F), seed=2) / H**0.5).astype(jnp.bfloat16)
    down = (floats((experts, F, H), seed=3) / F**0.5).astype(jnp.bfloat16)

    def layer(x, ids, weights, up, down):
        def expert_fn(sent):
            row_weights = sent.row_weights if applies_weights else None
            more = {"quantize": products, "row_weights": row_weights}
            return jax_ep.gated_mlp(sent.x, up, down, sent.group_sizes, **more)

        options = {"group": on.group, "num_experts": experts, "experts_apply_weights": applies_weights}
        both_ways = {"quantize": quantize, "quantize_gradient": quantize}
        return jax_ep.moe(x, ids, weights, expert_fn, **options, **both_ways)

    def loss(x, weights, up, down):
        out = on.map(layer)(x.astype(dtype), ids, weights, up.astype(dtype), down.astype(dtype))
        return jnp.sum(out.astype(jnp.float32) * cotangent)

    return jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(x, weights, up, down))


@pytest.mark.parametrize(
    ("quantize", "products", "applies_weights"),
    more_on_gpus([("fp8", "fp8_all", False)], [(None, "fp8", True)]),
)
def test_gradients_of_a_layer_are_near_those_in_float32(quantize, products, applies_weights):
    """Its gradients are near those in float32."""
    got = gradients_of_layer(products, quantize, applies_weights, jnp.bfloat16)
    want = gradients_of_layer(None, None, False, jnp.float32)
    for one, other in zip(got, want, strict=True):
        one, other = one.astype(np.float64), other.astype(np.float64)
        assert np.linalg.norm(one - other) <= 0.1 * np.linalg.norm(other)
        slope = np.sum(one * other) / np.sum(other**2)
        assert abs(slope - 1) < 0.03  # no bias


@functools.cache
def training(quantize):
    """Returns a program that trains a layer for 60 steps to do what a teacher does: the loss of each step."""
    num_experts, dtype, on = 8, jnp.bfloat16, ranks(R)

    def shard(quantize, x, ids, up, down):
        def feed_forward(sent):
            hidden = jnp.tanh(jax_ep.grouped_dot(sent.x, up.astype(dtype), sent.group_sizes))
            return jax_ep.grouped_dot(hidden, down.astype(dtype), sent.group_sizes)

        options = {"group": on.group, "num_experts": num_experts, "quantize": quantize}
        return jax_ep.moe(x, ids, jnp.full(ids.shape, 0.5), feed_forward, **options)

    def train(x, ids, teacher, student):
        def layer(quantize, w):
            return on.map(functools.partial(shard, quantize))(x, ids, *w).astype(jnp.float32)

        want = layer(None, teacher)

        def loss(student):
            return jnp.mean((layer(quantize, student) - want) ** 2)

        def step(state, _):
            student, momentum = state
            value, gradient = jax.value_and_grad(loss)(student)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
            return (jax.tree.map(lambda p, m: p - 2.0 * m, student, momentum), momentum), value

        return jax.lax.scan(step, (student, jax.tree.map(jnp.zeros_like, student)), length=60)[1]

    return jax.jit(train)


def trained_loss(quantize, seed):
    """Returns the last loss of a training that ends with less than half of its first."""
    keys = jax.random.split(jax.random.key(seed), 6)
    dtype, width, inner, experts = jnp.bfloat16, 128, 64, 8
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[-2] ** 0.5
    x = jax.random.normal(keys[0], (R * 64, width), dtype)
    ids = jax.random.randint(keys[1], (R * 64, 2), 0, experts)
    teacher = normal(keys[2], experts, width, inner), normal(keys[3], experts, inner, width)
    student = normal(keys[4], experts, width, inner), normal(keys[5], experts, inner, width)
    values = np.asarray(training(quantize)(x, ids, teacher, student))
    assert values[-1] < 0.5 * values[0]
    return values[-1]


@pytest.mark.slow
def test_training_reaches_the_loss_of_rows_as_they_are():
    """Within what different seeds make of it."""
    plain, quantised = (
        np.array([trained_loss(quantize, seed) for seed in range(4)]) for quantize in (None, "fp8_dequantize")
    )
    assert abs(quantised.mean() - plain.mean()) < plain.std()
