"""The kinds of products of rows by groups."""

import enum


class Product(enum.IntEnum):
    """Products of rows by groups: GroupedDot in ffi/core/params.h, with the same numbers."""

    ROWS = 0  # rows [C, M] times matrices [L, M, N]
    ROWS_TRANSPOSED = 1  # rows [C, N] times the transposes of matrices [L, M, N]
    WEIGHTS = 2  # for each group, its rows [C, M], transposed, times others [C, N]: [L, M, N]
