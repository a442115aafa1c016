"""The placement of experts on ranks: how it is planned, and the weights that it sends.

A plan is made from the counts of all ranks, which the op gathers; the weights travel as rows of `_transport`,
along a handle that this room makes. May import `_transport` and `_experts`, and what these may import. Words:
a *logical* expert is one of the model; a *physical* expert is an *instance* of a logical one on a rank; a
*place* holds the weights of one physical expert; a *piece* is a part of an expert's array that travels as a
row.
"""
