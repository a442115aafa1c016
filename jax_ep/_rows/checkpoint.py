"""The policy of `jax.checkpoint` that saves dispatched rows, and the function that names arrays for it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import checkpoint_names
from jax_ep._rows.dtypes import bits_of, is_differentiable

_saves = jax.checkpoint_policies.save_only_these_names(
    checkpoint_names.handle, checkpoint_names.weights, checkpoint_names.rows
)


def save_ep_residuals(*primitive: Any, **params: Any) -> Any:
    """A policy for `jax.checkpoint`: keeps handles and dispatched rows with their weights.

    The backward pass then sends no row a second time; what the experts compute is done again. To keep
    more, combine the names of `jax_ep.checkpoint_names` with your own: `jax.checkpoint_policies.
    save_only_these_names(names.handle, names.weights, names.rows, "mine")`. A policy that keeps the rows
    under a name of your own needs the first two besides, which are small. (Do not name float8 arrays
    yourself: JAX makes NaN of their largest numbers when it keeps them. Name their bits, by
    `jax.lax.bitcast_convert_type`.)
    """
    if not primitive:
        raise TypeError(
            "save_ep_residuals is a policy, not a function that makes one: pass it as it is, "
            "jax.checkpoint(f, policy=jax_ep.save_ep_residuals)"
        )
    return _saves(*primitive, **params)


def name_all(tree: Any, name: str) -> Any:
    """Names every array of a tree for `jax.checkpoint`."""

    def named(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or is_differentiable(leaf.dtype):
            return checkpoint_name(leaf, name)
        # JAX rounds the floats that it keeps to their own dtype, and takes the largest numbers of FP8 for
        # infinities there: so their bits are named.
        bits = jax.lax.bitcast_convert_type(leaf, bits_of(leaf.dtype))
        return jax.lax.bitcast_convert_type(checkpoint_name(bits, name), leaf.dtype)

    return jax.tree.map(named, tree)
