"""Ranks that come late to ops with on_timeout="mask" on the CPU: the others go on without them."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import assert_close, dequantize, floats, quantize, same_bits
from devices import make_mesh
from jax.sharding import PartitionSpec as P
from test_faults_cpu import sleep

import jax_ep

R, T, K, E, H = 4, 6, 2, 8, 128
TIMEOUT_S, LATE_S = 0.75, 1.75
BEGIN = time.monotonic()

pytestmark = [
    pytest.mark.one_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="delays are callbacks of the CPU"),
]


def now(_):
    return np.float32(time.monotonic() - BEGIN)


class Program:
    """Dispatch and combine, each after a delay of its own on each rank.

    The combine counts on those ranks that the dispatch found.
    """

    def __init__(self, order="expert", quantize=None, capacity=None):
        self.mesh, self.order = make_mesh((R,), ("mask",)), order
        self.quantize, self.capacity = quantize, capacity
        rng = np.random.default_rng(3)
        self.x = floats((R, T, H))
        self.ids = np.argsort(rng.random((R, T, E)), axis=-1)[..., :K].astype(np.int32)
        self.ids[..., 0] = np.arange(R * T).reshape(R, T) % E  # something comes from and goes to each rank

    def open(self, timeout_s=TIMEOUT_S):
        return jax_ep.Group(self.mesh, "mask", timeout_s=timeout_s)

    def shard(self, group, delays, active, x, ids):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        options = {"on_timeout": "mask", "implementation": "ffi"}
        begin = jax.pure_callback(now, scalar, x[0, 0])
        x = x + jax.pure_callback(sleep, scalar, delays[0] + 0 * begin)
        zeros = jax_ep.DispatchStatistics.zeros(group, E)
        routing = {"group": group, "num_experts": E, "order": self.order, "capacity": self.capacity}
        more = {"quantize": self.quantize, "statistics": zeros}
        sent = jax_ep.dispatch(x, ids, active_ranks=active, **routing, **more, **options)
        rows = sent.x if self.quantize is None else jax_ep.dequantize_fp8(sent.x, x.dtype)
        y = rows * 2 + jax.pure_callback(sleep, scalar, delays[1] + 0 * rows.ravel()[0])
        sums, after = jax_ep.combine(y, sent.handle, active_ranks=sent.active_ranks, **options)
        end = jax.pure_callback(now, scalar, sums[0, 0])
        seconds = jnp.stack([begin, end])
        return rows, sent.active_ranks, sums, after, seconds, sent.statistics.wait_us, sent.num_dropped

    def compile(self, group):
        """(delays {(op, rank): seconds}, active [R, R] as each rank sees it) -> results [R, ...]."""
        spec = P("mask")
        shard = functools.partial(self.shard, group)
        run = jax.jit(jax.shard_map(shard, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False))

        def call(delays=None, active=None):
            seconds = np.zeros((R, 2), np.float32)
            for (op, rank), delay in (delays or {}).items():
                seconds[rank, ("dispatch", "combine").index(op)] = delay
            active = np.ones((R, R), np.int32) if active is None else active
            arrays = (seconds.reshape(-1), active.reshape(-1), self.x.reshape(-1, H), self.ids.reshape(-1, K))
            return [out.reshape(R, -1, *out.shape[1:]) for out in jax.device_get(run(*arrays))]

        return call

    def require(self, out, in_dispatch, in_combine):
        """Right rows and sums of each rank, where it met those ranks that `in_...` [R, R] say."""
        rows, after_dispatch, sums, after_combine, _, _, num_dropped = out
        packed = None if self.quantize is None else quantize(self.x)
        x = self.x if packed is None else np.asarray(dequantize(packed, dtype=self.x.dtype))
        np.testing.assert_array_equal(after_dispatch, in_dispatch)
        np.testing.assert_array_equal(after_combine, in_combine)
        for rank in range(R):
            ids = oracle.mask_inactive(self.ids, E, in_dispatch[rank])
            want = oracle.dispatch(x, ids, None, E, self.order, self.capacity)
            assert same_bits(rows[rank].reshape(-1, H), want[rank].x)
            np.testing.assert_array_equal(num_dropped[rank], want[rank].num_dropped)
            y = np.stack([2 * received.x for received in want])
            assert_close(sums[rank], oracle.combine(y, want, T, active=in_combine[rank])[rank], terms=K)
        assert np.abs(sums).sum() > 1
        assert num_dropped.any() == (self.capacity is not None)


def without(*late):
    """[R, R]: those that come late are alone, and the others are without them."""
    views = np.ones((R, R), np.int32)
    views[:, late] = 0
    for rank in late:
        views[rank] = np.arange(R) == rank
    return views


ALL = np.ones((R, R), np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "late", "order", "more"),
    [
        # Each order has a late rank in the dispatch and in the combine.
        ("dispatch", [0, 3], "rank", {}),
        ("dispatch", [0, 3], "expert", {}),
        ("dispatch", [2], "expert_padded", {}),
        ("combine", [0], "rank", {}),
        ("combine", [0], "expert", {}),
        ("combine", [0], "expert_padded", {}),
        ("dispatch", [2], "rank", {"quantize": "fp8", "capacity": 5}),
        ("dispatch", [1], "expert", {"quantize": "fp8", "capacity": 7}),
    ],
)
def test_late_ranks_are_left_behind(op, late, order, more):
    """The others have the right rows, in time; then they go on alone, and with a new Group with all."""
    program = Program(order, **more)
    with program.open(30) as group:
        run = program.compile(group)
        program.require(run(), ALL, ALL)
    others = [rank for rank in range(R) if rank not in late]
    left = without(*late)
    with program.open() as group:
        out = run({(op, rank): LATE_S for rank in late})
        program.require(out, left if op == "dispatch" else ALL, left)
        begin, end = np.moveaxis(out[4].reshape(R, 2), 1, 0)
        took = end - begin.min()
        assert (took[others] > 0.9 * TIMEOUT_S).all()
        assert (took[others] < 2 * TIMEOUT_S).all(), took
        assert (took[late] > 0.9 * LATE_S).all()
        group.check()  # nothing has failed
        # Those that remain wait for nobody, whatever the others do.
        out = run({("dispatch", rank): LATE_S for rank in late}, active=out[3])
        program.require(out, left, left)
        took = out[4].reshape(R, 2)[:, 1] - out[4].reshape(R, 2)[:, 0].min()
        assert (took[others] < TIMEOUT_S).all(), took
        group.check()
    with program.open(30) as group:
        program.require(run(), ALL, ALL)


def test_how_long_each_rank_was_waited_for():
    program = Program()
    with program.open(30) as group:
        run = program.compile(group)
        run()
        wait = run({("dispatch", 1): 0.4, ("dispatch", 2): 0.8})[5] / 1e6
    assert (wait >= 0).all()
    assert (np.diag(wait) == 0).all()
    assert (wait[0, [1, 2]] > [0.3, 0.7]).all()
    assert wait[0, 2] - wait[0, 1] == pytest.approx(0.4, abs=0.2)
    assert 0.2 < wait[1, 2] < 0.6
    assert (wait[2] < 0.2).all()  # it came last
    assert (wait[:, 0] < 0.2).all()
    with program.open() as group:
        wait = run({("dispatch", 1): LATE_S}, active=np.tile([1, 1, 1, 0], (R, 1)))[5] / 1e6
        assert (wait[[0, 2], 1] > 0.9 * TIMEOUT_S).all()  # as long as it was waited for
        assert (wait[[0, 2], 1] < 2 * TIMEOUT_S).all()
        assert (wait[[1, 3]] == 0).all()  # one came when all had gone, and the other waits for nobody
        assert (wait[:, 3] == 0).all()  # nor is it waited for


@pytest.mark.parametrize(
    ("missing", "in_their_view"), [([2, 3], [0, 0, 1, 1]), ([3], [1, 1, 1, 0])], ids=["others", "itself"]
)
def test_ranks_that_disagree_about_who_is_active_do_not_meet(missing, in_their_view):
    """Each sees its own view through: the first ones count on all ranks, but the last ones do not."""
    program = Program()
    with program.open(30) as group:
        run = program.compile(group)
        program.require(run(), ALL, ALL)
    views, left = ALL.copy(), ALL.copy()
    views[missing] = in_their_view
    left[:, missing] = 0
    left[missing] = in_their_view
    text = rf"rank\(s\) {' '.join(map(str, missing))} did not arrive"
    with program.open() as group:
        program.require(run(active=views), left, left)
        group.check()

        def shard(active, x, ids):
            return jax_ep.dispatch(x, ids, group=group, num_experts=E, active_ranks=active).x

        run = jax.jit(jax.shard_map(shard, mesh=program.mesh, in_specs=P("mask"), out_specs=P("mask")))
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"dispatch: .* {text}"):
            jax.block_until_ready(
                run(views.reshape(-1), program.x.reshape(-1, H), program.ids.reshape(-1, K))
            )
        with pytest.raises(jax_ep.PeerTimeoutError, match=text):
            group.check()


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_is_left_behind_in_a_scan(late):
    """It does its later steps alone, as the others do without it: they meet in the right ones."""
    program = Program()
    steps = 4

    def shard(group, delays, active, x, ids):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)

        def step(active, delay):
            y = x + jax.pure_callback(sleep, scalar, delay)
            options = {"on_timeout": "mask", "implementation": "ffi"}
            sent = jax_ep.dispatch(y, ids, group=group, num_experts=E, active_ranks=active, **options)
            sums, active = jax_ep.combine(sent.x, sent.handle, active_ranks=sent.active_ranks, **options)
            return active, (sums, active)

        return jax.lax.scan(step, active, delays[0])[1]

    with program.open() as group:
        mapped = jax.shard_map(
            functools.partial(shard, group),
            mesh=program.mesh,
            in_specs=P("mask"),
            out_specs=P(None, "mask"),
            check_vma=False,
        )
        delays = np.zeros((R, steps), np.float32)
        arrays = (ALL.reshape(-1), program.x.reshape(-1, H), program.ids.reshape(-1, K))
        run = jax.jit(mapped)
        run.lower(delays, *arrays).compile()
        delays[late, 1] = LATE_S
        sums, active = jax.device_get(run(delays, *arrays))
        group.check()
    for step in range(steps):
        views = without(late) if step else ALL
        np.testing.assert_array_equal(active[step].reshape(R, R), views)
        for rank in range(R):
            ids = oracle.mask_inactive(program.ids, E, views[rank])
            copies = (ids[rank] >= 0).sum(axis=-1, keepdims=True)
            assert_close(sums[step].reshape(R, T, H)[rank], program.x[rank] * copies, terms=K)
