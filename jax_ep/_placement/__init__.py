"""The placement of experts on ranks: how it is planned, and the weights that it sends.

A plan is made from the counts of all ranks, which the op gathers; the weights travel as rows of `_transport`,
along a handle that this room makes. May import `_transport` and `_experts`, and what these may import. Words:
a *logical* expert is one of the model; a *physical* expert, or an *instance* of a logical one, is a place for
its weights on a rank; a *slot* is a place for a redundant expert; a *piece* is a part of an expert's array
that travels as a row.
"""
