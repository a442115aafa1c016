"""A routing, and the two actions that move rows along it: push, and its transpose pull.

May import `_rows`, and what `_rows` may import. Words: a *routing* has the static sizes of a dispatch; a
*handle* records the destination of each row; a *payload* is the rows that move, and a *leaf* one array of it;
*attendance* says which ranks take part; *route* computes a handle and pushes along it; a *backend*, made for
the ranks of a group, executes the actions: "ffi" by this package's handlers, "xla" by `jax.lax`; *local* ops
need no other rank.
"""
