"""FP8 with scales of blocks: the arithmetic of NumPy, bit for bit, and what an element may be off by.

Also weights that are quantized for forward passes alone.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import dequantize, floats, quantize, same_bits
from devices import make_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.one_jax


def oracle(x, rows, columns):
    """Values and scales of the matrices x [..., M, N], by NumPy's float32."""
    *lead, height, width = x.shape
    parts = x.astype(np.float32).reshape(*lead, height // rows, rows, width // columns, columns)
    largest = np.maximum(np.abs(parts).max(axis=(-3, -1), keepdims=True), np.float32(1e-4))
    scales = largest * np.float32(1 / 448)
    values = (parts * (np.float32(1) / scales)).astype(ml_dtypes.float8_e4m3fn)
    return values.reshape(x.shape), scales.reshape(*lead, height // rows, width // columns)


def wide_ranging(shape, seed=0):
    """Numbers over many orders of magnitude, some rows of them tiny."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(2 * rng.normal(size=(*shape[:-1], 1)))).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "block", "dtype", "by_op"),
    [
        *(((64, 512), 128, dtype, dtype == "float32") for dtype in ("float32", "bfloat16", "float16")),
        *(((3, 256, 384), (128, 128), dtype, dtype == "bfloat16") for dtype in ("float32", "bfloat16")),
        ((2, 8, 64), (4, 16), "float32", False),
        ((5, 96), 32, "bfloat16", False),
    ],
)
def test_values_and_scales_are_those_of_numpy(shape, block, dtype, by_op):
    x = wide_ranging(shape).astype(dtype)
    want_values, want_scales = oracle(x, *(block if isinstance(block, tuple) else (1, block)))
    for function in (jax_ep.quantize_fp8, quantize) if by_op else (quantize,):
        q = function(x, block=block)
        assert q.values.dtype == jnp.float8_e4m3fn
        assert q.scales.dtype == jnp.float32
        assert q.shape == shape
        np.testing.assert_array_equal(np.asarray(q.values).view(np.uint8), want_values.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(q.scales), want_scales)
        back = dequantize(q, dtype=jnp.float32)
        full = np.repeat(want_scales, shape[-1] // want_scales.shape[-1], axis=-1)
        full = np.repeat(full, shape[-2] // want_scales.shape[-2], axis=-2)
        np.testing.assert_array_equal(np.asarray(back), want_values.astype(np.float32) * full)


def test_a_program_that_converts_back_rounds():
    """On GPUs, XLA leaves a conversion to FP8 and back out if it may."""
    x = wide_ranging((16, 256))
    there_and_back = lambda x: jax_ep.dequantize_fp8(
        jax_ep.quantize_fp8(x, implementation="xla"), jnp.float32
    )
    np.testing.assert_array_equal(jax.jit(there_and_back)(x), dequantize(quantize(x), dtype=jnp.float32))


def test_one_row():
    x = floats((256,))
    q = quantize(x)
    assert q.values.shape == (256,)
    assert q.scales.shape == (2,)
    np.testing.assert_array_equal(dequantize(q), dequantize(quantize(x[None]))[0])


def test_error_is_bounded_and_without_bias():
    x = wide_ranging((512, 1024), seed=1)
    q = quantize(x)
    back = np.asarray(dequantize(q, dtype=jnp.float32), np.float64)
    scales = np.repeat(np.asarray(q.scales, np.float64), 128, axis=1)
    error = back - x
    assert (np.abs(error) <= np.maximum(np.abs(x) * 2.0**-4, scales * 2.0**-10) * (1 + 1e-6)).all()
    # The mean of n errors of random sign is about 1 / sqrt(n) of their size.
    relative = error / (scales * 448)
    assert abs(relative.mean()) < 4 * relative.std() / np.sqrt(relative.size)


def test_zeros_and_tiny_numbers_keep_a_scale():
    x = np.zeros((2, 128), np.float32)
    x[1] = 1e-8
    q = quantize(x)
    np.testing.assert_array_equal(np.asarray(q.scales), np.float32(1e-4) * np.float32(1 / 448))
    assert not np.asarray(dequantize(q))[0].any()


@pytest.mark.parametrize("rows", [3, 128])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan(bad, rows):
    """Also of many rows: XLA:CPU takes their maximum in another way, in which a NaN may be lost."""
    x = floats((rows, 256))
    x[1, 5], x[1, 6:9] = bad, 0
    q = jax.device_get(quantize(x))
    assert np.isnan(q.values[1, :128].astype(np.float32)).all()
    back = np.asarray(dequantize(q, dtype=jnp.float32))
    assert np.isnan(back[1, :128]).all()
    assert np.isnan(q.scales[1, 0])
    assert np.isfinite(back[1, 128:]).all()
    assert np.isfinite(np.delete(back, 1, axis=0)).all()


def test_no_rows():
    q = quantize(np.zeros((0, 256), np.float32))
    assert q.scales.shape == (0, 2)
    assert dequantize(q).shape == (0, 256)


@pytest.mark.parametrize(
    ("x", "block", "error", "text"),
    [
        (
            np.ones((4, 100), np.float32),
            128,
            ValueError,
            r"1 x 128 elements must divide .* got float32\[4, 100\]",
        ),
        (np.ones((4, 128), np.float32), (128, 128), ValueError, r"128 x 128 elements must divide"),
        (np.ones((128,), np.float32), (128, 128), ValueError, r"128 x 128 elements must divide"),
        (np.ones((4, 128), np.int32), 128, TypeError, r"must be floating, got int32\[4, 128\]"),
        (
            np.ones((4, 128), np.float32),
            0,
            ValueError,
            "block must be a positive int or a pair of them, got 0",
        ),
        (np.ones((4, 128), np.float32), (1, 2, 3), ValueError, r"or a pair of them, got \(1, 2, 3\)"),
        (np.ones((4, 128), np.float32), "128", ValueError, "or a pair of them, got '128'"),
    ],
)
def test_what_cannot_be_quantised(x, block, error, text):
    with pytest.raises(error, match=text):
        jax_ep.quantize_fp8(x, block=block)


def test_what_cannot_be_dequantised():
    with pytest.raises(TypeError, match="q must be a QuantizedArray, got"):
        jax_ep.dequantize_fp8(jnp.ones((4, 128)))
    values, one = np.ones((4, 128), jnp.float8_e4m3fn), np.ones((4, 1), np.float32)
    for scales in (np.ones((4, 3), np.float32), np.ones((2, 4, 1), np.float32), np.ones(4, np.float32)):
        with pytest.raises(ValueError, match="must have values float8_e4m3fn"):
            jax_ep.dequantize_fp8(jax_ep.QuantizedArray(values, scales))
    for parts in ((values, one.astype(jnp.bfloat16)), (values.astype(np.float32), one)):
        with pytest.raises(ValueError, match="must have values float8_e4m3fn"):
            jax_ep.dequantize_fp8(jax_ep.QuantizedArray(*parts))
    with pytest.raises(TypeError, match="must hold two arrays, got ndarray and list"):
        jax_ep.dequantize_fp8(jax_ep.QuantizedArray(values, [1.0]))
    for dtype in (jnp.int32, None):
        with pytest.raises(TypeError, match="dtype must be floating"):
            jax_ep.dequantize_fp8(jax_ep.QuantizedArray(values, one), dtype)


def test_no_gradient_passes_through_fp8():
    x = jnp.ones((4, 128))
    there_and_back = lambda x: jnp.sum(jax_ep.dequantize_fp8(jax_ep.quantize_fp8(x), jnp.float32))
    with pytest.raises(TypeError, match=r"dequantize_fp8 has no gradient.*stop_gradient"):
        jax.grad(there_and_back)(x)
    with pytest.raises(TypeError, match=r"quantize_fp8 has no gradient.*fp8_dequantize"):
        jax.grad(lambda x: jnp.sum(jax_ep.quantize_fp8(x).scales))(x)
    assert not jax.jit(jax.grad(lambda x: there_and_back(jax.lax.stop_gradient(x))))(x).any()


@pytest.mark.parametrize(
    ("shape", "block", "spec"),
    [
        ((8, 256, 256), (128, 128), P(None, "a", "b")),
        ((8, 384), 128, P(None, "b")),  # three scales in a row: not divided by two
        ((512,), 128, P(("a", "b"))),
    ],
)
def test_explicit_sharding(shape, block, spec):
    x = wide_ranging(shape)
    want = quantize(x, block=block)
    with jax.set_mesh(make_mesh((2, 2), ("a", "b"), AxisType.Explicit)):
        q = quantize(jax.device_put(x, spec), block=block)
        back = dequantize(q)
        assert q.values.sharding.is_equivalent_to(back.sharding, len(shape))
    assert back.sharding.spec[: len(spec)] == tuple(spec)
    for got, one in zip((*jax.tree.leaves(q), back), (*jax.tree.leaves(want), dequantize(want)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(one).tobytes()


L, M, F = 3, 256, 128
SIZES = np.array([70, 0, 130], np.int32)
ROWS = 260
for_training = jax.jit(jax_ep.quantize_weights)
forward_only = jax.jit(functools.partial(jax_ep.quantize_weights, gradients=False))


@functools.cache
def experts():
    """Rows, and the up and down projections."""
    rows, up = floats((ROWS, M)), floats((L, M, 2, F), seed=2)
    return tuple(jnp.asarray(array, jnp.bfloat16) for array in (rows, up, floats((L, F, M), seed=3)))


def mlp(rows, up, down, quantize="fp8", **options):
    return jax_ep.gated_mlp(rows, up, down, SIZES, quantize=quantize, **options)


def padded(rows, up, down):
    rows = rows[: L * 80].reshape(L, 80, M)
    return jax_ep.gated_mlp(rows, up, down, np.array([70, 0, 9], np.int32), quantize="fp8")


def scanned(rows, up, down):
    """Two layers, whose weights are stacked."""
    layers = jax.tree.map(lambda array: jnp.stack([array, array[::-1]]), (up, down))
    return jax.lax.scan(lambda rows, w: (mlp(rows, *w), None), rows, layers)[0]


def batched(rows, up, down):
    layers = jax.tree.map(lambda array: jnp.stack([array, array[::-1]]), (up, down))
    return jax.vmap(mlp, (None, 0, 0))(rows, *layers)


USES = {
    "gated_mlp": mlp,
    "all in FP8": functools.partial(mlp, quantize="fp8_all", save="inputs"),
    "grouped_dot": lambda rows, up, down: jax_ep.grouped_dot(rows[:, :F], down, SIZES),
    "FP8 rows": lambda rows, up, down: mlp(jax_ep.quantize_fp8(rows), up, down),
    "padded experts": padded,
    "scan": scanned,
    "vmap": batched,
    "one of them": lambda rows, up, down: mlp(rows, up, experts()[2]),
}


@pytest.mark.parametrize("use", USES)
def test_weights_of_forward_passes_give_the_same_bits(use):
    """Arrays of NumPy too, as a checkpoint may return them."""
    rows, *matrices = experts()
    run = jax.jit(USES[use])
    want = run(rows, *map(for_training, matrices))
    quantized = [forward_only(w) for w in matrices]
    assert same_bits(run(rows, *quantized), want)
    if use in ("gated_mlp", "grouped_dot"):
        assert same_bits(run(rows, *jax.tree.map(np.asarray, quantized)), want)


def test_weights_of_forward_passes_take_a_byte_for_each_element():
    for w in experts()[1:]:
        q = forward_only(w)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(q)) == w.size + w.size // 128**2 * 4
        assert q.shape == for_training(w).shape == w.shape


LOSSES = {
    **{name: USES[name] for name in ("gated_mlp", "all in FP8", "grouped_dot", "scan", "vmap")},
    "checkpoint": jax.checkpoint(mlp),
    "one of them": lambda rows, up, down: mlp(rows, jax_ep.quantize_weights(experts()[1]), down),
}


DOWN_ONLY = ("grouped_dot", "one of them")
CASES = [(use, argument) for use in LOSSES for argument in (0, 1, 2) if argument != 1 or use not in DOWN_ONLY]


@pytest.mark.parametrize(("use", "argument"), CASES)
def test_weights_of_forward_passes_have_no_gradient(use, argument):
    """Neither they nor the matrices that they were made of, nor rows."""
    rows, *matrices = experts()
    name = "grouped_dot" if use == "grouped_dot" else "gated_mlp"

    def loss(*given):
        return jnp.sum(LOSSES[use](*given).astype(jnp.float32))

    def of_matrices(rows, *matrices):
        return loss(rows, *(jax_ep.quantize_weights(w, gradients=False) for w in matrices))

    error = rf"{name}: quantize_weights\(gradients=False\) keeps only what a forward pass reads.*leave "
    for function, given in ((loss, map(forward_only, matrices)), (of_matrices, matrices)):
        with pytest.raises(TypeError, match=error):
            jax.eval_shape(jax.grad(function, argument, allow_int=True), rows, *given)


def test_scales_of_forward_passes_have_no_gradient():
    scales = lambda w: jnp.sum(jax_ep.quantize_weights(w, gradients=False).transposed.scales)
    with pytest.raises(TypeError, match="quantize_weights: with gradients=False the result has no gradient"):
        jax.grad(scales)(experts()[1])


def test_refuses_parts_of_quantized_weights():
    rows, _, w = experts()
    full = jax_ep.quantize_weights(w)
    for made in (
        jax_ep.QuantizedWeights(full.transposed, full.kept),
        jax_ep.QuantizedWeights(full.transposed.values),
        jax_ep.QuantizedWeights(full.w, full.transposed, full.kept),
    ):
        with pytest.raises(TypeError, match="must be a result of quantize_weights"):
            jax_ep.grouped_dot(rows, made, jnp.zeros(full.shape[0], jnp.int32))


def test_weights_of_a_checkpoint_in_fp8():
    """Made of arrays as they lie in a file: [L, N, M], with scales of 128 x 128."""
    rows, *matrices = experts()
    stored = [quantize(w.swapaxes(-1, 1), block=(128, 128)) for w in (matrices[0][:, :, 0], matrices[1])]
    up = jax.tree.map(lambda array: jnp.stack([array, array], 1), stored[0])
    got = jax.jit(mlp)(rows, jax_ep.QuantizedWeights(up), jax_ep.QuantizedWeights(stored[1]))
    gates = jnp.stack([matrices[0][:, :, 0]] * 2, axis=2)
    assert same_bits(got, jax.jit(mlp)(rows, gates, matrices[1]))
    by_column = jax_ep.QuantizedWeights(quantize(matrices[1].swapaxes(1, 2)))
    for run in (mlp, USES["grouped_dot"]):
        with pytest.raises(ValueError, match=r"must have scales of 128 x 128 elements.*got 1 x 128"):
            run(rows, matrices[0], by_column)
