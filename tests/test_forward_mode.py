"""Forward mode: an error that names the op, wherever a tangent goes through one; and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, ranks, same_bits
from jax.sharding import PartitionSpec as P

import jax_ep

R, T, E, H = 2, 4, 4, 128
IDS = jnp.asarray(np.arange(R * T * 2).reshape(R * T, 2) % E, jnp.int32)
X = jnp.asarray(floats((R * T, H)))
ONES = jnp.ones((T, 1))
SIZES = jnp.asarray([3, 5], jnp.int32)
MATRICES = jnp.asarray(floats((2, H, H)))


def dispatch(x, weights=None, **options):
    options = {"group": ranks(R).group, "num_experts": E, **options}
    return jax_ep.dispatch(x, IDS[:T], weights, **options)


def combine(x, **options):
    """Of rows that all depend on x, along a handle that does not."""
    sent = dispatch(ONES, jnp.ones((T, 2)))
    rows = jnp.broadcast_to(x[:1], (sent.x.shape[0], H))
    weights = sent.row_weights if options.pop("weighted", False) else None
    return jax_ep.combine(rows, sent.handle, row_weights=weights, **options)


def start(x):
    pending = jax_ep.dispatch_start(x, IDS[:T], group=ranks(R).group, num_experts=E)
    return jax_ep.dispatch_done(pending).x


# Inside of shard_map: what is called, and how its error begins.
MAPPED = {
    "dispatch": (lambda x: dispatch(x).x, "dispatch has no forward mode"),
    "dispatch of a pytree": (
        lambda x: dispatch({"a": x, "b": IDS[:T]}).x["a"],
        "dispatch has no forward mode",
    ),
    "dispatch by rank": (lambda x: dispatch(x, order="rank").x, "dispatch has no forward mode"),
    "padded": (lambda x: dispatch(x, order="expert_padded").x, "dispatch has no forward mode"),
    "xla": (lambda x: dispatch(x, implementation="xla").x, "dispatch has no forward mode"),
    "weights": (lambda x: dispatch(ONES, x[:, :2]).row_weights, "dispatch has no forward mode"),
    "through FP8": (lambda x: dispatch(x, quantize="fp8_dequantize").x, "dispatch has no forward mode"),
    "to FP8": (
        lambda x: dispatch(x, quantize="fp8").x.scales,
        "dispatch: quantize='fp8' gives rows without a gradient",
    ),
    "dispatch that ranks may miss": (
        lambda x: dispatch(x, on_timeout="mask").x,
        "dispatch: with active_ranks or on_timeout='mask' it has no gradient",
    ),
    "redispatch": (lambda x: jax_ep.redispatch(x, dispatch(ONES).handle), "redispatch .* no forward mode"),
    "combine": (combine, "combine .* has no forward mode"),
    "weighted combine": (lambda x: combine(x, weighted=True), "combine has no forward mode"),
    "bias": (lambda x: combine(jnp.ones((1, H)), bias=x), "combine has no forward mode"),
    "combine that ranks may miss": (
        lambda x: combine(x, on_timeout="mask")[0],
        "combine: with active_ranks or on_timeout='mask' it has no gradient",
    ),
    "start": (start, "dispatch has no forward mode"),
    "moe": (
        lambda x: jax_ep.moe(
            x, IDS[:T], jnp.ones((T, 2)), lambda sent: sent.x, group=ranks(R).group, num_experts=E
        ),
        "dispatch has no forward mode",
    ),
    "moe's experts": (
        lambda x: jax_ep.moe(
            ONES, IDS[:T], jnp.ones((T, 2)), lambda sent: sent.x * x[:1], group=ranks(R).group, num_experts=E
        ),
        "combine has no forward mode",
    ),
}
LOCAL = {
    "permute": (lambda x: jax_ep.permute(x, IDS, num_local_experts=E).x, "permute has no forward mode"),
    "unpermute": (lambda x: jax_ep.unpermute(x, IDS), "unpermute .* has no forward mode"),
    "grouped_dot": (lambda x: jax_ep.grouped_dot(x, MATRICES, SIZES), "grouped_dot has no forward mode"),
    "its weights": (
        lambda x: jax_ep.grouped_dot(X, MATRICES * x[0, 0], SIZES),
        "grouped_dot has no forward mode",
    ),
    "grouped_dot of FP8": (
        lambda x: jax_ep.grouped_dot(
            jax_ep.QuantizedArray(jnp.ones((R * T, H), jnp.float8_e4m3fn), x[:, :1]),
            jax_ep.quantize_fp8(MATRICES, block=(128, 128)),
            SIZES,
        ),
        "grouped_dot: FP8 operands have no gradient",
    ),
    "quantize_fp8": (lambda x: jax_ep.quantize_fp8(x).scales, "quantize_fp8 has no gradient"),
    "dequantize_fp8": (
        lambda x: jax_ep.dequantize_fp8(
            jax_ep.QuantizedArray(jnp.ones((R * T, H), jnp.float8_e4m3fn), x[:, :1])
        ),
        "dequantize_fp8 has no gradient",
    ),
}
OPS = MAPPED | LOCAL


def function_of(name):
    function, error = OPS[name]
    if name in MAPPED:
        function = jax.shard_map(function, mesh=ranks(R).mesh, in_specs=P("ep"), out_specs=P("ep"))
    return function, error


def in_scan(function, x):
    return jax.lax.scan(lambda total, _: (total + jnp.sum(function(x)), None), 0.0, length=2)[0]


WAYS = {
    "jvp": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jvp in jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "linearize": lambda f, x: jax.linearize(jax.jit(f), x)[1](x),
    "in a scan": lambda f, x: jax.jit(jax.jacfwd(lambda x: in_scan(f, x)))(x),
    "in a checkpoint": lambda f, x: jax.jvp(jax.jit(jax.checkpoint(f)), (x,), (x,)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPS)
def test_the_error_names_the_op(name, way):
    function, error = function_of(name)
    with pytest.raises(TypeError, match=error):
        WAYS[way](lambda x: function(x).astype(jnp.float32), X)


@pytest.mark.parametrize("name", ["dispatch", "weighted combine", "permute", "grouped_dot"])
def test_eager_mode(name):
    function, error = function_of(name)
    with pytest.raises(TypeError, match=error + r" \(jax.jvp, .* take jax.grad, jax.vjp or jax.jacrev"):
        jax.jvp(function, (X,), (X,))


GRADIENTS = {
    "dispatch": r"combine \(also as the gradient of dispatch\) has no forward mode",
    "combine": r"redispatch \(also as the gradient of combine\) has no forward mode",
    "weighted combine": "the gradient of combine has no forward mode",
    "permute": r"unpermute \(also as the gradient of permute\) has no forward mode",
    "unpermute": "the gradient of unpermute has no forward mode",
    "grouped_dot": "grouped_dot has no forward mode",
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_forward_over_reverse(name):
    """The tangent may come in with the cotangent alone."""
    function, _ = function_of(name)
    gradient = lambda scale: jax.grad(lambda x: jnp.sum(scale * function(x).astype(jnp.float32)))(X)
    with pytest.raises(TypeError, match=GRADIENTS[name]):
        jax.jit(jax.jacfwd(gradient))(1.0)


def test_a_jacobian_times_a_vector_by_reverse_mode():
    """As docs/sharp_bits.md has it. Of a dispatch, which is linear, it is the dispatch of the vector."""
    function, _ = function_of("dispatch")
    vector = jnp.asarray(floats(X.shape, seed=5))

    @jax.jit
    def times(x, vector):
        rows, pull = jax.vjp(function, x)
        return jax.vjp(lambda cotangent: pull(cotangent)[0], jnp.zeros_like(rows))[1](vector)[0]

    assert same_bits(times(X, vector), jax.jit(function)(vector))


def test_gradients_of_every_kind_are_the_same():
    """Of a layer under vmap of grad, grad of vmap, checkpoint and scan: all are one gradient."""

    def layer(x):
        sent = dispatch(x, jnp.ones((T, 2)))
        y = jax_ep.grouped_dot(jnp.tanh(sent.x), MATRICES, sent.group_sizes)
        return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights)

    mapped = jax.shard_map(layer, mesh=ranks(R).mesh, in_specs=P("ep"), out_specs=P("ep"))
    loss = lambda x: jnp.sum(mapped(x) ** 2)
    scanned = lambda x: jax.lax.scan(lambda c, _: (c + loss(x), None), 0.0, length=3)[0] / 3
    want = np.asarray(jax.jit(jax.grad(loss))(X))
    batch = jnp.stack([X, 2 * X])
    gradients = {
        "checkpoint": jax.grad(jax.checkpoint(loss)),
        "scan": jax.grad(scanned),
        "scan of checkpoint": jax.grad(jax.checkpoint(scanned)),
        "vmap of grad": lambda _: jax.vmap(jax.grad(loss))(batch)[0],
        "vmap of grad of checkpoint": lambda _: jax.vmap(jax.grad(jax.checkpoint(jax.jit(loss))))(batch)[0],
        "grad of vmap": lambda _: jax.grad(lambda batch: jnp.sum(jax.vmap(jax.jit(loss))(batch)))(batch)[0],
    }
    # GPUs multiply float32 as tf32, of 10 bits, which XLA does in another order in a loop.
    error = 2.0**-9 * np.abs(want).max() if jax.default_backend() == "gpu" else 1e-4
    for name, gradient in gradients.items():
        got = np.asarray(jax.jit(gradient)(X))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=error, err_msg=name)
