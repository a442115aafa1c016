"""Groups: identity, life, and ranks that never come."""

import contextlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats
from conftest import make_mesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep


def doubled(group, mesh):
    """Every token to expert 0 and back, twice the value."""

    def shard(x):
        ids = jnp.zeros((len(x), 1), jnp.int32)
        d = jax_ep.dispatch(x, ids, group=group, num_experts=group.size, implementation="ffi")
        return jax_ep.combine(d.x * 2, d.handle, group=group, implementation="ffi")

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names)))


def test_equality_and_hash():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    one = jax_ep.Group(mesh, "ep")
    same = jax_ep.Group(mesh, "ep", timeout_s=3)
    assert one == same
    assert hash(one) == hash(same)
    assert one.size == 4
    assert one.axis_name == "ep"
    renamed = Mesh(mesh.devices, ("dp", "x"))
    permuted = Mesh(mesh.devices[:, ::-1], ("dp", "ep"))
    transposed = Mesh(mesh.devices.T, ("ep", "dp"))
    assert one != jax_ep.Group(renamed, "x")
    assert one != jax_ep.Group(permuted, "ep")
    assert one == jax_ep.Group(transposed, "ep")  # the same ranks and groups
    assert one != jax_ep.Group(mesh, ("dp", "ep"))
    assert one != "ep"


@pytest.mark.parametrize("num_sms", [1, 0, -3])
def test_too_few_sms(num_sms):
    with pytest.raises(ValueError, match=f"num_sms must be at least 2 .*got {num_sms}"):
        jax_ep.Group(make_mesh((4,), ("ep",)), "ep", num_sms=num_sms)


def test_equal_groups_share_their_state_until_the_last_close():
    mesh = make_mesh((4,), ("closed",))  # other tests keep a group of "ep" open
    x = floats((8, 3))
    one, two = jax_ep.Group(mesh, "closed"), jax_ep.Group(mesh, "closed")
    run = doubled(one, mesh)
    np.testing.assert_allclose(run(x), 2 * x)
    one.close()
    one.close()  # twice is fine
    np.testing.assert_allclose(run(x * 3), 6 * x)  # two still holds the state
    two.close()
    if jax.default_backend() == "cpu":  # on GPUs a recorded graph runs without asking the handler
        with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
            jax.block_until_ready(run(x))
    with pytest.raises(RuntimeError, match="closed"):
        one.check()
    with pytest.raises(RuntimeError, match="closed"):
        doubled(one, mesh)(x)
    with jax_ep.Group(mesh, "closed"):
        np.testing.assert_allclose(run(x), 2 * x)  # made anew, the old program runs again


def test_close_waits_for_work_in_flight():
    mesh = make_mesh((4,), ("flight",))
    x = floats((400, 500))
    for _ in range(5):
        with jax_ep.Group(mesh, "flight") as group:
            run = doubled(group, mesh)
            y = x
            for _ in range(10):
                y = run(y) / 2
        np.testing.assert_allclose(y, x, rtol=1e-6)


def test_jitted_code_closes_over_an_equal_group():
    """A group is static: an equal one made later finds the compiled program."""
    mesh = make_mesh((2,), ("ep",))
    traces = []

    @jax.jit
    def run(handle_and_x):
        traces.append(1)
        handle, x = handle_and_x
        return jax.tree.map(lambda a: a + 0, handle), x

    def handle_of(group):
        shard = lambda x: jax_ep.dispatch(x, jnp.zeros((2, 1), jnp.int32), group=group, num_experts=2).handle
        mapped = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        return mapped(jnp.ones((4, 1)))

    for _ in range(2):
        with jax_ep.Group(mesh, "ep") as group:
            run((handle_of(group), 1.0))
    assert len(traces) == 1


def skipping_dispatch(group, mesh):
    """A dispatch that the ranks in a list pass by."""

    def shard(missing, x):
        absent = jnp.isin(jax.lax.axis_index("gone"), missing)
        ids = jnp.zeros((2, 1), jnp.int32)

        def send():
            return jax_ep.dispatch(x, ids, group=group, num_experts=4, implementation="ffi").x[:2]

        return jax.lax.cond(absent, lambda: x, send)

    spec = P("gone")
    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(P(), spec), out_specs=spec))


@pytest.mark.parametrize("first_call", [True, False])
@pytest.mark.parametrize("missing", [[3], [0, 2]])
def test_a_rank_that_never_arrives(missing, first_call):
    """The others get an error that names group, op and ranks, in time; then work goes on."""
    mesh = make_mesh((4,), ("gone",))
    x = floats((8, 3))
    names = " ".join(map(str, missing))
    expected = rf"dispatch: of group Group\('gone', [cg]pu devices .*rank\(s\) {names} did not arrive"
    with jax_ep.Group(mesh, "gone", timeout_s=1.0) as group:
        run = skipping_dispatch(group, mesh)
        if not first_call:
            jax.block_until_ready(run(jnp.array([-1] * len(missing)), x))
        begin = time.monotonic()
        # On a GPU only the first call can fail; later ones tell with the next op, or check.
        told_later = not first_call and jax.default_backend() == "gpu"
        with (
            contextlib.nullcontext()
            if told_later
            else pytest.raises(jax.errors.JaxRuntimeError, match=expected)
        ):
            jax.block_until_ready(run(jnp.array(missing), x))
        assert time.monotonic() - begin < 10
        with pytest.raises(jax_ep.PeerTimeoutError, match=expected):
            group.check()
    with jax_ep.Group(mesh, "gone") as group:
        group.check()
        np.testing.assert_allclose(doubled(group, mesh)(x), 2 * x)


def test_stats():
    with jax_ep.Group(make_mesh((2,), ("ep",)), "ep") as group:
        stats = group.stats()
        assert (stats.implementation, stats.reason) == ("ffi", "")
        on_gpu = jax.default_backend() == "gpu"
        assert stats.device_bytes <= 2**20
        assert (stats.device_bytes > 0) == on_gpu
    with pytest.raises(RuntimeError, match=r"stats: .* is closed"):
        group.stats()


def test_the_newest_timeout_holds():
    mesh = make_mesh((2,), ("brief",))
    with jax_ep.Group(mesh, "brief", timeout_s=500), jax_ep.Group(mesh, "brief", timeout_s=0.2) as group:

        def shard(x):
            send = lambda: jax_ep.dispatch(x, jnp.zeros((1, 1), jnp.int32), group=group, num_experts=2).x[:1]
            return jax.lax.cond(jax.lax.axis_index("brief") == 0, lambda: x, send)

        run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("brief"), out_specs=P("brief")))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"within 0\.2 s"):
            jax.block_until_ready(run(jnp.ones((2, 1))))


def check_after(group, result):
    """On GPUs it may be a kernel that finds out; then check tells."""
    jax.block_until_ready(result)
    group.check()


def test_a_program_on_other_devices_than_the_group_s():
    """Same axis sizes, other devices: only the handler can see it."""
    mesh = make_mesh((4,), ("turned",))
    other = Mesh(mesh.devices[::-1], ("turned",))
    with jax_ep.Group(mesh, "turned") as group:
        run = doubled(group, other)
        errors = (jax.errors.JaxRuntimeError, jax_ep.PeerTimeoutError)
        with pytest.raises(errors, match="made for another mesh"):
            check_after(group, run(jnp.ones((4, 2))))
    with jax_ep.Group(mesh, "turned") as group:
        np.testing.assert_allclose(doubled(group, mesh)(jnp.ones((4, 2))), 2 * np.ones((4, 2)))
