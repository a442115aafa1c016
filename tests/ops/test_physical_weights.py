"""Products with weights of which the redundant experts' lie apart: the bits of those with one array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, more_on_gpus, quantize, same_bits

import jax_ep

L, S, H, F = 3, 2, 256, 128
SIZES = np.array([70, 0, 130, 37, 0], np.int32)  # a slot of the last two is empty
ROWS = 260


def quantize_first(function):
    """Returns the function, which then gets its weights quantized."""
    return lambda rows, w: function(rows, jax.tree.map(jax_ep.quantize_weights, w, is_leaf=is_weights))


def is_weights(w):
    return isinstance(w, jax.Array | jax_ep.PhysicalWeights)


def dot(rows, w):
    return jax_ep.grouped_dot(rows, w["up"], SIZES)


def mlp(rows, w, **options):
    return jax_ep.gated_mlp(rows, w["up"], w["down"], SIZES, b_up=w["bias"], **options)


FUNCTIONS = {
    "grouped_dot": dot,
    "gated_mlp": mlp,
    "gated_mlp of one of them": lambda rows, w: mlp(rows, w | {"down": jnp.asarray(w["down"])}),
    "gated_mlp in fp8": functools.partial(mlp, quantize="fp8"),
    "gated_mlp all in fp8": functools.partial(mlp, quantize="fp8_all", save="inputs"),
    "grouped_dot of quantize_weights": quantize_first(lambda rows, w: dot(rows, {"up": w["up"]})),
}


# The others differ from these in what kernels read.
OTHERS = ("gated_mlp", "gated_mlp in fp8")
CASES = more_on_gpus(
    [
        pytest.param(name, jnp.bfloat16, marks=[pytest.mark.slow] * ("fp8" in name))
        for name in FUNCTIONS
        if name not in OTHERS
    ],
    [*((name, jnp.bfloat16) for name in OTHERS), ("gated_mlp", jnp.float32)],
)


@pytest.mark.one_jax
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_values_and_gradients(name, dtype):
    """A product and a layer, forward and backward, and the gradient of a product's gradient."""
    gate_and_up = (2, F) if "mlp" in name else (2 * F,)
    w = {"up": floats((L + S, H, *gate_and_up), dtype), "down": floats((L + S, F, H), dtype, seed=1)}
    if "quantize_weights" not in name:
        w["bias"] = floats((L + S, *gate_and_up), dtype, seed=2)
    rows = floats((ROWS, H), dtype, seed=3)
    apart = {key: jax_ep.PhysicalWeights(array[:L], array[L:]) for key, array in w.items()}

    def loss(rows, w):
        out = FUNCTIONS[name](rows, w)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    def run(rows, w):
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(rows, w)

    def curvature(rows, w):
        gradients, out = run(rows, w)
        return jnp.sum(gradients[0].astype(jnp.float32) ** 2), (gradients, out)

    # Around a layer's second gradient XLA may sum in another order.
    function = jax.jit(jax.grad(curvature, 1, has_aux=True) if name == "grouped_dot" else run)
    got, want = function(rows, apart), function(rows, w)
    whole = jax.tree.map(
        lambda w: np.concatenate([w.home, w.redundant]) if isinstance(w, jax_ep.PhysicalWeights) else w,
        got,
        is_leaf=lambda w: isinstance(w, jax_ep.PhysicalWeights),
    )
    assert jax.tree.structure(whole) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(want), strict=True):
        assert same_bits(one, other)


@pytest.mark.one_jax
def test_quantized_arrays_and_a_batch():
    """Matrices in FP8, and `jax.vmap` over the rows alone, and over the weights, too."""
    rows, w = floats((ROWS, H)), floats((L + S, H, F), seed=1)
    apart = jax_ep.PhysicalWeights(jnp.asarray(w[:L]), jnp.asarray(w[L:]))
    in_blocks = functools.partial(quantize, block=(128, 128))
    q = jax.tree.map(jax_ep.PhysicalWeights, in_blocks(apart.home), in_blocks(apart.redundant))
    x = quantize(rows)
    dot = jax.jit(lambda rows, w: jax_ep.grouped_dot(rows, w, SIZES))
    assert same_bits(dot(x, q), dot(x, in_blocks(w)))
    two = np.stack([rows, rows[::-1]])
    want = np.stack([dot(rows, w), dot(rows[::-1], w)])
    assert same_bits(jax.jit(jax.vmap(dot, (0, None)))(two, apart), want)
    twice = jax.tree.map(lambda a: np.stack([a, a]), apart)
    assert same_bits(jax.jit(jax.vmap(dot))(two, twice), want)
    np.testing.assert_array_equal(jnp.asarray(apart), w)


@pytest.mark.one_jax
def test_weights_of_forward_passes():
    rows, up, down = floats((ROWS, H)), floats((L + S, H, 2, F), seed=1), floats((L + S, F, H), seed=2)
    apart = [jax_ep.PhysicalWeights(jnp.asarray(w[:L]), jnp.asarray(w[L:])) for w in (up, down)]
    forward = functools.partial(jax_ep.quantize_weights, gradients=False)
    run = jax.jit(lambda rows, *w: jax_ep.gated_mlp(rows, *map(forward, w), SIZES, quantize="fp8"))
    assert same_bits(run(rows, *apart), run(rows, up, down))
