"""Defaults that a new run records where its configuration leaves a key open.

Each of them changes the last bits of what is sampled, so a run keeps what it began with: runs from
before a default go on as they were.
"""

from marin_rl.config import Config
from marin_rl.rollouts.dialogue_cache import with_dialogue_cache


def as_begun(config: Config) -> Config:
    """Return the configuration that a new run records. Raises as `with_dialogue_cache` does."""
    return with_dialogue_cache(with_adapters_apart(config))


def with_adapters_apart(config: Config) -> Config:
    """The configuration with `serve_merged: false` where servers follow a run with an adapter.

    They have the base once, and load a few megabytes for each version.
    """
    inference, policy = config.inference, config.policy
    if policy.lora is None or policy.quantize_base is not None or not inference.pulled:
        return config
    if inference.serve_merged is not None:
        return config
    apart = inference.model_copy(update={"serve_merged": False})
    return config.model_copy(update={"inference": apart})
