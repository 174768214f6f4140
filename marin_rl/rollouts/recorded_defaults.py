"""Choices that a new run records for keys marked `AS_BEGUN` that its configuration leaves null.

Each of them changes the last bits of what is sampled, so a run keeps what it began with: runs from
before a choice go on as they were.
"""

from collections.abc import Callable, Mapping

from marin_rl.config import Config, with_choices
from marin_rl.rollouts.dialogue_cache import prefix_cache_of


def as_begun(config: Config) -> Config:
    """Return the configuration that a new run records. Raises as `prefix_cache_of` does."""
    return with_choices(config, lambda key: CHOICES[key](config))


def serve_merged_of(config: Config) -> bool | None:
    """False where servers follow a run with an adapter; None where they do not: no choice.

    They have the base once, and load a few megabytes for each version. True where weights change in
    flight: requests end on the adapter that they began with, but go on with merged weights.
    """
    policy = config.policy
    if policy.lora is None or policy.quantize_base is not None or not config.inference.pulled:
        return None
    return config.in_flight_updates


CHOICES: Mapping[str, Callable[[Config], bool | None]] = {
    "inference.engine.prefix_cache": prefix_cache_of,
    "inference.serve_merged": serve_merged_of,
}
