"""The three products of 16-bit rows and of FP8, over shapes and sizes that kernels treat differently.

Against float64, to what the sums in float32 and one rounding allow.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import dequantize, pairwise, quantize
from devices import make_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.one_jax

ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# rows, inner, outer, groups: widths that tiles divide and do not, more groups than a warp has lanes, groups
# of few rows and of many.
SHAPES = [
    (1, 8, 8, 1),
    (40, 16, 32, 4),
    (600, 256, 64, 3),
    (513, 72, 520, 5),
    (700, 136, 392, 40),
    (130, 250, 66, 3),  # widths that are no multiples of 8
]
ON_GPU = jax.default_backend() == "gpu"
if ON_GPU:
    # Long sums of many rows, forward and backward.
    SHAPES += [(1040, 5120, 392, 2), (280, 392, 4096, 2)]


def uneven(groups, rows):
    share = np.exp(np.random.default_rng(1).normal(size=groups))
    return np.floor(share / share.sum() * rows * 3 / 4).astype(int)


def one_each(groups, rows):
    return (np.arange(groups) < rows).astype(int)


KINDS = {
    "uneven": uneven,
    "one row each": one_each,
    "gaps": lambda groups, rows: np.where(np.arange(groups) % 3 == 1, rows // groups, 0),
    "all in the last": lambda groups, rows: np.where(np.arange(groups) == groups - 1, rows, 0),
    "none": lambda groups, rows: np.zeros(groups, int),
}


def problem(shape, kind, dtype):
    """Rows, matrices, a cotangent and sizes; NaN past the groups, which must not matter."""
    rows, inner, outer, groups = shape
    rng = np.random.default_rng(rows + inner)
    arrays = [
        rng.normal(size=s).astype(jnp.dtype(dtype))
        for s in ((rows, inner), (groups, inner, outer), (rows, outer))
    ]
    sizes = KINDS[kind](groups, rows).astype(np.int32)
    arrays[0][sizes.sum() :] = np.nan
    arrays[2][sizes.sum() :] = np.nan
    return *arrays, sizes


def reference(rows, weights, cotangent, sizes):
    """Each product, and what the magnitudes of its terms add up to."""
    rows, weights, cotangent = (a.astype(np.float64) for a in (rows, weights, cotangent))
    products = [np.zeros((*s, 2)) for s in (cotangent.shape, rows.shape, weights.shape)]
    begin = 0
    for group, size in enumerate(sizes):
        part, matrix = slice(begin, begin + size), weights[group]
        pairs = (rows[part], matrix), (cotangent[part], matrix.T), (rows[part].T, cotangent[part])
        for product, where, (a, b) in zip(products, (part, part, group), pairs, strict=True):
            product[where] = np.stack([a @ b, np.abs(a) @ np.abs(b)], axis=-1)
        begin += size
    return products


@functools.partial(jax.jit, static_argnames="num_sms")
def products(rows, weights, cotangent, sizes, num_sms=None):
    product = lambda r, w: jax_ep.grouped_dot(r, w, sizes, num_sms=num_sms)
    value, transposed = jax.vjp(product, rows, weights)
    return value, *transposed(cotangent)


def assert_near(got, want, ulp):
    value, magnitude = want[..., 0], want[..., 1]
    # What the sums and the rounding may be off by; the last is half of float16's smallest number.
    allowed = ulp * np.abs(value) + 1e-5 * magnitude + 2.0**-25
    off = np.abs(np.asarray(got, np.float64) - value)
    assert (off <= allowed).all(), f"{(off > allowed).sum()} of {off.size} are off, by up to {np.nanmax(off)}"


@pytest.mark.parametrize(("dtype", "shape", "kind"), pairwise([*ULP], SHAPES, [*KINDS]), ids=str)
def test_products_of_sixteen_bits(dtype, shape, kind):
    arrays = problem(shape, kind, dtype)
    got = jax.device_get(products(*arrays))
    for one, want in zip(got, reference(*arrays), strict=True):
        assert one.dtype == dtype
        assert_near(one, want, ULP[dtype])
    for one, again in zip(got, jax.device_get(products(*arrays)), strict=True):
        assert one.tobytes() == again.tobytes()


def test_in_a_scan_over_layers():
    """On GPUs XLA replays the body as a CUDA graph, where sizes are known on the device only."""
    layers, rows, groups, width = 6 if ON_GPU else 3, 300, 5, 64
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, width)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(layers, groups, width, width)) / 8, jnp.bfloat16)
    sizes = np.stack([list(KINDS.values())[i % len(KINDS)](groups, rows) for i in range(layers)])
    sizes = jnp.asarray(sizes, jnp.int32)

    def step(x, layer):
        return x + jnp.tanh(jax_ep.grouped_dot(x, *layer)), None

    def scanned(x, weights):
        return jnp.sum(jax.lax.scan(step, x, (weights, sizes))[0].astype(jnp.float32))

    def unrolled(x, weights):
        for layer in zip(weights, sizes, strict=True):
            x, _ = step(x, layer)
        return jnp.sum(x.astype(jnp.float32))

    run = jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))
    first = jax.device_get(run(x, weights))
    for _ in range(5):
        again = jax.device_get(run(x, weights))
        assert all(
            a.tobytes() == b.tobytes()
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
        )
    want = jax.device_get(jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1)))(x, weights))
    # XLA may round to bfloat16 between other operations here than there, in each of the layers.
    for got, one in zip(jax.tree.leaves(first), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(one, np.float32), rtol=0.05, atol=0.1
        )


@pytest.mark.skipif(not ON_GPU, reason="XLA:CPU expands its ragged product")
def test_nothing_is_copied_for_a_product():
    """Of a feed-forward layer's gradient: temporaries are rows that autodiff keeps, and no matrices."""
    rows, width, inner, groups = 128, 256, 1024, 16
    shapes = [(rows, width), (groups, width, inner), (groups, inner, width)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def loss(x, up, down, sizes):
        hidden = jnp.tanh(jax_ep.grouped_dot(x, up, sizes))
        return jnp.sum(jax_ep.grouped_dot(hidden, down, sizes).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, sizes).compile()
    memory = compiled.memory_analysis()
    # The hidden rows, their tanh, the cotangents of both and of the result; five calls' scratch.
    allowed = 4 * rows * inner * 2 + rows * width * 2 + 5 * (129 << 10)
    assert (
        memory.temp_size_in_bytes <= allowed < groups * width * inner * 2 + 2 * rows * inner * 2 + (1 << 20)
    )


@pytest.mark.skipif(ON_GPU, reason="kernels of this package read 16-bit floats as they are")
def test_sixteen_bits_are_not_widened_as_a_whole():
    """XLA:CPU would widen all rows to float32 for slices of them, and copy the result for each tile."""
    rows, width, groups = 4096, 64, 4
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, width), (groups, width, width))]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    compiled = jax.jit(jax_ep.grouped_dot).lower(*arrays, sizes).compile()
    result, tiles = rows * width * 2, 128 * width * (2 + 4) + width * width * 2
    assert compiled.memory_analysis().temp_size_in_bytes < result + 2 * tiles


@pytest.mark.parametrize("num_sms", [2, 7, 10_000])
def test_num_sms(num_sms):
    arrays = problem((600, 256, 64, 3), "uneven", "bfloat16")
    got, want = jax.device_get((products(*arrays, num_sms=num_sms), products(*arrays)))
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("num_sms", "error", "text"),
    [
        (1, ValueError, "grouped_dot: num_sms must be between 2 and 65536 .or None., got 1"),
        (2.5, TypeError, "grouped_dot: num_sms must be an int of at least 2 .or None., got 2.5"),
    ],
)
def test_num_sms_that_cannot_be(num_sms, error, text):
    with pytest.raises(error, match=text):
        jax_ep.grouped_dot(jnp.ones((4, 3)), jnp.ones((2, 3, 6)), jnp.ones(2, jnp.int32), num_sms=num_sms)


@pytest.mark.skipif(not ON_GPU, reason="XLA's own product says nothing of such sizes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [[30, -5, 2**31 - 1], [30, -(2**31), 40]], ids=str)
def test_sizes_that_are_not_those_of_any_rows(dtype, sizes):
    """An array that somebody has tampered with: what is past the rows is cut off, and negative is none."""
    rows, weights, cotangent, _ = problem((40, 16, 8, 3), "none", "bfloat16")
    rng = np.random.default_rng(0)
    rows, weights, cotangent = (rng.normal(size=a.shape).astype(dtype) for a in (rows, weights, cotangent))
    got = jax.device_get(products(rows, weights, cotangent, np.array(sizes, np.int32)))
    want = jax.device_get(products(rows, weights, cotangent, np.array([30, 0, 10], np.int32)))
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()


def quantised(shape, kind):
    rows, weights, _, sizes = problem(shape, kind, "bfloat16")
    rows[sizes.sum() :] = 1  # a NaN makes its row's scale NaN, which is read
    return quantize(rows), quantize(weights, block=(128, 128)), sizes


fp8_product = jax.jit(functools.partial(jax_ep.grouped_dot, num_sms=64))


@jax.jit
def fp8_product_of_transpose(rows, weights, sizes):
    return jax_ep.grouped_dot(rows, jax.tree.map(lambda a: a.swapaxes(1, 2), weights), sizes)


FP8_SHAPES = [(513, 256, 384, 5), pytest.param((700, 128, 256, 40), marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_products_of_fp8(shape, kind):
    rows, weights, sizes = quantised(shape, kind)
    got = jax.device_get(fp8_product(rows, weights, sizes))
    wide = [np.asarray(dequantize(q, dtype=jnp.float32)) for q in (rows, weights)]
    want = reference(*wide, np.zeros((shape[0], shape[2])), sizes)[0]
    assert got.dtype == jnp.bfloat16
    # The tensor cores keep 14 bits of a sum of FP8 products within a block (arXiv:2412.19437, section 3.5.2).
    assert_near(got, want[..., :1] * [1, 0] + want[..., 1:] * [0, 20 if ON_GPU else 1], ULP["bfloat16"])
    kept = jax.tree.map(lambda a: np.asarray(a).swapaxes(1, 2), weights)
    assert np.asarray(fp8_product_of_transpose(rows, kept, sizes)).tobytes() == got.tobytes()


# Each number of rows that the kernel for few rows treats differently.
FEW = np.tile([1, 8, 9, 16, 17, 33, 0, 64, 65, 0, 0, 0, 0, 0, 0], 4).astype(np.int32)


@pytest.mark.parametrize("sizes", [FEW, np.array([2, 0, 1], np.int32)], ids=["many groups", "five rows"])
@pytest.mark.parametrize("dtype", [*ULP, "fp8"])
def test_groups_of_few_rows(dtype, sizes):
    """Two blocks compute many tiles, of sums that end within a stage. More rows take the other kernel."""
    groups, rows = len(sizes), sizes.sum() + 2
    inner, outer = (2176, 256) if dtype == "fp8" else (1344, 136)
    x, w, _, _ = problem((rows, inner, outer, groups), "none", "bfloat16" if dtype == "fp8" else dtype)
    x = np.random.default_rng(2).normal(size=x.shape).astype(x.dtype)
    longer = np.resize(x, (2 * rows + 64, inner))
    product = jax.jit(functools.partial(jax_ep.grouped_dot, num_sms=2))
    if dtype == "fp8":
        w = quantize(w, block=(128, 128))
        got, other = (np.asarray(product(quantize(r), w, sizes)) for r in (x, longer))
        x, w = (np.asarray(dequantize(q, dtype=jnp.float32)) for q in (quantize(x), w))
    else:
        x[sizes.sum() :] = np.nan
        got, other = (np.asarray(product(r, w, sizes)) for r in (x, longer))
    want = reference(x, w, np.zeros((rows, outer)), sizes)[0]
    slack = [1, 20] if dtype == "fp8" and ON_GPU else [1, 1]
    assert_near(got, want * slack, ULP.get(dtype, ULP["bfloat16"]))
    assert got.tobytes() == other[:rows].tobytes()


@pytest.mark.parametrize(
    ("rows", "groups", "inner", "outer"), [(0, 2, 128, 256), (5, 0, 128, 256), (5, 2, 0, 256), (5, 2, 128, 0)]
)
def test_nothing_of_fp8(rows, groups, inner, outer):
    @jax.jit
    def product(left, right):
        weights = jax_ep.quantize_fp8(right, block=(128, 128))
        return jax_ep.grouped_dot(jax_ep.quantize_fp8(left), weights, jnp.zeros(groups, jnp.int32))

    got = product(np.ones((rows, inner), np.float32), np.ones((groups, inner, outer), np.float32))
    np.testing.assert_array_equal(got, np.zeros((rows, outer)))
    assert got.dtype == jnp.bfloat16


def test_fp8_under_explicit_sharding():
    mesh = make_mesh((2, 2), ("a", "b"), AxisType.Explicit)
    rows, weights, sizes = quantised((40, 128, 256, 4), "uneven")
    want = np.asarray(jax.jit(jax_ep.grouped_dot)(rows, weights, sizes))
    with jax.set_mesh(mesh):
        rows = jax.device_put(rows, P("a", None))
        weights = jax.device_put(weights, P(None, None, "b"))
        got = jax.jit(jax_ep.grouped_dot)(rows, weights, sizes)
    assert got.sharding.spec == P("a", "b")
    np.testing.assert_allclose(np.asarray(got, np.float32), want.astype(np.float32), rtol=2.0**-7, atol=1e-3)


def test_a_batch_of_fp8():
    rows, weights, sizes = quantised((40, 128, 128, 4), "uneven")
    twice = jax.tree.map(lambda a: np.stack([a, a]), rows)
    got = jax.jit(jax.vmap(jax_ep.grouped_dot, (0, None, None)))(twice, weights, sizes)
    want = np.asarray(jax.jit(jax_ep.grouped_dot)(rows, weights, sizes))
    assert all(np.asarray(one).tobytes() == want.tobytes() for one in got)


def test_fp8_operands_that_cannot_be():
    rows, weights, sizes = quantised((40, 128, 128, 4), "uneven")
    with pytest.raises(TypeError, match="both be quantized, or neither; got QuantizedArray and"):
        jax_ep.grouped_dot(rows, weights.values, sizes)
    with pytest.raises(ValueError, match="w of 128 x 128, got 1 x 128 and 1 x 128; quantize"):
        jax_ep.grouped_dot(rows, quantize(np.ones((4, 128, 128), np.float32)), sizes)
    with pytest.raises(ValueError, match="1 x 128 elements and w of 128 x 128, got 1 x 64"):
        jax_ep.grouped_dot(quantize(np.ones((40, 128), np.float32), block=64), weights, sizes)
    with pytest.raises(ValueError, match=r"group_sizes must be int32 \[4\], .* got float32\[4\]"):
        jax_ep.grouped_dot(rows, weights, sizes.astype(np.float32))
    with pytest.raises(TypeError, match="FP8 operands have no gradient"):
        jax.grad(
            lambda s: jnp.sum(jax_ep.grouped_dot(jax_ep.QuantizedArray(rows.values, s), weights, sizes))
        )(rows.scales)
