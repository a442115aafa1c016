"""The public ops: one module each, with its docstring, checks and result types.

May import `_placement`, and what `_placement` may import. Ops do not import each other, except that `moe`
and `overlap` are made of other ops, and that `dispatch` adds to the statistics of `statistics`.
"""
