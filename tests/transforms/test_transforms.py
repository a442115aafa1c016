"""The ops inside the rest of JAX: jit, scan, cond, replicated arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, ranks
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P
from layers import E, H, R, T, dense, dense_gradients, experts, inputs, layer

import jax_ep

pytestmark = pytest.mark.processes


def test_independent_layers_of_different_shapes_interleaved():
    """Ops that do not depend on each other, beside XLA's own collectives, many times over."""
    on = ranks(R)
    x, ids, w = inputs()
    wide = jnp.tile(x, (1, 3))
    ids_1 = ids[:, :1]

    def shard(x, wide, ids, ids_1, w):
        parts = [layer(x * i, ids, w, on.group) for i in range(1, 4)]
        others = [
            jax_ep.moe(wide * i, ids_1, w[:, :1], experts, group=on.group, num_experts=32, capacity=64)
            for i in range(1, 3)
        ]
        mean = jax.lax.pmean(sum(parts), "ep")
        return sum(parts) + jax.lax.all_gather(mean, "ep").sum(axis=0), sum(others)

    mapped = jax.jit(on.map(shard, check_vma=False))
    first = jax.device_get(mapped(x, wide, ids, ids_1, w))
    for _ in range(30):
        again = jax.device_get(mapped(x, wide, ids, ids_1, w))
        assert jax.tree.all(jax.tree.map(np.array_equal, first, again))


def test_in_scan_with_gradient():
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        def step(carry, scale):
            return layer(carry * scale, ids, w, on.group), jnp.sum(carry)

        return jax.lax.scan(step, x, jnp.arange(1.0, 6.0))[0]

    def unrolled(x, ids, w):
        for scale in range(1, 6):
            x = layer(x * scale, ids, w, on.group)
        return x

    def run(function):
        mapped = on.map(function)
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(mapped(x, ids, w) ** 2)))(x)

    got, want = run(shard), run(unrolled)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)


def test_in_cond():
    on = ranks(R)
    x, ids, w = inputs()

    def shard(flag, x, ids, w):
        return jax.lax.cond(flag, lambda: layer(x, ids, w, on.group), lambda: x * 1.0)

    mapped = jax.jit(jax.shard_map(shard, mesh=on.mesh, in_specs=(P(), *[P("ep")] * 3), out_specs=P("ep")))
    np.testing.assert_allclose(mapped(True, x, ids, w), dense(x, ids, w), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(mapped(False, x, ids, w), x)


@pytest.mark.no_gpu
def test_gradient_of_a_cond_that_differs_between_stages():
    """Only the first stage has the layer. Its weights are cast before the branch (docs/sharp_bits.md)."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("stage", "ep"), axis_types=auto, devices=jax.devices()[:4])
    group = jax_ep.Group(mesh, "ep")
    x, ids = floats((2, 2 * T, H)), jnp.tile(jnp.array([[1], [0]]), (T, 1))
    matrices, weights = floats((2, H, H), seed=1), floats((2 * T, 1), seed=2)

    def shard(matrices, x, ids, weights):
        matrices, ids, weights = jax.lax.pcast((matrices, ids, weights), "stage", to="varying")
        product = lambda sent: jnp.tanh(sent.x @ matrices[0])
        moe = lambda: jax_ep.moe(x[0], ids, weights, product, group=group, num_experts=2)
        return jax.lax.cond(jax.lax.axis_index("stage") == 0, moe, lambda: x[0] * 1.0)[None]

    specs = P("ep"), P("stage", "ep"), P("ep"), P("ep")
    mapped = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P("stage", "ep"))

    def plain(matrices, x, ids, weights):
        first = weights * jnp.tanh(jnp.einsum("th,thk->tk", x[0], matrices[ids[:, 0]]))
        return jnp.stack([first, x[1]])

    def gradients(function):
        loss = lambda matrices, x, weights: jnp.sum(jnp.sin(function(matrices, x, ids, weights)))
        return jax.jit(jax.grad(loss, (0, 1, 2)))(matrices, x, weights)

    for got, want in zip(gradients(mapped), gradients(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_eager_mode():
    """Outside of jit: shard_map runs each op by itself."""
    on = ranks(2)
    x, ids, w = inputs(2)
    mapped = on.map(lambda x, ids, w: layer(x, ids, w, on.group))
    value, transposed = jax.vjp(lambda x, w: mapped(x, ids, w), x, w)
    np.testing.assert_allclose(value, dense(x, ids, w), rtol=1e-5, atol=1e-6)
    for got, want in zip(transposed(2 * value), dense_gradients(x, ids, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gated_experts_in_eager_mode():
    on = ranks(2)
    x, ids, w = inputs(2)
    up, down = jnp.full((E, x.shape[1], 8), 0.1), jnp.full((E, 4, x.shape[1]), 0.2)

    def loss(x, w, up, down):
        shard = lambda x, ids, w, *given: jax_ep.moe(x, ids, w, jax_ep.GatedExperts(*given), group=on.group)
        return jnp.sum(jnp.sin(on.map(shard)(x, ids, w, up, down)))

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))
    for got, want in zip(gradients(x, w, up, down), jax.jit(gradients)(x, w, up, down), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_replicated_weights_get_their_gradient_summed():
    """An expert parameter that is the same on all ranks, under check_vma."""
    on = ranks(R)
    x, ids, w = inputs()

    def shard(scale, x, ids, w):
        return jax_ep.moe(x, ids, w, lambda sent: sent.x * scale, group=on.group, num_experts=E)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=(P(), *[P("ep")] * 3), out_specs=P("ep"))
    d_scale = jax.jit(jax.grad(lambda s: jnp.sum(mapped(s, x, ids, w))))(jnp.float32(2))
    value = jax.jit(mapped)(jnp.float32(1), x, ids, w)
    np.testing.assert_allclose(d_scale, jnp.sum(value), rtol=1e-4)


def test_replicated_tokens():
    """With x the same on all ranks: its gradient is the sum of the ranks'."""
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        return layer(x, ids, w, on.group)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=(P(), P("ep"), P("ep")), out_specs=P("ep"))
    tiled = on.map(shard)
    got = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, ids, w))))(x[:T])
    want = jax.jit(jax.grad(lambda x: jnp.sum(tiled(x, ids, w))))(jnp.tile(x[:T], (R, 1)))
    np.testing.assert_allclose(got, want.reshape(R, T, H).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_a_handle_leaves_shard_map_and_comes_back():
    on = ranks(R)
    x, ids, _ = inputs()
    first = jax.jit(on.map(lambda x, ids: jax_ep.dispatch(x, ids, group=on.group, num_experts=E)))(x, ids)
    second = jax.jit(on.map(lambda y, handle: jax_ep.combine(y, handle)))
    copies = np.asarray(second(jnp.ones_like(first.x), first.handle))
    np.testing.assert_allclose(second(first.x, first.handle), copies * np.asarray(x), rtol=1e-6)


def test_many_launches_without_waiting():
    on = ranks(R)
    x, ids, w = inputs()
    mapped = jax.jit(on.map(lambda *a: layer(*a, on.group)))
    results = [mapped(x * i, ids, w) for i in range(100)]
    np.testing.assert_allclose(results[99], dense(x * 99, ids, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_checkify(implementation):
    x, ids = jnp.ones((4, 8)), jnp.array([[0, 1], [1, 2], [2, -1], [3, 0]], jnp.int32)

    def loss(x):
        sent = jax_ep.permute(x, ids, num_local_experts=4, implementation=implementation)
        checkify.check(jnp.all(sent.tokens_per_expert > 0), "an expert has no row")
        return jnp.sum(sent.x)

    for function in (loss, jax.grad(loss)):
        error, _ = checkify.checkify(jax.jit(function))(x)
        error.throw()


def test_local_ops_where_jit_is_disabled():
    x, ids = jnp.arange(8.0).reshape(4, 2), jnp.array([[0], [1], [0], [1]], jnp.int32)
    with jax.disable_jit():
        sent = jax_ep.permute(x, ids, num_local_experts=2)
        back = jax_ep.unpermute(sent.x, sent.row_map)
    np.testing.assert_array_equal(back, x)
