"""The public ops: one module each, with its docstring, checks and result types.

May import `_placement`, and what `_placement` may import. Ops do not import each other, except that `moe`
and `overlap` are made of other ops, and that `dispatch` adds to the statistics of `statistics`. Each op
checks its arguments by an `OpArguments`, which has the name that errors begin with. An op that `moe` is made
of has a function `<op>_as`, to which `moe` passes its own `OpArguments`.
"""
