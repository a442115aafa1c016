"""Times of the ops, and of what JAX has instead, on the devices that are there."""
