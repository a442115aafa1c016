"""What JAX itself lacks.

Each module names the JAX issue or the version that would make it unnecessary, if there is one. It knows
nothing of ranks or experts, and imports only `_checks` and `_extension`. Words: a *primitive* is JAX's unit
of computation; an axis of a mesh is *manual* inside `jax.shard_map`, and otherwise *Auto* or *Explicit*.
"""
