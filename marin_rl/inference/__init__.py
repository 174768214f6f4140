"""Sampling from a policy: the protocol, its client, the engine, and how weights reach it."""
