"""Extensions of JAX that do not depend on ranks or experts.

May import `_checks` and `_extension`. Each module names the JAX issue or version that would make it
unnecessary, if there is one. Terms: a *primitive* is JAX's unit of computation; a mesh axis is *manual*
inside `jax.shard_map`, and otherwise *Auto* or *Explicit*.
"""
