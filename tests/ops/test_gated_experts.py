"""GatedExperts: the same values and gradients as the function that it stands for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, more_on_gpus, ranks, routing
from devices import most_ranks
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._experts import xla_engine
from jax_ep._experts.engine import Product
from jax_ep._ops import moe
from jax_ep._ops.gated_experts import combined_rows
from jax_ep._rows.counts import rows_in_groups

pytestmark = pytest.mark.processes

R, T, K, L, H, F = most_ranks(), 12, 2, 2, 128, 128
E = R * L


@functools.cache
def inputs(dtype, width=H, has_biases=True, is_shared=False):
    ids = jnp.asarray(routing("sprinkled", R, T, K, E).reshape(-1, K))
    arrays = {
        "x": jnp.asarray(floats((R * T, width)), dtype),
        "weights": jnp.asarray(floats((R * T, K), seed=2)),
        "w_up": jnp.asarray(floats((E, width, 2, F), seed=3) / width**0.5, dtype),
        "w_down": jnp.asarray(floats((E, F, width), seed=4) / F**0.5, dtype),
        "b_up": jnp.asarray(floats((E, 2, F), seed=5), dtype),
        "b_down": jnp.asarray(floats((E, width), seed=6), dtype),
    }
    if not has_biases:
        arrays = {name: array for name, array in arrays.items() if not name.startswith("b_")}
    if is_shared:  # each rank has its own, so that mixed up gradients differ
        arrays["s_up"] = jnp.asarray(floats((R, width, 2, F), seed=7) / width**0.5, dtype)
        arrays["s_down"] = jnp.asarray(floats((R, F, width), seed=8) / F**0.5, dtype)
        arrays["s_bias"] = jnp.asarray(floats((R, width), seed=9), dtype)
    return ids, arrays


def value_and_gradients(shard, dtype, **options):
    """Runs shard(ids, **arrays) on all ranks. Returns its value and the gradients of all arrays."""
    on = ranks(R)
    ids, arrays = inputs(dtype, **options)
    mapped = on.map(lambda ids, arrays: shard(ids, **arrays))

    def loss(arrays):
        y = mapped(ids, arrays)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)


def by_object(moe_options, **options):
    def shard(ids, x, weights, s_up=None, s_down=None, s_bias=None, **arrays):
        experts = jax_ep.GatedExperts(**arrays, **options)
        shared = None
        if s_up is not None:
            shared = dataclasses.replace(experts, w_up=s_up, w_down=s_down, b_up=None, b_down=s_bias)
        return jax_ep.moe(x, ids, weights, experts, group=ranks(R).group, shared=shared, **moe_options)

    return shard


def by_function(moe_options, redundant=0, **options):
    applies = moe_options.get("experts_apply_weights", False)

    def shard(ids, x, weights, s_up=None, s_down=None, s_bias=None, **arrays):
        def experts(sent, arrays=arrays):
            biases = {name: jnp.asarray(arrays[name]) for name in ("b_up", "b_down")}
            row_weights = sent.row_weights if applies else None
            return jax_ep.gated_mlp(
                sent.x,
                arrays["w_up"],
                arrays["w_down"],
                sent.group_sizes,
                row_weights=row_weights,
                **biases,
                **options,
            )

        given = {"expert_params": arrays} if redundant else {}
        sums = jax_ep.moe(
            x, ids, weights, experts, group=ranks(R).group, num_experts=E, **given, **moe_options
        )
        if s_up is None:
            return sums
        num_valid = moe_options.get("num_valid_tokens", T)
        sizes = jnp.asarray([num_valid], jnp.int32)
        of_shared = jax_ep.gated_mlp(x, s_up, s_down, sizes, b_down=s_bias, **options)
        return sums + of_shared.astype(sums.dtype)

    return shard


CASES = {
    "plain": (jnp.float32, {}, {"activation": "gelu"}, {}),
    "redundant": (jnp.float32, {"num_redundant_experts": 1}, {}, {}),
    # bfloat16 tokens travel as FP8 without being told.
    "fp8": (jnp.bfloat16, {}, {"quantize": "fp8"}, {"quantize": "fp8"}),
    "fp8_all": (jnp.bfloat16, {"expert_alignment": 8}, {"quantize": "fp8_all"}, {"quantize": "fp8"}),
    "fp8, dequantized": (jnp.bfloat16, {"quantize": "fp8_dequantize"}, {"quantize": "fp8"}, {}),
    "shared": (jnp.float32, {"num_valid_tokens": 7}, {"activation": "gelu"}, {}),
    "shared, weights": (jnp.float32, {"experts_apply_weights": True, "capacity": 40}, {"save": "inputs"}, {}),
    # The sums of FP8 rows are bfloat16, and so is the sum with the shared expert's float32 rows.
    "shared, fp8, float32": (jnp.float32, {"quantize": "fp8"}, {"quantize": "fp8"}, {}),
    "shared, fp8": (jnp.bfloat16, {"num_redundant_experts": 1}, {"quantize": "fp8_all"}, {"quantize": "fp8"}),
}


# With the newest JAX one of them runs. On CPUs other cases have the products of "fp8" and "fp8_all", too.
IN_FP8 = ("fp8", "fp8_all")
QUICK = ("plain", "fp8, dequantized", "shared")


def marks_of(case):
    if case == "shared":
        return []
    return [pytest.mark.one_jax, *[pytest.mark.slow] * (case not in QUICK)]


@pytest.mark.parametrize(
    "case",
    more_on_gpus(
        [pytest.param(case, marks=marks_of(case)) for case in CASES if case not in IN_FP8], [*IN_FP8]
    ),
)
def test_equals_the_function(case):
    dtype, moe_options, options, told = CASES[case]
    redundant = moe_options.get("num_redundant_experts", 0)
    given = {"is_shared": case.startswith("shared")}
    got = value_and_gradients(by_object(moe_options, **options), dtype, **given)
    want = value_and_gradients(by_function({**moe_options, **told}, redundant, **options), dtype, **given)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.any(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(want))


@pytest.mark.one_jax
def test_in_a_function():
    """They can be called, between a dispatch and a combine of one's own, or in a function that moe takes."""

    def shard(ids, x, weights, **arrays):
        experts = jax_ep.GatedExperts(**arrays, quantize="fp8")
        options = {"group": ranks(R).group, "num_experts": E, "quantize": "fp8"}
        return jax_ep.moe(x, ids, weights, lambda sent: experts(sent), **options)

    got = value_and_gradients(shard, jnp.bfloat16)
    want = value_and_gradients(by_object({}, quantize="fp8"), jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="Nothing overlaps on CPUs.")
@pytest.mark.parametrize(
    ("quantize", "save", "weights_first", "is_shared"),
    [
        (None, "preactivation", False, False),
        (None, "inputs", True, False),
        (None, "inputs", False, True),
        ("fp8", "preactivation", True, False),
        ("fp8", "inputs", False, True),
        ("fp8_all", "preactivation", False, True),
        ("fp8_all", "inputs", True, True),
    ],
)
def test_overlap_changes_no_bit(quantize, save, weights_first, is_shared):
    options = {"experts_apply_weights": weights_first}
    given = {"width": 1536, "has_biases": False}  # a second product of 1024 columns, and of 512

    def results(overlap):
        shard = by_object(options, quantize=quantize, save=save, overlap=overlap)
        return value_and_gradients(shard, jnp.bfloat16, **given, is_shared=is_shared)

    jax.tree.map(np.testing.assert_array_equal, results(True), results(False))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="Nothing overlaps on CPUs.")
def test_overlap_needs_memory_for_what_travels():
    """While the gradient of w_up is computed, the rows that are combined, and their sums at each rank."""
    tokens, width, inner = 1024, 1536, 512
    capacity = tokens * K
    shapes = {"x": (R * tokens, width), "w_up": (E, width, 2 * inner), "w_down": (E, inner, width)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    arrays["weights"] = jax.ShapeDtypeStruct((R * tokens, K), jnp.float32)
    ids = jax.ShapeDtypeStruct((R * tokens, K), jnp.int32)

    def temporaries(overlap):
        shard = by_object({"capacity": capacity}, overlap=overlap)
        run = ranks(R).map(lambda ids, arrays: shard(ids, **arrays))
        loss = lambda arrays, ids: jnp.sum(run(ids, arrays).astype(jnp.float32))
        compiled = jax.jit(jax.grad(loss)).lower(arrays, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    most = (capacity + R * tokens) * width * 2
    assert temporaries(True) <= temporaries(False) + most


@pytest.mark.slow
@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("quantize", "save", "weights_first"), [(None, "preactivation", False), ("fp8_all", "inputs", True)]
)
def test_reads_no_row_without_an_expert(quantize, save, weights_first, monkeypatch):
    """The kernels leave such rows of a layer's products as they are, here NaN."""

    def results():
        options = {"quantize": quantize, "save": save, "implementation": "xla"}
        shard = by_object({"experts_apply_weights": weights_first}, **options)
        return value_and_gradients(shard, jnp.bfloat16)

    want, original = results(), xla_engine._grouped_dot

    def undefined(factors, options):
        out = original(factors, options)
        if options.clears_rows or factors.kind is Product.WEIGHTS:
            return out
        is_row = rows_in_groups(factors.group_sizes, out.shape[0], options.rows_per_group)
        products.append(factors)
        return jnp.where(is_row[:, None], out, jnp.nan)

    products = []
    monkeypatch.setattr(xla_engine, "_grouped_dot", undefined)
    close = functools.partial(
        np.testing.assert_allclose, rtol=1e-2, atol=1e-2
    )  # some units of bfloat16; no NaN is
    jax.tree.map(lambda *both: close(*(np.asarray(one, np.float32) for one in both)), results(), want)
    assert products


@pytest.mark.slow
@pytest.mark.one_jax
@pytest.mark.parametrize("save", ["preactivation", "inputs"])
def test_second_derivatives(save):
    """Those of the function form, also where communication runs beside products."""

    def second(make, **options):
        def penalty(ids, arrays):
            shard = make({"experts_apply_weights": True}, precision="highest", save=save, **options)
            square = lambda arrays: jnp.sum(ranks(R).map(lambda ids, a: shard(ids, **a))(ids, arrays) ** 2)
            return jnp.sum(jax.grad(square)(arrays)["x"] ** 2)

        ids, arrays = inputs(jnp.float32, is_shared=True)
        return jax.jit(jax.grad(penalty, argnums=1))(ids, arrays)

    got, want = second(by_object, overlap=True), second(by_function)
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6 * np.max(np.abs(other)))


def test_rounded_scales_are_those_of_the_tokens_too(monkeypatch):
    """Tokens that travel with other scales than the products have would be rounded twice."""
    ids, arrays = inputs(jnp.bfloat16)

    def scales(ids, x, weights, **arrays):
        seen = []

        def spy(experts, sent, *arguments, **options):
            seen.append(sent.x.scales)
            return combined_rows(experts, sent, *arguments, **options)

        monkeypatch.setattr(moe, "combined_rows", spy)
        experts = jax_ep.GatedExperts(**arrays, quantize="fp8", round_scale=True)
        jax_ep.moe(x, ids, weights, experts, group=ranks(R).group)
        return seen[0]

    got = np.asarray(jax.jit(ranks(R).map(lambda ids, arrays: scales(ids, **arrays)))(ids, arrays))
    got = got[got > 0]
    assert np.any(got != 1)
    np.testing.assert_array_equal(np.exp2(np.round(np.log2(got))), got)


def test_is_a_pytree_of_its_arrays():
    """It enters shard_map with one spec, and its gradient is another one."""
    on = ranks(R)
    ids, arrays = inputs(jnp.float32)
    x, weights = arrays["x"], arrays["weights"]
    experts = jax_ep.GatedExperts(arrays["w_up"], arrays["w_down"], activation="clipped")

    layer = jax.shard_map(
        lambda experts, x, ids, weights: jax_ep.moe(x, ids, weights, experts, group=on.group),
        mesh=on.mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    gradient = jax.jit(jax.grad(lambda experts: jnp.sum(layer(experts, x, ids, weights) ** 2)))(experts)
    assert isinstance(gradient, jax_ep.GatedExperts)
    assert (gradient.activation, gradient.b_up) == ("clipped", None)
    assert gradient.w_up.shape == experts.w_up.shape
    assert np.any(gradient.w_down)
    assert experts.num_experts == E


@pytest.mark.one_jax
def test_quantized_weights():
    """Of quantize_weights, once for several layers."""
    dtype = jnp.bfloat16

    def shard(of_experts, **given):
        def run(ids, x, weights, w_up, w_down, b_up, b_down):
            up, down = map(jax_ep.quantize_weights, (w_up, w_down))
            return of_experts(up, down, x, ids, weights)

        return run

    def by_object(up, down, x, ids, weights):
        experts = jax_ep.GatedExperts(up, down, quantize="fp8")
        assert experts.num_experts == L
        return jax_ep.moe(x, ids, weights, experts, group=ranks(R).group)

    def by_function(up, down, x, ids, weights):
        experts = lambda sent: jax_ep.gated_mlp(sent.x, up, down, sent.group_sizes, quantize="fp8")
        return jax_ep.moe(x, ids, weights, experts, group=ranks(R).group, num_experts=E, quantize="fp8")

    got, want = (value_and_gradients(shard(function), dtype) for function in (by_object, by_function))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def quantized_layer(gradients, moe_options, products="fp8"):
    """A layer, with a shared expert, whose weights are quantized."""

    def shard(ids, x, weights, w_up, w_down, b_up, b_down, s_up, s_down, s_bias):
        quantize = functools.partial(jax_ep.quantize_weights, gradients=gradients)
        experts = jax_ep.GatedExperts(*map(quantize, (w_up, w_down)), b_up, b_down, quantize=products)
        shared = jax_ep.GatedExperts(*map(quantize, (s_up, s_down)), b_down=s_bias, quantize=products)
        return jax_ep.moe(x, ids, weights, experts, group=ranks(R).group, shared=shared, **moe_options)

    return shard


@pytest.mark.parametrize(
    ("moe_options", "products"),
    [
        pytest.param({}, "fp8"),
        pytest.param({"num_redundant_experts": 1}, "fp8_all", marks=pytest.mark.one_jax),
        pytest.param({"experts_apply_weights": True}, "fp8", marks=pytest.mark.one_jax),
    ],
    ids=str,
)
def test_weights_of_forward_passes_give_the_same_bits(moe_options, products):
    ids, arrays = inputs(jnp.bfloat16, is_shared=True)

    def run(gradients):
        shard = quantized_layer(gradients, moe_options, products)
        return jax.jit(ranks(R).map(lambda ids, arrays: shard(ids, **arrays)))(ids, arrays)

    np.testing.assert_array_equal(run(False), run(True))


@pytest.mark.one_jax
@pytest.mark.parametrize("name", ["x", "weights", "w_up", "w_down", "b_up", "s_up", "s_down", "s_bias"])
def test_weights_of_forward_passes_have_no_gradient(name):
    ids, arrays = inputs(jnp.bfloat16, is_shared=True)
    shard = quantized_layer(False, {})

    def loss(array):
        mapped = ranks(R).map(lambda ids, arrays: shard(ids, **arrays))
        return jnp.sum(mapped(ids, arrays | {name: array}).astype(jnp.float32))

    with pytest.raises(
        TypeError, match=r"moe: quantize_weights\(gradients=False\) keeps only what a forward"
    ):
        jax.eval_shape(jax.grad(loss), arrays[name])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"expert_params": jnp.zeros((L, 1))}, "GatedExperts has its weights; leave expert_params out"),
        ({"num_experts": 2 * E}, "a matrix for each of the 4 experts of this rank, got 2"),
    ],
)
def test_refuses(options, error):
    with pytest.raises(ValueError, match=error):
        value_and_gradients(by_object(options), jnp.float32)


def test_a_shared_expert_is_one_and_needs_gated_experts():
    def shard(make, ids, x, weights, w_up, w_down, **biases):
        shared = jax_ep.GatedExperts(w_up, w_down)  # of two
        return jax_ep.moe(x, ids, weights, make(shared), group=ranks(R).group, num_experts=E, shared=shared)

    with pytest.raises(ValueError, match=r"shared must be one expert.*got 2"):
        value_and_gradients(functools.partial(shard, lambda shared: shared), jnp.float32)
    with pytest.raises(TypeError, match="got GatedExperts beside a function"):
        value_and_gradients(functools.partial(shard, lambda _: lambda sent: sent.x), jnp.float32)


def test_a_function_needs_the_number_of_experts():
    shard = lambda ids, x, weights, **arrays: jax_ep.moe(
        x, ids, weights, lambda sent: sent.x, group=ranks(R).group
    )
    with pytest.raises(ValueError, match="num_experts must be given with a function"):
        value_and_gradients(shard, jnp.float32)
