"""Who the ranks are, and how they reach each other.

May import `_checks`, `_extension` and `_jax`. This is the only room with mutable state at module level.
Words: a *rank* is one device along a group's mesh axes; *host* means a machine, or on CPUs a process; a
*control block* is the memory on a GPU through which its peers exchange words; *rails* are NCCL connections
between hosts.
"""
