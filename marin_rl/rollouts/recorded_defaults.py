"""Choices that a new run records for keys marked `AS_BEGUN` that its configuration leaves null.

Each of them changes what is sampled or learned, so a run keeps what it began with: runs from before
a choice go on as they were. Leaves out the cache of prefixes itself
(`inference.kept_prefixes`), and what a chat template writes after an answer (`end_tokens`).
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from marin_rl.chat_templates import ChatTemplate, prove, reads_clock
from marin_rl.config import Config, EnvironmentConfig, PolicyConfig, with_choices
from marin_rl.end_tokens import template_end
from marin_rl.environments.episode import HasEpisodes
from marin_rl.environments.registry import loaded_environment
from marin_rl.rollouts.data_warnings import GENERATORS, training_environments
from marin_rl.rollouts.policy_tokenizer import end_ids_in, light_tokenizer
from marin_rl.tokenizer_files import tokenizer_folder

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
    dialogues = any(map(has_dialogues, training_environments(config).values()))
    return True if dialogues else None


def has_dialogues(chosen: EnvironmentConfig) -> bool:
    """Return True where an environment has episodes of several turns."""
    several = chosen.name not in GENERATORS and chosen.turns_max != 1
    return several and isinstance(loaded_environment(chosen), HasEpisodes)


def serve_merged_of(config: Config) -> bool | None:
    """False where servers follow a run with an adapter; None where they do not: no choice.

    They have the base once, and load a few megabytes for each version. True where weights change in
    flight: requests end on the adapter that they began with, but go on with merged weights.
    """
    policy = config.policy
    if policy.lora is None or policy.quantize_base is not None or not config.inference.pulled:
        return None
    return config.in_flight_updates


def policy_as_begun(policy: PolicyConfig) -> PolicyConfig:
    """Return the policy that a new run records. Raises InputError as `end_tokens_of` does."""
    return with_choices(policy, lambda key: POLICY_CHOICES[key](policy))


def end_tokens_of(policy: PolicyConfig) -> tuple[str, ...] | None:
    """The token that ends an answer by the policy's chat template; None where none does.

    Raises InputError as `prove` and `template_end` do.
    """
    if tokenizer_folder(policy) is None:
        return None  # its one end token ends everything
    tokenizer = light_tokenizer(policy)
    if ChatTemplate.of(tokenizer).is_built_in:
        return None
    prove(tokenizer)
    listed = [str(tokenizer.decode([end])) for end in end_ids_in(tokenizer)]
    end = template_end(tokenizer, listed)
    return None if end is None else (end,)


def template_options_of(policy: PolicyConfig) -> dict[str, Any] | None:
    """The day on which the run begins, where the chat template asks for it. Raises InputError."""
    if tokenizer_folder(policy) is None:
        return None
    # The local day, as templates have it from transformers.
    today = datetime.now(UTC).astimezone().date().isoformat()
    return {"date": today} if reads_clock(light_tokenizer(policy)) else None


POLICY_CHOICES: Mapping[str, Callable[[PolicyConfig], Any]] = {
    "end_tokens": end_tokens_of,
    "chat_template_options": template_options_of,
}
CHOICES: Mapping[str, Callable[[Config], Any]] = {
    "policy.end_tokens": lambda config: end_tokens_of(config.policy),
    "policy.chat_template_options": lambda config: template_options_of(config.policy),
    "inference.engine.prefix_cache": prefix_cache_of,
    "inference.serve_merged": serve_merged_of,
}
