"""grouped_dot and gated_mlp of padded experts [L, C, M]: the bits of the same rows, expert by expert.

Empty rows and their cotangents are NaN, so whoever reads one is found.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TOLERANCE, assert_close, floats, more_on_gpus, quantize, ranks, routing, same_bits
from devices import make_mesh, most_ranks
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._experts import xla_engine

# No multiples of the tiles of rows; an empty expert, and a full one.
SIZES, C = np.array([130, 0, 257, 300, 64], np.int32), 300
L, USED, H, F = len(SIZES), SIZES.sum(), 256, 128
FILLED = np.arange(C) < SIZES[:, None]
IS_GPU = jax.default_backend() == "gpu"
SHARED = pytest.mark.one_jax


def padded(shape, dtype, seed):
    """Returns an array [L, C, ...] that is NaN in empty rows."""
    array = floats((L, C, *shape), dtype, seed)
    array[~FILLED] = np.nan
    return array


def adjacent(array):
    """Returns the filled rows expert by expert, and zeros behind them: as many rows as before."""
    out = np.zeros((L * C, *array.shape[2:]), array.dtype)
    out[:USED] = array[FILLED]
    return out


def assert_rows(got, want, compare=None):
    """Compares padded rows with adjacent ones, bit for bit unless told otherwise. Empty rows are zero."""
    got, want = np.asarray(got), np.asarray(want)
    (compare or assert_same_bits)(got[FILLED], want[:USED])
    assert not got[~FILLED].astype(np.float32).any()


def assert_same_bits(got, want):
    assert same_bits(got, want)


def assert_alike(got, want):
    """Compares arrays, on GPUs bit for bit.

    On CPUs sums over the last rows of an array have another order, and the last elements of a thread's share
    of an activation are computed by other instructions.
    """
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        if IS_GPU:
            assert same_bits(one, other)
        else:
            unit = 4 * TOLERANCE[np.dtype(one.dtype)]
            one, other = (np.asarray(array, np.float64) for array in (one, other))
            assert np.abs(one - other).max() <= unit * np.abs(other).max()


@SHARED
@pytest.mark.parametrize(
    ("dtype", "inner", "outer"),
    more_on_gpus(
        [("float32", 40, 24), ("bfloat16", 256, 384), ("float16", 5, 3)],
        [
            *(("float32", *widths) for widths in ((256, 384), (5, 3))),
            *(("bfloat16", *widths) for widths in ((40, 24), (5, 3))),
            *(("float16", *widths) for widths in ((256, 384), (40, 24))),
        ],
    ),
)
def test_products_and_gradients(dtype, inner, outer):
    rows, w = padded((inner,), jnp.dtype(dtype), 1), floats((L, inner, outer), jnp.dtype(dtype), 2)
    cotangent = padded((outer,), jnp.dtype(dtype), 3)

    @jax.jit
    def run(rows, w, sizes, cotangent):
        value, transposed = jax.vjp(lambda rows, w: jax_ep.grouped_dot(rows, w, sizes), rows, w)
        return value, *transposed(cotangent)

    with jax.default_matmul_precision("highest"):
        value, d_rows, d_w = jax.device_get(run(rows, w, SIZES, cotangent))
        want = run(adjacent(rows), w, SIZES, adjacent(cotangent))
        # Of sizes that are out of range, as many rows count as there are.
        wild = run(rows, w, np.where(SIZES == 0, -7, np.where(SIZES == C, 2**31 - 1, SIZES)), cotangent)
    assert (value.shape, d_rows.shape) == ((L, C, outer), rows.shape)
    assert_rows(value, want[0])
    assert_rows(d_rows, want[1])
    assert_alike(d_w, want[2])
    for one, other in zip(wild, (value, d_rows, d_w), strict=True):
        assert same_bits(one, other)
    for expert, size in enumerate(SIZES):
        left, right = (array[expert, :size].astype(np.float64) for array in (rows, cotangent))
        assert_close(value[expert, :size], left @ w[expert].astype(np.float64), terms=inner)
        assert_close(d_w[expert], left.T @ right, terms=max(size, 1))


@SHARED
@pytest.mark.parametrize("experts", [1, 40])
def test_numbers_of_experts(experts):
    """One, and more than a warp has threads."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 33, experts, np.int32)
    rows = floats((experts, 32, 64), jnp.bfloat16)
    filled = np.arange(32) < sizes[:, None]
    rows[~filled] = np.nan
    w = floats((experts, 64, 64), jnp.bfloat16, seed=2)
    run = jax.jit(jax_ep.grouped_dot)
    got = np.asarray(run(rows, w, sizes))
    flat = np.zeros((experts * 32, 64), jnp.bfloat16)
    flat[: sizes.sum()] = rows[filled]
    assert same_bits(got[filled], np.asarray(run(flat, w, sizes))[: sizes.sum()])
    assert not got[~filled].astype(np.float32).any()


def no_rows(rows, w, sizes):
    out, transposed = jax.vjp(lambda rows, w: jax_ep.grouped_dot(rows, w, sizes), rows, w)
    return out, *transposed(jnp.ones_like(out))


@pytest.mark.one_jax
@pytest.mark.parametrize("shape", [(3, 0, 8), (3, 4, 0), (0, 4, 8)], ids=str)
def test_no_rows_and_no_width(shape):
    experts, capacity, width = shape
    w, sizes = jnp.ones((experts, width, 16)), jnp.full(experts, capacity, jnp.int32)
    value, d_rows, d_w = jax.jit(no_rows)(jnp.ones(shape), w, sizes)
    np.testing.assert_array_equal(value, np.zeros((experts, capacity, 16)))
    np.testing.assert_array_equal(d_rows, np.zeros(shape) + (16 if 0 not in shape else 0))
    np.testing.assert_array_equal(d_w, np.zeros(w.shape))


@SHARED
def test_products_of_fp8():
    """Rows in FP8, with matrices in FP8 and with quantize_weights. What empty rows hold is not read."""
    rows, w = padded((H,), jnp.bfloat16, 1), jnp.asarray(floats((L, H, F), jnp.bfloat16, 2))
    q, flat = quantize(rows), quantize(adjacent(rows))
    matrices = quantize(w, block=(128, 128))
    ready = jax.jit(jax_ep.quantize_weights)(w)
    run = jax.jit(jax_ep.grouped_dot)
    for given in (matrices, ready):
        got = run(q, given, SIZES)
        assert got.shape == (L, C, F)
        assert_rows(got, run(flat, given, SIZES))

    @jax.jit
    def with_gradients(rows, carrier, w, cotangent):
        def product(carrier, w):
            given = jax_ep.QuantizedArray(rows.values, rows.scales, carrier)
            return jax_ep.grouped_dot(given, jax_ep.quantize_weights(w), SIZES)

        return jax.vjp(product, carrier, w)[1](cotangent)

    cotangent = padded((F,), jnp.bfloat16, 3)
    d_rows, d_w = with_gradients(q, jnp.zeros_like(rows), w, cotangent)
    want = with_gradients(flat, jnp.zeros((L * C, H), jnp.bfloat16), w, adjacent(cotangent))
    assert_rows(d_rows, want[0])
    assert_alike(d_w, want[1])


OPTIONS = {
    "float32": {},
    "bfloat16": {"activation": "gelu"},
    "inputs": {"save": "inputs"},
    "a function": {"activation": lambda gate, up: jnp.tanh(gate) * up},
    "fp8": {"quantize": "fp8"},
    "fp8, inputs": {"quantize": "fp8", "save": "inputs"},
    "fp8_all": {"quantize": "fp8_all"},
    "fp8_all, inputs": {"quantize": "fp8_all", "save": "inputs", "round_scale": True},
}


def gated_case(name, extra):
    """Returns rows [L, C, H], the other differentiable arguments, and the options."""
    dtype = jnp.dtype("float32" if name == "float32" else "bfloat16")
    up, down = floats((L, H, 2, F), seed=2) / H**0.5, floats((L, F, H), seed=3) / F**0.5
    arguments = {"rows": padded((H,), dtype, 1), "w_up": up.astype(dtype), "w_down": down.astype(dtype)}
    if extra == "redundant":
        for key in ("w_up", "w_down"):
            arguments[key] = jax_ep.PhysicalWeights(arguments[key][:3], arguments[key][3:])
    if extra == "biases":
        biases = floats((L, 2, F), seed=4), floats((L, H), seed=5)
        arguments |= {"b_up": biases[0].astype(dtype), "b_down": biases[1].astype(dtype)}
    if extra in ("weights", "biases"):
        arguments["row_weights"] = padded((), np.float32, 6)
    return arguments, OPTIONS[name]


@SHARED
@pytest.mark.parametrize(
    ("name", "extra"),
    more_on_gpus(
        [
            ("float32", "biases"),
            ("bfloat16", "redundant"),
            ("a function", None),
            pytest.param("fp8", "quantized", marks=pytest.mark.slow),
            pytest.param("fp8_all", "biases", marks=pytest.mark.slow),
            pytest.param("fp8_all, inputs", "redundant", marks=pytest.mark.slow),
        ],
        [
            *((name, None) for name in OPTIONS if name != "a function"),
            *((name, "weights") for name in ("float32", "fp8_all")),
            ("fp8", "redundant"),
            ("fp8_all", "quantized"),
        ],
    ),
)
def test_gated_experts(name, extra):
    arguments, options = gated_case(name, extra)
    cotangent = padded((H,), arguments["rows"].dtype, 9)

    @jax.jit
    def run(arguments, cotangent):
        def experts(given):
            if extra == "quantized":
                given = given | {key: jax_ep.quantize_weights(given[key]) for key in ("w_up", "w_down")}
            return jax_ep.gated_mlp(**given, group_sizes=SIZES, **options)

        value, transposed = jax.vjp(experts, arguments)
        return value, transposed(cotangent)[0]

    flat = {key: adjacent(a) if key in ("rows", "row_weights") else a for key, a in arguments.items()}
    with jax.default_matmul_precision("highest"):
        value, gradients = run(arguments, cotangent)
        want, wanted = run(flat, adjacent(cotangent))
    assert value.shape == (L, C, H)
    assert_rows(value, want, assert_alike)
    for key in ("rows", "row_weights"):
        if key in wanted:
            assert_rows(gradients.pop(key), wanted.pop(key), assert_alike)
    assert_alike(gradients, wanted)


@SHARED
@pytest.mark.slow
@pytest.mark.parametrize(
    ("products", "quantize_rows"), more_on_gpus([("fp8_all", "fp8")], [(None, None), ("fp8_all", None)])
)
def test_a_layer_equals_that_of_expert_order(products, quantize_rows):
    """From dispatch to combine, with gradients, on rows and on FP8 rows with a carrier.

    test_dispatch_padded.py has a layer whose rows and products are not in FP8.
    """
    R = min(most_ranks(), 4)
    on, experts, tokens, k = ranks(R), 2 * R, 24, 2
    x, weights = floats((R * tokens, H), jnp.bfloat16), floats((R * tokens, k), seed=7)
    ids = routing("uniform", R, tokens, k, experts).reshape(-1, k)
    up = (floats((experts, H, 2, F), seed=2) / H**0.5).astype(jnp.bfloat16)
    down = (floats((experts, F, H), seed=3) / F**0.5).astype(jnp.bfloat16)

    def layer(order, x, ids, weights, up, down):
        to = {"group": on.group, "num_experts": experts, "order": order, "quantize": quantize_rows}
        sent = jax_ep.dispatch(x, ids, weights, **to)
        options = {"row_weights": sent.row_weights, "quantize": products}
        y = jax_ep.gated_mlp(sent.x, up, down, sent.group_sizes, **options)
        return jax_ep.combine(y, sent.handle, row_weights=None)

    def with_gradients(order):
        def loss(x, weights, up, down):
            out = on.map(functools.partial(layer, order))(x, ids, weights, up, down)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(x, weights, up, down)

    (gradients, value), (wanted, want) = map(with_gradients, ("expert_padded", "expert"))
    assert_alike((value, gradients), (want, wanted))


def test_vmap():
    rows, w = floats((2, L, 20, 8)), floats((L, 8, 16), seed=2)
    sizes = np.array([[3, 0, 20, 7, 9], [0, 20, 1, 2, 3]], np.int32)
    got = jax.jit(jax.vmap(jax_ep.grouped_dot, (0, None, 0)))(rows, w, sizes)
    run = jax.jit(jax_ep.grouped_dot)
    assert same_bits(got, np.stack([run(rows[0], w, sizes[0]), run(rows[1], w, sizes[1])]))


@pytest.mark.parametrize(
    "sharded",
    [
        *(pytest.param(axes, marks=pytest.mark.one_jax) for axes in ((None, None), ("a", None), (None, "a"))),
        ("a", "b"),
    ],
    ids=str,
)
def test_explicit_sharding(sharded):
    """The result is sharded as the first two dimensions of rows and the last one of matrices."""
    mesh = make_mesh((2, 2), ("a", "b"), AxisType.Explicit)
    rows, w, sizes = floats((4, 20, 8)), floats((4, 8, 16), seed=2), np.array([3, 0, 20, 7], np.int32)

    def run(rows, w):
        value, transposed = jax.vjp(lambda rows, w: jax_ep.grouped_dot(rows, w, sizes), rows, w)
        return value, *transposed(jnp.tanh(value))

    want = jax.jit(run)(rows, w)
    with jax.set_mesh(mesh):
        given = jax.device_put(rows, P(*sharded)), jax.device_put(w, P(None, None, "b"))
        got = jax.jit(run)(*given)
    assert got[0].sharding.spec == P(*sharded, None if "b" in sharded else "b")
    assert got[1].sharding.is_equivalent_to(given[0].sharding, 3)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


def test_a_scan_stores_rows_of_two_products_once():
    sizes = np.array([3, 0, 9], np.int32)

    def layer(rows, w):
        rows = jnp.tanh(rows)
        return jax_ep.grouped_dot(rows, w, sizes) + jax_ep.grouped_dot(rows, 2 * w, sizes), None

    def stored(rows):
        run = lambda rows, w: jnp.sum(jax.lax.scan(layer, rows, w)[0])
        jaxpr = jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(rows, jnp.ones((4, 3, 8, 8)))
        forward = next(one for one in jaxpr.eqns if one.primitive.name == "scan")
        return sum(output.aval.size for output in forward.outvars)

    assert stored(jnp.ones((3, 20, 8))) == stored(jnp.ones((60, 8)))


def test_products_of_tpus(monkeypatch):
    """There all rows are multiplied, and empty ones cleared. XLA's ops of TPUs run on CPUs, too."""
    rows, w = padded((40,), np.float32, 1), floats((L, 40, 24), seed=2)
    cotangent = padded((24,), np.float32, 3)

    def run(rows, w):
        product = lambda rows, w: jax_ep.grouped_dot(rows, w, SIZES, implementation="xla")
        value, transposed = jax.vjp(product, rows, w)
        return value, *transposed(cotangent)

    with jax.default_matmul_precision("highest"):
        want = jax.jit(run)(rows, w)
        monkeypatch.setattr(xla_engine, "current_platform", lambda: "tpu")
        got = jax.jit(lambda *given: run(*given))(rows, w)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rows": (4, 6, 8)}, r"matrix for each of the 4 experts of rows \[4, 6, 8\], got 3"),
        ({"rows": (3, 6, 7)}, r"got 7 in rows float32\[3, 6, 7\] and 8 in w"),
        ({"rows": (1, 3, 6, 8)}, r"or three of padded experts \[L, C, M\], got float32\[1, 3, 6, 8\]"),
        ({"group_sizes": [1, 2]}, "a matrix for each of the 2 experts of this rank, got 3"),
        ({"group_sizes": [1, 7, 0]}, r"of which there are 6 for each expert, got \[1, 7, 0\]"),
        ({"group_sizes": [1, -1, 0]}, r"of which there are 6 for each expert, got \[1, -1, 0\]"),
        ({"group_offset": 0}, r"group_offset needs rows \[C, M\], got rows of padded experts \[3, 6, 8\]"),
    ],
    ids=str,
)
def test_grouped_dot_rejects(changed, text):
    given = {"rows": (3, 6, 8), "group_sizes": [1, 2, 3]} | changed
    rows, sizes = jnp.ones(given.pop("rows")), jnp.array(given.pop("group_sizes"), jnp.int32)
    with pytest.raises(ValueError, match=f"grouped_dot: .*{text}"):
        jax_ep.grouped_dot(rows, jnp.ones((3, 8, 4)), sizes, **given)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rows": (4, 6, 8)}, r"matrix for each of the 4 experts of rows \[4, 6, 8\], got 3"),
        ({"rows": (1, 3, 6, 8)}, r"\[L, C, H\] of padded experts, .* got \[1, 3, 6, 8\]"),
        ({"row_weights": (18,)}, r"row_weights must be \[3, 6\] with rows \[3, 6, 8\] .*, got \[18\]"),
    ],
    ids=str,
)
def test_gated_mlp_rejects(changed, text):
    shapes = {"rows": (3, 6, 8), "w_up": (3, 8, 2, 4), "w_down": (3, 4, 8)} | changed
    arrays = {name: jnp.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"gated_mlp: .*{text}"):
        jax_ep.gated_mlp(**arrays, group_sizes=jnp.ones(3, jnp.int32))
