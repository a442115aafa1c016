"""Gradients: closed forms, and against JAX's own differentiation of the xla implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, FP8, floats, pairwise, ranks, routing, weights_of

import jax_ep
from jax_ep._group.group import ranks_of
from jax_ep._transport.backend import Pull, Push
from jax_ep._transport.routing import Routing
from jax_ep._transport.xla import Xla

pytestmark = [pytest.mark.processes, pytest.mark.moves_rows]

R, T, K, E, H = 4, 7, 3, 8, 5


def on_all(function, *, check_vma=True):
    on = ranks(R)
    return on.map(function, check_vma=check_vma)


def flat(array):
    return jnp.asarray(array.reshape(-1, *array.shape[2:]))


@pytest.fixture(params=["rank", "expert"])
def order(request):
    return request.param


@pytest.fixture(params=[None, 10])
def capacity(request):
    return request.param


def kept(order, capacity, ids):
    """For each token and k: does its row survive? And the rows of each token."""
    received = oracle.dispatch(np.zeros((R, T, 1)), ids, None, E, order, capacity)
    rows = np.zeros((R, T), np.float32)
    pairs = np.zeros((R, T, K), bool)
    routed = np.stack([oracle.routed(one, E) for one in ids])
    for rank, one in enumerate(received):
        for source in one.sources:
            if source is None:
                continue
            s, t, k = source
            rows[s, t] += 1
            if order == "expert":
                pairs[s, t, k] = True
            else:
                pairs[s, t] |= (routed[s, t] >= 0) & (routed[s, t] // (E // R) == rank)
    return rows, pairs


@pytest.mark.one_jax
def test_closed_form_of_dispatch(order, capacity, implementation):
    """Of sum(rows): d x = kept rows of the token; of sum(weights): d w = 1 where the pair is kept."""
    ids = routing("sprinkled", R, T, K, E)
    on = ranks(R)

    def shard(x, ids, w):
        d = jax_ep.dispatch(
            x,
            ids,
            w,
            group=on.group,
            num_experts=E,
            order=order,
            capacity=capacity,
            implementation=implementation,
        )
        return d.x, weights_of(d)

    def loss(x, w):
        rows, weights = on_all(shard)(x, flat(ids), w)
        return jnp.sum(rows) + jnp.sum(weights)

    x, w = flat(floats((R, T, H))), flat(floats((R, T, K), np.float16))
    d_x, d_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    rows, pairs = kept(order, capacity, ids)
    np.testing.assert_array_equal(d_x, np.broadcast_to(rows.reshape(-1, 1), d_x.shape))
    assert d_w.dtype == np.float16  # the input's dtype
    np.testing.assert_array_equal(d_w, pairs.reshape(-1, K))


def reference_layer(routing_, x, ids, w):
    """The xla implementation without its custom rules: plain JAX differentiates it."""
    backend = Xla(routing_.ranks)
    d = backend.route(routing_, ids, Push((x,), w))
    y = jnp.tanh(d.rows[0])
    if routing_.order == "expert":
        return backend.pull(d.handle, Pull((y,), d.weights))[0][0]
    y = y * jnp.sum(d.weights, axis=1, keepdims=True)
    return backend.pull(d.handle, Pull((y,)))[0][0]


def layer(order, capacity, implementation, x, ids, w):
    group = ranks(R).group
    d = jax_ep.dispatch(
        x, ids, w, group=group, num_experts=E, order=order, capacity=capacity, implementation=implementation
    )
    y = jnp.tanh(d.x)
    if order == "expert":
        return jax_ep.combine(y, d.handle, row_weights=d.row_weights, implementation=implementation)
    y = y * jnp.sum(d.topk_weights, axis=1, keepdims=True)
    return jax_ep.combine(y, d.handle, implementation=implementation)


def resolved(order, capacity):
    size = capacity or oracle.worst_case(order, R * T, K, E // R)
    return Routing(ranks_of(ranks(R).group), order, T, K, E, size, 1)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("order", "capacity", "check_vma"), pairwise(["rank", "expert"], [None, 10], [True, False])
)
def test_against_the_reference_differentiated_by_jax(order, capacity, check_vma):
    ids = flat(routing("sprinkled", R, T, K, E))
    x, w = flat(floats((R, T, H))), flat(floats((R, T, K), seed=2))
    target = flat(floats((R, T, H), seed=3))

    def gradients(function):
        mapped = on_all(function, check_vma=check_vma)
        loss = lambda x, w: jnp.sum((mapped(x, ids, w) - target) ** 2)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)

    want, (want_x, want_w) = gradients(functools.partial(reference_layer, resolved(order, capacity)))
    for implementation in ("ffi", "xla"):
        got, (got_x, got_w) = gradients(functools.partial(layer, order, capacity, implementation))
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(got_x, want_x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got_w, want_w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [pytest.param("rank", marks=pytest.mark.one_jax), "expert"])
def test_second_order_against_the_reference_differentiated_by_jax(order):
    """The gradient of <gradient, direction>, in the tokens and in the weights."""
    ids = flat(routing("uniform", R, T, K, E))
    x, w = flat(floats((R, T, H))), flat(floats((R, T, K), seed=2))
    along = flat(floats((R, T, H), seed=4)), flat(floats((R, T, K), seed=5))

    def second(function):
        mapped = on_all(function)
        first = jax.grad(lambda x, w: jnp.sum(mapped(x, ids, w) ** 3), argnums=(0, 1))
        slope = lambda x, w: sum(map(jnp.vdot, first(x, w), along))
        return jax.jit(jax.grad(slope, argnums=(0, 1)))(x, w)

    want = second(functools.partial(reference_layer, resolved(order, None)))
    for implementation in ("ffi", "xla"):
        got = second(functools.partial(layer, order, None, implementation))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_payloads_without_gradient(implementation):
    """Integers get float0, FP8 gets zeros; the floating leaf beside them its gradient."""
    ids = flat(routing("uniform", R, T, K, E))
    on = ranks(R)
    x = {
        "f32": flat(floats((R, T, H))),
        "fp8": flat(floats((R, T, H)).astype(FP8)),
        "int": flat(np.arange(R * T * 2, dtype=np.int32).reshape(R, T, 2)),
    }

    def shard(x, ids):
        options = {"order": "rank", "implementation": implementation}
        return jax_ep.dispatch(x, ids, group=on.group, num_experts=E, **options).x

    def loss(x):
        rows = on_all(shard)(x, ids)
        return jnp.sum(rows["f32"] ** 2) + jnp.sum(rows["fp8"].astype(jnp.float32))

    d_x = jax.jit(jax.grad(loss, allow_int=True))(x)
    assert d_x["int"].dtype == jax.dtypes.float0
    assert d_x["fp8"].dtype == FP8
    assert not np.asarray(d_x["fp8"], np.float32).any()
    assert np.abs(d_x["f32"]).min() > 0


def test_gradient_of_a_redispatch(capacity, implementation):
    ids = routing("sprinkled", R, T, K, E)
    on = ranks(R)

    def shard(x, other, ids):
        routing = {"num_experts": E, "order": "rank", "capacity": capacity}
        first = jax_ep.dispatch(x, ids, group=on.group, **routing, implementation=implementation)
        return jax_ep.redispatch(other, first.handle, implementation=implementation)

    x, other = flat(floats((R, T, H))), flat(floats((R, T, 2)))
    loss = lambda *a: jnp.sum(on_all(shard)(*a, flat(ids)))
    d_x, d_other = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, other)
    np.testing.assert_array_equal(d_x, 0)
    rows, _ = kept("rank", capacity, ids)
    np.testing.assert_array_equal(d_other, np.broadcast_to(rows.reshape(-1, 1), d_other.shape))


@pytest.mark.one_jax
def test_cotangents_of_padding_and_tail_are_ignored(order, implementation):
    """A loss that reads the padding does not change the gradient."""
    ids = flat(routing("sprinkled", R, T, K, E))
    on = ranks(R)
    alignment = 4 if order == "expert" else 1

    def shard(x, ids, w):
        d = jax_ep.dispatch(
            x,
            ids,
            w,
            group=on.group,
            num_experts=E,
            order=order,
            expert_alignment=alignment,
            implementation=implementation,
        )
        unused = (d.topk_idx < 0) if order == "rank" else ~d.is_row()
        empty = unused.all(axis=-1) if order == "rank" else unused
        loud = jnp.where(empty[:, None], d.x * 1e6, d.x)
        loud_weights = jnp.where(unused, weights_of(d) * 1e6, weights_of(d))
        return loud, loud_weights

    def loss(x, w):
        return sum(jnp.sum(part) for part in on_all(shard)(x, ids, w))

    x, w = flat(floats((R, T, H))), flat(floats((R, T, K)))
    d_x, d_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    rows, pairs = kept(order, None, ids.reshape(R, T, K))
    np.testing.assert_array_equal(d_x, np.broadcast_to(rows.reshape(-1, 1), d_x.shape))
    np.testing.assert_array_equal(d_w, pairs.reshape(-1, K))


def test_bfloat16_gradients_are_sums_in_float32(implementation):
    ids = routing("uniform", R, T, K, E)
    on = ranks(R)
    cotangent = floats((R, R * T, H), BF16, seed=9)

    def shard(x, ids, ct):
        options = {"order": "rank", "implementation": implementation}
        d = jax_ep.dispatch(x, ids, group=on.group, num_experts=E, **options)
        return jnp.sum(d.x.astype(jnp.float32) * ct.astype(jnp.float32), keepdims=True)

    x = flat(floats((R, T, H), BF16))
    d_x = jax.jit(jax.grad(lambda x: jnp.sum(on_all(shard)(x, flat(ids), flat(cotangent)))))(x)
    received = oracle.dispatch(np.zeros((R, T, 1)), ids, None, E, "rank")
    want = oracle.combine(cotangent, received, T)
    assert d_x.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(d_x, np.float32), want.reshape(-1, H), rtol=2**-8, atol=1e-6)


@pytest.mark.one_jax
def test_rows_of_two_widths_with_weights(implementation):
    """float64 rows beside float32 ones: the weights' gradient sums over both."""
    with jax.enable_x64(True):
        ids = flat(routing("uniform", R, T, K, E))
        x, w = flat(floats((R, T, H), np.float64)), flat(floats((R, T, K), seed=2))
        by = {"implementation": implementation}

        def shard(x, w, ids):
            sent = jax_ep.dispatch(x, ids, w, group=ranks(R).group, num_experts=E, **by)
            y = {"wide": sent.x, "narrow": jnp.sin(sent.x).astype(jnp.float32)}
            return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights, **by)

        def loss(x, w):
            out = on_all(shard)(x, w, ids)
            return jnp.sum((out["wide"] + out["narrow"].astype(jnp.float64)) ** 2)

        d_x, d_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    x, w = np.asarray(x), np.asarray(w, np.float64)
    one, total = x + np.sin(x), w.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(d_x, 2 * total**2 * one * (1 + np.cos(x)), rtol=1e-5, atol=1e-5)
    expected = np.broadcast_to((2 * total * one**2).sum(axis=1, keepdims=True), w.shape)
    np.testing.assert_allclose(d_w, expected, rtol=1e-5, atol=1e-5)
