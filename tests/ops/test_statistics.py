"""DispatchStatistics: what dispatches add up. How long ranks wait is tested in test_faults_mask.py."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import floats, pairwise, ranks, routing
from devices import make_mesh, most_ranks, need_devices
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.one_jax

R, T, K, E, H, STEPS = min(most_ranks(), 4), 6, 3, 8, 16, 3
IDS = np.stack([routing("sprinkled", R, T, K, E, seed=step) for step in range(STEPS)])
X = floats((R * T, H))
FLAT_IDS = IDS[0].reshape(R * T, K)


def mapped(shard, **options):
    on = ranks(R)
    specs = {"in_specs": P("ep"), "out_specs": P("ep")} | options
    return jax.jit(jax.shard_map(functools.partial(shard, on.group), mesh=on.mesh, **specs))


def zeros():
    return mapped(lambda group: jax_ep.DispatchStatistics.zeros(group, E), in_specs=())()


@pytest.mark.parametrize(("order", "capacity"), [("rank", 5), ("expert", 7), ("expert_padded", None)])
def test_what_experts_got(order, capacity, implementation):
    """Carried in a scan, and out of one program and into the next; rows that are dropped do not count."""

    def shard(group, statistics, x, ids):
        def step(statistics, ids):
            sent = jax_ep.dispatch(
                x,
                ids,
                group=group,
                num_experts=E,
                order=order,
                capacity=capacity,
                statistics=statistics,
                implementation=implementation,
            )
            return sent.statistics, sent.num_dropped

        begin = jax_ep.DispatchStatistics.zeros(group, E) if statistics is None else statistics
        return jax.lax.scan(step, begin, ids)

    ids = IDS.reshape(STEPS, R * T, K)
    out = (P("ep"), P(None, "ep"))
    fresh = mapped(lambda group, *a: shard(group, None, *a), in_specs=(P("ep"), P(None, "ep")), out_specs=out)
    again = mapped(shard, in_specs=(P("ep"), P("ep"), P(None, "ep")), out_specs=out)
    want = [oracle.dispatch(X.reshape(R, T, H), one, None, E, order, capacity) for one in IDS]
    counts = sum(np.concatenate([rank.tokens_per_expert for rank in step]) for step in want)

    first, num_dropped = fresh(X, ids)
    dropped = np.array([[rank.num_dropped[0] for rank in step] for step in want])
    np.testing.assert_array_equal(num_dropped, dropped)
    assert order == "expert_padded" or dropped.any()
    np.testing.assert_array_equal(first.tokens_per_expert, counts)
    second, _ = again(first, X, ids)
    np.testing.assert_array_equal(second.tokens_per_expert, 2 * counts)

    assert (first.wait_us.shape, first.wait_us.dtype) == ((R * R,), np.float32)
    assert first.tokens_per_expert.dtype == np.int32
    if implementation == "xla":
        assert not np.asarray(second.wait_us).any()
    else:
        before, after = np.asarray(first.wait_us), np.asarray(second.wait_us)
        assert (before >= 0).all()
        assert (after >= before).all()
        assert not np.diag(after.reshape(R, R)).any()
        assert R == 1 or after.any()  # somebody was there first


@pytest.mark.parametrize(("quantize", "implementation"), [("fp8_dequantize", "ffi"), (None, "xla")])
def test_gradients_are_those_without(quantize, implementation):
    x, weights = floats((R * T, 128)), floats((R * T, K), seed=2)

    def shard(with_statistics, group, x, weights, statistics):
        given = statistics if with_statistics else None
        options = {"quantize": quantize, "implementation": implementation, "statistics": given}
        sent = jax_ep.dispatch(x, FLAT_IDS[:T], weights, group=group, num_experts=E, **options)
        assert (sent.statistics is None) == (given is None)
        wait = 0 if given is None else jnp.sum(sent.statistics.wait_us)
        sums = jax_ep.combine(
            jnp.tanh(sent.x), sent.handle, row_weights=sent.row_weights, implementation=implementation
        )
        return sums + wait * 0

    def gradients(with_statistics):
        run = mapped(functools.partial(shard, with_statistics))
        loss = lambda *a: jnp.sum(run(*a) ** 2)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), allow_int=True))(x, weights, zeros())

    *got, of_statistics = gradients(True)
    *want, _ = gradients(False)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).any()
    assert not of_statistics.wait_us.any()


def test_remat_keeps_what_was_measured():
    """The backward pass needs the statistics, and does not dispatch again for them."""

    def shard(group, x, statistics):
        def body(x):
            sent = jax_ep.dispatch(
                x, FLAT_IDS[:T], group=group, num_experts=E, statistics=statistics, implementation="ffi"
            )
            return jax_ep.combine(jnp.sin(sent.x), sent.handle), jnp.sin(x) * sent.statistics.wait_us[0]

        return jax.checkpoint(body, policy=jax_ep.save_ep_residuals)(x)

    run = mapped(shard)
    gradient = jax.jit(jax.grad(lambda x: sum(jnp.sum(part) for part in run(x, zeros()))))
    assert len(re.findall(r"@jax_ep_route\b", gradient.lower(X).as_text())) == 1


def test_zeros_made_outside_are_one_rank_s():
    begin = jax_ep.DispatchStatistics.zeros(ranks(R).group, E)
    assert (begin.tokens_per_expert.shape, begin.wait_us.shape) == ((E // R,), (R,))

    def shard(group, x, ids):
        return jax_ep.dispatch(x, ids, group=group, num_experts=E, statistics=begin).statistics

    got = mapped(shard)(X, FLAT_IDS).tokens_per_expert
    want = np.bincount(FLAT_IDS[(FLAT_IDS >= 0) & (FLAT_IDS < E)], minlength=E)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("order", "quantize", "implementation"),
    pairwise(["rank", "expert", "expert_padded"], [None, "fp8", "fp8_dequantize"], ["ffi", "xla"]),
)
def test_no_tokens(order, quantize, implementation):
    """T = 0 on each rank, which makes its arrays itself: JAX fails where it splits empty ones."""
    capacity = None if order == "expert_padded" else 4
    options = {"order": order, "capacity": capacity, "quantize": quantize, "implementation": implementation}

    def shard(group, statistics, count):
        x, ids, weights = jnp.zeros((0, 128)), jnp.zeros((0, K), jnp.int32), jnp.zeros((0, K))
        more = {"num_valid_tokens": count, "statistics": statistics, **options}
        sent = jax_ep.dispatch(x, ids, weights, group=group, num_experts=E, **more)
        rows = jax_ep.dequantize_fp8(sent.x, x.dtype) if quantize == "fp8" else sent.x
        assert rows.shape == (*sent.handle.routing.buffer, 128)
        sums = jax_ep.combine(rows, sent.handle, row_weights=None, bias=x, implementation=implementation)
        assert sums.shape == x.shape
        counts = sent.num_tokens, sent.num_dropped, sent.tokens_per_expert
        return counts, sent.statistics, jnp.sum(rows)[None] + jnp.sum(sums)

    begin = jax.tree.map(lambda array: array + 5, zeros())
    counts, after, total = mapped(shard)(begin, np.zeros(R, np.int32))
    assert not any(np.asarray(leaf).any() for leaf in (*counts, total))
    np.testing.assert_array_equal(after.tokens_per_expert, begin.tokens_per_expert)
    assert (np.asarray(after.wait_us) >= begin.wait_us).all()


def int_waits(statistics):
    return jax_ep.DispatchStatistics(statistics.tokens_per_expert, statistics.wait_us.astype(jnp.int32))


def of_all_ranks(statistics):
    return jax.tree.map(lambda array: jnp.tile(array, R), statistics)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda s: (s.tokens_per_expert, s.wait_us), TypeError, "to begin with, got tuple"),
        (lambda s: True, TypeError, "got bool"),
        (int_waits, ValueError, rf"wait_us must be float32 \[R\] = \[{R}\] .*got int32\[{R}\]"),
        (of_all_ranks, ValueError, rf"tokens_per_expert must be int32 \[L\] = \[{E // R}\] .*int32\[{E}\]"),
    ],
)
def test_wrong_statistics(make, error, text):
    if R == 1 and make is of_all_ranks:
        pytest.skip("one rank is all ranks")

    def shard(group, x, ids):
        given = make(jax_ep.DispatchStatistics.zeros(group, E))
        return jax_ep.dispatch(x, ids, group=group, num_experts=E, statistics=given).x

    with pytest.raises(error, match=f"^dispatch: statistics.*{text}"):
        mapped(shard)(X, FLAT_IDS)


def test_zeros_of_wrong_arguments():
    group = ranks(R).group
    with pytest.raises(TypeError, match=r"^DispatchStatistics\.zeros: group must be a jax_ep\.Group"):
        jax_ep.DispatchStatistics.zeros("ep", E)
    with pytest.raises(ValueError, match=r"^DispatchStatistics\.zeros: num_experts counts the experts"):
        jax_ep.DispatchStatistics.zeros(group, 0)


def test_statistics_in_a_scan_beside_another_manual_axis():
    """Tokens are sharded over both axes; what is carried keeps one type."""
    need_devices(4)
    mesh = make_mesh((2, 2), ("dp", "ep"))
    experts, tokens = 4, 4

    def shard(group, x, ids):
        def step(statistics, _):
            sent = jax_ep.dispatch(x, ids, group=group, num_experts=experts, statistics=statistics)
            return sent.statistics, None

        return jax.lax.scan(step, jax_ep.DispatchStatistics.zeros(group, experts), None, 2)[0]

    both = P(("dp", "ep"))
    with jax_ep.Group(mesh, "ep") as group:
        run = jax.shard_map(functools.partial(shard, group), mesh=mesh, in_specs=both, out_specs=both)
        ids = np.arange(4 * tokens, dtype=np.int32)[:, None] % experts
        out = jax.jit(run)(floats((4 * tokens, H)), ids)
    np.testing.assert_array_equal(out.tokens_per_expert, np.full(2 * experts, 2 * 2 * tokens // experts))
