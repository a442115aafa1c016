"""Forward mode: the TypeError of `jax.custom_vjp`, never a wrong tangent; and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, ranks, same_bits

import jax_ep

R, T, E, H = 2, 4, 4, 128
IDS = jnp.asarray(np.arange(R * T * 2).reshape(R * T, 2) % E, jnp.int32)
X = jnp.asarray(floats((R * T, H)))
SIZES = jnp.asarray([3, 5], jnp.int32)
MATRICES = jnp.asarray(floats((2, H, H)))


def on_all(function):
    # The mesh is made at the call, because a host may have too few devices for it.
    return lambda x: ranks(R).map(function)(x)


def dispatch(x, weights=None, **options):
    return jax_ep.dispatch(x, IDS[:T], weights, group=ranks(R).group, num_experts=E, **options)


def combine(x):
    """Sums rows that depend on x, along a handle that does not."""
    sent = dispatch(jnp.ones((T, 1)), jnp.ones((T, 2)))
    rows = jnp.broadcast_to(x[:1], (sent.x.shape[0], H))
    return jax_ep.combine(rows, sent.handle, row_weights=sent.row_weights)


OPS = {
    "dispatch": on_all(lambda x: dispatch(x).x),
    "dispatch to FP8": on_all(lambda x: dispatch(x, quantize="fp8").x.scales),
    "dispatch that ranks may miss": on_all(lambda x: dispatch(x, on_timeout="mask").x),
    "combine": on_all(combine),
    "permute": lambda x: jax_ep.permute(x, IDS, num_local_experts=E).x,
    "unpermute": lambda x: jax_ep.unpermute(x, IDS),
    "grouped_dot": lambda x: jax_ep.grouped_dot(x, MATRICES, SIZES),
    "quantize_fp8": lambda x: jax_ep.quantize_fp8(x).scales,
}
WAYS = {
    "jvp": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jacfwd": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "linearize": lambda f, x: jax.linearize(jax.jit(f), x)[1](x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPS)
def test_rejects_forward_mode(name, way):
    with pytest.raises(TypeError, match="custom_vjp"):
        WAYS[way](OPS[name], X)


def test_rejects_forward_over_reverse():
    """The tangent comes in with the cotangent alone."""
    gradient = lambda scale: jax.grad(lambda x: jnp.sum(scale * OPS["dispatch"](x)))(X)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(jax.jacfwd(gradient))(1.0)


def test_jacobian_times_vector_by_reverse_mode():
    """As docs/sharp_bits.md has it. Of a dispatch, which is linear, it is the dispatch of the vector."""
    function = on_all(lambda x: dispatch(x).x)
    vector = jnp.asarray(floats(X.shape, seed=5))

    @jax.jit
    def times(x, vector):
        rows, pull = jax.vjp(function, x)
        return jax.vjp(lambda cotangent: pull(cotangent)[0], jnp.zeros_like(rows))[1](vector)[0]

    assert same_bits(times(X, vector), jax.jit(function)(vector))


def test_transformed_gradients_are_the_same():
    """Of a layer under vmap of grad, grad of vmap, checkpoint and scan: all are one gradient."""

    def layer(x):
        sent = dispatch(x, jnp.ones((T, 2)))
        y = jax_ep.grouped_dot(jnp.tanh(sent.x), MATRICES, sent.group_sizes)
        return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights)

    mapped = ranks(R).map(layer)
    loss = lambda x: jnp.sum(mapped(x) ** 2)
    scanned = lambda x: jax.lax.scan(lambda c, _: (c + loss(x), None), 0.0, length=3)[0] / 3
    want = np.asarray(jax.jit(jax.grad(loss))(X))
    batch = jnp.stack([X, 2 * X])
    gradients = {
        "scan of checkpoint": jax.grad(jax.checkpoint(scanned)),
        "vmap of grad of checkpoint": lambda _: jax.vmap(jax.grad(jax.checkpoint(jax.jit(loss))))(batch)[0],
        "grad of vmap": lambda _: jax.grad(lambda batch: jnp.sum(jax.vmap(jax.jit(loss))(batch)))(batch)[0],
    }
    # GPUs multiply float32 as tf32, of 10 bits, which XLA does in another order in a loop.
    error = 2.0**-9 * np.abs(want).max() if jax.default_backend() == "gpu" else 1e-4
    all_of_them = jax.jit(lambda x: {name: gradient(x) for name, gradient in gradients.items()})
    for name, got in jax.device_get(all_of_them(X)).items():
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=error, err_msg=name)
