"""The ops on meshes of every kind: Auto and Explicit, permuted, with several groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, pairwise
from devices import make_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import R, dense, dense_gradients, inputs, layer

import jax_ep
from jax_ep import _extension

pytestmark = pytest.mark.processes

# All devices as a mesh of two axes: (2, 4) where there are eight.
OUTER = min(2, R)
INNER = R // OUTER


def check_layer(mesh, group, spec, *, check_vma=True, put=False):
    x, ids, w = inputs(mesh.size)
    want, want_gradients = dense(x, ids, w), dense_gradients(x, ids, w)
    if put:
        x, ids, w = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, ids, w))
    mapped = jax.shard_map(
        lambda *a: layer(*a, group), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    np.testing.assert_allclose(jax.jit(mapped)(x, ids, w), want, rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x, w, ids: jnp.sum(mapped(x, ids, w) ** 2), argnums=(0, 1)))
    for got, expected in zip(gradient(x, w, ids), want_gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_auto_and_explicit_meshes(kind, check_vma):
    mesh = make_mesh((R,), ("ep",), kind)
    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        check_layer(mesh, group, P("ep"), check_vma=check_vma, put=True)


def test_permuted_devices():
    order = [rank for rank in (3, 1, 0, 2, 7, 5, 4, 6) if rank < R]
    devices = make_mesh((R,), ("ep",)).devices[order]
    mesh = Mesh(devices, ("ep",))
    with jax_ep.Group(mesh, "ep") as group:
        check_layer(mesh, group, P("ep"))


@pytest.mark.parametrize("shape", [(OUTER, INNER), (INNER, OUTER), (R, 1), (1, R)])
def test_independent_groups_of_a_mesh(shape):
    mesh = make_mesh(shape, ("dp", "ep"))
    with jax_ep.Group(mesh, "ep") as group:
        assert group.size == shape[1]
        check_layer(mesh, group, P(("dp", "ep")))


@pytest.mark.one_jax
@pytest.mark.skipif(R < 8, reason="Three axes of two devices each.")
def test_gated_experts_divided_over_a_third_axis():
    """With a shared expert, all of them divided by columns, in an Explicit mesh."""
    tokens, width, inner, experts, k = 12, 32, 24, 4, 2
    mesh = make_mesh((2, 2, 2), ("dp", "ep", "tp"), AxisType.Explicit)
    by_token, up, down = P(("dp", "ep")), P("ep", None, None, "tp"), P("ep", "tp")
    specs = (by_token, by_token, up, down, P(None, None, None, "tp"), P(None, "tp"))
    shapes = (
        (4 * tokens, width),
        (4 * tokens, k),
        (experts, width, 2, inner),
        (experts, inner, width),
        (1, width, 2, inner),
        (1, inner, width),
    )
    arrays = [floats(shape, seed=i) * 0.3 for i, shape in enumerate(shapes)]
    ids = np.random.default_rng(0).integers(0, experts, (4 * tokens, k)).astype(np.int32)

    def of_mesh(ids, x, weights, w_up, w_down, *shared):
        made = jax_ep.GatedExperts(w_up, w_down)
        options = {"group": group, "shared": jax_ep.GatedExperts(*shared)}
        return jax.lax.psum(jax_ep.moe(x, ids, weights, made, **options), "tp")

    def of_all(ids, x, weights, w_up, w_down, shared_up, shared_down):
        def rows(w_up, w_down):
            gate, up = jnp.einsum("th,ehpf->petf", x, w_up)
            return jnp.einsum("etf,efh->teh", jax.nn.silu(gate) * up, w_down)

        chosen = jnp.sum(jax.nn.one_hot(ids, experts) * weights[..., None], axis=1)
        return jnp.einsum("te,teh->th", chosen, rows(w_up, w_down)) + rows(shared_up, shared_down)[:, 0]

    def gradients(function, arrays, ids):
        loss = lambda arrays: jnp.sum(jnp.sin(function(ids, *arrays)))
        return jax.jit(jax.value_and_grad(loss))(arrays)

    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        mapped = jax.shard_map(of_mesh, mesh=mesh, in_specs=(by_token, *specs), out_specs=by_token)
        put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        got = gradients(mapped, put, jax.device_put(ids, NamedSharding(mesh, by_token)))
    want = gradients(of_all, [jnp.asarray(array) for array in arrays], ids)
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.max(np.abs(other)))


def test_a_group_over_the_first_axis():
    mesh = make_mesh((INNER, OUTER), ("ep", "dp"))
    with jax_ep.Group(mesh, "ep") as group:
        check_layer(mesh, group, P(("ep", "dp")))


@pytest.mark.parametrize("axes", [("a", "b"), pytest.param(("b", "a"), marks=pytest.mark.one_jax)])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_a_group_over_two_axes(axes, implementation):
    """Ranks are row-major over the axes as named: each rank's rows arrive where axis_index says."""
    mesh = make_mesh((OUTER, INNER), ("a", "b"))
    ids = (np.arange(R)[None] * np.ones((R, 1), np.int32)).astype(np.int32)  # one token to every rank

    with jax_ep.Group(mesh, axes) as group:

        def shard(ids):
            me = jax.lax.axis_index(axes).astype(jnp.float32)
            d = jax_ep.dispatch(
                me[None, None], ids, group=group, num_experts=R, implementation=implementation
            )
            back = jax_ep.combine(d.x, d.handle, implementation=implementation)
            return d.x, back

        rows, back = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))(ids)
        np.testing.assert_array_equal(rows.reshape(R, R), np.tile(np.arange(R), (R, 1)))
        np.testing.assert_array_equal(back[:, 0], np.arange(R) * R)


def test_two_groups_of_different_axes_in_one_program():
    mesh = make_mesh((OUTER, INNER), ("a", "b"))
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


def test_an_axis_left_to_automatic_sharding(open_group):
    """Its devices repeat the work: that is said once, and the result is right."""
    mesh = make_mesh((2, 2), ("dp", "ep"))
    group = open_group(mesh, "ep")
    _extension.warn_once.cache_clear()
    x, ids, w = inputs(2)
    mapped = jax.shard_map(
        lambda *shards: layer(*shards, group),
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
        axis_names={"ep"},
    )
    with pytest.warns(RuntimeWarning, match=r"leaves the mesh axes \('dp',\) to automatic sharding"):
        y = jax.jit(mapped)(x, ids, w)
    np.testing.assert_allclose(y, dense(x, ids, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "spec", "order"),
    [
        pytest.param(*case, marks=[] if case[2] == "expert" else pytest.mark.one_jax)
        for case in pairwise(["ffi", "xla"], [P(("ep", "dp")), P("ep", "dp")], ["rank", "expert"])
    ],
)
def test_rows_that_are_sharded_over_another_explicit_axis(implementation, spec, order):
    """In a shard_map over the group's axis alone: results and gradients are those of whole rows."""
    mesh = make_mesh((OUTER, INNER), ("dp", "ep"), AxisType.Explicit)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8 * INNER, 2 * OUTER)).astype(np.float32)
    ids = rng.integers(0, 2 * INNER, (8 * INNER, 3)).astype(np.int32)
    weights = rng.random((8 * INNER, 3), np.float32)

    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):

        def shard(x, ids, weights):
            options = {"group": group, "num_experts": 2 * INNER, "implementation": implementation}
            sent = jax_ep.dispatch(x, ids, weights, order=order, **options)
            by_rank = order == "rank"
            again = jax_ep.redispatch(x, sent.handle, implementation=implementation)
            y = sent.x * again if not by_rank else sent.x * jnp.sum(sent.topk_weights, axis=1, keepdims=True)
            row_weights = None if by_rank else sent.row_weights
            return jax_ep.combine(
                y, sent.handle, row_weights=row_weights, bias=x, implementation=implementation
            )

        mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})
        function = lambda x, weights, ids: jnp.sum(mapped(x, ids, weights) ** 2)
        specs = []

        @jax.jit
        def run(x, weights, ids):
            value, gradients = jax.value_and_grad(function, argnums=(0, 1))(x, weights, ids)
            specs.append(jax.typeof(gradients[0]).sharding.spec)
            return value, gradients

        put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
        rows = P(spec[0])
        value, gradients = run(put(x, spec), put(weights, rows), put(ids, rows))
        want, wanted = run(put(x, P("ep")), put(weights, P("ep")), put(ids, P("ep")))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert specs[0][0] == spec[0]
    for got, expected in zip(gradients, wanted, strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_local_ops_on_arrays_that_are_sharded_over_an_explicit_axis(implementation):
    mesh = make_mesh((R,), ("x",), AxisType.Explicit)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4 * R, 3)).astype(np.float32)
    ids = rng.integers(-1, 3, (4 * R, 2)).astype(np.int32)

    @jax.jit
    def there_and_back(rows, ids):
        there = jax_ep.permute(rows, ids, num_local_experts=3, implementation=implementation)
        back = jax_ep.unpermute(there.x, there.row_map, implementation=implementation)
        options = {"num_experts": 3, "num_ranks": 3, "implementation": implementation}
        return there.x, back, jax_ep.get_dispatch_layout(ids, **options)

    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, P("x")))
        got = there_and_back(put(rows), put(ids))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(there_and_back(rows, ids)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("implementation", ["ffi", pytest.param("xla", marks=pytest.mark.one_jax)])
def test_vmap_on_explicit_mesh(implementation):
    """Over a batch that no axis shards."""
    mesh = make_mesh((OUTER, INNER), ("dp", "ep"), AxisType.Explicit)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 8 * INNER, 2)).astype(np.float32)
    ids = rng.integers(0, 2 * INNER, (3, 8 * INNER, 3)).astype(np.int32)
    weights = rng.random((3, 8 * INNER, 3), np.float32)

    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):

        def layer(x, ids, weights):
            options = {"group": group, "num_experts": 2 * INNER, "implementation": implementation}
            return jax_ep.moe(x, ids, weights, lambda sent: sent.x, **options)

        def gradient_of(function, batch):
            spec = P(*batch, "ep")
            mapped = jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names={"ep"})
            gradient = jax.jit(jax.grad(lambda x, w, ids: jnp.sum(mapped(x, ids, w) ** 2), (0, 1)))
            put = lambda array: jax.device_put(array, NamedSharding(mesh, spec))
            return lambda *arrays: gradient(*map(put, arrays))

        got, one_by_one = gradient_of(jax.vmap(layer), [None])(x, weights, ids), gradient_of(layer, [])
        for i in range(3):
            wanted = one_by_one(x[i], weights[i], ids[i])
            for one, want in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one[i], want, rtol=1e-5, atol=1e-6)
