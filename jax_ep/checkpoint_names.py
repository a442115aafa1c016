"""Names that `jax.checkpoint` can save, beside the policy `save_ep_residuals`."""

from typing import Final

handle: Final = "jax_ep_handle"
"""Name of all index results of `dispatch` (the handle, the counts, the received ids) and of `balance`."""

weights: Final = "jax_ep_weights"
"""Name of the weights that `dispatch` and `redispatch` return beside the rows."""

rows: Final = "jax_ep_rows"
"""Name of the rows that `dispatch` and `redispatch` return."""

replicas: Final = "jax_ep_replicas"
"""Name of the weights that `replicate` sends. `save_ep_residuals` does not save them, because they would take
the memory of S experts for each layer. The backward pass sends them again."""
