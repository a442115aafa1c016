"""The ops on meshes of every kind: Auto and Explicit, permuted, with several groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import R, dense, dense_gradients, inputs, layer

import jax_ep
from jax_ep import _extension

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


def test_a_group_over_the_first_axis():
    mesh = make_mesh((INNER, OUTER), ("ep", "dp"))
    with jax_ep.Group(mesh, "ep") as group:
        check_layer(mesh, group, P(("ep", "dp")))


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
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
