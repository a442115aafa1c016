"""`jax.vmap` over a batch that another Explicit mesh axis shards: each of its devices does its own part."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

DP, EP = 2, 2
B, T, K, E, H = 4, 6, 2, 4, 128
L = E // EP


def fetch(results):
    """The results, once they are there on all devices: the next program finds none of them at work."""
    return jax.device_get(jax.block_until_ready(results))


def products(sent, matrices):
    return jax_ep.grouped_dot(sent.x, matrices, sent.group_sizes)


def layer(x, ids, weights, matrices, how):
    return jax_ep.moe(x, ids, weights, lambda sent: products(sent, matrices), num_experts=E, **how)


def by_rank(x, ids, weights, matrices, how):
    implementation = how["implementation"]
    sent = jax_ep.dispatch(x, ids, weights, order="rank", num_experts=E, **how)
    there = jax_ep.permute(
        sent.x,
        sent.topk_idx,
        num_local_experts=L,
        topk_weights=sent.topk_weights,
        implementation=implementation,
    )
    y = jax_ep.grouped_dot(there.x, matrices, there.group_sizes)
    y = jax_ep.unpermute(y, there.row_map, topk_weights=sent.topk_weights, implementation=implementation)
    return jax_ep.combine(y, sent.handle, implementation=implementation)


def in_steps(x, ids, weights, matrices, how):
    """A scan and a checkpoint around ops that start and end apart, statistics and a second payload."""
    implementation, group = how["implementation"], how["group"]

    @jax.checkpoint
    def step(carry, scale):
        rows, statistics = carry
        pending = jax_ep.dispatch_start(
            rows * scale, ids, weights, num_experts=E, statistics=statistics, **how
        )
        sent = jax_ep.dispatch_done(pending)
        again = jax_ep.redispatch(x, sent.handle, implementation=implementation)
        y = products(sent, matrices) + again
        ending = jax_ep.combine_start(
            y, sent.handle, row_weights=sent.row_weights, bias=x, implementation=implementation
        )
        return (jnp.tanh(jax_ep.combine_done(ending)), sent.statistics), sent.num_tokens

    statistics = jax_ep.DispatchStatistics.zeros(group, E)
    (out, statistics), counts = jax.lax.scan(step, (x, statistics), jnp.arange(1.0, 3.0))
    rows = jnp.sum(statistics.tokens_per_expert) - jnp.sum(counts)  # 0
    return out + rows.astype(out.dtype)


def unweighted(x, ids, weights, matrices, how):
    """Handlers take an array without elements where there are no weights."""
    sent = jax_ep.dispatch(x, ids, num_experts=E, **how)
    y = products(sent, matrices)
    return jax_ep.combine(y, sent.handle, implementation=how["implementation"])


def as_fp8(x, ids, weights, matrices, how):
    return layer(x, ids, weights, matrices, {**how, "quantize": "fp8_dequantize"})


LAYERS = {f.__name__: f for f in (layer, by_rank, in_steps, as_fp8)}


def inputs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((B, EP * T, H)).astype(np.float32)
    ids = rng.integers(-1, E, (B, EP * T, K)).astype(np.int32)
    weights = rng.random((B, EP * T, K), np.float32)
    matrices = rng.standard_normal((E, H, H)).astype(np.float32) / np.float32(np.sqrt(H))
    return x, ids, weights, matrices


def mapped_over_ranks(one, mesh, group, implementation, check_vma=True):
    """A function of all elements' rows, whose batch is mapped inside a shard_map over the ranks alone."""
    how = {"group": group, "implementation": implementation}

    def shard(x, ids, weights, matrices):
        return jax.vmap(lambda *element: one(*element, matrices, how))(x, ids, weights)

    rows = P(None, "ep")
    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(rows, rows, rows, P("ep")),
        out_specs=rows,
        axis_names={"ep"},
        check_vma=check_vma,
    )


def sharded(mesh, batch):
    x, ids, weights, matrices = inputs()
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    return [*(put(array, batch, "ep") for array in (x, ids, weights)), put(matrices, "ep")]


def value_and_gradients(function, x, ids, weights, matrices):
    loss = lambda x, weights, matrices: jnp.sum(function(x, ids, weights, matrices) ** 2)
    gradients = jax.grad(loss, argnums=(0, 1, 2))(x, weights, matrices)
    return function(x, ids, weights, matrices), gradients


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_sharded_batch_gives_what_its_elements_give(name, implementation, check_vma):
    mesh = make_mesh((DP, EP), ("dp", "ep"), AxisType.Explicit)
    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        function = mapped_over_ranks(LAYERS[name], mesh, group, implementation, check_vma)
        run = jax.jit(lambda *arrays: value_and_gradients(function, *arrays))
        got, got_gradients = run(*sharded(mesh, "dp"))
        assert jax.typeof(got).sharding.spec == P("dp", "ep", None)
        assert jax.typeof(got_gradients[0]).sharding.spec == P("dp", "ep", None)

        x, ids, weights, matrices = sharded(mesh, None)
        wanted = []
        for i in range(B):
            element = [array[i : i + 1] for array in (x, ids, weights)]
            wanted.append(run(*element, matrices))
    np.testing.assert_allclose(got, np.concatenate([want for want, _ in wanted]), rtol=1e-5, atol=1e-5)
    for of_rows, want in ((0, np.concatenate), (1, np.concatenate), (2, sum)):
        expected = np.asarray(want([gradients[of_rows] for _, gradients in wanted]))
        assert np.any(expected)
        np.testing.assert_allclose(got_gradients[of_rows], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_the_bits_that_a_dispatch_of_a_sharded_batch_brings(implementation):
    mesh = make_mesh((DP, EP), ("dp", "ep"), AxisType.Explicit)

    def one(x, ids, weights, matrices, how):
        sent = jax_ep.dispatch(x, ids, weights, num_experts=E, capacity=9, **how)
        return sent.x, sent.row_weights, sent.num_dropped, sent.group_sizes, sent.row_experts()

    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        run = jax.jit(mapped_over_ranks(one, mesh, group, implementation))
        got, want = (fetch(run(*sharded(mesh, batch))) for batch in ("dp", None))
    assert np.any(want[2])
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_sharded_batch_is_not_gathered():
    """The handlers' rows do not leave their devices: the loops are over the elements of one device."""
    mesh = make_mesh((DP, EP), ("dp", "ep"), AxisType.Explicit)
    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        function = mapped_over_ranks(layer, mesh, group, "ffi")
        run = jax.jit(lambda *arrays: value_and_gradients(function, *arrays))
        text = str(run.trace(*sharded(mesh, "dp")).jaxpr)
    lengths = {int(length) for length in re.findall(r"\blength=(\d+)", text)}
    assert lengths == {B // DP}
    assert "all_gather" not in text


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_local_ops_of_a_sharded_batch(implementation):
    """Without a shard_map around, and with gradients taken of each element."""
    mesh = make_mesh((DP, EP), ("dp", "ep"), AxisType.Explicit)

    def there_and_back(rows, ids, weights, matrices):
        there = jax_ep.permute(
            rows, ids, num_local_experts=E, topk_weights=weights, implementation=implementation
        )
        y = jax_ep.grouped_dot(there.x, matrices, there.group_sizes)
        counts = jax_ep.get_dispatch_layout(
            ids, num_experts=E, num_ranks=EP, implementation=implementation
        ).num_tokens_per_expert
        back = jax_ep.unpermute(y, there.row_map, topk_weights=weights, implementation=implementation)
        return back, counts, jax_ep.quantize_fp8(rows).scales

    def run(rows, ids, weights, matrices):
        loss = lambda *element: jnp.sum(there_and_back(*element)[0] ** 2)
        one = lambda rows, ids, weights: (
            there_and_back(rows, ids, weights, matrices),
            jax.grad(loss, argnums=(0, 2, 3))(rows, ids, weights, matrices),
        )
        return jax.vmap(one)(rows, ids, weights)

    x, ids, weights, matrices = inputs()
    want = jax.jit(run)(x, ids, weights, matrices)
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        got = jax.jit(run)(*(put(array, "dp") for array in (x, ids, weights)), put(matrices))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("one", [layer, unweighted])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_batches_of_batches(implementation, one):
    """The inner ones are sharded, or the outer one, or both.

    The group's axis is the mesh's first: else XLA (jax 0.12) ends the process (docs/sharp_bits.md).
    """
    most = len(jax.devices()) // (DP * EP)
    mesh = make_mesh((EP, DP, min(2, max(1, most))), ("ep", "dp", "dq"), AxisType.Explicit)
    x, ids, weights, matrices = inputs()
    grid = [array.reshape(2, 2, *array.shape[1:]) for array in (x, ids, weights)]
    spec = P(None, None, "ep")
    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        how = {"group": group, "implementation": implementation}

        def shard(x, ids, weights, matrices):
            return jax.vmap(jax.vmap(lambda *element: one(*element, matrices, how)))(x, ids, weights)

        mapped = jax.shard_map(
            shard, mesh=mesh, in_specs=(spec,) * 3 + (P("ep"),), out_specs=spec, axis_names={"ep"}
        )
        run = jax.jit(lambda *arrays: value_and_gradients(mapped, *arrays))
        put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
        results = []
        for batch in ((None, None), ("dp", None), (None, "dp"), ("dp", "dq"), ("dq", "dp")):
            arrays = [put(array, *batch, "ep") for array in grid]
            results.append(fetch(run(*arrays, put(matrices, "ep"))))
    want, *others = results
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def compare_where_ranks_span_hosts(implementation):
    mesh = make_mesh((DP, EP), ("dp", "ep"), AxisType.Explicit)
    with jax_ep.Group(mesh, "ep", ranks_per_node=1) as group, jax.set_mesh(mesh):
        function = mapped_over_ranks(layer, mesh, group, implementation)
        run = jax.jit(lambda *arrays: value_and_gradients(function, *arrays))
        got, want = (fetch(run(*sharded(mesh, batch))) for batch in ("dp", None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_a_sharded_batch_where_ranks_span_hosts(implementation):
    """On the CPU in a new process: in an old one so many of XLA's own collectives may hang there."""
    if jax.default_backend() != "cpu":
        compare_where_ranks_span_hosts(implementation)
        return
    code = f"import test_explicit_batches as tests; tests.compare_where_ranks_span_hosts('{implementation}')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
