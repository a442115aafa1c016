"""Names that `jax.checkpoint` can keep, and the policy that keeps what was sent."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

CHECKPOINT_HANDLE = "jax_ep_handle"
"""Name of all index results of `dispatch`: the handle, the counts, the received ids."""

CHECKPOINT_WEIGHTS = "jax_ep_weights"
"""Name of the weights that `dispatch` and `redispatch` return beside the rows."""

CHECKPOINT_ROWS = "jax_ep_rows"
"""Name of the rows that `dispatch` and `redispatch` return."""

_saves = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_HANDLE, CHECKPOINT_WEIGHTS, CHECKPOINT_ROWS)


def save_ep_residuals(*primitive: Any, **params: Any) -> Any:
    """A policy for `jax.checkpoint`: keeps handles and dispatched rows with their weights.

    The backward pass then sends no row a second time; what the experts compute is done again. To keep
    more, combine the names with your own: `jax.checkpoint_policies.save_only_these_names(
    CHECKPOINT_HANDLE, CHECKPOINT_WEIGHTS, CHECKPOINT_ROWS, "mine")`. A policy that keeps the rows under a
    name of your own needs the first two besides, which are small.
    """
    if not primitive:
        raise TypeError(
            "save_ep_residuals is a policy, not a function that makes one: pass it as it is, "
            "jax.checkpoint(f, policy=jax_ep.save_ep_residuals)"
        )
    return _saves(*primitive, **params)


def name_all(tree: Any, name: str) -> Any:
    """Names every array of a tree for `jax.checkpoint`."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), tree)
