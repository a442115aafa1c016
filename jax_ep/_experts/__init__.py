"""The products of a rank's experts: rows, group by group, times the group's matrix, in FP8 or not.

Nothing here communicates, and nothing depends on how the rows came to this rank, so this room and
`_transport` do not import each other. May import `_rows`, and what `_rows` may import. Words: a *group* of
rows is those of one expert; *wide* operands are not in FP8; *columns* are rows in FP8 that are stored
transposed, as the gradient of a matrix reads them.
"""
