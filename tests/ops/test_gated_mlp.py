"""gated_mlp against a float32 reference, and its passes and products in FP8 against XLA's ops."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import dequantize, floats, more_on_gpus, quantize, same_bits
from devices import make_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._experts.activations import OF_KERNELS, Gated
from jax_ep._experts.choice import choose_engine
from jax_ep._experts.engine import Factors, Options, Product
from jax_ep._experts.products import fp8_weight_gradient
from jax_ep._rows.fp8 import COTANGENT_FLOOR, quantize_blocks

C, H, F = 700, 256, 128
SIZES = np.array([130, 0, 257, 100, 64], np.int32)
L, USED = len(SIZES), SIZES.sum()
ONLY_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="same program as others on CPUs")


@functools.cache
def arrays(dtype):
    """Rows, w_up [L, H, 2, F], w_down, both biases and row weights; NaN past the groups."""
    rows = floats((C, H), dtype)
    rows[USED:] = np.nan
    up, down = floats((L, H, 2, F), seed=2) / H**0.5, floats((L, F, H), seed=3) / F**0.5
    biases = floats((L, 2, F), seed=4) / 4, floats((L, H), seed=5) / 4
    dtype = jnp.dtype(dtype)
    return *(jnp.asarray(a.astype(dtype)) for a in (rows, up, down, *biases)), floats((C,), seed=6)


def reference(activation, rows, up, down, b_up, b_down, row_weights):
    """In float32, of the used rows."""
    rows, up, down, b_up, b_down = (a.astype(jnp.float32) for a in (rows, up, down, b_up, b_down))
    is_row = np.arange(SIZES.max()) < SIZES[:, None]
    of_expert = np.zeros(is_row.shape, np.int32)
    of_expert[is_row] = np.arange(USED)
    z = jnp.einsum("lch,lhif->ilcf", rows[of_expert], up) + b_up.swapaxes(0, 1)[:, :, None]
    out = jnp.einsum("lcf,lfh->lch", activation(*z), down) + b_down[:, None]
    return out[is_row] * row_weights[:USED, None]


def by_op(rows, up, down, b_up, b_down, row_weights, **options):
    extra = {"b_up": b_up, "b_down": b_down, "row_weights": row_weights}
    return jax_ep.gated_mlp(rows, up, down, SIZES, **extra, **options)


def with_gradients(function, given, *cotangents):
    """Returns the result and the gradients for a cotangent, or a list of those for several."""

    def loss(cotangent, *given):
        out = function(*given)
        return jnp.sum(out[:USED].astype(jnp.float32) * cotangent), out

    run = jax.jit(jax.grad(loss, argnums=tuple(range(1, 1 + len(given))), has_aux=True))
    with jax.default_matmul_precision("highest"):
        found = [run(cotangent, *given) for cotangent in cotangents]
    found = [jax.device_get((out, *gradients)) for gradients, out in found]
    return found if len(found) > 1 else found[0]


def assert_near(got, want, tolerance):
    """Within a share of the norm, array by array."""
    for one, other in zip(got, want, strict=True):
        one, other = (np.asarray(a, np.float64) for a in (one, other))
        one = one[:USED] if one.shape[0] == C else one
        other = other[:USED] if other.shape[0] == C else other
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


def clipped(gate, up):
    gate = jnp.where(gate > 7, 7, gate)
    up = jnp.where(up > 7, 7, jnp.where(up < -7, -7, up))
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate) * up,
    "clipped": clipped,
}


@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        # with_gradients sets the precision "highest"
        pytest.param(jnp.float32, {}, 1e-5, marks=pytest.mark.one_jax),
        pytest.param(jnp.float32, {"precision": "high"}, 5e-3, marks=ONLY_GPU),  # tf32
        pytest.param(jnp.bfloat16, {"save": "inputs", "activation": "gelu"}, 0.01, marks=pytest.mark.one_jax),
        pytest.param(jnp.bfloat16, {"quantize": "fp8"}, 0.08, marks=pytest.mark.one_jax),
        pytest.param(
            jnp.bfloat16,
            {"quantize": "fp8_all", "activation": "clipped", "round_scale": True},
            0.08,
            marks=pytest.mark.one_jax,
        ),
    ],
    ids=str,
)
def test_values_and_gradients(dtype, options, tolerance):
    cotangent = floats((USED, H), seed=9)
    got = with_gradients(functools.partial(by_op, **options), arrays(dtype), cotangent)
    activation = ACTIVATIONS[options.get("activation", "silu")]
    want = with_gradients(functools.partial(reference, activation), arrays(dtype), cotangent)
    assert_near(got, want, tolerance)
    assert not got[0][USED:].any()
    assert not got[1][USED:].any()


@pytest.mark.one_jax
def test_a_function_as_activation_and_gradients_of_gradients():
    rows, up, down, *_ = arrays(jnp.float32)
    rows = rows.at[USED:].set(0)

    def curvature(activation):
        run = lambda rows, up: jnp.sum(jax_ep.gated_mlp(rows, up, down, SIZES, activation=activation) ** 2)
        first = jax.grad(run, argnums=1)
        return jax.jit(jax.grad(lambda rows: jnp.sum(first(rows, up) ** 2)))(rows)

    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(curvature("silu"), curvature(ACTIVATIONS["silu"]))


@pytest.mark.parametrize("save", ["preactivation", "inputs"])
@pytest.mark.parametrize("quantize", [None, "fp8", "fp8_all"])
def test_what_is_saved(save, quantize):
    """Weights and rows, and the preactivation. With FP8 alone, the rows are transposed, in whole tiles."""
    rows, up, down, *_ = arrays(jnp.bfloat16)
    run = lambda rows, up, down: jax_ep.gated_mlp(rows, up, down, SIZES, save=save, quantize=quantize)
    saved = jax.eval_shape(lambda *given: jax.vjp(run, *given)[1], rows, up, down)
    shapes = sorted(a.shape for a in jax.tree.leaves(saved) if a.ndim > 1)
    tiles = C // 128 + L
    kept = {"inputs": [(C, H)], "preactivation": [(C, H), (C, 2 * F)]}[save]
    if quantize == "fp8_all" and save == "preactivation":
        kept = [(C, 2 * F), (H, tiles * 128), (tiles, H)]
    assert shapes == sorted([*kept, up.shape, down.shape])


@pytest.mark.slow
@pytest.mark.one_jax
def test_ways_to_save_and_quantized_weights_give_the_same_bits():
    """And small cotangents are not lost: a power of two in the loss is one in the gradients, bit for bit."""
    given = arrays(jnp.bfloat16)
    cotangent = floats((USED, H), seed=9)

    def ready(rows, up, down, *others, **options):
        return by_op(rows, jax_ep.quantize_weights(up), jax_ep.quantize_weights(down), *others, **options)

    run = functools.partial(by_op, quantize="fp8_all")
    want, small = with_gradients(run, given, cotangent, cotangent * 2.0**-40)
    for one, other in zip(small[1:4], want[1:4], strict=True):
        np.testing.assert_array_equal(one.astype(np.float32), other.astype(np.float32) * 2.0**-40)
    got = with_gradients(functools.partial(ready, quantize="fp8_all", save="inputs"), given, cotangent)
    assert all(
        same_bits(a[:USED] if a.shape[0] == C else a, b[:USED] if b.shape[0] == C else b)
        for a, b in zip(got, want, strict=True)
    )


@ONLY_GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_activations_in_fp8_agree_with_functions(activation):
    rows, up, down, *_ = arrays(jnp.bfloat16)
    up = 4 * up  # some gates past the limit

    def run(activation, *given):
        return jax_ep.gated_mlp(*given, SIZES, quantize="fp8_all", activation=activation)

    cotangent = floats((USED, H), seed=9)
    got, want = (
        with_gradients(functools.partial(run, one), (rows, up, down), cotangent)
        for one in (activation, ACTIVATIONS[activation])
    )
    assert_near(got, want, 5e-3)


@ONLY_GPU
@pytest.mark.parametrize("rows_per_group", [0, 41])
@pytest.mark.parametrize("activation", OF_KERNELS)
def test_fused_activations_of_many_rows_are_those_of_few(activation, rows_per_group):
    sizes = np.random.default_rng(0).integers(0, 42, 100, np.int32)
    z = jnp.asarray(8 * floats((41 * len(sizes), 2 * F)), jnp.bfloat16)

    def convert(z, sizes, rows_per_group=0):
        engine = choose_engine(None, Options(rows_per_group=rows_per_group))
        return jax.device_get(jax.jit(engine.activate_fp8)(Gated(z, None, sizes, activation)))

    few = [convert(part, np.array([len(part)], np.int32)) for part in jnp.split(z, 10)]
    is_row = np.arange(41) < sizes[:, None] if rows_per_group else np.arange(len(z)) < sizes.sum()
    is_row = is_row.ravel()
    got = convert(z, sizes, rows_per_group)
    assert same_bits(got.values[is_row], np.concatenate([q.values for q in few])[is_row])
    assert same_bits(got.scales[is_row], np.concatenate([q.scales for q in few])[is_row])


@pytest.mark.one_jax
@pytest.mark.parametrize(("dtype", "round_scale"), [(jnp.bfloat16, True), (jnp.float32, False)])
def test_passes_give_the_bits_of_quantize_fp8(dtype, round_scale):
    engine = choose_engine(None, Options(round_scale=round_scale))
    rows, up, *_ = map(np.array, arrays(dtype))
    rows[3, 7], rows[131, 200] = np.inf, 1e-30
    first = rows[:USED]
    run = lambda function, *given, **options: jax.device_get(jax.jit(function, **options)(*given))
    both = run(engine.quantize_both, rows, SIZES, 1e-30, static_argnums=2)
    columns = [run(engine.quantize_columns, x, SIZES) for x in (rows, quantize(rows))]
    wide = [first.astype(np.float32), np.asarray(dequantize(quantize(first), dtype=jnp.float32))]
    floors = [COTANGENT_FLOOR, 1e-4, 1e-4]
    in_blocks = functools.partial(run, quantize_blocks, static_argnums=(1, 2, 3))
    want = in_blocks(first, (1, 128), round_scale, COTANGENT_FLOOR)
    assert same_bits(both[0].values[:USED], want.values)
    assert same_bits(both[0].scales[:USED], want.scales)
    alone = run(engine.quantize_rows, rows, SIZES)
    want = in_blocks(first, (1, 128), round_scale, 1e-4)
    assert same_bits(alone.values[:USED], want.values)
    assert same_bits(alone.scales[:USED], want.scales)
    ends = np.cumsum(SIZES)
    tiles = -(-SIZES // 128)
    for (values, scales), x, floor in zip([both[1], *columns], [wide[0], *wide], floors, strict=True):
        groups = np.split(x, ends[:-1])
        padded = [np.pad(g, ((0, n * 128 - len(g)), (0, 0))) for g, n in zip(groups, tiles, strict=True)]
        q = in_blocks(np.concatenate(padded), (128, 1), round_scale, floor)
        assert same_bits(values[:, : tiles.sum() * 128], q.values.T)
        assert same_bits(scales[: tiles.sum()], q.scales)
    up = up.reshape(L, H, 2 * F)
    w, forward = (
        run(functools.partial(jax_ep.quantize_weights, round_scale=round_scale, gradients=gradients), up)
        for gradients in (True, False)
    )
    q = jax.device_get(quantize(up, block=(128, 128), round_scale=round_scale))
    for got, want in (
        (w.kept.values, q.values),
        (w.kept.scales, q.scales),
        (w.transposed.values, q.values.swapaxes(1, 2)),
        (w.transposed.scales, q.scales.swapaxes(1, 2)),
        (forward.transposed.values, w.transposed.values),
        (forward.transposed.scales, w.transposed.scales),
    ):
        assert same_bits(got, want)


widened = jax.jit(lambda columns: columns.dequantized())


@pytest.mark.one_jax
@pytest.mark.parametrize("sizes", [SIZES, [0, 0, 0], [1, 128, 127, 129, 0, 300]], ids=str)
def test_weight_gradients_of_fp8(sizes):
    """Against the float64 product of the same FP8 numbers."""
    sizes = np.asarray(sizes, np.int32)
    left, right = floats((C, H), jnp.bfloat16), floats((C, 384), jnp.bfloat16, seed=2)
    engines = [choose_engine(None, Options(num_sms=num_sms)) for num_sms in more_on_gpus([0], [64])]
    convert = jax.jit(engines[0].quantize_columns)
    columns = [convert(jnp.asarray(x), sizes) for x in (left, right)]
    factors = Factors(*columns, jnp.asarray(sizes), kind=Product.WEIGHTS)
    multiply = jax.jit(fp8_weight_gradient, static_argnums=0)
    got, *others = (np.asarray(multiply(engine, factors), np.float64) for engine in engines)
    assert all(same_bits(got, again) for again in others)
    wide = [np.asarray(widened(one), np.float64) for one in columns]
    ends = np.cumsum(-(-sizes // 128) * 128)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        part = slice(end - -(-size // 128) * 128, end)
        want, terms = wide[0][part].T @ wide[1][part], np.abs(wide[0][part]).T @ np.abs(wide[1][part])
        # The tensor cores keep 14 bits of a sum of FP8 products within a block.
        bound = 2.0**-8 * np.abs(want) + (2.0**-12 if jax.default_backend() == "gpu" else 2.0**-20) * terms
        assert (np.abs(got[group] - want) <= bound + 1e-6).all()


@pytest.mark.one_jax
@pytest.mark.parametrize("quantized", [False, True], ids=["bfloat16 rows", "FP8 rows"])
def test_grouped_dot_of_quantized_weights(quantized):
    """Values and gradients of a single product."""
    rows, up, *_ = arrays(jnp.bfloat16)
    up = up.reshape(L, H, 2 * F)

    def by_op(rows, up):
        w = jax_ep.quantize_weights(up)
        if quantized:
            q = jax_ep.quantize_fp8(jax.lax.stop_gradient(rows))
            rows = jax_ep.QuantizedArray(q.values, q.scales, rows)
        return jax_ep.grouped_dot(rows, w, SIZES)

    cotangent = floats((USED, 2 * F), seed=9)
    got = with_gradients(by_op, (rows, up), cotangent)
    want = with_gradients(lambda rows, up: jax_ep.grouped_dot(rows, up, SIZES), (rows, up), cotangent)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 3
    assert_near(got, want, 0.05)


def test_saving_inputs_takes_less_memory():
    """In a stack of layers, whose preactivations [C, 2F] are not kept. XLA needs other memory, too."""
    layers = 12
    rows, up, down = (jnp.nan_to_num(a) for a in arrays(jnp.bfloat16)[:3])

    def temporaries(save):
        def loss(rows, up, down):
            layer = lambda rows, _: (rows + jax_ep.gated_mlp(rows, up, down, SIZES, save=save), None)
            return jnp.sum(jax.lax.scan(layer, rows, length=layers)[0].astype(jnp.float32))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(rows, up, down).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    saved = temporaries("preactivation") - temporaries("inputs")
    assert saved >= layers * C * 2 * F * 2 / 2


def test_a_policy_may_keep_fp8():
    """JAX would turn the largest numbers of float8 arrays that a policy keeps into NaN."""
    rows, up, down, *_ = arrays(jnp.bfloat16)
    up = up.reshape(L, H, 2 * F)
    carrier = jnp.nan_to_num(rows)
    q = quantize(carrier)

    def layer(carrier, up, down):
        rows = jax_ep.QuantizedArray(q.values, q.scales, carrier)
        ready = jax_ep.quantize_weights(up), jax_ep.quantize_weights(down)
        return jax_ep.gated_mlp(rows, *ready, SIZES, quantize="fp8_all")

    cotangent = floats((USED, H), seed=9)
    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)
    got, want = (with_gradients(one, (carrier, up, down), cotangent) for one in (kept, layer))
    assert_near(got, want, 1e-3)


@pytest.mark.one_jax
def test_packed_gate_and_up_give_the_same_bits():
    """No layout needs a copy of the matrices."""
    rows, up, down, b_up, *_ = arrays(jnp.float32)
    run = lambda up, b_up: jax_ep.gated_mlp(rows, up, down, SIZES, b_up=b_up)
    given = [(up, b_up), (up.reshape(L, H, 2 * F), b_up.reshape(L, 2 * F))]
    split, packed = programs = [jax.jit(run).lower(*arguments).compile() for arguments in given]
    assert same_bits(split(*given[0]), packed(*given[1]))
    memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert abs(memory[0] - memory[1]) < up.nbytes / 10  # a copy of the biases
    for arguments in given:
        gradients = jax.eval_shape(lambda *given: jax.vjp(run, *given)[1](rows), *arguments)
        assert [d.shape for d in gradients] == [a.shape for a in arguments]


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_no_second_derivative_in_fp8(quantize):
    rows, up, down, *_ = arrays(jnp.bfloat16)
    q = jax_ep.quantize_weights
    functions = {
        "rows": lambda rows, up: jax_ep.gated_mlp(rows, up, down, SIZES, quantize=quantize),
        "weights": lambda rows, up: jax_ep.gated_mlp(
            rows, q(up) if quantize else up, down, SIZES, quantize=quantize
        ),
        "a product": lambda rows, up: jax_ep.grouped_dot(
            rows, q(up[:, :, 0]) if quantize else up[:, :, 0], SIZES
        ),
    }
    for name, function in functions.items():
        loss = lambda rows, up, function=function: jnp.sum(function(rows, up).astype(jnp.float32) ** 2)
        argument = int(name != "rows")
        first = jax.grad(loss, argument)
        second = jax.grad(lambda *given, first=first: jnp.sum(first(*given).astype(jnp.float32)), argument)
        if quantize is None:
            jax.eval_shape(second, rows, up)
        else:
            with pytest.raises(
                TypeError, match="second derivative, because the first one is computed in FP8"
            ):
                jax.eval_shape(second, rows, up)


def test_explicit_axes_may_shard_the_inner_width():
    mesh = make_mesh((2,), ("x",), AxisType.Explicit)
    rows, up, down, *_ = arrays(jnp.float32)
    given = rows.at[USED:].set(0), up, down
    run = lambda rows, up, down: jnp.sum(jax_ep.gated_mlp(rows, up, down, SIZES) ** 2)
    want = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(*given)
    specs = P(None, None), P(None, None, None, "x"), P(None, "x", None)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, spec) for a, spec in zip(given, specs, strict=True)]
        got = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(*placed)
        ready = jax.jit(jax_ep.quantize_weights)(placed[1])
    for one, other, spec in zip(got, want, specs, strict=True):
        assert one.sharding.spec == spec
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    alone = jax.jit(jax_ep.quantize_weights)(up)
    for one, other in zip(jax.tree.leaves(ready), jax.tree.leaves(alone), strict=True):
        assert same_bits(one, other)


@pytest.mark.one_jax
def test_rows_and_weights_under_explicit_sharding():
    mesh = make_mesh((2,), ("x",), AxisType.Explicit)
    rows, up, down, *_ = arrays(jnp.float32)
    run = lambda rows, up, down: jnp.sum(jax_ep.gated_mlp(rows, up, down, SIZES))
    want = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(rows.at[USED:].set(0), up, down)
    with jax.set_mesh(mesh):
        given = (
            jax.device_put(rows.at[USED:].set(0), P("x", None)),
            jax.device_put(up, P(None, "x")),
            jax.device_put(down, P()),
        )
        got = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(*given)
    for one, other, array in zip(got, want, given, strict=True):
        assert one.sharding.is_equivalent_to(array.sharding, one.ndim)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_fp8_rows_without_a_carrier_have_no_gradient():
    rows, up, down, *_ = arrays(jnp.bfloat16)
    run = lambda rows: jnp.sum(jax_ep.gated_mlp(jax_ep.quantize_fp8(rows), up, down, SIZES, quantize="fp8"))
    with pytest.raises(TypeError, match="gated_mlp: FP8 rows without a carrier have no gradient"):
        jax.eval_shape(jax.grad(run), rows)


@pytest.mark.slow
@pytest.mark.one_jax
def test_micro_batches_share_quantized_weights():
    rows, up, down, *_ = arrays(jnp.bfloat16)
    batches = np.nan_to_num(np.stack([rows, rows[::-1]]))
    batches[:, USED:] = 0
    run = functools.partial(jax_ep.gated_mlp, group_sizes=SIZES, quantize="fp8")

    def shared(up, down):
        ready = jax_ep.quantize_weights(up), jax_ep.quantize_weights(down)
        step = lambda total, rows: (total + jnp.sum(run(rows, *ready).astype(jnp.float32)), None)
        return jax.lax.scan(step, 0.0, batches)[0]

    got = jax.jit(jax.grad(shared, argnums=(0, 1)))(up, down)
    alone = jax.jit(jax.grad(lambda up, down, rows: jnp.sum(run(rows, up, down).astype(jnp.float32)), (0, 1)))
    each = [alone(up, down, rows) for rows in batches]
    for one, *others in jax.device_get(list(zip(got, *each, strict=True))):
        total = sum(other.astype(np.float32) for other in others)
        np.testing.assert_allclose(one.astype(np.float32), total, rtol=2.0**-6, atol=1e-2)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"activation": "relu"}, ValueError, r"activation must be one of \['clipped', 'gelu', 'silu'\]"),
        ({"quantize": "int8"}, ValueError, "quantize must be None, 'fp8' or 'fp8_all', got 'int8'"),
        (
            {"precision": "fp8"},
            ValueError,
            "precision must be None, .* got 'fp8'; quantize='fp8' of gated_mlp",
        ),
        ({"save": "all"}, ValueError, "save must be 'preactivation' or 'inputs', got 'all'"),
        ({"round_scale": True}, ValueError, "round_scale needs quantize"),
        ({"w_up": np.zeros((L, H, F), np.float32)}, ValueError, r"w_up must be \[5, 256, 2, 128\] or "),
        ({"w_up": np.zeros((L, H, F, 2), np.float32)}, ValueError, r"or \[5, 256, 256\] with rows"),
        (
            {"row_weights": np.zeros(C, np.int32)},
            TypeError,
            r"row_weights must be floating, got int32\[700\]",
        ),
        ({"b_up": np.zeros((L, 2, F), bool)}, TypeError, r"b_up must be floating, got bool\[5, 2, 128\]"),
        ({"activation": jax.nn.silu}, TypeError, "a function of two arrays, gate and up, .*too many"),
        ({"activation": lambda a, b: (a, b)}, TypeError, r"returns floating \[700, 128\], got \('float32"),
        ({"activation": lambda a, b: a[0]}, TypeError, r"returns floating \[700, 128\], got float32\[128\]"),
        ({"row_weights": np.zeros(3)}, ValueError, r"row_weights must be \[700\] with rows"),
        ({"w_down": np.zeros((L, F, H), jnp.bfloat16)}, TypeError, "must have one floating dtype"),
    ],
    ids=lambda value: (
        "" if isinstance(value, type) else str(next(iter(value))) if isinstance(value, dict) else value
    ),
)
def test_rejects(changed, error, text):
    rows, w_up, w_down, *_ = arrays(jnp.float32)
    given = {"rows": rows, "w_up": w_up, "w_down": w_down, "group_sizes": SIZES} | changed
    with pytest.raises(error, match=text):
        jax_ep.gated_mlp(**given)


@pytest.mark.parametrize(
    ("options", "split"),
    [
        ({}, True),
        pytest.param({}, False, marks=pytest.mark.one_jax),
        pytest.param({"quantize": "fp8"}, True, marks=pytest.mark.one_jax),
        ({"quantize": "fp8_all", "save": "inputs"}, False),
    ],
    ids=str,
)
def test_a_scan_stores_no_weights(options, split):
    """They are slices of what the scan takes, so storing them would take as much memory again."""
    rows, up, down, b_up, *_ = arrays(jnp.bfloat16)
    given = (up, b_up) if split else (up.reshape(L, H, 2 * F), b_up.reshape(L, 2 * F))
    stacked = jax.tree.map(lambda array: jnp.stack([array] * 2), (*given, down))

    def layer(x, w):
        return jax_ep.gated_mlp(x, w[0], w[2], SIZES, b_up=w[1], **options), None

    jaxpr = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, rows, w)[0])))(stacked)
    forward = next(one for one in jaxpr.eqns if one.primitive.name == "scan")
    stored = [math.prod(output.aval.shape) for output in forward.outvars]
    assert max(stored) <= 2 * C * 2 * F, "preactivations are the largest"
    assert not {math.prod(array.shape) for array in stacked} & set(stored)
