"""The parts of `python -m jax_ep` that do not belong to the demo or the benchmark.

May import all other parts of the package.
"""
