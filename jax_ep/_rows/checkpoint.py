"""The policy of `jax.checkpoint` that saves dispatched rows, and the function that names arrays for it."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import checkpoint_names
from jax_ep._rows.dtypes import bits_of, is_differentiable

Tree = TypeVar("Tree")

_saves = jax.checkpoint_policies.save_only_these_names(
    checkpoint_names.handle, checkpoint_names.weights, checkpoint_names.rows
)


def save_ep_residuals(*primitive: Any, **params: Any) -> Any:
    """Saves handles, and dispatched rows with their weights: a policy for `jax.checkpoint`.

    The backward pass then sends no row a second time. It computes the experts a second time. To save more,
    combine the names of `jax_ep.checkpoint_names` with your own: `jax.checkpoint_policies.
    save_only_these_names(names.handle, names.weights, names.rows, "mine")`.

    A policy can also save the rows under a name of your own, in the place of `names.rows`. It must also save
    `names.handle` and `names.weights`, which are small. Name the received rows themselves, `sent.x`, not a
    value that is computed from them. Otherwise the rows are sent a second time. Do not name float8 arrays,
    because JAX turns their largest numbers into NaN when it saves them. Name their bits, by
    `jax.lax.bitcast_convert_type`.
    """
    if not primitive:
        raise TypeError(
            "save_ep_residuals is a policy, not a function that makes one: pass it as it is, "
            "jax.checkpoint(f, policy=jax_ep.save_ep_residuals)"
        )
    return _saves(*primitive, **params)


def name_all(tree: Tree, name: str) -> Tree:
    """Names every array of a tree for `jax.checkpoint`."""

    def named(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or is_differentiable(leaf.dtype):
            return checkpoint_name(leaf, name)
        # JAX rounds the floats that it keeps to their own dtype, and takes the largest numbers of FP8 for
        # infinities there: so their bits are named.
        bits = jax.lax.bitcast_convert_type(leaf, bits_of(leaf.dtype))
        return jax.lax.bitcast_convert_type(checkpoint_name(bits, name), leaf.dtype)

    return jax.tree.map(named, tree)
