"""The placement of experts on ranks: the plan of a step, and the weights that it sends.

A plan needs `_transport` only for the counts of other ranks; the weights travel as rows, along a handle that
this room makes. May import `_transport` and `_experts`, and what these may import. Words: a *logical* expert
is one of the model; a *physical* expert, or an *instance* of a logical one, is a place for its weights on a
rank; a *slot* is a place for a redundant expert; a *piece* is a part of an expert's array that travels as a
row.
"""
