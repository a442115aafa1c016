"""The layers that are tested in chunks of their tokens: experts of many kinds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import floats, ranks, routing
from conftest import most_ranks
from jax.sharding import PartitionSpec as P

import jax_ep

R, T, K, E, H, F = most_ranks(), 10, 3, 16, 8, 16
L = E // R


def arrays():
    ids = routing("sprinkled", R, T, K, E).reshape(-1, K)
    return floats((R * T, H)), ids, floats((R * T, K), seed=2)


def parameters():
    shapes = {"up": (E, H, F), "gate": (E, H, F), "down": (E, F, H), "bias": (E, F), "scale": (E, 1, 1)}
    return {name: floats(shape, seed=3 + i) for i, (name, shape) in enumerate(shapes.items())}


def mlp(p, sent):
    dot = functools.partial(jax_ep.grouped_dot, group_sizes=sent.group_sizes)
    return dot(jax.nn.gelu(dot(sent.x, p["up"])), p["down"])


def swiglu(p, sent):
    dot = functools.partial(jax_ep.grouped_dot, group_sizes=sent.group_sizes)
    return dot(jax.nn.silu(dot(sent.x, p["gate"])) * dot(sent.x, p["up"]), p["down"])


def cast(p, sent):
    """Products in another dtype than the weights are kept in."""
    dot = functools.partial(jax_ep.grouped_dot, group_sizes=sent.group_sizes)
    wide = lambda array: array.astype(jnp.bfloat16)
    return dot(jnp.tanh(dot(wide(sent.x), wide(p["up"]))), wide(p["down"])).astype(jnp.float32)


def twice(p, sent):
    """One matrix in two products, scaled and transposed, and in something that is no product."""
    dot = functools.partial(jax_ep.grouped_dot, group_sizes=sent.group_sizes)
    up = p["up"] * p["scale"]
    hidden = jnp.tanh(dot(sent.x, up))
    return dot(hidden, up.swapaxes(1, 2)) + sent.x * jnp.mean(up)


def biased(p, sent):
    dot = functools.partial(jax_ep.grouped_dot, group_sizes=sent.group_sizes)
    expert = sent.row_experts()
    bias = jnp.where(expert[:, None] < 0, 0, p["bias"][expert])
    return dot(jax.nn.gelu(dot(sent.x, p["up"]) + bias), p["down"]) * sent.row_weights[:, None]


def checkpointed(p, sent):
    return jax.checkpoint(lambda x, up, down: mlp({"up": up, "down": down}, _with(sent, x)))(
        sent.x, p["up"], p["down"]
    )


def jitted(p, sent):
    return jax.jit(lambda x, p: swiglu(p, _with(sent, x)))(sent.x, p)


def scanned(p, sent):
    """Experts whose weight products are computed in a loop, from where they cannot be taken."""
    step = lambda x, _: (jnp.tanh(mlp(p, _with(sent, x))), None)
    return jax.lax.scan(step, sent.x, length=2)[0]


def modulated(p, sent):
    """What a product makes is multiplied by something of the chunk, here 1: it cannot wait for the others."""
    one = jnp.minimum(1 + sent.num_dropped[0], 1).astype(jnp.float32)
    return mlp({**p, "up": p["up"] * one}, sent)


def _with(sent, x):
    return dataclasses.replace(sent, x=x)


# How many products for the gradients of weights each chunk has, and how many there are of all chunks' rows.
EXPERTS = {
    mlp: (0, 2),
    swiglu: (0, 3),
    cast: (0, 2),
    twice: (0, 2),
    biased: (0, 2),
    checkpointed: (0, 2),
    jitted: (0, 3),
    scanned: (2, 0),
    modulated: (2, 0),
}


def shard(group, experts, x, ids, w, p, **options):
    return jax_ep.moe(x, ids, w, lambda sent: experts(p, sent), group=group, num_experts=E, **options)


def mapped(experts, check_vma=True, **options):
    on = ranks(R)
    function = functools.partial(shard, on.group, experts, **options)
    return jax.shard_map(function, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma)


def gradient(function, ids):
    def loss(x, w, p):
        y = function(x, ids, w, p)
        return jnp.sum(y**2), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def assert_sums(got, want, tolerance=1e-5):
    """Relative to the largest: sums of the same terms in another order."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(np.abs(other).max(initial=0)) or 1.0
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * scale)
