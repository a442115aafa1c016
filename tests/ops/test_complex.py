"""Complex rows: moved bit for bit, beside leaves that have gradients, and without a gradient of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks, routing

import jax_ep

R, T, K, E, H = 4, 6, 2, 8, 3
IDS = routing("uniform", R, T, K, E).reshape(-1, K)
ORDERS = ["rank", "expert", "expert_padded"]


def complexes(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)


def on_all(function, *arrays):
    return ranks(R).map(function)(*arrays)


def dispatch(x, ids, weights=None, **options):
    return jax_ep.dispatch(x, ids, weights, group=ranks(R).group, num_experts=E, **options)


OPS = {
    "dispatch": lambda x, ids: dispatch(x, ids).x,
    "redispatch": lambda x, ids: jax_ep.redispatch(x, dispatch(ids, ids).handle),
    "permute": lambda x, ids: jax_ep.permute(x, ids, num_local_experts=E).x,
}


@pytest.mark.parametrize("name", OPS)
def test_rejects_gradients_of_complex_rows(name):
    run = lambda x: jnp.sum(jnp.real(on_all(OPS[name], x, IDS)))
    match = rf"{name}: complex rows have no gradient, got complex64\[6,3\].*; pass their real and imaginary"
    with pytest.raises(TypeError, match=match):
        jax.jit(jax.grad(run))(complexes(R * T, H))


@pytest.mark.parametrize(
    ("order", "policy", "implementation"),
    [
        pytest.param("rank", None, "ffi", marks=pytest.mark.one_jax),
        pytest.param("expert_padded", None, "ffi", marks=pytest.mark.one_jax),
        ("expert", jax_ep.save_ep_residuals, "xla"),
    ],
)
def test_complex_rows_beside_gradients_of_others(order, policy, implementation):
    """Gradients of a real leaf and of weights; the complex rows are those of a dispatch without gradients."""
    x, wide = complexes(R * T, H), np.random.default_rng(1).random((R * T, H), np.float32)
    weights = np.random.default_rng(2).random((R * T, K), np.float32)

    def shard(payload, ids, weights):
        sent = dispatch(payload, ids, weights, order=order, implementation=implementation)
        arrived = sent.topk_weights if order == "rank" else sent.row_weights
        there = None if order == "rank" else sent.is_row()[..., None]
        rows = sent.x if there is None else jax.tree.map(lambda row: jnp.where(there, row, 0), sent.x)
        again = jnp.sin(rows["wide"]) * jnp.real(rows["x"]) * jnp.sum(arrived)
        return again, rows["x"]

    def loss(wide, weights, x):
        layer = lambda payload, weights: on_all(shard, payload, IDS, weights)
        again, rows = jax.checkpoint(layer, policy=policy)({"x": x, "wide": wide}, weights)
        return jnp.sum(again), rows

    (_, rows), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(wide, weights, x)
    np.testing.assert_array_equal(rows, jax.jit(loss)(wide, weights, x)[1])
    assert np.any(rows)
    split = lambda wide, weights: loss(wide, weights, jax.lax.stop_gradient(jnp.asarray(x)))[0]
    assert all(map(np.any, gradients))
    for got, want in zip(gradients, jax.jit(jax.grad(split, (0, 1)))(wide, weights), strict=True):
        np.testing.assert_array_equal(got, want)


def test_complex_rows_are_not_summed(implementation):
    ids = routing("uniform", R, T, K, E)

    def shard(x, ids):
        sent = jax_ep.dispatch(x, ids, group=ranks(R).group, num_experts=E, implementation=implementation)
        return jax_ep.combine(sent.x, sent.handle, implementation=implementation)

    with pytest.raises(TypeError, match="combine: y is summed, so it must be floating; got complex64"):
        ranks(R).run(shard, complexes(R, T, H), ids)
