"""A small MoE layer for the tests, and what it computes."""

import jax.numpy as jnp
import numpy as np
from cases import floats, routing
from devices import most_ranks

import jax_ep

R, T, K, E, H = most_ranks(), 6, 2, 16, 4


def inputs(size=R, seed=0):
    ids = routing("sprinkled", size, T, K, E, seed).reshape(-1, K)
    x, w = floats((size * T, H), seed=seed + 1), floats((size * T, K), seed=seed + 2)
    return jnp.asarray(x), jnp.asarray(ids), jnp.asarray(w)


def experts(sent):
    return jnp.tanh(sent.x) * 1.5


def layer(x, ids, w, group, **options):
    return jax_ep.moe(x, ids, w, experts, group=group, num_experts=E, **options)


def used_choices(ids):
    """Bool [N, K]: in range."""
    ids = np.asarray(ids)
    return (ids >= 0) & (ids < E)


def dense(x, ids, w):
    """What the layer computes, with every expert the same function."""
    total = np.where(used_choices(ids), w, 0).sum(axis=1, keepdims=True)
    return np.tanh(np.asarray(x)) * 1.5 * total


def dense_gradients(x, ids, w):
    """Of sum(layer ** 2) in x and w."""
    y, tanh, used = dense(x, ids, w), np.tanh(np.asarray(x)), used_choices(ids)
    total = np.where(used, w, 0).sum(axis=1, keepdims=True)
    d_x = 2 * y * 1.5 * total * (1 - tanh**2)
    d_w = np.where(used, (2 * y * 1.5 * tanh).sum(axis=1, keepdims=True), 0)
    return d_x, d_w
