"""Groups: identity, life, and ranks that never come."""

import contextlib
import functools
import pathlib
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats
from devices import make_mesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._group import handshake, memory


def doubled(group, mesh):
    """Every token to expert 0 and back, twice the value."""

    def shard(x):
        ids = jnp.zeros((len(x), 1), jnp.int32)
        options = {"order": "rank", "implementation": "ffi"}
        d = jax_ep.dispatch(x, ids, group=group, num_experts=group.size, **options)
        return jax_ep.combine(d.x * 2, d.handle, implementation="ffi")

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names)))


def test_equality_and_hash(open_group):
    mesh = make_mesh((2, 4), ("dp", "ep"))
    one = open_group(mesh, "ep")
    same = open_group(mesh, "ep", timeout_s=3)
    assert one == same
    assert hash(one) == hash(same)
    assert one.size == 4
    assert one.axis_name == "ep"
    renamed = Mesh(mesh.devices, ("dp", "x"))
    permuted = Mesh(mesh.devices[:, ::-1], ("dp", "ep"))
    transposed = Mesh(mesh.devices.T, ("ep", "dp"))
    assert one != open_group(renamed, "x")
    assert one != open_group(permuted, "ep")
    assert one == open_group(transposed, "ep")  # the same ranks and groups
    assert one != open_group(mesh, ("dp", "ep"))
    assert one != "ep"


@pytest.mark.parametrize("num_sms", [1, 0, -3])
def test_too_few_sms(num_sms):
    with pytest.raises(ValueError, match=f"num_sms must be between 2 and .*got {num_sms}"):
        jax_ep.Group(make_mesh((4,), ("ep",)), "ep", num_sms=num_sms)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), -float("inf")])
def test_no_time_out(timeout_s):
    with pytest.raises(ValueError, match=f"timeout_s must be positive, got {timeout_s}"):
        jax_ep.Group(make_mesh((4,), ("ep",)), "ep", timeout_s=timeout_s)


@pytest.mark.one_jax
@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10, 1e300, 1e9])
def test_very_long_time_outs(timeout_s):
    """A rank that is late is waited for: neither nanoseconds nor deadlines overflow."""
    mesh = make_mesh((4,), ("patient",))

    def shard(x):
        send = lambda x: jax_ep.dispatch(x, jnp.zeros((2, 1), jnp.int32), group=group, num_experts=4).x
        slow = lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: jnp.sin(y @ jnp.ones((64, 64)) / 64), x)
        return send(jax.lax.cond(jax.lax.axis_index("patient") == 0, slow, lambda x: x, x))

    with jax_ep.Group(mesh, "patient", timeout_s=timeout_s) as group:
        run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("patient"), out_specs=P("patient")))
        jax.block_until_ready(run(jnp.ones((8, 64))))
        group.check()


class FakeGpus:
    """What the extension does for a group on GPUs, as far as it can be pretended."""

    def __init__(self):
        self.log = []
        self.failed = False
        self.busy = threading.Lock()
        self.module = SimpleNamespace(
            group_bytes=lambda num_ranks: 4096,
            has_expired=lambda key: self.failed,
            last_epoch=lambda key: 2**31 + 5,
            last_call=lambda key: 7,
            reset_device_group=self.reset,
            open_device_group=self.open,
        )

    def reserving(self, size):
        assert size == 4096

        def program(x):
            time.sleep(0.02)  # so that threads meet
            (device,) = jnp.asarray(x).devices()
            self.log.append(("reserve", device.id))
            return jnp.array([device.id << 8, device.id + 1], jnp.uint32)

        return program

    def reset(self, key, epoch, calls):
        self.log.append(("reset", epoch, calls))
        self.failed = False
        return ""

    def open(self, key, ranks, num_ranks):
        assert self.busy.acquire(blocking=False), "two threads prepare a group at once"
        time.sleep(0.02)
        self.log.append(("open", num_ranks))
        self.ranks = ranks
        self.busy.release()
        return ""


@pytest.fixture
def fake_gpus(monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("pretends on the CPU")
    fake = FakeGpus()
    monkeypatch.setattr(memory, "_reserving", fake.reserving)
    monkeypatch.setattr(memory, "_controls", {})
    return fake


def test_threads_that_make_equal_groups_reserve_memory_once(fake_gpus):
    mesh = make_mesh((4,), ("ep",))
    devices = list(mesh.devices)
    with jax_ep.Group(mesh, "ep") as group:
        reasons = []
        open_it = lambda: reasons.append(group._open_on_gpus(fake_gpus.module, devices))
        threads = [threading.Thread(target=open_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert reasons == [""] * 4
    assert sorted(entry for entry in fake_gpus.log if entry[0] == "reserve") == [
        ("reserve", device.id) for device in devices
    ]
    assert fake_gpus.log.count(("open", 4)) == 4
    assert fake_gpus.ranks == [
        (device.local_hardware_id, device.id << 8 | device.id + 1 << 32, 0, 0) for device in devices
    ]


def test_a_group_is_made_while_a_function_is_traced(fake_gpus):
    mesh = make_mesh((2,), ("ep",))

    @jax.jit
    def traced(x):
        with jax_ep.Group(mesh, "ep") as group:
            assert group._open_on_gpus(fake_gpus.module, list(mesh.devices)) == ""
            fake_gpus.failed = True
            assert group._open_on_gpus(fake_gpus.module, list(mesh.devices)) == ""
        return x

    traced(1.0)
    assert [entry[0] for entry in fake_gpus.log] == ["reserve", "reserve", "open", "reset", "open"]


def test_a_failed_group_is_reset_after_what_was_launched_before(fake_gpus, monkeypatch):
    mesh = make_mesh((2,), ("ep",))
    devices = list(mesh.devices)
    drain = lambda devices, limit_s: fake_gpus.log.append(("drain", len(devices)))
    monkeypatch.setattr(handshake, "drain", drain)
    fake_gpus.failed = True
    with jax_ep.Group(mesh, "ep") as group:
        assert group._open_on_gpus(fake_gpus.module, devices) == ""
    assert fake_gpus.log[2:] == [("drain", 2), ("reset", 2**31 + 5, 7), ("open", 2)]


def test_a_wait_that_ends():
    release = threading.Event()
    with pytest.raises(
        handshake.SetupTimeout, match=r"Group: knocking did not end within 0\.1 s in process 0"
    ):
        handshake.run_within(0.1, "knocking", release.wait)
    release.set()
    assert handshake.run_within(60, "knocking", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        handshake.run_within(60, "knocking", lambda: 1 // 0)


def test_what_cannot_end_is_told_by_name(fake_gpus, monkeypatch):
    def stuck(devices, limit_s):
        raise handshake.SetupTimeout("Group: waiting for earlier programs did not end")

    monkeypatch.setattr(handshake, "drain", stuck)
    fake_gpus.failed = True
    mesh = make_mesh((2,), ("ep",))
    with (
        jax_ep.Group(mesh, "ep") as group,
        pytest.raises(jax_ep.PeerTimeoutError, match="waiting for earlier programs"),
    ):
        group._open_on_gpus(fake_gpus.module, list(mesh.devices))


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


@pytest.mark.one_jax
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
        info = group.info()
        assert (info.implementation, info.reason) == ("ffi", "")
        on_gpu = jax.default_backend() == "gpu"
        assert info.device_bytes <= (8 + 36) * 2**20  # the control block, and the arena of few tokens
        assert (info.device_bytes > 0) == on_gpu
    with pytest.raises(RuntimeError, match=r"info: .* is closed"):
        group.info()


@pytest.mark.no_gpu
@pytest.mark.parametrize("ranks_per_domain", [None, 1])
def test_another_option_of_an_equal_group_warns_and_counts(open_group, ranks_per_domain):
    mesh = make_mesh((2,), ("options",))
    open_equal = functools.partial(open_group, mesh, "options", ranks_per_domain=ranks_per_domain)
    first = open_equal()
    assert first._timeout_s == 300
    open_equal(timeout_s=500, num_sms=4)  # the first was given none
    open_equal(timeout_s=500)
    texts = r"got timeout_s=7.0 and num_sms=6, .*still open has timeout_s=500.0 and num_sms=4\. .*close the"
    with pytest.warns(UserWarning, match=texts) as warned:
        open_equal(timeout_s=7, num_sms=6)
    assert pathlib.Path(warned[0].filename).name == "conftest.py"  # of open_group, which calls Group
    assert open_equal()._timeout_s == 7


def test_equal_groups_share_the_timeout_until_the_last_close():
    mesh = make_mesh((2,), ("brief",))
    with jax_ep.Group(mesh, "brief", timeout_s=0.2), jax_ep.Group(mesh, "brief") as group:

        def shard(x):
            send = lambda: jax_ep.dispatch(x, jnp.zeros((1, 1), jnp.int32), group=group, num_experts=2).x[:1]
            return jax.lax.cond(jax.lax.axis_index("brief") == 0, lambda: x, send)

        run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("brief"), out_specs=P("brief")))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"within 0\.2 s"):
            jax.block_until_ready(run(jnp.ones((2, 1))))
    with jax_ep.Group(mesh, "brief") as group:
        assert group._timeout_s == 300


@pytest.mark.no_gpu
def test_warns_of_too_few_threads(monkeypatch):
    mesh = make_mesh((8,), ("threads",))
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setenv("NPROC", "15")
    with pytest.warns(RuntimeWarning, match=r'so 16 for the 8 devices .* has 15; .*"NPROC"\] = "16"'):
        jax_ep.Group(mesh, "threads").close()
    jax_ep.Group(mesh, "threads").close()  # warns only once
    monkeypatch.setenv("PJRT_NPROC", "2")  # XLA has at least one thread for each of the 8 devices
    jax_ep.Group(Mesh(mesh.devices[:4], ("threads",)), "threads").close()


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
