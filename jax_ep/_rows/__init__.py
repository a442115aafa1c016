"""Rows of arrays by themselves: their indices, counts, dtypes, FP8 blocks, and the policy of checkpoints.

Rows move between ranks in `_transport`, and are multiplied in `_experts`. Both rooms need these functions,
and neither room needs the other. Nothing here communicates. May import `_group`, and what `_group` may
import. Words: a *block* of FP8 is the elements that share a scale; *counts* are numbers of rows that a
program computes, so they may be any integers; an index -1 means no row.
"""
