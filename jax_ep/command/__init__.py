"""What `python -m jax_ep` needs besides the demo and the benchmark.

May import any other room.
"""
