"""Scoring by the user's functions: the part of an environment that a reward function makes.

Owns the loading of the functions and the weights of what they return. Leaves out how a function is
called (`reward_functions`), and the examples that are scored (`chat`, `tool_class`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from marin_rl.config import CodeName, Section
from marin_rl.environments.base import SHIPPED, Dialogues, GroupScore
from marin_rl.environments.reward_functions import Part, RewardFunction
from marin_rl.environments.scoring import fault_of
from marin_rl.errors import Abstained, ConfigError, RewardFault
from marin_rl.finite import number
from marin_rl.types import Example, Message, RewardComponent
from marin_rl.user_code import check_importable, load, parse_spec

NOT_APPLICABLE = "None: the function does not apply, so this rollout has no reward"


class RewardEntry(Section):
    """One of several reward functions: its weight in the sum, and the name of its component."""

    function: CodeName = Field(description="FILE.py:function or module:function")
    weight: float = Field(default=1.0, description="weight of the function in the reward")
    name: str | None = Field(
        default=None, min_length=1, description="name of the component; null: the function's"
    )

    @property
    def typed(self) -> str:
        """The function as the user writes it, without the digest of its file."""
        spec = parse_spec(self.function)
        return self.function if spec is None else spec.typed

    @property
    def component(self) -> str:
        return self.name or self.typed.rpartition(":")[2]


RewardOption = CodeName | tuple[CodeName | RewardEntry, ...]


@runtime_checkable
class FunctionOptions(Protocol):
    """Options that name functions; without a `reward` nothing may be scored."""

    @property
    def reward(self) -> str | Sequence[str | RewardEntry] | None:
        """Code of the reward function, or of several."""
        ...

    @property
    def extract(self) -> str | None: ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight by component name."""
        ...

    @property
    def reward_workers(self) -> int:
        """Processes that run the function."""
        ...


class FunctionScored:
    """Scores by a reward function, and extracts answers by a function, or all of a completion."""

    def __init__(self, options: FunctionOptions, reward_name: str = "") -> None:
        self._entries = _entries_of(options.reward)
        for entry in self._entries:
            check_importable(entry.function, "reward function")
        if options.extract is not None:
            check_importable(options.extract, "extracting function")
        self._functions = options
        self._several = not isinstance(options.reward, str)
        self._rewards: list[RewardFunction] = []
        self.workers = options.reward_workers
        self.reward_name = " + ".join(entry.typed for entry in self._entries) or reward_name

    @property
    def extracts_here(self) -> bool:
        return self._functions.extract is None or self._functions.extract in SHIPPED

    def extract(self, completion: str) -> str | None:
        if self._functions.extract is None:
            return completion.strip() or None
        return load(self._functions.extract, "extracting function")(completion)

    def load_scorer(self) -> None:
        """Import the reward functions. Raises InputError for one that is missing or does not fit.

        The parameters of each say whose convention it follows.
        """
        self._rewards = [
            RewardFunction(load(entry.function, "reward function"), entry.typed)
            for entry in self._entries
        ]

    @property
    def scores_groups(self) -> bool:
        return any(function.convention == "trl" for function in self._rewards)

    @property
    def wants_completion_ids(self) -> bool:
        return any(function.wants_completion_ids for function in self._rewards)

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        assert self._rewards, "load_scorer comes before score"
        if self.scores_groups:
            alone = [(Message(role="assistant", content=completion),)]
            (score,) = self.score_group(example, [completion], [()], alone)
        else:
            score = _joined([self._of_completion(i, example, completion) for i in self._places])
        if isinstance(score, RewardFault):
            raise score
        return score

    def score_group(
        self,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> list[GroupScore]:
        """Score the completions of one example, in one call of each function of TRL's convention.

        Raises what such a function raises; what another one raises is the fault of a completion.
        """
        assert self._rewards, "load_scorer comes before score"
        by_function = [
            self._of_group(place, example, completions, completion_ids, dialogues)
            for place in self._places
        ]
        return [_joined(scores) for scores in zip(*by_function, strict=True)]

    @property
    def _places(self) -> range:
        return range(len(self._rewards))

    def _of_group(
        self,
        place: int,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> list[GroupScore]:
        """Scores by one of the functions; () where it does not apply."""
        function = self._rewards[place]
        if function.convention == "trl":
            values = function.of_group(example, completions, completion_ids, dialogues)
            return [self._of_value(place, value) for value in values]
        scores: list[GroupScore] = []
        for completion in completions:
            try:
                scores.append(self._of_completion(place, example, completion))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
                scores.append(fault_of(error))
        return scores

    def _of_completion(
        self, place: int, example: Example, completion: str
    ) -> tuple[RewardComponent, ...]:
        return self._weighted(place, self._rewards[place].of_completion(example, completion))

    def _of_value(self, place: int, value: Any) -> GroupScore:
        if value is None:
            return ()
        try:
            return self._weighted(place, [Part(name="reward", value=number(value))])
        except ValueError as error:
            return RewardFault(str(error))

    def _weighted(self, place: int, parts: Sequence[Part]) -> tuple[RewardComponent, ...]:
        """Components of a function's parts; of several functions, by the name of each."""
        entry, weights = self._entries[place], self._functions.reward_weights
        names = [part.name for part in parts]
        if self._several:
            names = [_within(entry.component, name) for name in names]
        return tuple(
            RewardComponent(
                name=name, value=part.value, weight=entry.weight * weights.get(name, part.weight)
            )
            for name, part in zip(names, parts, strict=True)
        )


def _entries_of(
    reward: str | Sequence[str | RewardEntry] | None,
) -> tuple[RewardEntry, ...]:
    """Entries of the option `reward`. Raises ConfigError for none in a list, and equal names."""
    if reward is None:
        return ()
    listed = [reward] if isinstance(reward, str) else reward
    entries = tuple(RewardEntry(function=x) if isinstance(x, str) else x for x in listed)
    names = [entry.component for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"environment.options.reward: two functions have the component {twice!r}: give one of "
            "them a name, {function: FILE.py:function, name: OTHER}"
        )
    if not entries:
        raise ConfigError("environment.options.reward: expected at least one function, found []")
    return entries


def _within(component: str, part: str) -> str:
    """Name of a part of one of several functions; its only or main part has the function's name."""
    return component if part in ("reward", "score") else f"{component}.{part}"


def _joined(scores: Sequence[GroupScore]) -> GroupScore:
    """The components of all functions that apply; a fault where one failed, or none applies."""
    fault = next((score for score in scores if isinstance(score, RewardFault)), None)
    components = tuple(c for score in scores if not isinstance(score, RewardFault) for c in score)
    return fault or components or Abstained(NOT_APPLICABLE)
