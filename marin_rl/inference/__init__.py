"""Sampling from a policy: the protocol, its client, and the engine and server behind it."""
