"""The environment protocol, the registry by name, and the checks that all environments share.

An environment makes examples out of (seed, index, split) alone and scores completions; it keeps no
state between calls. One of another package is registered by its entry point in the group
"marin_rl.environments"; a class in a file of the user is named as code (`custom`). Time limits
on scoring are in `scoring`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import orjson

from marin_rl.errors import InputError, RewardFault
from marin_rl.finite import BOUNDS, fit_rewards, number, reward_number, shown
from marin_rl.types import Example, Message, RewardComponent, Split

# Functions of this package that a configuration may name: no foreign code is imported for them.
_ANSWERS = ("exact_match", "number_match", "last_number")
SHIPPED = frozenset(f"marin_rl.environments.answers:{name}" for name in _ANSWERS)


@runtime_checkable
class Environment(Protocol):
    """Problems and their scoring.

    `version` changes whenever examples or scores may. `size` is the number of different training
    examples, None where there is no end of them; an index beyond it starts over. `workers` is the
    number of processes that score, each with a time limit that interrupts; 0 is for scoring that
    cannot hang and happens where it is called.

    `load_examples` loads what examples need, once, in the process that samples, and `load_scorer`
    what scoring needs, once, in each process that scores; both raise InputError. `example` is a
    pure function of its arguments, `demonstration` the answer for a supervised warm start, if
    there is one. `score` gives the named components of a reward, and may raise any exception.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def workers(self) -> int: ...

    def load_examples(self) -> None: ...

    def example(self, seed: int, index: int, split: Split) -> Example: ...

    def demonstration(self, example: Example) -> str | None: ...

    def load_scorer(self) -> None: ...

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]: ...


# Optional parts of an environment.


@runtime_checkable
class Extracts(Protocol):
    """Extracts the answer that a completion gives, as votes are counted; None without one."""

    def extract(self, completion: str) -> str | None: ...


@runtime_checkable
class ExtractsHere(Protocol):
    """Says whether `extract` is code of this package, which cannot hang and needs no worker."""

    @property
    def extracts_here(self) -> bool: ...


@runtime_checkable
class FixedSet(Protocol):
    """Has a number of different evaluation examples."""

    @property
    def eval_size(self) -> int: ...


@runtime_checkable
class FoldsSeeds(Protocol):
    """Seeds that differ by a multiple of `seed_period` may make one example; None: no two do."""

    @property
    def seed_period(self) -> int | None: ...


GroupScore = tuple[RewardComponent, ...] | RewardFault
Dialogues = Sequence[Sequence[Message]]


@runtime_checkable
class ScoresGroups(Protocol):
    """Scores the completions of one example in one call, where `scores_groups` is True.

    That is known after `load_scorer`. Where `wants_completion_ids` is False, `completion_ids` are
    empty. A dialogue is all that followed the prompt: the model's turns, of which `completions` are
    the last, and what the environment answered. `score_group` gives a score or a fault per
    completion, in order, and may raise any exception.
    """

    @property
    def scores_groups(self) -> bool: ...

    @property
    def wants_completion_ids(self) -> bool: ...

    def score_group(
        self,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> Sequence[GroupScore]: ...


@runtime_checkable
class ScoresLimits(Protocol):
    """Scores a completion whose check exceeded `limit`: it is wrong."""

    def score_of_limit(self, completion: str, limit: str) -> tuple[RewardComponent, ...]: ...


@runtime_checkable
class NamesReward(Protocol):
    """Has a name of its reward for errors, other than the environment's."""

    @property
    def reward_name(self) -> str: ...


@runtime_checkable
class ChecksDemonstrations(Protocol):
    """Raises InputError for a first one of `count` training examples without a demonstration."""

    def check_demonstrations(self, seed: int, count: int) -> None: ...


@runtime_checkable
class NamesRows(Protocol):
    """Names the file and the row of an example."""

    def place(self, seed: int, index: int, split: Split) -> str: ...


@runtime_checkable
class ReadsRows(Protocol):
    """Has the digest of its files, known after `load_examples`; None where it reads none."""

    @property
    def rows_digest(self) -> str | None: ...


@runtime_checkable
class HasNotices(Protocol):
    """Has sentences on its data that a user may not expect, known after `load_examples`.

    Those on rewards are left out where nothing is `scored`: of demonstrations.
    """

    def notices(self, *, scored: bool = True) -> Sequence[str]: ...


def extracts_here(environment: Environment) -> bool:
    """Return True where answers are extracted in this process, without a worker."""
    if environment.workers == 0 or not isinstance(environment, Extracts):
        return True
    return isinstance(environment, ExtractsHere) and environment.extracts_here


def answer_in(environment: Environment, completion: str) -> str | None:
    """The answer that an environment extracts; by default the whole text, stripped.

    None, which is no vote, where extracting fails.
    """
    if not isinstance(environment, Extracts):
        return completion.strip() or None
    try:
        return environment.extract(completion)
    except InputError:
        raise
    except Exception:  # noqa: BLE001 - what a function makes of a model's words must not end a run
        return None


def plain_json(metadata: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """`metadata` as plain JSON values: what is not JSON becomes a string, NaN becomes null.

    Raises InputError where a key cannot be one in JSON.
    """
    option = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS
    try:
        return orjson.loads(orjson.dumps(dict(metadata), default=str, option=option))
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: its metadata cannot be written as JSON: {error}") from error


def checked_components(value: object) -> tuple[RewardComponent, ...]:
    """Check that `value` is a reward. Raises ValueError saying what it is instead."""
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"expected reward components, found {value!r:.80}")
    for component in value:
        if not isinstance(component, RewardComponent):
            raise ValueError(f"expected a reward component, found {component!r:.80}")
    components = tuple(map(_checked, value))
    reward_number(reward_of(components), "weighted sum of the reward components")
    return components


def _checked(component: RewardComponent) -> RewardComponent:
    """Return a component with numbers that can be trained on. Raises ValueError naming it."""
    written = component.value, component.weight
    found = "found {} = {} with weight {}".format(component.name, *map(shown, written))
    try:
        value, weight = map(number, written)
    except ValueError:
        raise ValueError(f"expected numbers, {found}") from None
    if not (math.isfinite(value) and math.isfinite(weight)):
        raise ValueError(f"expected finite numbers, {found}")
    if not fit_rewards(value) or not fit_rewards(weight):
        raise ValueError(f"expected numbers {BOUNDS}; {found}")
    plain = all(isinstance(each, int | float) for each in written)
    return component if plain else replace(component, value=value, weight=weight)


def reward_of(components: tuple[RewardComponent, ...]) -> float:
    """Sum of `weight * value`."""
    return float(sum(component.weight * component.value for component in components))
