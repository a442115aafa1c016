"""Other payloads along the routes of a dispatch; payloads and shards with nothing in them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, floats, ranks, routing, same_bits, tagged_rows, weights_of
from devices import make_mesh, most_ranks

import jax_ep

pytestmark = pytest.mark.processes

R, T, K, E = most_ranks(), 12, 3, 16
ORDERS = ("rank", "expert")


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["random", "sprinkled"])
def test_weights_along_a_handle(kind, order, implementation):
    ids = routing(kind, R, T, K, E)
    x, weights = tagged_rows(R, T, 5, BF16), floats((R, T, K))
    on = ranks(R)

    def shard(x, ids, weights):
        by = {"implementation": implementation}
        handle = jax_ep.dispatch((), ids, group=on.group, num_experts=E, order=order, **by).handle
        alone = jax_ep.redispatch((), handle, topk_weights=weights, **by)
        return jax_ep.redispatch(x, handle, topk_weights=weights, **by), alone

    (rows, arrived), (nothing, alone) = on.run(shard, x, ids, weights)
    assert nothing == ()
    for rank, want in enumerate(oracle.dispatch(x, ids, weights, E, order)):
        assert same_bits(rows[rank], want.x)
        np.testing.assert_array_equal(arrived[rank], want.weights, strict=True)
        np.testing.assert_array_equal(alone[rank], want.weights, strict=True)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", [*ORDERS, "expert_padded"])
def test_sources_of_rows_and_values_of_choices(order, implementation):
    """Ids that are neither an expert nor -1 are counted; FP8 rows have sources, too."""
    ids, weights = routing("sprinkled", R, T, K, E), floats((R, T, K))
    x = floats((R, T, 128), seed=3)
    on, capacity = ranks(R), None if order == "expert_padded" else 12
    by = {"order": order, "capacity": capacity, "quantize": "fp8", "implementation": implementation}

    def shard(x, ids, weights):
        sent = jax_ep.dispatch(x, ids, weights, group=on.group, num_experts=E, **by)
        if order == "rank":
            return sent.row_sources(), (weights, weights), sent.num_invalid
        values, transposed = jax.vjp(sent.to_topk, 2 * sent.row_weights)
        return sent.row_sources(), (values, *transposed(weights)), sent.num_invalid

    sources, (values, gradient), num_invalid = on.run(shard, x, ids, weights)
    invalid = (ids < -1) | (ids >= E)
    assert invalid.any()
    np.testing.assert_array_equal(num_invalid[:, 0], invalid.sum(axis=(1, 2)))
    want = np.zeros((R, T, K), np.float32)
    for rank, one in enumerate(oracle.dispatch(x, ids, weights, E, order, capacity)):
        expected = [(-1, -1) if source is None else source[:2] for source in one.sources]
        found = [array[rank].reshape(-1) for array in sources]
        np.testing.assert_array_equal(np.stack(found, 1), expected)
        if order != "rank":  # the weights were the cotangents
            np.testing.assert_array_equal(gradient[rank].reshape(-1), one.weights)
        for source in filter(None, one.sources):
            want[source] = 2 * weights[source]
    if order != "rank":
        np.testing.assert_array_equal(values, want)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ORDERS)
def test_gradient_of_weights_along_a_handle(order, implementation):
    """Of <arrived weights, noise>: each kept choice gets the noise where its weight arrived."""
    ids = routing("random", R, T, K, E)
    x, weights = floats((R, T, 2)), floats((R, T, K))
    on = ranks(R)
    capacity = 20

    def shard(x, ids, weights):
        by = {"implementation": implementation}
        sent = jax_ep.dispatch(
            x, ids, weights, group=on.group, num_experts=E, order=order, capacity=capacity, **by
        )
        (_, arrived), transposed = jax.vjp(
            lambda x, w: jax_ep.redispatch(x, sent.handle, topk_weights=w, **by), x, weights
        )
        noise = arrived * 0 + jnp.cos(jnp.arange(arrived.size, dtype=jnp.float32)).reshape(arrived.shape)
        d_x, d_weights = transposed((sent.x * 0 + 1, noise))
        return weights_of(sent), d_x, d_weights, noise

    arrived, d_x, d_weights, noise = on.run(shard, x, ids, weights)
    want_x, want = np.zeros_like(x), np.zeros_like(weights)
    for rank, one in enumerate(oracle.dispatch(x, ids, weights, E, order, capacity)):
        np.testing.assert_array_equal(arrived[rank], one.weights)
        for c, source in enumerate(one.sources):
            if source is None:
                continue
            s, t, k = source
            want_x[s, t] += 1
            if order == "expert":
                want[s, t, k] = noise[rank, c]
            else:
                here = one.topk_idx[c] >= 0
                want[s, t, here] = noise[rank, c, here]
    np.testing.assert_array_equal(d_x, want_x)
    np.testing.assert_array_equal(d_weights, want)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ORDERS)
def test_an_empty_payload_routes_only(order, implementation):
    ids, weights = routing("sprinkled", R, T, K, E), floats((R, T, K))
    on = ranks(R)

    def shard(ids, weights):
        options = {"num_experts": E, "order": order, "implementation": implementation}
        return jax_ep.dispatch({}, ids, weights, group=on.group, **options)

    sent = on.run(shard, ids, weights)
    assert sent.x == {}
    for rank, want in enumerate(oracle.dispatch(np.zeros((R, T, 1)), ids, weights, E, order)):
        np.testing.assert_array_equal(weights_of(sent)[rank], want.weights, strict=True)
        np.testing.assert_array_equal(sent.tokens_per_expert[rank], want.tokens_per_expert, strict=True)


@pytest.mark.one_jax
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("capacity", [None, 22])
def test_which_rows_are_whose(alignment, capacity, implementation):
    ids = routing("random", R, T, K, E)
    x = tagged_rows(R, T, 2, np.float32)
    on = ranks(R)

    def shard(x, ids):
        options = {"capacity": capacity, "expert_alignment": alignment, "implementation": implementation}
        sent = jax_ep.dispatch(x, ids, group=on.group, num_experts=E, **options)
        return sent.row_experts(), sent.is_row()

    row_experts, is_row = on.run(shard, x, ids)
    for rank, want in enumerate(oracle.dispatch(x, ids, None, E, "expert", capacity, alignment)):
        first = rank * (E // R)
        expert = [-1 if s is None else ids[s] - first for s in want.sources]
        np.testing.assert_array_equal(row_experts[rank], np.array(expert, np.int32), strict=True)
        np.testing.assert_array_equal(is_row[rank], np.array(expert) >= 0, strict=True)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("capacity", [None, 8])
def test_no_tokens(order, capacity, implementation):
    """T = 0: nothing is sent, and every result has its shape."""
    on = ranks(2)
    x, ids = np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, K), np.int32)
    weights = np.zeros((2, 0, K), np.float32)

    def shard(x, ids, weights):
        by = {"implementation": implementation}

        def layer(x, weights):
            sent = jax_ep.dispatch(
                x, ids, weights, group=on.group, num_experts=4, order=order, capacity=capacity, **by
            )
            row_weights = weights_of(sent) if order == "expert" else None
            y = jax_ep.combine(sent.x, sent.handle, row_weights=row_weights, **by)
            return y, (sent, jax_ep.redispatch(x, sent.handle, **by))

        y, transposed, (sent, again) = jax.vjp(layer, x, weights, has_aux=True)
        return y, sent, again, transposed(y)

    y, sent, again, (d_x, d_weights) = on.run(shard, x, ids, weights)
    rows = capacity or 0
    assert y.shape == (2, 0, 3)
    assert d_x.shape == (2, 0, 3)
    assert d_weights.shape == (2, 0, K)
    assert sent.x.shape == again.shape == (2, rows, 3)
    assert not sent.x.any()
    assert not again.any()
    assert not weights_of(sent).any()
    for name in ("tokens_per_expert", "num_tokens", "num_dropped"):
        assert not getattr(sent, name).any()


@pytest.mark.one_jax
def test_no_tokens_local(implementation):
    by = {"implementation": implementation}
    counts = functools.partial(jax_ep.get_dispatch_layout, num_experts=8, num_ranks=4, ranks_per_domain=2)
    permute = functools.partial(jax_ep.permute, num_local_experts=4, capacity=8)
    ids = np.zeros((0, K), np.int32)
    layout = jax.jit(functools.partial(counts, **by))(ids)
    assert not np.asarray(layout.num_tokens_per_expert).any()
    assert layout.is_token_in_rank.shape == (0, 4)
    p = jax.jit(functools.partial(permute, **by))(np.zeros((0, 3), np.float32), ids)
    np.testing.assert_array_equal(p.x, np.zeros((8, 3)))
    assert jax_ep.unpermute(p.x, p.row_map, **by).shape == (0, 3)


def test_rejects_handle_of_closed_group():
    """Results of jit have the group of its first call."""
    on = ranks(2)
    x, ids = np.ones((2 * T, 2), np.float32), routing("uniform", 2, T, K, E).reshape(-1, K)

    def send(x, ids, group):
        shard = lambda x, ids: jax_ep.dispatch(x, ids, group=group, num_experts=E)
        return on.map(shard)(x, ids)

    def back(sent):
        shard = lambda sent: jax_ep.combine(sent.x, sent.handle)
        return jax.jit(on.map(shard))(sent)

    sends = jax.jit(send, static_argnames="group")
    spare = make_mesh((2,), ("ep",))
    with jax_ep.Group(spare, "ep") as first:
        sends(x, ids, group=first)
    with jax_ep.Group(spare, "ep") as second:
        sent = sends(x, ids, group=second)
        assert sent.handle.routing.group is first
        with pytest.raises(RuntimeError, match=r"combine: .* is closed; make a new Group"):
            back(sent)


def test_row_experts_outside_of_shard_map():
    on = ranks(2)
    ids = routing("uniform", 2, T, K, E).reshape(-1, K)
    shard = lambda ids: jax_ep.dispatch((), ids, group=on.group, num_experts=E)
    sent = jax.jit(on.map(shard))(ids)
    with pytest.raises(ValueError, match=r"row_experts: handle\.topk_idx must be int32"):
        sent.row_experts()
