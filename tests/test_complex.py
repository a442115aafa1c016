"""Complex rows: moved bit for bit, and differentiated as JAX differentiates a plain gather of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks, routing

import jax_ep

R, T, K, E, H = 4, 6, 2, 8, 3


def complexes(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)


def score(rows, factors):
    """A number that depends on all of each row, and in no simple way on its conjugate."""
    return jnp.sum(jnp.real(factors * rows**2) + jnp.imag(rows) ** 3)


def check_against_a_gather(arrive, num_rows):
    """`arrive` brings a payload of rows and tags to [R * num_rows] rows; the tags say whose they are."""
    x, factors = complexes(R * T, H), complexes(R * num_rows, H, seed=1)
    tags = np.arange(1, R * T + 1, dtype=np.int32)  # 0 means padding

    def moved(x):
        rows, tags_there = arrive({"rows": x, "tag": tags}).values()
        return score(rows, factors), (rows, tags_there)

    gradient, (rows, source) = jax.jit(jax.grad(moved, has_aux=True))(x)

    def gathered(x):
        return score(jnp.where((source > 0)[:, None], x[source - 1], jnp.zeros((), x.dtype)), factors)

    assert np.any(np.asarray(source))
    np.testing.assert_array_equal(rows, np.where((source > 0)[:, None], x[source - 1], 0))
    np.testing.assert_allclose(gradient, jax.grad(gathered)(x), rtol=1e-5, atol=1e-5)


def on_all(function, *arrays):
    spec = jax.sharding.PartitionSpec("ep")
    return jax.shard_map(function, mesh=ranks(R).mesh, in_specs=spec, out_specs=spec)(*arrays)


@pytest.mark.parametrize("capacity", [None, 7])
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("again", [False, True], ids=["dispatch", "redispatch"])
def test_gradient_of_dispatch(again, order, capacity, implementation):
    ids = routing("sprinkled", R, T, K, E).reshape(-1, K)

    def shard(payload, ids):
        options = {"num_experts": E, "order": order, "capacity": capacity}
        sent = jax_ep.dispatch(payload, ids, group=ranks(R).group, **options, implementation=implementation)
        if again:
            return jax_ep.redispatch(payload, sent.handle, implementation=implementation)
        return sent.x

    worst = R * T if order == "rank" else R * T * K
    check_against_a_gather(lambda payload: on_all(shard, payload, ids), capacity or worst)


def test_gradient_of_permute(implementation):
    ids = routing("random", 1, R * T, K, E)[0]

    def arrive(payload):
        return jax_ep.permute(payload, ids, num_local_experts=E, implementation=implementation).x

    check_against_a_gather(arrive, R * T * K // R)


def test_gradient_of_a_layer(implementation):
    """Whose experts make one real number of a complex row."""
    ids = routing("uniform", R, T, K, E).reshape(-1, K)
    x, w = complexes(R * T, H), np.random.default_rng(2).random((R * T, K), np.float32)
    factors = complexes(H, seed=3)

    def experts(rows):
        sums = jnp.sum(rows * factors[None], axis=1)
        return (jnp.real(sums) ** 2 + jnp.imag(sums) ** 3)[:, None]

    def shard(x, ids, w):
        options = {"group": ranks(R).group, "num_experts": E}
        run = lambda sent: experts(sent.x)
        return jax_ep.moe(x, ids, w, run, **options, implementation=implementation)

    got = jax.jit(jax.grad(lambda x, w: jnp.sum(on_all(shard, x, ids, w) ** 2), argnums=(0, 1)))(x, w)
    dense = lambda x, w: jnp.sum((jnp.sum(w, axis=1, keepdims=True) * experts(x)) ** 2)
    for a, b in zip(got, jax.grad(dense, argnums=(0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_complex_rows_are_not_summed(implementation):
    ids = routing("uniform", R, T, K, E)

    def shard(x, ids):
        sent = jax_ep.dispatch(x, ids, group=ranks(R).group, num_experts=E, implementation=implementation)
        return jax_ep.combine(sent.x, sent.handle, implementation=implementation)

    with pytest.raises(TypeError, match="combine: y is summed, so it must be floating; got complex64"):
        ranks(R).run(shard, complexes(R, T, H), ids)
