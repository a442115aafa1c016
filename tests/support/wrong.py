"""What the tests of wrong uses share: small arrays, and the ops called with them."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import ranks
from jax.sharding import PartitionSpec as P

import jax_ep

R, T, K, E, H = 2, 4, 2, 4, 3
X = np.ones((R * T, H), np.float32)
IDS = np.zeros((R * T, K), np.int32)
W = np.ones((R * T, K), np.float32)
GROUPS = np.ones((E // R,), np.int32)
MATRICES = np.ones((E // R, H, H), np.float32)
OBJECTS = np.array([object()] * T)


def traced(function):
    """Traces a function of one rank's rows; nothing runs."""
    mapped = jax.shard_map(function, mesh=ranks(R).mesh, in_specs=P("ep"), out_specs=P("ep"))
    jax.jit(mapped).trace(X)


def dispatch(x, ids=IDS[:T], weights=None, **options):
    return jax_ep.dispatch(x, ids, weights, **{"group": ranks(R).group, "num_experts": E, **options})


def combine(x, **options):
    return jax_ep.combine(x, dispatch(x[:T]).handle, **options)


def moe(x, expert_fn, **options):
    options = {"group": ranks(R).group, "num_experts": E, **options}
    return jax_ep.moe(x, IDS[:T], W[:T], expert_fn, **options)


def wide(x):
    return jnp.tile(x[:, :1], (1, 128))
