"""The public ops: one module each, with its docstring, checks and result types.

May import `_transport` and what `_transport` may import. Ops do not import each other, except that `moe` and
`overlap` call `dispatch` and `combine`.
"""
