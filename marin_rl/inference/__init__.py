"""Sampling from a policy: the protocol, its client, the engine, and how weights reach it."""

from marin_rl.deferred import defer

defer("datasets", "wandb")  # what Levanter imports, and needs for nothing here
