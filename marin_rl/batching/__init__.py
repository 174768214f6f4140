"""Processing of committed rollouts into padded training batches: NumPy and Arrow only, no JAX."""
