"""Sums and gradients of groups whose ranks span domains, with domains made up on one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, assert_close, few_tokens_as_many, floats, ranks, routing, same_bits
from devices import most_ranks, need_devices
from jax.sharding import PartitionSpec as P
from layers import dense, dense_gradients, inputs, layer

import jax_ep

R = most_ranks()
PER_DOMAIN = [n for n in (1, 2, 4) if n < R]
MIDDLE, LAST = PER_DOMAIN[len(PER_DOMAIN) // 2 :][:1], PER_DOMAIN[-1:]
pytestmark = [pytest.mark.one_jax, pytest.mark.processes, pytest.mark.usefixtures("two_devices")]


def domains_of(per_domain, size=R):
    return ranks(size, per_domain)


def sums(on, y, ids, experts, weights=None, biases=(), **options):
    def shard(y, ids, weights, biases):
        x = jnp.zeros((ids.shape[0], 1))
        handle = jax_ep.dispatch(x, ids, group=on.group, num_experts=experts, **options).handle
        return jax_ep.combine(y, handle, row_weights=weights, bias=biases or None)

    return on.run(shard, y, ids, weights, biases)


@pytest.mark.parametrize(
    ("order", "weighted", "per_domain", "dtype"),
    [
        *(("expert", True, number, BF16) for number in PER_DOMAIN),
        *((order, False, number, BF16) for order in ("rank", "expert") for number in MIDDLE),
        *((order, order == "expert", number, np.float32) for order in ("rank", "expert") for number in LAST),
    ],
)
def test_combine_rounds_each_host_s_sum_once(per_domain, order, weighted, dtype):
    """A domain's share of a sum is made in float32, and rounded to travel; domains are added in order."""
    tokens, k, experts = 11, 4, 4 * R
    ids = routing("sprinkled", R, tokens, k, experts)
    received = oracle.dispatch(np.zeros((R, tokens, 1)), ids, None, experts, order)
    y = floats((R, len(received[0].sources), 5), dtype)
    unused = np.array([[source is None for source in one.sources] for one in received])
    y[unused] = np.nan  # never read
    weights = floats(y.shape[:2], seed=3) if weighted else None
    biases = (floats((R, tokens, 5), dtype, seed=4),)
    got = sums(domains_of(per_domain), y, ids, experts, weights, biases, order=order)
    folds = order == "expert" and jax.default_backend() == "gpu"
    want = oracle.combine(y, received, tokens, weights, biases, folds, per_domain=per_domain)
    assert got.dtype == dtype
    assert_close(got, want, terms=4)


def test_a_sum_is_made_host_by_host():
    """On the first domain 2^24 + 1 - 2^24 is 0 in float32; 1 + 1 on the second then stays."""
    need_devices(4)
    on = domains_of(2, 4)
    y = np.array([2.0**24, 1.0, 1.0, 1.0], np.float32)
    ids = np.tile(np.arange(4, dtype=np.int32), (4, 1, 1))

    def shard(mine, ids):
        sent = jax_ep.dispatch(mine, ids, group=on.group, num_experts=4, order="rank")
        return jax_ep.combine(jnp.broadcast_to(mine, sent.x.shape), sent.handle)

    got = on.run(shard, y.reshape(4, 1, 1), ids)
    first, second = np.float32(2.0**24) + np.float32(1), np.float32(2)
    assert first + second != y[0] + y[1] + y[2] + y[3]  # in another order it would be another number
    np.testing.assert_array_equal(got, np.full((4, 1, 1), first + second))


def results(on, x, ids, w, order, implementation="ffi", **options):
    """A weighted layer, another payload along its routes, and the gradients of both."""
    return on.apply(compiled(on, order, implementation, **options), x, ids, w)


@functools.cache
def compiled(on, order, implementation, by_counts=False, **options):
    """`by_counts`: as if there were many tokens."""
    experts = 4 * R

    def shard(x, ids, w):
        def layer(x, w):
            sent = jax_ep.dispatch(
                x, ids, w, group=on.group, num_experts=experts, order=order, **options,
                implementation=implementation,
            )  # fmt: skip
            weights = None if order == "rank" else sent.row_weights
            scaled = sent.x * sent.topk_weights.sum(axis=1)[:, None] if order == "rank" else sent.x
            y = jax_ep.combine(
                jnp.tanh(scaled), sent.handle, row_weights=weights, implementation=implementation
            )
            again, arrived = jax_ep.redispatch(
                x * 2, sent.handle, topk_weights=w, implementation=implementation
            )
            return jnp.sum(y**2) + jnp.sum(jnp.sin(again)) + jnp.sum(arrived**2), (y, again, arrived)

        with few_tokens_as_many(by_counts):
            (_, out), gradients = jax.value_and_grad(layer, argnums=(0, 1), has_aux=True)(x, w)
        return out, gradients

    return jax.jit(on.map(shard))


@pytest.mark.parametrize(
    ("per_domain", "order", "implementation", "by_counts"),
    [
        *((number, "expert", "ffi", False) for number in sorted({*PER_DOMAIN[:1], *LAST})),
        *((number, "expert", "ffi", True) for number in MIDDLE),
        *(
            (number, order, "ffi", order == "rank")
            for number in MIDDLE
            for order in ("rank", "expert_padded")
        ),
        *((number, "expert", "xla", False) for number in MIDDLE),
    ],
)
def test_a_layer_with_redispatch_and_gradients(per_domain, order, implementation, by_counts):
    tokens, k = 7, 3
    ids = routing("sprinkled", R, tokens, k, 4 * R)
    x, w = floats((R, tokens, 4)), floats((R, tokens, k))
    got = results(domains_of(per_domain), x, ids, w, order, implementation, by_counts=by_counts)
    want = results(ranks(R), x, ids, w, order)
    (y, again, arrived), gradients = got
    assert same_bits(again, want[0][1])
    assert same_bits(arrived, want[0][2])
    for one, other in zip((y, *gradients), (want[0][0], *want[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_counts", [False, True])
def test_gradients_of_what_hop_1_dropped(by_counts):
    """They are those of the layer whose routing has no such choices."""
    tokens, k, rows = 9, 3, 4
    ids = routing("sprinkled", R, tokens, k, 4 * R)
    x, w = floats((R, tokens, 4)), floats((R, tokens, k))
    left = oracle.dropped_by_hop_1(ids, 4 * R, R // 2, rows)
    got = results(domains_of(R // 2), x, ids, w, "expert", domain_capacity=2 * rows, by_counts=by_counts)
    want = results(ranks(R), x, left, w, "expert")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_handles_are_interchangeable_between_implementations():
    on = domains_of(R // 2)
    ids = routing("sprinkled", R, 8, 2, 2 * R)
    x = floats((R, 8, 4))

    def shard(x, ids):
        sent = jax_ep.dispatch(x, ids, group=on.group, num_experts=2 * R, implementation="ffi")
        return jax_ep.combine(sent.x, sent.handle, implementation="xla"), jax_ep.combine(sent.x, sent.handle)

    one, other = on.run(shard, x, ids)
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_handles_leave_and_enter_shard_map():
    on = domains_of(R // 2)
    ids = routing("sprinkled", R, 8, 2, 2 * R)
    x = floats((R, 8, 4))
    mapped = lambda f: jax.jit(on.map(f))
    dispatch = lambda x, ids: jax_ep.dispatch(x, ids, group=on.group, num_experts=2 * R)
    sent = mapped(dispatch)(x.reshape(-1, 4), ids.reshape(-1, 2))
    assert sent.handle.sent_rows.shape == (R * 8, 2)
    assert sent.handle.received_rows.shape == (R * R * 8, 2)
    back = mapped(jax_ep.combine)(sent.x, sent.handle)
    used = (np.stack([oracle.routed(one, 2 * R) for one in ids]) >= 0).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(back).reshape(R, 8, 4), x * used, rtol=1e-6)


def test_under_vmap():
    on = domains_of(R // 2)
    batch = [inputs(seed=seed) for seed in range(3)]
    x, ids, w = (jnp.stack(parts) for parts in zip(*batch, strict=True))

    def shard(x, ids, w):
        return jax.vmap(lambda *one: layer(*one, on.group))(x, ids, w)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=P(None, "ep"), out_specs=P(None, "ep"))
    y, d_x = jax.jit(lambda x: jax.value_and_grad(lambda x: jnp.sum(mapped(x, ids, w) ** 2))(x))(x)
    np.testing.assert_allclose(y, sum(np.sum(dense(*one) ** 2) for one in batch), rtol=1e-5)
    want = np.stack([dense_gradients(*one)[0] for one in batch])
    np.testing.assert_allclose(d_x, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", [None, jax_ep.save_ep_residuals], ids=["none", "save_ep_residuals"])
def test_in_a_scan_of_checkpoints(policy):
    """The same gradients as without; with the policy no row goes a second time, on neither hop."""
    on = domains_of(R // 2)
    x, ids, w = inputs()

    def gradient(wrap):
        def shard(x, ids, w):
            body = wrap(lambda x: layer(x, ids, w, on.group))
            return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=2)[0]

        mapped = on.map(shard)
        return jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, ids, w) ** 2)))

    remat = gradient(lambda body: jax.checkpoint(body, policy=policy))
    np.testing.assert_allclose(remat(x), gradient(lambda body: body)(x), rtol=1e-5, atol=1e-6)
    lowered = remat.lower(x).as_text()
    # Forward a dispatch and a combine, backward their transposes; without the policy the dispatch once more.
    assert len(re.findall(r"\ball_to_all\b", lowered)) == (5 if policy is None else 4)
    if R > 2:  # of two, hop 1 is between all
        # Whatever is kept for the backward pass, nothing goes from every rank to every other.
        compiled = remat.lower(x).compile().as_text()
        everybody = re.escape(f"{{{{{','.join(map(str, range(R)))}}}}}")
        assert re.findall(r" all-to-all\(.*replica_groups=\{\{", compiled)
        assert not re.findall(rf" all-to-all\(.*replica_groups={everybody}", compiled)


def test_over_two_axes_under_explicit_sharding():
    """The group spans two axes of a mesh, of which the first goes over domains."""
    need_devices(4)
    mesh = jax.make_mesh((2, R // 2), ("domain", "rank"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    axes = ("domain", "rank")
    group = jax_ep.Group(mesh, axes, ranks_per_domain=R // 2)
    x, ids, w = (jax.device_put(a, jax.sharding.NamedSharding(mesh, P(axes))) for a in inputs())
    mapped = jax.shard_map(lambda *a: layer(*a, group), mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    with jax.set_mesh(mesh):
        y = jax.jit(mapped)(x, ids, w)
    np.testing.assert_allclose(y, dense(*inputs()), rtol=1e-5, atol=1e-6)


def test_groups_beside_each_other():
    """Two groups along one axis, each of two domains."""
    need_devices(8)
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    group = jax_ep.Group(mesh, "ep", ranks_per_domain=2)
    x, ids, w = inputs(8)
    spec = P(("dp", "ep"))
    mapped = jax.shard_map(lambda *a: layer(*a, group), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(x, ids, w), dense(x, ids, w), rtol=1e-5, atol=1e-6)
