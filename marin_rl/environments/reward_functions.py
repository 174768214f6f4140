"""Scores by reward functions as people write them: the conventions of TRL, verl and this project.

A function's parameters say which convention it follows, once, when it is loaded. Owns how functions
are called, what they may return, and the weights of several. Leaves out the examples that are
scored (`chat`, `tool_class`), and the processes and time limits of scoring (`scoring`).
"""

import asyncio
import inspect
import json
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import CodeName, Section
from marin_rl.environments.base import SHIPPED, Dialogues, Environment, GroupScore
from marin_rl.environments.prompt_files import (
    COMPLETION,
    CONVERSATIONAL,
    OTHER_ANSWER_COLUMNS,
    value_at,
)
from marin_rl.environments.scoring import fault_of
from marin_rl.errors import Abstained, ConfigError, InputError, RewardFault
from marin_rl.finite import number
from marin_rl.types import Example, Message, RewardComponent
from marin_rl.user_code import check_importable, load, parse_spec

Convention = Literal["example", "trl", "verl"]

SIGNATURES = """
  reward(example, completion) -> number, or a mapping of names to numbers; None: not applicable
  reward(prompts, completions, **columns) -> list with a number or None per completion  (TRL)
  compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number, or a \
mapping with "score"; None: not applicable  (verl)"""
NOT_APPLICABLE = "None: the function does not apply, so this rollout has no reward"

_TRL = frozenset({"prompts", "completions", "completion_ids"})
_VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
# Names that say that a parameter is no example, or no completion: `reward(completion, answer)`
# could be called too, and would score every completion wrongly.
_NO_EXAMPLE = frozenset({"completion", "response", "output", "prediction", "generated"})
_NO_COMPLETION = frozenset({"example", "answer", "label", "target", "reference", "expected"})


def _part(name: Any, value: Any, weight: float = 1.0) -> RewardComponent:
    try:
        return RewardComponent(name=str(name), value=number(value), weight=weight)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class RewardFunction:
    """A user's function behind the convention that its parameters follow.

    `name` is what the configuration calls it. Raises InputError where no convention fits.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function, self._name = function, name
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some builtins have none
            signature = None
        parameters = () if signature is None else tuple(signature.parameters.values())
        keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes = frozenset(p.name for p in keywords)
        self._required = frozenset(p.name for p in keywords if p.default is p.empty)
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.convention = self._convention(signature)
        if self.convention == "verl" and self._required - _VERL:
            raise InputError(
                f"reward function {name!r} also takes {_names(self._required - _VERL)} without a "
                f"default: expected one of{SIGNATURES}"
            )

    def _convention(self, signature: inspect.Signature | None) -> Convention:
        if signature is None:
            return "example"
        if "example" not in self._takes and self._takes & _TRL:
            return "trl"
        if {"solution_str", "ground_truth"} <= self._takes:
            return "verl"
        try:
            first, second, *_ = (*signature.bind("example", "completion").arguments, None)
        except TypeError:
            first = second = None
        if first is None or first in _NO_EXAMPLE or second in _NO_COMPLETION:
            raise InputError(
                f"reward function {self._name!r} takes {signature}: expected one of{SIGNATURES}"
            )
        return "example"

    @property
    def wants_completion_ids(self) -> bool:
        """True where the function may read the token ids of completions."""
        return self.convention == "trl" and (self._open or "completion_ids" in self._takes)

    def of_completion(self, example: Example, completion: str) -> list[RewardComponent]:
        """Return the parts of one completion's reward that are not None.

        Raises ValueError, or as the function.
        """
        assert self.convention != "trl", "such a function scores groups"
        if self.convention == "verl":
            return self._by_verl(example, completion)
        value = self._result(self._function(example, completion))
        if not isinstance(value, Mapping):
            return [] if value is None else [RewardComponent(name="reward", value=number(value))]
        return [_part(name, part) for name, part in value.items() if part is not None]

    def of_group(
        self,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> list[Any]:
        """Return the values of a group as the function gives them, one per completion.

        Raises ValueError for another number of them, or as the function.
        """
        n = len(completions)
        columns = {"answer": example.answer, **example.metadata}
        arguments = {
            name: [value] * n
            for name, value in columns.items()
            if name not in (CONVERSATIONAL, COMPLETION) and (name, value) != ("answer", None)
        }
        prompts: list[Any] = [example.messages[-1].content for _ in completions]
        replies: list[Any] = list(completions)
        # As in TRL: where the prompt is messages, completions are the messages that followed it.
        if example.metadata.get(CONVERSATIONAL) is True:
            prompts = [
                [{"role": m.role, "content": m.content} for m in example.messages]
                for _ in completions
            ]
            replies = [[_as_trl_has_it(message) for message in dialogue] for dialogue in dialogues]
        ids = [list(one) for one in completion_ids]
        arguments |= {"prompts": prompts, "completions": replies, "completion_ids": ids}
        values = self._result(self._function(**self._taken(arguments, set(arguments) - _TRL)))
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise ValueError(f"expected a list of {n} numbers, found {values!r:.80}")
        values = list(values)
        if len(values) != n:
            raise ValueError(f"expected a list of {n} numbers, found {len(values)}: {values!r:.80}")
        return values

    def _by_verl(self, example: Example, completion: str) -> list[RewardComponent]:
        """A mapping's `score` is the reward; its other numbers count only with a weight."""
        arguments: dict[str, Any] = {
            "solution_str": completion,
            "ground_truth": typed_answer(example),
            "extra_info": example.metadata.get("extra_info"),
        }
        if "data_source" in example.metadata:
            arguments["data_source"] = example.metadata["data_source"]
        value = self._result(self._function(**self._taken(arguments, example.metadata)))
        if value is None:
            return []
        if not isinstance(value, Mapping):
            return [RewardComponent(name="score", value=number(value))]
        if value.get("score", 0) is None:
            return []
        if "score" not in value:
            raise ValueError(f"expected a number or a mapping with 'score', found {value!r:.80}")
        others = [
            _part(name, part, weight=0.0)
            for name, part in value.items()
            if name != "score" and not isinstance(part, str) and hasattr(type(part), "__float__")
        ]
        return [_part("score", value["score"]), *others]

    def _taken(self, arguments: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
        """Return the arguments that the function takes. ValueError for one without a column."""
        if missing := self._required - set(arguments):
            raise ValueError(
                f"it takes {_names(missing)}, which the row does not have; it has "
                f"{_names(columns) or 'no more columns'}"
            )
        return {key: value for key, value in arguments.items() if self._open or key in self._takes}

    @cached_property
    def _runner(self) -> asyncio.Runner:
        """One event loop for all calls, for clients that a function keeps belong to one."""
        runner = asyncio.Runner()
        weakref.finalize(self, runner.close)
        return runner

    def _result(self, value: Any) -> Any:
        return self._runner.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def typed_answer(example: Example) -> Any:
    """Return the answer with the type that its row gives it; a text where that is not known."""
    for name in ("answer", *OTHER_ANSWER_COLUMNS):
        value = value_at(example.metadata, name)
        if value is not None and str(value) == example.answer:
            return value
    return example.answer


def _as_trl_has_it(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        functions = [
            {"name": call.name, "arguments": json.loads(call.arguments)}
            for call in message.tool_calls
        ]
        body["tool_calls"] = [{"type": "function", "function": each} for each in functions]
    return body | ({"name": message.name} if message.name is not None else {})


def _names(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names)))


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


class FunctionOptions(Section):
    """Options that name functions of the user."""

    reward: RewardOption = Field(
        default="marin_rl.environments.answers:exact_match",
        description="FILE.py:function or module:function, with the parameters of TRL, of verl, or "
        "(example, completion); or a list of such, each also as {function, weight, name}",
    )
    extract: CodeName | None = Field(
        default=None,
        description="FILE.py:function or module:function, (completion) -> answer or None, for "
        "majority votes; null: all of the completion",
    )
    reward_weights: dict[str, float] = Field(
        default={}, description="weight by component name; 1 if not"
    )
    reward_workers: int = Field(
        default=1, ge=1, le=64, description="processes that run the function"
    )


class FunctionScored(Environment):
    """Scores by a reward function, and extracts answers by a function, or all of a completion."""

    def __init__(self, options: FunctionOptions, reward_name: str = "") -> None:
        self._entries = _entries_of(options.reward)
        for entry in self._entries:
            check_importable(entry.function, "reward function")
        if options.extract is not None:
            check_importable(options.extract, "extracting function")
        self._functions = options
        self._rewards: list[tuple[RewardEntry, RewardFunction]] = []
        self.workers = options.reward_workers
        self.extracts_here = options.extract is None or options.extract in SHIPPED
        self.reward_name = " + ".join(entry.typed for entry in self._entries) or reward_name

    def extract(self, completion: str) -> str | None:
        if self._functions.extract is None:
            return super().extract(completion)
        return load(self._functions.extract, "extracting function")(completion)

    def load_scorer(self) -> None:
        self._rewards = [
            (entry, RewardFunction(load(entry.function, "reward function"), entry.typed))
            for entry in self._entries
        ]
        self.wants_completion_ids = any(f.wants_completion_ids for _, f in self._rewards)

    @property
    def scores_groups(self) -> bool:
        return any(function.convention == "trl" for _, function in self._rewards)

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        alone = [(Message(role="assistant", content=completion),)]
        (score,) = self.score_group(example, [completion], [()], alone)
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
        by_function = []
        for entry, function in self._rewards:
            if function.convention == "trl":
                values = function.of_group(example, completions, completion_ids, dialogues)
                by_function.append([self._of_value(entry, value) for value in values])
            else:
                by_function.append(
                    [self._of_completion(entry, function, example, each) for each in completions]
                )
        return [_joined(scores) for scores in zip(*by_function, strict=True)]

    def _of_value(self, entry: RewardEntry, value: Any) -> GroupScore:
        """The score of one of TRL's values; () where the function does not apply."""
        if value is None:
            return ()
        try:
            return self._weighted(entry, [RewardComponent(name="reward", value=number(value))])
        except ValueError as error:
            return RewardFault(str(error))

    def _of_completion(
        self, entry: RewardEntry, function: RewardFunction, example: Example, completion: str
    ) -> GroupScore:
        try:
            return self._weighted(entry, function.of_completion(example, completion))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            return fault_of(error)

    def _weighted(
        self, entry: RewardEntry, parts: Sequence[RewardComponent]
    ) -> tuple[RewardComponent, ...]:
        """Components of a function's parts; of several functions, by the name of each."""
        components = []
        for part in parts:
            name = part.name
            if not isinstance(self._functions.reward, str):  # its main part has the function's name
                main = name in ("reward", "score")
                name = entry.component if main else f"{entry.component}.{name}"
            weight = entry.weight * self._functions.reward_weights.get(name, part.weight)
            components.append(replace(part, name=name, weight=weight))
        return tuple(components)


def _entries_of(reward: str | Sequence[str | RewardEntry] | None) -> tuple[RewardEntry, ...]:
    """Entries of the option `reward`. Raises ConfigError for none in a list, and equal names."""
    if reward is None:
        return ()
    listed = [reward] if isinstance(reward, str) else reward
    entries = tuple(RewardEntry(function=x) if isinstance(x, str) else x for x in listed)
    if not entries:
        raise ConfigError("environment.options.reward: expected at least one function, found []")
    names = [entry.component for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"environment.options.reward: two functions have the component {twice!r}: give one of "
            "them a name, {function: FILE.py:function, name: OTHER}"
        )
    return entries


def _joined(scores: Sequence[GroupScore]) -> GroupScore:
    """The components of all functions that apply; a fault where one failed, or none applies."""
    fault = next((score for score in scores if isinstance(score, RewardFault)), None)
    components = tuple(c for score in scores if not isinstance(score, RewardFault) for c in score)
    return fault or components or Abstained(NOT_APPLICABLE)
