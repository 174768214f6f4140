"""From committed rollouts to padded training batches: NumPy and Arrow only, no JAX."""
