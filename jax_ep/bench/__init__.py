"""Benchmarks of the ops on the available devices, next to JAX's own alternatives."""
