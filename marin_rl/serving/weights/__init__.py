"""New weights for a running server: loading, switching, following a run, the canary."""
