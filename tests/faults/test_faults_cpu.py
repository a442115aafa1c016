"""Late, missing and mistaken ranks on the CPU; tests/support/faults.py does worse to GPUs."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, weights_of
from devices import make_mesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

RANKS, TOKENS, WIDTH = 4, 6, 3
TIMEOUT_S = 0.5
OPS = ("dispatch", "combine", "gradient")

pytestmark = [
    pytest.mark.one_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="tests/support/faults.py is for GPUs"),
]


class Layer:
    """A program of one kind of op; the sum over its outputs tells nothing, so all of them are compared."""

    def __init__(self, axis, op, order, ranks=RANKS, steps=1):
        self.mesh, self.axis = make_mesh((ranks,), (axis,)), axis
        self.ranks, self.op, self.order, self.steps = ranks, op, order, steps
        rng = np.random.default_rng(3)
        self.x = floats((ranks * TOKENS, WIDTH))
        self.ids = np.stack([rng.permutation(2 * ranks)[:2] for _ in self.x]).astype(np.int32)
        self.weights = rng.random(self.ids.shape, np.float32)

    def open(self, timeout_s=TIMEOUT_S):
        return jax_ep.Group(self.mesh, self.axis, timeout_s=timeout_s)

    def compile(self, group):
        """(x, delays, absent) -> results; a rank sleeps for its delay, and passes by where it is absent."""
        sends = {"group": group, "num_experts": 2 * self.ranks, "order": self.order, "implementation": "ffi"}

        def shard(delay, absent, x, ids, weights):
            x = x + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), delay[0])

            def layer(x, weights):
                sent = jax_ep.dispatch(x, ids, weights, **sends)
                y = sent.x * 2
                row_weights = weights_of(sent) if self.order == "expert" else None
                return jax_ep.combine(y, sent.handle, row_weights=row_weights, implementation="ffi")

            def whole():
                if self.op == "dispatch":
                    return jax_ep.dispatch(x, ids, **sends).x[:TOKENS]
                if self.op == "combine":
                    return layer(x, weights)
                return jax.grad(lambda x: jnp.sum(layer(x, weights) ** 2))(x)

            def step(total, _):
                return total + jax.lax.cond(absent[0], lambda: jnp.zeros_like(x), whole), None

            return jax.lax.scan(step, jnp.zeros_like(x), None, self.steps)[0]

        spec = P(self.axis)
        run = jax.jit(jax.shard_map(shard, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False))

        def call(delays=(), absent=()):
            seconds = np.array([dict(delays).get(rank, 0) for rank in range(self.ranks)], np.float32)
            gone = np.isin(np.arange(self.ranks), absent)
            return run(seconds, gone, self.x, self.ids, self.weights)

        return call


def sleep(seconds):
    time.sleep(float(np.asarray(seconds)))
    return np.zeros((), np.float32)


def wait_for_error(group, run):
    """Launches what must fail; the text that `check` gives, after how many seconds, and what was raised."""
    raised = []

    def launch():
        try:
            jax.block_until_ready(run())
        except jax.errors.JaxRuntimeError as error:
            raised.append(str(error))

    # XLA may hold the caller until the late rank has come; `check` knows before.
    thread = threading.Thread(target=launch)
    begin = time.monotonic()
    thread.start()
    text = ""
    while not text and time.monotonic() - begin < 20:
        try:
            group.check()
            time.sleep(0.01)
        except jax_ep.PeerTimeoutError as error:
            text = str(error)
    took = time.monotonic() - begin
    thread.join(20)
    assert not thread.is_alive()
    return text, took, raised


def assert_named(text, op, axis, missing):
    ops = ("dispatch", "combine") if op == "gradient" else ("dispatch",)
    assert text.startswith(tuple(f"{name}: of group Group('{axis}'" for name in ops)), text
    assert f"rank(s) {' '.join(map(str, missing))} did not arrive" in text


@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_comes_late(op, order):
    """The others are told in time, and so is the late one; then the same program runs again.

    Each op and each order runs alone and in a scan of three steps, but not in all combinations. By rank the
    first rank is late, by expert the last one.
    """
    steps = (1, 3)[(OPS.index(op) + (order == "expert")) % 2]
    layer = Layer("late", op, order, steps=steps)
    with layer.open(30) as group:
        run = layer.compile(group)
        right = np.asarray(run())
    late = 0 if order == "rank" else RANKS - 1
    with layer.open() as group:
        text, took, raised = wait_for_error(group, lambda: run(delays={late: 3 * TIMEOUT_S}))
        assert_named(text, op, "late", [late])
        assert took < 2 * TIMEOUT_S
        assert len(raised) == 1  # no results, right or stale
        assert_named(raised[0].partition(": ")[2], op, "late", [late])
        group.check()  # it has been told
    with layer.open(30) as group:
        np.testing.assert_array_equal(run(), right)
        group.check()


@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("op", ["combine", "gradient"])
def test_ranks_that_never_come(op, order):
    layer = Layer("never", op, order)
    with layer.open(30) as group:
        run = layer.compile(group)
        right = np.asarray(run())
    with layer.open() as group:
        text, took, raised = wait_for_error(group, lambda: run(absent=[1, 2]))
        assert_named(text, op, "never", [1, 2])
        assert took < 2 * TIMEOUT_S
        assert len(raised) == 1
    with layer.open(30) as group:
        np.testing.assert_array_equal(run(), right)


@pytest.mark.slow
def test_late_ranks_again_and_again():
    """At any time around the time-out: an error or right results. Nothing of it holds up the next group,
    which is made while the rank may still be late.
    """
    layer, rng = Layer("often", "gradient", "expert"), np.random.default_rng(0)
    with layer.open(30) as group:
        run = layer.compile(group)
        right = np.asarray(run())
    outcomes = set()
    for _ in range(12):
        seconds = float(rng.uniform(0, 0.4))
        with layer.open(0.2) as group:
            try:
                np.testing.assert_array_equal(run(delays={int(rng.integers(RANKS)): seconds}), right)
                outcomes.add("right")
            except jax.errors.JaxRuntimeError:
                outcomes.add("error")
        begin = time.monotonic()
        with layer.open(3) as group:
            np.testing.assert_array_equal(run(), right)
            group.check()
        assert time.monotonic() - begin < 2
    assert outcomes == {"right", "error"}


def test_other_groups_are_made_while_ops_run():
    layer = Layer("main", "gradient", "expert", ranks=8)
    stop, made, errors = threading.Event(), [], []

    def make_groups():
        try:
            while not stop.is_set():
                for devices in (layer.mesh.devices, layer.mesh.devices[::-1]):
                    with jax_ep.Group(Mesh(devices, ("main",)), "main", timeout_s=20) as group:
                        made.append(group)
        except Exception as error:
            errors.append(error)

    with layer.open(20) as group:
        run = layer.compile(group)
        right = np.asarray(run())
        thread = threading.Thread(target=make_groups)
        thread.start()
        try:
            for i in range(200):
                np.testing.assert_array_equal(run(), right)
                if i >= 30 and len(made) >= 4:
                    break
        finally:
            stop.set()
            thread.join(30)
        assert not errors
        assert len(made) >= 4
        group.check()


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_all_live_arrays_are_deleted(order):
    """Nothing that this package needs may be among them."""
    others = {id(array) for array in jax.live_arrays()}  # which other tests hold
    layer = Layer("bare", "gradient", order, ranks=8)
    with layer.open(20) as group:
        run = layer.compile(group)
        right = np.asarray(run())
        for _ in range(3):
            for array in jax.live_arrays():
                if id(array) not in others:
                    array.delete()
            np.testing.assert_array_equal(run(), right)
        group.check()


@pytest.mark.parametrize("absent", [1, 2])
def test_one_of_several_groups_is_told_by_its_list_of_devices(absent):
    mesh = make_mesh((2, 2), ("other", "mine"))
    with jax_ep.Group(mesh, "mine", timeout_s=TIMEOUT_S) as group:

        def shard(x):
            send = lambda: jax_ep.dispatch(x, jnp.zeros((1, 1), jnp.int32), group=group, num_experts=2).x[:1]
            place = jax.lax.axis_index(("other", "mine"))
            return jax.lax.cond(place == absent, lambda: x, send)

        spec = P(("other", "mine"))
        run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec))
        told = rf"\[\[.*\]\]\) \(list {absent // 2 + 1} of 2\), rank\(s\) {absent % 2} did not arrive"
        with pytest.raises(jax.errors.JaxRuntimeError, match=told):
            jax.block_until_ready(run(jnp.ones((4, 1))))


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10])
def test_a_timeout_that_never_comes(timeout_s):
    layer = Layer("patient", "gradient", "rank")
    with layer.open(timeout_s) as group:
        run = layer.compile(group)
        right = np.asarray(run())
        # A rank that is late is waited for.
        np.testing.assert_array_equal(run(delays={1: 0.3}), right)
        group.check()


def test_a_timeout_that_is_no_number():
    with pytest.raises(ValueError, match="timeout_s must be positive, got nan"):
        Layer("patient", "dispatch", "rank").open(float("nan"))
