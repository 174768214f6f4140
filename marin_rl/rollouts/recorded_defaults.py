"""Choices that a new run records for keys marked `AS_BEGUN` that its configuration leaves null.

Each of them changes the last bits of what is sampled, so a run keeps what it began with: runs from
before a choice go on as they were. Leaves out the cache of prefixes itself
(`inference.kept_prefixes`).
"""

from collections.abc import Callable, Mapping

from marin_rl.config import Config, with_choices
from marin_rl.environments.episode import HasEpisodes
from marin_rl.environments.registry import loaded_environment
from marin_rl.rollouts.data_warnings import GENERATORS, training_environments

# From here on continued dialogues are measurably faster (bench/episodes.py). Prompts run in pieces
# of as many positions as there are slots, and few at a time are slower than a whole prompt.
CONTEXT_MIN = 512
SLOTS_MIN = 64


def as_begun(config: Config) -> Config:
    """Return the configuration that a new run records. Raises as `prefix_cache_of` does."""
    return with_choices(config, lambda key: CHOICES[key](config))


def prefix_cache_of(config: Config) -> bool | None:
    """True for a run of an embedded engine with long dialogues, else None: no choice.

    Reads the environment, once per process. Raises ConfigError, InputError as `loaded_environment`.
    """
    inference = config.inference
    if inference.endpoints:
        return None
    if inference.engine.slots < SLOTS_MIN or config.policy.context_length < CONTEXT_MIN:
        return None
    return True if _has_dialogues(config) else None


def _has_dialogues(config: Config) -> bool:
    """Return True where an environment of the run has episodes of several turns."""
    return any(
        chosen.name not in GENERATORS
        and chosen.turns_max != 1
        and isinstance(loaded_environment(chosen), HasEpisodes)
        for chosen in training_environments(config).values()
    )


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
