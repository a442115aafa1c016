"""The ops inside the rest of JAX: jit, scan, cond, remat, vmap, meshes of every kind."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, ranks, routing
from conftest import make_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

R, T, K, E, H = 8, 6, 2, 16, 4


def inputs(size=R, seed=0):
    ids = routing("sprinkled", size, T, K, E, seed).reshape(-1, K)
    x, w = floats((size * T, H), seed=seed + 1), floats((size * T, K), seed=seed + 2)
    return jnp.asarray(x), jnp.asarray(ids), jnp.asarray(w)


def experts(rows, group_sizes):
    return jnp.tanh(rows) * 1.5


def layer(x, ids, w, group, **options):
    return jax_ep.moe(x, ids, w, experts, group=group, num_experts=E, **options)


def used_choices(ids):
    """Bool [N, K]: in range, and not a repetition."""
    ids = np.asarray(ids)
    used = (ids >= 0) & (ids < E)
    for k in range(1, K):
        used[:, k] &= ~(ids[:, :k] == ids[:, k : k + 1]).any(axis=1)
    return used


def dense(x, ids, w):
    """What the layer computes, with every expert the same function."""
    total = np.where(used_choices(ids), w, 0).sum(axis=1, keepdims=True)
    return np.tanh(np.asarray(x)) * 1.5 * total


def dense_gradients(x, ids, w):
    """Of sum(layer ** 2) in x and w."""
    y, tanh, used = dense(x, ids, w), np.tanh(np.asarray(x)), used_choices(ids)
    total = np.where(used, w, 0).sum(axis=1, keepdims=True)
    d_x = 2 * y * 1.5 * total * (1 - tanh**2)
    d_w = np.where(used, (2 * y * 1.5 * tanh).sum(axis=1, keepdims=True), 0)
    return d_x, d_w


def check_layer(mesh, group, spec, *, check_vma=True, put=False):
    x, ids, w = inputs(mesh.size)
    want, want_gradients = dense(x, ids, w), dense_gradients(x, ids, w)
    if put:
        x, ids, w = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, ids, w))
    mapped = jax.shard_map(
        lambda *a: layer(*a, group), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    np.testing.assert_allclose(jax.jit(mapped)(x, ids, w), want, rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(mapped(x, ids, w) ** 2), argnums=(0, 1)))
    for got, expected in zip(gradient(x, w), want_gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_auto_and_explicit_meshes(kind, check_vma):
    mesh = make_mesh((R,), ("ep",), kind)
    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        check_layer(mesh, group, P("ep"), check_vma=check_vma, put=True)


def test_permuted_devices():
    devices = make_mesh((R,), ("ep",)).devices[[3, 1, 0, 2, 7, 5, 4, 6]]
    mesh = Mesh(devices, ("ep",))
    with jax_ep.Group(mesh, "ep") as group:
        check_layer(mesh, group, P("ep"))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1), (1, 8)])
def test_independent_groups_of_a_mesh(shape):
    mesh = make_mesh(shape, ("dp", "ep"))
    with jax_ep.Group(mesh, "ep") as group:
        assert group.size == shape[1]
        check_layer(mesh, group, P(("dp", "ep")))


def test_a_group_over_the_first_axis():
    mesh = make_mesh((4, 2), ("ep", "dp"))
    with jax_ep.Group(mesh, "ep") as group:
        check_layer(mesh, group, P(("ep", "dp")))


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_a_group_over_two_axes(axes, implementation):
    """Ranks are row-major over the axes as named: each rank's rows arrive where axis_index says."""
    mesh = make_mesh((2, 4), ("a", "b"))
    ids = (np.arange(R)[None] * np.ones((R, 1), np.int32)).astype(np.int32)  # one token to every rank

    with jax_ep.Group(mesh, axes) as group:

        def shard(ids):
            me = jax.lax.axis_index(axes).astype(jnp.float32)
            d = jax_ep.dispatch(
                me[None, None], ids, group=group, num_experts=R, implementation=implementation
            )
            back = jax_ep.combine(d.x, d.handle, group=group, implementation=implementation)
            return d.x, back

        rows, back = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))(ids)
        np.testing.assert_array_equal(rows.reshape(R, R), np.tile(np.arange(R), (R, 1)))
        np.testing.assert_array_equal(back[:, 0], np.arange(R) * R)


def test_two_groups_of_different_axes_in_one_program():
    mesh = make_mesh((2, 4), ("a", "b"))
    x, ids, w = inputs()
    with jax_ep.Group(mesh, "a") as over_a, jax_ep.Group(mesh, "b") as over_b:
        assert over_a != over_b

        def shard(x, ids, w):
            y = layer(x, ids, w, over_a) + layer(x, ids, w, over_b)
            return layer(y, ids, w, over_a)

        spec = P(("a", "b"))
        got = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec))(x, ids, w)
    once = dense(x, ids, w)
    np.testing.assert_allclose(got, dense(2 * once, ids, w), rtol=1e-5, atol=1e-6)


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

    mapped = jax.jit(jax.shard_map(shard, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
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
        mapped = jax.shard_map(function, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"))
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


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_vmap(implementation):
    on = ranks(R)
    batch = [inputs(seed=seed) for seed in range(3)]
    x, ids, w = (jnp.stack(parts) for parts in zip(*batch, strict=True))

    def shard(x, ids, w):
        return jax.vmap(lambda *one: layer(*one, on.group, implementation=implementation))(x, ids, w)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=P(None, "ep"), out_specs=P(None, "ep"))
    got = jax.jit(mapped)(x, ids, w)
    for i, one in enumerate(batch):
        np.testing.assert_allclose(got[i], dense(*one), rtol=1e-5, atol=1e-6)
    d_x = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, ids, w))))(x)
    assert np.isfinite(d_x).all()


def test_linearize_and_eager_mode():
    on = ranks(2)
    x, ids, w = inputs(2)
    mapped = jax.shard_map(
        lambda x: layer(x, ids[:T], w[:T], on.group), mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep")
    )
    value, transposed = jax.vjp(mapped, x)
    np.testing.assert_allclose(value, jax.jit(mapped)(x), rtol=1e-6)
    assert transposed(jnp.ones_like(value))[0].shape == x.shape


def test_replicated_weights_get_their_gradient_summed():
    """An expert parameter that is the same on all ranks, under check_vma."""
    on = ranks(R)
    x, ids, w = inputs()

    def shard(scale, x, ids, w):
        return jax_ep.moe(x, ids, w, lambda rows, _: rows * scale, group=on.group, num_experts=E)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=(P(), *[P("ep")] * 3), out_specs=P("ep"))
    d_scale = jax.jit(jax.grad(lambda s: jnp.sum(mapped(s, x, ids, w))))(jnp.float32(2))
    value = jax.jit(mapped)(jnp.float32(1), x, ids, w)
    np.testing.assert_allclose(d_scale, jnp.sum(value), rtol=1e-4)


def test_replicated_tokens():
    """X the same on all ranks: its gradient is the sum of the ranks'."""
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        return layer(x, ids, w, on.group)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=(P(), P("ep"), P("ep")), out_specs=P("ep"))
    tiled = jax.shard_map(shard, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"))
    got = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, ids, w))))(x[:T])
    want = jax.jit(jax.grad(lambda x: jnp.sum(tiled(x, ids, w))))(jnp.tile(x[:T], (R, 1)))
    np.testing.assert_allclose(got, want.reshape(R, T, H).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_a_handle_leaves_shard_map_and_comes_back():
    on = ranks(R)
    x, ids, _ = inputs()
    first = jax.jit(
        jax.shard_map(
            lambda x, ids: jax_ep.dispatch(x, ids, group=on.group, num_experts=E),
            mesh=on.mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )
    )(x, ids)
    second = jax.jit(
        jax.shard_map(
            lambda y, handle: jax_ep.combine(y, handle, group=on.group),
            mesh=on.mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )
    )
    copies = np.asarray(second(jnp.ones_like(first.x), first.handle))
    np.testing.assert_allclose(second(first.x, first.handle), copies * np.asarray(x), rtol=1e-6)


def count_calls(text):
    names = re.findall(r'custom_call_target="(jax_ep_\w+)"', text)
    return {name.removeprefix("jax_ep_"): names.count(name) for name in sorted(set(names))}


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("policy", [None, "save"])
def test_checkpoint(policy, where):
    """Same gradients as without; with the policy nothing is dispatched a second time."""
    on = ranks(R)
    x, ids, w = inputs()
    scale = jnp.float32(1.3)
    policy = jax_ep.save_ep_residuals if policy else None

    def body(x, ids, w, scale):
        expert = lambda rows, sizes: jnp.tanh(rows * scale)
        return jax_ep.moe(x * 2, ids, w, expert, group=on.group, num_experts=E)

    def shard(x, ids, w, scale):
        block = jax.checkpoint(body, policy=policy) if where == "inside" else body
        return block(block(x, ids, w, scale), ids, w, scale)

    def gradient(function):
        mapped = jax.shard_map(
            function, mesh=on.mesh, in_specs=(*[P("ep")] * 3, P()), out_specs=P("ep"), check_vma=True
        )
        if where == "around" and function is shard:
            mapped = jax.checkpoint(mapped, policy=policy)
        loss = lambda x, w, scale: jnp.sum(mapped(x, ids, w, scale) ** 2)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    def plain(x, ids, w, scale):
        return body(body(x, ids, w, scale), ids, w, scale)

    compiled = gradient(shard).lower(x, w, scale).compile()
    for got, want in zip(compiled(x, w, scale), gradient(plain)(x, w, scale), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    calls = count_calls(compiled.as_text())
    # Two layers forward; backward one cached dispatch and one combine each.
    assert calls["cached_dispatch"] == 2
    if policy is not None:
        assert calls["dispatch"] == 2


def test_checkpoint_around_scan():
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        block = jax.checkpoint(
            lambda carry, _: (layer(carry, ids, w, on.group), None), policy=jax_ep.save_ep_residuals
        )
        return jax.lax.scan(block, x, None, length=4)[0]

    def plain(x, ids, w):
        for _ in range(4):
            x = layer(x, ids, w, on.group)
        return x

    def run(function):
        mapped = jax.shard_map(function, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, ids, w) ** 2)))(x)

    np.testing.assert_allclose(run(shard), run(plain), rtol=1e-5, atol=1e-6)


def test_one_layer_is_two_calls_and_no_other_collective():
    on = ranks(R)
    x, ids, w = inputs()
    mapped = jax.shard_map(lambda *a: layer(*a, on.group), mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"))
    text = jax.jit(mapped).lower(x, ids, w).compile().as_text()
    assert count_calls(text) == {"combine": 1, "dispatch": 1}
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text
    loss = lambda x, w: jnp.sum(mapped(x, ids, w) ** 2)
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile().as_text()
    assert count_calls(text) == {"cached_dispatch": 1, "combine": 2, "dispatch": 1}
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


def test_unused_results_are_removed():
    """The ops are pure: a dispatch whose result nobody reads is not run."""
    on = ranks(R)
    x, ids, _ = inputs()

    def shard(x, ids):
        jax_ep.dispatch(x, ids, group=on.group, num_experts=E)
        return x * 2

    mapped = jax.jit(jax.shard_map(shard, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep")))
    assert count_calls(mapped.lower(x, ids).compile().as_text()) == {}


def test_many_launches_without_waiting():
    on = ranks(R)
    x, ids, w = inputs()
    mapped = jax.jit(
        jax.shard_map(lambda *a: layer(*a, on.group), mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"))
    )
    results = [mapped(x * i, ids, w) for i in range(100)]
    np.testing.assert_allclose(results[99], dense(x * 99, ids, w), rtol=1e-5, atol=1e-5)
