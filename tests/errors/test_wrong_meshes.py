"""Programs that run on another mesh than that of their group."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats
from devices import make_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import num_processes

import jax_ep

pytestmark = pytest.mark.processes

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])
ORDERS = pytest.mark.parametrize("order", ["rank", "expert"])
TIMEOUT_S = 60


def layer_of(group, order):
    def layer(x, ids):
        sent = jax_ep.dispatch(x, ids, group=group, num_experts=8, order=order)
        return jax_ep.combine(sent.x, sent.handle)

    return layer


def compile_for(rows, function):
    ids = np.arange(2 * rows, dtype=np.int32).reshape(rows, 2) * 3 % 8
    return functools.partial(jax.jit(function), floats((rows, 3)), ids)


def compile_layer(group, mesh, axes, order, check_vma=True):
    """A dispatch and a combine of `group` on a mesh, over whose axes the tokens are sharded."""
    layer, spec = layer_of(group, order), P(axes)
    run = jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return compile_for(4 * int(np.prod([mesh.shape[axis] for axis in axes])), run)


def check_refused(group, run, told):
    """The program fails, and long before a time-out. On GPUs the next thing to be asked says why."""
    begin = time.monotonic()
    if jax.default_backend() == "cpu":
        with pytest.raises(jax.errors.JaxRuntimeError, match=told):
            np.asarray(run())
        group.check()  # nothing is late
    else:
        # An error may only say another domain failed. `run()` would gather results from all processes, but
        # a process whose call has raised does not take part.
        program = run.func.lower(*run.args).compile()
        errors = (jax.errors.JaxRuntimeError, jax_ep.PeerTimeoutError)
        with pytest.raises(errors, match=r"another mesh|whose error says why"):
            _ = jax.block_until_ready(program(*run.args)), group.check()
    assert time.monotonic() - begin < TIMEOUT_S / 2


@ORDERS
def test_ranks_that_are_swapped(order):
    """Ranks 0 and 3 are in the right places; they do not wait for the others, whose calls are wrong."""
    mesh = make_mesh((4,), ("swapped",))
    turned = Mesh(mesh.devices[[0, 2, 1, 3]], ("swapped",))
    with jax_ep.Group(mesh, "swapped", timeout_s=TIMEOUT_S) as group:
        run = compile_layer(group, turned, ("swapped",), order)
        check_refused(group, run, r"another mesh: device [12] runs as rank")


@ORDERS
@CHECK_VMA
def test_ranks_that_change_their_list(check_vma, order):
    """Devices 1 and 3 keep their rank, but exchange rows with others."""
    mesh = make_mesh((2, 2), ("other", "mine"))
    turned = Mesh(mesh.devices[[[0, 1], [1, 0]], [0, 1]], mesh.axis_names)
    with jax_ep.Group(mesh, "mine", timeout_s=TIMEOUT_S) as group:
        run = compile_layer(group, turned, mesh.axis_names, order, check_vma)
        told = r"another mesh: its rank [01] runs in another list of ranks than its rank [01]; make the Group"
        check_refused(group, run, told)


@pytest.mark.skipif(num_processes() > 1, reason="processes without the error wait in XLA's collective")
@CHECK_VMA
def test_ranks_that_change_their_host(check_vma):
    mesh = make_mesh((4,), ("moved",))
    turned = Mesh(mesh.devices[[0, 3, 2, 1]], ("moved",))
    with jax_ep.Group(mesh, "moved", timeout_s=TIMEOUT_S, ranks_per_domain=2) as group:
        run = compile_layer(group, turned, ("moved",), "rank", check_vma)
        check_refused(group, run, r"one group per domain\).* was made for another mesh")


@ORDERS
@CHECK_VMA
def test_lists_in_another_order(check_vma, order):
    """They exchange no rows, so neither their order matters, nor the axes that tell them apart."""
    mesh = make_mesh((2, 2, 1), ("a", "mine", "b"))
    turned = Mesh(mesh.devices[::-1].swapaxes(0, 2), ("c", "mine", "d"))
    axes = ("d", "c", "mine")
    with jax_ep.Group(mesh, "mine") as group, jax_ep.Group(turned, "mine") as right:
        runs = [compile_layer(each, turned, axes, order, check_vma) for each in (group, right)]
        np.testing.assert_array_equal(runs[0](), runs[1]())
        group.check()


def test_lists_of_equal_rows():
    """Results vary along no axis that the rows do not vary along, or else shard_map would raise an error."""
    mesh = make_mesh((2, 2), ("other", "mine"))
    with jax_ep.Group(mesh, "mine") as group:
        # By expert each of a token's two choices brings its row back.
        np.testing.assert_array_equal(compile_layer(group, mesh, ("mine",), "expert")(), 2 * floats((8, 3)))


def compile_batch(group, mesh, check_vma):
    """A batch of layers, spread over "other" by `spmd_axis_name`; and what they compute."""

    def layer(x, ids):
        sent = jax_ep.dispatch(x, ids, group=group, num_experts=8, order="expert")
        factor = 1 + jax.lax.axis_index("mine")
        return jax_ep.combine(sent.x * factor.astype(x.dtype), sent.handle)

    options = {"mesh": mesh, "in_specs": P("mine"), "out_specs": P("mine"), "check_vma": check_vma}
    run = jax.jit(jax.vmap(jax.shard_map(layer, **options), spmd_axis_name="other"))
    x, ids = floats((2, 8, 3)), np.arange(32, dtype=np.int32).reshape(2, 8, 2) * 3 % 8

    sharding = NamedSharding(mesh, P("other", "mine"))
    call = functools.partial(run, *jax.device_put((x, ids), sharding))
    return call, x * (1 + ids // 4).sum(axis=-1, keepdims=True).astype(np.float32)


@CHECK_VMA
def test_lists_along_which_a_batch_is_spread(check_vma):
    """`jax.vmap` lets rows vary along an axis that nobody knew of where the layer was traced."""
    mesh = make_mesh((2, 2), ("other", "mine"))
    turned = Mesh(mesh.devices[[[0, 1], [1, 0]], [0, 1]], mesh.axis_names)
    with jax_ep.Group(mesh, "mine", timeout_s=TIMEOUT_S) as group:
        run, expected = compile_batch(group, mesh, check_vma)
        np.testing.assert_array_equal(run(), expected)
        check_refused(group, compile_batch(group, turned, check_vma)[0], "another list of ranks")


@CHECK_VMA
def test_lists_along_an_axis_of_an_outer_shard_map(check_vma):
    mesh = make_mesh((2, 2), ("outer", "mine"))
    turned = Mesh(mesh.devices[[[0, 1], [1, 0]], [0, 1]], mesh.axis_names)
    with jax_ep.Group(mesh, "mine", timeout_s=TIMEOUT_S) as group:

        def outer(x, ids):
            layer, spec = layer_of(group, "expert"), P("mine")
            options = {"axis_names": {"mine"}, "check_vma": check_vma}
            return jax.shard_map(layer, in_specs=spec, out_specs=spec, **options)(x, ids)

        def compile_on(mesh):
            options = {"axis_names": {"outer"}, "check_vma": check_vma}
            spec = P("outer")
            return compile_for(16, jax.shard_map(outer, mesh=mesh, in_specs=spec, out_specs=spec, **options))

        right = compile_layer(group, mesh, mesh.axis_names, "expert", check_vma)()
        np.testing.assert_array_equal(compile_on(mesh)(), right)
        check_refused(group, compile_on(turned), "another list of ranks")


LOCAL_OPS = {
    "permute": lambda x, ids: jax_ep.permute(x, ids, num_local_experts=8).x,
    "unpermute": lambda x, ids: jax_ep.unpermute(x, ids),
    "get_dispatch_layout": lambda x, ids: jax_ep.get_dispatch_layout(ids, num_experts=8, num_ranks=2),
    "grouped_dot": lambda x, ids: jax_ep.grouped_dot(x, x[None], jnp.array([8], jnp.int32)),
}
LAYERS = ["dispatch", "dispatch of a batch of batches", "shard_map in vmap"]


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("name", [*LAYERS, *LOCAL_OPS])
def test_rejects_batch_that_explicit_axis_shards(name, implementation):
    mesh = make_mesh((2, 2), ("other", "mine"), AxisType.Explicit)
    with jax_ep.Group(mesh, "mine") as group, jax.set_mesh(mesh):

        def layer(x, ids):
            sent = jax_ep.dispatch(x, ids, group=group, num_experts=8, implementation=implementation)
            return jax_ep.combine(sent.x, sent.handle, implementation=implementation)

        of_ranks = lambda function, *batch: jax.shard_map(
            function, in_specs=P(*batch, "mine"), out_specs=P(*batch, "mine"), axis_names={"mine"}
        )
        run = {
            "dispatch": of_ranks(jax.vmap(layer), None),
            "dispatch of a batch of batches": of_ranks(jax.vmap(jax.vmap(layer)), None, None),
            "shard_map in vmap": jax.vmap(of_ranks(layer)),
        }.get(name) or jax.vmap(LOCAL_OPS[name])
        batches = ["other"] + [None] * ("batches" in name)
        shape = [2] * len(batches)

        def put(dtype):
            rows = "mine" if name in LAYERS else None
            return jax.device_put(jnp.zeros((*shape, 8, 8), dtype), NamedSharding(mesh, P(*batches, rows)))

        with pytest.raises(ValueError, match=r"no Explicit mesh axis may .* over 'other'; make"):
            jax.jit(run)(put(jnp.float32), put(jnp.int32))
