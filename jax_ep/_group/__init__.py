"""Groups of ranks, and the connections between ranks.

May import `_checks`, `_extension` and `_jax`. No other part of the package has mutable state at module level.
Terms: a *rank* is one device along a group's mesh axes; a *host* is a machine, or on CPUs a process; a
*control block* is the memory on a GPU through which its peers exchange words; *rails* are NCCL connections
between hosts.
"""
