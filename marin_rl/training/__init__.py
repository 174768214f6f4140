"""Everything that changes parameters: the model, its losses, the optimizer step and the loop."""

from marin_rl.deferred import defer

defer("datasets", "wandb")  # what Levanter imports, and needs for nothing here
