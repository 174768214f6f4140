"""Evaluation sets of a run: its environment's held-out examples, or named sets.

A named set is an environment too, often `chat` over a fixed file; its examples carry the set's name
as theirs, so that it separates metrics and rows. No example of a fixed set counts twice.
Leaves out sampling and summing up (evaluate.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.base import (
    Environment,
    FixedSet,
    check_seeds_apart,
    construct,
    environment_of,
    loaded_environment,
)
from marin_rl.environments.scoring import Judge
from marin_rl.types import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Examples of one environment; `name` is None where it is the run's own."""

    name: str | None
    config: EnvironmentConfig
    environment: Environment
    examples: int

    def example(self, index: int) -> Example:
        """The example at `index`, the same in every round."""
        found = self.environment.example(self.config.eval_seed, index, "eval")
        return found if self.name is None else replace(found, environment=self.name)


def held_out_sets(config: Config) -> tuple[HeldOut, ...]:
    """Everything that an evaluation of a run asks, with examples loaded.

    Raises ConfigError for an unknown environment, wrong options, or seeds from which training and
    evaluation would meet; InputError where there are no examples.
    """
    named = config.evaluation.sets
    if named is None:
        return (_held_out(None, config.environment, environment_of(config), config),)
    used, asked = config.rounds * config.rollouts.groups_per_round, config.evaluation.examples
    for name, chosen in named.items():
        if chosen.name == config.environment.name:
            check_seeds_apart(
                config.environment,
                chosen,
                train_examples=used,
                eval_examples=asked,
                held_out_section=f"evaluation.sets.{name}",
            )
    return tuple(
        _held_out(name, chosen, loaded_environment(chosen, "eval"), config)
        for name, chosen in sorted(named.items())
    )


def judges_of(config: Config) -> Judge | Mapping[str, Judge]:
    """The judges of an evaluation's answers: the run's environment, or that of each named set."""
    if config.evaluation.sets is None:
        return Judge(construct(config.environment), config.environment)
    return {
        name: Judge(construct(chosen), chosen) for name, chosen in config.evaluation.sets.items()
    }


def _held_out(
    name: str | None, chosen: EnvironmentConfig, environment: Environment, config: Config
) -> HeldOut:
    examples = config.evaluation.examples
    if isinstance(environment, FixedSet):
        examples = min(examples, environment.eval_size)
    return HeldOut(name=name, config=chosen, environment=environment, examples=examples)
