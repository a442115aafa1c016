"""Groups of ranks, and the connections between ranks.

May import `_checks`, `_extension` and `_jax`. No other part of the package has mutable state at module level.
A `Group` has an identity and a life. Other rooms use its `Ranks`, which do not change, and the functions
`ranks_of`, `resolve_implementation` and `require_open`, but no private attribute.
Terms: a *rank* is one device along a group's mesh axes; a *domain* is a host, several hosts that
NVLink joins, or on CPUs a process; a *control block* is the memory on a GPU through which its peers exchange
words; *rails* are NCCL connections between domains.
"""
