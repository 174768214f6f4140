"""Default of `inference.engine.prefix_cache`: what a new run records where the key is null.

With the cache prompts have other last bits than without, so a run keeps what it began with: runs
from before this default go on without. Leaves out the cache itself (`inference.kept_prefixes`).
"""

from marin_rl.config import Config
from marin_rl.environments.episode import HasEpisodes
from marin_rl.environments.registry import loaded_environment
from marin_rl.rollouts.data_warnings import GENERATORS, training_environments

# From here on continued dialogues are measurably faster (bench/episodes.py). Prompts run in pieces
# of as many positions as there are slots, and few at a time are slower than a whole prompt.
CONTEXT_MIN = 512
SLOTS_MIN = 64


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
