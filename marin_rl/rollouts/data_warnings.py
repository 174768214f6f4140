"""Facts about a run's data that its user may not expect, known before anything starts.

Owns the sentences that `run`, its plan and `doctor` print. Nothing here is an error: what cannot
work is refused where the data is read (`environments`).
"""

from collections.abc import Iterator

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.base import FixedSet, HasNotices
from marin_rl.environments.episode import HasEpisodes
from marin_rl.environments.mixture import entry_alone
from marin_rl.environments.registry import loaded_environment

# Tokens of a context from which on continued dialogues are measurably faster (bench/episodes.py).
CACHED_FROM = 512

# They make examples without an end, from libraries that take seconds to import.
GENERATORS = ("echo", "reasoning_gym")


def data_warnings(config: Config) -> list[str]:
    """Return what environments say of their data, small held-out sets, and dialogues uncached.

    Reads the prompts, once per process. Raises ConfigError, InputError as `loaded_environment`.
    """
    warnings: list[str] = []
    for chosen in _environments(config):
        environment = loaded_environment(chosen)
        if isinstance(environment, HasNotices):
            warnings += [notice for notice in environment.notices() if notice not in warnings]
    return [*warnings, *_small_sets(config), *_uncached_dialogues(config)]


def _own(config: Config) -> dict[str, EnvironmentConfig]:
    """The run's environments by their keys, with the settings of each alone."""
    outer = config.environment
    if outer.mixture is None:
        return {"environment": outer}
    return {f"environment.{n}": entry_alone(outer, e) for n, e in enumerate(outer.mixture)}


def _environments(config: Config) -> Iterator[EnvironmentConfig]:
    chosen = [*_own(config).values(), *(config.evaluation.sets or {}).values()]
    if config.policy.init == "sft" and config.sft.environment is not None:
        chosen.append(config.sft.environment)
    yield from (environment for environment in chosen if environment.name not in GENERATORS)


def _uncached_dialogues(config: Config) -> Iterator[str]:
    """Yield the advice to continue long dialogues from the engine's cache, unless that is set."""
    inference = config.inference
    if inference.endpoints or inference.engine.prefix_cache is not None:
        return
    if config.policy.context_length < CACHED_FROM:
        return
    for chosen in _own(config).values():
        several = chosen.name not in GENERATORS and chosen.turns_max != 1
        if several and isinstance(loaded_environment(chosen), HasEpisodes):
            yield (
                f"episodes of {chosen.name.partition('#')[0]} have several turns and up to "
                f"{config.policy.context_length} tokens, which every turn computes again: "
                "inference.engine.prefix_cache: true continues a turn from the cache of the last "
                "one, false says that none shall be kept"
            )
            return


def _small_sets(config: Config) -> Iterator[str]:
    """Yield a sentence for each evaluation set with fewer examples than are asked for."""
    wanted = config.evaluation.examples
    sets = config.evaluation.sets or _own(config)
    for name, chosen in sorted(sets.items()):
        if chosen.name in GENERATORS:
            continue
        environment = loaded_environment(chosen)
        if not isinstance(environment, FixedSet) or environment.eval_size >= wanted:
            continue
        key = f"evaluation.sets.{name}" if config.evaluation.sets else name
        held_out = environment.eval_size
        every = f"every evaluation has {held_out} example{'' if held_out == 1 else 's'}"
        if environment.size is None:  # it makes its examples: there are no rows to hold out
            yield (
                f"evaluation.examples is {wanted}, but {key} has {held_out} different ones, so "
                f"{every}"
            )
            continue
        yield (
            f"evaluation.examples is {wanted}, but {key} holds out {held_out} of its "
            f"{held_out + environment.size} rows, so {every}; "
            f"raise {key}.options.eval_fraction or add rows"
        )
