"""Programs lowered for CUDA on any machine: what a GPU would be asked to run."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cases import count_calls, ranks
from layers import E, R, inputs, layer

import jax_ep
from jax_ep import _extension
from jax_ep._ops import beside


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_every_op_lowers_for_cuda(order, gpu_group):
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        sent = jax_ep.dispatch(x, ids, w, group=gpu_group, num_experts=E, order=order, implementation="ffi")
        again = jax_ep.redispatch(x, sent.handle, implementation="ffi")
        out = jax_ep.combine(sent.x + again, sent.handle, row_weights=None, implementation="ffi")
        layout = jax_ep.get_dispatch_layout(ids, num_experts=E, num_ranks=R, implementation="ffi")
        moved = jax_ep.permute(x, ids, num_local_experts=E, implementation="ffi")
        back = jax_ep.unpermute(moved.x, moved.row_map, topk_weights=w, implementation="ffi")
        return out + back, layout.num_tokens_per_expert

    lowered = jax.jit(on.map(shard)).trace(x, ids, w).lower(lowering_platforms=("cuda",))
    counts = count_calls(lowered.as_text("hlo"))
    assert counts == dict.fromkeys(["layout", "permute", "pull", "push", "route", "unpermute"], 1)

    def another_program(*arguments):
        return jax.jit(on.map(shard))(*arguments)

    # Ranks compare the program's name. Otherwise processes whose threads run two programs of equal ops in
    # different orders would exchange their rows.
    other = jax.jit(another_program).trace(x, ids, w).lower(lowering_platforms=("cuda",))
    for text, name in ((lowered.as_text(), "jit_shard"), (other.as_text(), "jit_another_program")):
        assert re.findall(r'program = "(.*?)"', text) == [name] * 3


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_the_kernel_makes_fp8(order, gpu_group):
    x, ids, _ = inputs()

    def shard(x, ids):
        wide = jnp.tile(x, (1, 128))
        sent = jax_ep.dispatch(wide, ids, group=gpu_group, num_experts=E, order=order, quantize="fp8")
        return sent.x.values

    mapped = jax.jit(ranks(R).map(shard))
    text = mapped.trace(x, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"quantize = (\d)", text) == ["1"]


@pytest.mark.parametrize(("order", "rows"), [("rank", "capacity"), ("expert", "tokens")])
def test_the_kernel_sums_to_fp8(order, rows, gpu_group):
    """It has room for one sum for each token of all ranks, or for each row: values, then their scales."""
    x, ids, _ = inputs()
    sizes = {"tokens": len(x), "capacity": 3 * R}
    y = jnp.zeros((R * sizes["capacity"], 256))

    def shard(x, ids, y):
        options = {"group": gpu_group, "num_experts": E, "order": order, "capacity": sizes["capacity"]}
        sent = jax_ep.dispatch(x, ids, **options)
        return jax_ep.combine(y, sent.handle, quantize="fp8", round_scale=True)

    mapped = jax.jit(ranks(R).map(shard))
    text = mapped.trace(x, ids, y).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"quantize = (\d)", text) == ["0", "2"]
    (results,) = re.findall(r"@jax_ep_pull\b.*-> \((.*)\)", text)
    assert results.split(", ")[-1] == f"tensor<{sizes[rows] * (256 + 4 * 2)}xui8>"


@pytest.mark.parametrize("measured", [False, True])
def test_waits_are_measured_only_for_statistics(measured, gpu_group):
    """Without them the handler has no room for `wait_us`, the last of its results before the rows."""
    x, ids, _ = inputs()

    def shard(x, ids):
        begin = jax_ep.DispatchStatistics.zeros(gpu_group, E) if measured else None
        sent = jax_ep.dispatch(x, ids, group=gpu_group, num_experts=E, statistics=begin, implementation="ffi")
        return sent.x, sent.statistics

    mapped = jax.jit(ranks(R).map(shard))
    text = mapped.trace(x, ids).lower(lowering_platforms=("cuda",)).as_text()
    (results,) = re.findall(r"@jax_ep_route\b.*-> \((.*)\)", text)
    assert results.split(", ")[-2] == f"tensor<{R if measured else 0}xf32>"


def test_a_layer_and_its_gradient_lower_for_cuda(gpu_group):
    on = ranks(R)
    x, ids, w = inputs()
    mapped = on.map(lambda *a: layer(*a, gpu_group, implementation="ffi"))
    gradient = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(mapped(x, ids, w)), argnums=(0, 1)))
    text = gradient.trace(x, w).lower(lowering_platforms=("cuda",)).as_text("hlo")
    assert count_calls(text) == {"route": 1, "pull": 2, "push": 1}


def count_layer_calls(
    gpu_group,
    monkeypatch,
    width=2048,
    wanted=range(6),
    shared=False,
    weights_first=False,
    wrap=lambda shard: shard,
    **options,
):
    """Returns the calls of a layer, and of the gradients that are wanted: of x, w, and matrices.

    A shared expert has matrices of its own, on every rank, whose gradients may be wanted, too.
    """
    monkeypatch.setattr(_extension, "runs_kernels", lambda implementation: True)
    on = ranks(R)
    x, ids, w = inputs()
    arrays = jnp.ones((x.shape[0], width)), w, jnp.ones((E, width, 32)), jnp.ones((E, 16, width))
    arrays += jnp.ones((1, width, 32)), jnp.ones((1, 16, width))

    def shard(ids, x, w, up, down, shared_up, shared_down):
        experts = jax_ep.GatedExperts(up, down, **options)
        layer_options = {"experts_apply_weights": weights_first, "implementation": "ffi"}
        if shared:
            layer_options["shared"] = dataclasses.replace(experts, w_up=shared_up, w_down=shared_down)
        return jax_ep.moe(x, ids, w, experts, group=gpu_group, **layer_options)

    specs = (*[jax.sharding.PartitionSpec("ep")] * 5, *[jax.sharding.PartitionSpec()] * 2)
    mapped = jax.shard_map(wrap(shard), mesh=on.mesh, in_specs=specs, out_specs=specs[0])
    loss = lambda *arrays: jnp.sum(mapped(ids, *arrays))
    program = jax.jit(jax.value_and_grad(loss, argnums=tuple(wanted)) if wanted else loss)
    return count_calls(program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text("hlo"))


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"overlap": False}, {"route": 1, "push": 1, "pull": 2, "grouped_dot": 6}),
        # Tokens' gradients travel beside the gradient of w_up.
        ({}, {"route": 1, "push": 1, "pull": 1, "pull_beside": 1, "grouped_dot": 5}),
        # So do sums of columns that are ready.
        ({"weights_first": True}, {"route": 1, "push": 1, "pull": 1, "pull_beside": 2, "grouped_dot": 5}),
        # The first product is repeated beside the cotangents of the sums.
        ({"save": "inputs"}, {"route": 1, "push_beside": 1, "pull": 1, "pull_beside": 1, "grouped_dot": 5}),
        # A shared expert's products run beside the dispatch, the sums and their cotangents.
        ({"shared": True}, {"route_beside": 1, "push_beside": 1, "pull_beside": 2, "grouped_dot": 8}),
        (
            {"shared": True, "weights_first": True},
            {"route_beside": 1, "push_beside": 1, "pull_beside": 3, "grouped_dot": 8},
        ),
    ],
)
def test_communication_beside_products_lowers_for_cuda(options, counts, gpu_group, monkeypatch):
    assert count_layer_calls(gpu_group, monkeypatch, **{"overlap": True, **options}) == counts


def test_short_communication_runs_in_sequence(gpu_group, monkeypatch):
    assert "pull_beside" not in count_layer_calls(gpu_group, monkeypatch)
    monkeypatch.setattr(beside, "_MIN_ELEMENTS", 1)
    assert ("pull_beside" in count_layer_calls(gpu_group, monkeypatch)) == (R > 2)


def test_a_policy_keeps_what_was_computed_beside_a_dispatch(gpu_group, monkeypatch):
    wrap = lambda shard: jax.checkpoint(shard, policy=jax_ep.save_ep_residuals)
    calls = count_layer_calls(gpu_group, monkeypatch, shared=True, overlap=True, wrap=wrap)
    assert calls["route_beside"] == 1
    assert "route" not in calls


def test_a_second_derivative_beside_products_lowers_for_cuda(gpu_group, monkeypatch):
    """Of a shared expert whose matrices are the same on all ranks, which the rows that travel are not."""

    def squared_gradient(shard):
        def wrapped(ids, x, *arrays):
            value = lambda x: jnp.sum(shard(ids, x, *arrays) ** 2)
            return jax.grad(value)(x)

        return wrapped

    calls = count_layer_calls(gpu_group, monkeypatch, shared=True, overlap=True, wrap=squared_gradient)
    assert calls["route_beside"] > 0


@pytest.mark.parametrize(
    ("wanted", "count"),
    [((0,), 1), ((4,), 0), ((4, 5), 0), ((2,), 0), ((2, 4), 1)],  # of x; shared; w_up; and both
)
def test_a_shared_expert_s_gradient_is_computed_if_it_is_needed(wanted, count, gpu_group, monkeypatch):
    calls = count_layer_calls(gpu_group, monkeypatch, wanted=wanted, shared=True, overlap=True)
    assert calls.get("push_beside", 0) == count


@pytest.mark.parametrize("wanted", [(0,), (2,), (2, 3)])
def test_a_gradient_that_is_not_needed_is_not_computed(wanted, gpu_group, monkeypatch):
    """One call would have both, so there is none if one of them is not needed."""
    assert "pull_beside" not in count_layer_calls(gpu_group, monkeypatch, wanted=wanted, overlap=True)


def test_columns_that_kernels_do_not_load_are_not_apart(gpu_group, monkeypatch):
    count = lambda width: count_layer_calls(gpu_group, monkeypatch, width=width, wanted=(), overlap=True)
    assert count(2044) == {"route": 1, "pull": 1, "grouped_dot": 2}
    assert count(2048) == {"route": 1, "pull": 1, "pull_beside": 1, "grouped_dot": 2}


@pytest.mark.skipif(R == 1, reason="On one rank XLA partitions nothing.")
@pytest.mark.parametrize("order", ["rank", "expert", "layer"])
def test_no_empty_array_crosses_shard_map_in_a_loop(order, gpu_group):
    """It crashes the compiler of jaxlib 0.11.2, in the gradient of any loop over layers."""
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        options = {"group": gpu_group, "implementation": "ffi"}
        if order == "layer":
            up, down = jnp.ones((E // R, x.shape[1], 4)), jnp.ones((E // R, 2, x.shape[1]))
            return jax_ep.moe(x, ids, w, jax_ep.GatedExperts(up, down), **options)
        sent = jax_ep.dispatch(x, ids, w, num_experts=E, order=order, **options)
        rows = jnp.sin(sent.x)
        if order == "rank":
            moved = jax_ep.permute(rows, sent.topk_idx, num_local_experts=E // R, implementation="ffi")
            rows = jax_ep.unpermute(jnp.sin(moved.x), moved.row_map, implementation="ffi")
        return jax_ep.combine(rows, sent.handle, row_weights=None, implementation="ffi")

    def loss(x, w):
        return jnp.sum(jax.lax.scan(lambda x, _: (on.map(shard)(x, ids, w), None), x, length=2)[0])

    text = jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    bodies = re.findall(r"sdy.manual_computation.*", text)
    assert len(bodies) > 2
    assert not [body for body in bodies if "tensor<0x" in body]


def test_a_program_for_other_devices_than_the_group_s_is_refused():
    on = ranks(2)
    x, ids, w = inputs(2)
    mapped = jax.jit(on.map(lambda *a: layer(*a, on.group, implementation="ffi")))
    other = "cpu" if jax.default_backend() == "gpu" else "cuda"
    with pytest.raises(ValueError, match=rf"lowered for {other}, but Group\(.*has (cpu|gpu) devices"):
        mapped.trace(x, ids, w).lower(lowering_platforms=(other,))


def test_num_sms_reaches_all_products(monkeypatch):
    monkeypatch.setattr(_extension, "current_platform", lambda: "gpu")
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    monkeypatch.setattr(_extension, "has_fp8_products", lambda: True)
    sizes = jnp.ones((3,), jnp.int32)

    def run(rows, weights):
        product = lambda rows, weights: jax_ep.grouped_dot(rows, weights, sizes, num_sms=50)
        fp8 = jax_ep.quantize_fp8(rows), jax_ep.quantize_fp8(weights, block=(128, 128))
        return product(*fp8), jax.vjp(product, rows, weights)[1](jnp.ones((20, 256)))

    traced = jax.jit(run).trace(jnp.ones((20, 128)), jnp.ones((3, 128, 256)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"@jax_ep_grouped_dot\b.*num_sms = 50 : i64", text)) == 3


def test_a_grouped_product_and_its_gradients_lower_for_cuda(monkeypatch):
    monkeypatch.setattr(_extension, "current_platform", lambda: "gpu")
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    sizes = jnp.ones((3,), jnp.int32)
    loss = lambda rows, weights: jnp.sum(jnp.tanh(jax_ep.grouped_dot(rows, weights, sizes)))
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    traced = gradient.trace(jnp.ones((20, 8)), jnp.ones((3, 8, 16)))
    assert [a.shape for a in traced.out_info[1]] == [(20, 8), (3, 8, 16)]
    assert count_calls(traced.lower(lowering_platforms=("cuda",)).as_text("hlo")) == {"grouped_dot": 3}


def test_gated_mlp_in_fp8_lowers_for_cuda(monkeypatch):
    """Six products, and a pass for each array that they read. Two of the passes compute the activation."""
    monkeypatch.setattr(_extension, "runs_kernels", lambda implementation: True)
    monkeypatch.setattr(_extension, "has_fp8_products", lambda: True)
    sizes = jnp.full((3,), 5, jnp.int32)

    def loss(rows, up, down):
        up, down = jax_ep.quantize_weights(up), jax_ep.quantize_weights(down)
        return jnp.sum(jax_ep.gated_mlp(rows, up, down, sizes, quantize="fp8_all").astype(jnp.float32))

    given = jnp.ones((20, 128)), jnp.ones((3, 128, 512)), jnp.ones((3, 256, 128))
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(*given)
    counts = count_calls(traced.lower(lowering_platforms=("cuda",)).as_text("hlo"))
    assert counts == {"grouped_dot": 6, "quantize": 4, "quantize_gated": 2}


def test_a_forward_pass_in_fp8_lowers_for_cuda(monkeypatch):
    """Weights that were quantized for it are read as they are, and only one layout of them was written."""
    monkeypatch.setattr(_extension, "runs_kernels", lambda implementation: True)
    monkeypatch.setattr(_extension, "has_fp8_products", lambda: True)
    sizes = jnp.full((3,), 5, jnp.int32)
    quantize = jax.jit(functools.partial(jax_ep.quantize_weights, gradients=False))
    matrices = [jnp.ones(shape, jnp.bfloat16) for shape in ((3, 128, 2, 256), (3, 256, 128))]
    up, down = (jax.eval_shape(quantize, w) for w in matrices)
    text = quantize.trace(matrices[1]).lower(lowering_platforms=("cuda",)).as_text()
    (types,) = re.findall(r"custom_call @jax_ep_quantize\b.*-> \((.*)\)", text)
    assert types == "tensor<0xf8E4M3FN>, tensor<3x2x1xf32>, tensor<3x128x256xf8E4M3FN>, tensor<0xf32>"
    run = jax.jit(lambda rows, *w: jax_ep.gated_mlp(rows, *w, sizes, quantize="fp8"))
    hlo = run.trace(jnp.ones((20, 128)), up, down).lower(lowering_platforms=("cuda",)).as_text("hlo")
    assert count_calls(hlo) == {"grouped_dot": 2, "quantize": 1, "quantize_gated": 1}


@pytest.mark.parametrize("quantize", [None, "fp8_all"])
def test_padded_experts_lower_for_cuda(quantize, monkeypatch):
    """Each handler gets the number of rows of an expert, and no pass over the rows masks them."""
    monkeypatch.setattr(_extension, "runs_kernels", lambda implementation: True)
    monkeypatch.setattr(_extension, "has_fp8_products", lambda: True)
    sizes = jnp.full((3,), 5, jnp.int32)
    given = (jnp.ones(shape, jnp.bfloat16) for shape in ((3, 20, 128), (3, 128, 256), (3, 128, 128)))

    def run(rows, up, down, cotangent):
        experts = lambda *given: jax_ep.gated_mlp(*given, sizes, quantize=quantize)
        value, transposed = jax.vjp(experts, rows, up, down)
        return value, jax_ep.grouped_dot(rows, up, sizes), *transposed(cotangent)

    traced = jax.jit(run).trace(*given, jnp.ones((3, 20, 128), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @jax_ep_\w+.*", text)
    of_matrices = [call for call in calls if "of_matrices = 1" in call]
    assert all("rows_per_group = 20 : i64" in call for call in calls if call not in of_matrices)
    assert len(calls) - len(of_matrices) == (11 if quantize else 7)
    assert "stablehlo.iota" not in text
