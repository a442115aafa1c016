"""Extensions of JAX that do not depend on groups, routings or experts.

May import `_checks` and `_extension`. Terms: a *primitive* is JAX's unit of computation; a mesh axis is
*manual* inside `jax.shard_map`, and otherwise *Auto* or *Explicit*; a *batch* is the elements that `jax.vmap`
maps over.
"""
