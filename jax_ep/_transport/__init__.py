"""A routing, and the two actions that move rows along it: push, and its transpose pull.

May import `_group` and what is below it. Words: a *routing* has the static sizes of a dispatch; a *handle*
records the destination of each row; a *leaf* is one array of a payload; *route* computes a handle and
pushes along it; a *backend* executes the actions: "ffi" by this package's handlers, "xla" by `jax.lax`.
"""
