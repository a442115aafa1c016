"""Gradients taken inside shard_map: the numbers of the table in docs/sharp_bits.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, ranks
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.no_gpu

R, T, K, E, H = 2, 4, 1, 2, 4
PARAMETERS = {"router": floats((H, E)), "experts": floats((E, H, H), seed=2)}
X = floats((R * T, H), seed=3)
SPECS = {"router": P(), "experts": P("ep")}


def layer(parameters, x):
    weights, ids = jax.lax.top_k(jax.nn.softmax(x @ parameters["router"]), K)
    experts = lambda sent: jnp.tanh(sent.x) @ parameters["experts"][0]
    return jax_ep.moe(x, ids, weights, experts, group=ranks(R).group, num_experts=E)


@functools.cache
def true_gradients():
    mapped = jax.shard_map(layer, mesh=ranks(R).mesh, in_specs=(SPECS, P("ep")), out_specs=P("ep"))
    return jax.jit(jax.grad(lambda p, x: jnp.mean(mapped(p, x) ** 2), (0, 1)))(PARAMETERS, X)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_inside_shard_map(check_vma):
    def gradients(parameters, x, form):
        def loss(parameters, x):
            local = jnp.mean(layer(parameters, x) ** 2)
            return jax.lax.pmean(local, "ep") if form == "pmean" else local

        of_parameters, of_x = jax.grad(loss, (0, 1))(parameters, x)
        # Varying, so that each device's own comes out.
        router = of_parameters["router"][None] + jnp.zeros_like(of_x[:1, :1, None])
        return router, of_parameters["experts"], of_x

    def shard(parameters, x):
        return {form: gradients(parameters, x, form) for form in ("local", "pmean")}

    options = {"in_specs": (SPECS, P("ep")), "out_specs": P("ep"), "check_vma": check_vma}
    results = jax.jit(jax.shard_map(shard, mesh=ranks(R).mesh, **options))(PARAMETERS, X)
    want, want_x = true_gradients()
    for form, (router, experts, of_x) in results.items():
        factor = 1 if check_vma and form == "pmean" else R
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5, err_msg=form)
        close(experts, factor * want["experts"])
        close(of_x, factor * want_x)
        if check_vma:
            close(router, np.broadcast_to(factor * want["router"], router.shape))
        else:
            assert not np.allclose(router, router[:1], rtol=1e-2)
            close(router.sum(axis=0), R * want["router"])
            close(router.mean(axis=0), want["router"])  # the recipe
