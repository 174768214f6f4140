"""Reward functions as people write them: the conventions of TRL, verl and this project.

A function's parameters say which convention it follows, once, when it is loaded. Owns how it is
called and what it may return. Leaves out where it comes from (`chat`), the processes and time
limits that it runs under (`scoring`), and the name that its errors carry.
"""

import asyncio
import inspect
import json
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from marin_rl.environments.base import Dialogues
from marin_rl.environments.prompt_rows import (
    COMPLETION,
    CONVERSATIONAL,
    OTHER_ANSWER_COLUMNS,
    value_at,
)
from marin_rl.errors import InputError
from marin_rl.finite import number
from marin_rl.types import Example, Message

Convention = Literal["example", "trl", "verl"]

SIGNATURES = """
  reward(example, completion) -> number, or a mapping of names to numbers; None: not applicable
  reward(prompts, completions, **columns) -> list with a number or None per completion  (TRL)
  compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number, or a \
mapping with "score"; None: not applicable  (verl)"""

_TRL = frozenset({"prompts", "completions", "completion_ids"})
_VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
# Names that say that a parameter is no example, or no completion.
_NO_EXAMPLE = frozenset({"completion", "response", "output", "prediction", "generated"})
_NO_COMPLETION = frozenset({"example", "answer", "label", "target", "reference", "expected"})


def _takes_example_and_completion(signature: inspect.Signature) -> bool:
    """Return True where both can be passed by position and no name says that it means another.

    `reward(completion, answer)` could be called too, and would score every completion wrongly.
    """
    try:
        first, second, *_ = (*signature.bind("example", "completion").arguments, None)
    except TypeError:
        return False
    return first not in _NO_EXAMPLE and second not in _NO_COMPLETION


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Named part of a reward, with its weight where the configuration gives none."""

    name: str
    value: float
    weight: float = 1.0


def _part(name: Any, value: Any, weight: float = 1.0) -> Part:
    """Return a part of a mapping. Raises ValueError, which names it."""
    try:
        return Part(name=str(name), value=number(value), weight=weight)
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

    @property
    def wants_completion_ids(self) -> bool:
        """True where the function may read the token ids of completions."""
        return self.convention == "trl" and (self._open or "completion_ids" in self._takes)

    def of_completion(self, example: Example, completion: str) -> list[Part]:
        """Return the parts of one completion's reward; those that are None, or all, are left out.

        Raises ValueError, or as the function.
        """
        assert self.convention != "trl", "such a function scores groups"
        if self.convention == "verl":
            return self._by_verl(example, completion)
        value = self._result(self._function(example, completion))
        if not isinstance(value, Mapping):
            return [] if value is None else [Part(name="reward", value=number(value))]
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
        arguments = _group_arguments(example, completions, completion_ids, dialogues)
        taken = self._taken(arguments, set(arguments) - _TRL)
        values = self._result(self._function(**taken))
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise ValueError(f"expected a list of {n} numbers, found {values!r:.80}")
        values = list(values)
        if len(values) != n:
            raise ValueError(f"expected a list of {n} numbers, found {len(values)}: {values!r:.80}")
        return values

    def _convention(self, signature: inspect.Signature | None) -> Convention:
        if signature is None:
            return "example"
        if "example" not in self._takes and self._takes & _TRL:
            return "trl"
        if {"solution_str", "ground_truth"} <= self._takes:
            return "verl"
        if not _takes_example_and_completion(signature):
            raise InputError(
                f"reward function {self._name!r} takes {signature}: expected one of{SIGNATURES}"
            )
        return "example"

    def _by_verl(self, example: Example, completion: str) -> list[Part]:
        """A mapping's `score` is the reward; its other numbers count only with a weight."""
        arguments: dict[str, Any] = {
            "solution_str": completion,
            "ground_truth": typed_answer(example),
            "extra_info": example.metadata.get("extra_info"),
        }
        if "data_source" in example.metadata:
            arguments["data_source"] = example.metadata["data_source"]
        taken = self._taken(arguments, example.metadata)
        value = self._result(self._function(**taken))
        if value is None:
            return []
        if not isinstance(value, Mapping):
            return [Part(name="score", value=number(value))]
        if value.get("score", 0) is None:
            return []
        if "score" not in value:
            raise ValueError(f"expected a number or a mapping with 'score', found {value!r:.80}")
        others = {
            str(name): part
            for name, part in value.items()
            if name != "score" and not isinstance(part, str) and hasattr(type(part), "__float__")
        }
        return [
            _part("score", value["score"]),
            *(_part(name, part, weight=0.0) for name, part in others.items()),
        ]

    def _taken(self, arguments: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
        """Return the arguments that the function takes.

        Raises ValueError, with the row's `columns`, where it needs one that is not there.
        """
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
        """Return what the function returned, awaited where it is asynchronous."""
        return self._runner.run(_awaited(value)) if inspect.isawaitable(value) else value


def typed_answer(example: Example) -> Any:
    """Return the answer with the type that its row gives it; a text where that is not known."""
    for name in ("answer", *OTHER_ANSWER_COLUMNS):
        value = value_at(example.metadata, name)
        if value is not None and str(value) == example.answer:
            return value
    return example.answer


def _group_arguments(
    example: Example,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    dialogues: Dialogues,
) -> dict[str, list[Any]]:
    """Return TRL's arguments: one entry per completion.

    Where the prompt is a list of messages, completions are the messages that followed it.
    """
    conversational = example.metadata.get(CONVERSATIONAL) is True
    columns = {"answer": example.answer, **example.metadata}
    arguments = {
        name: [value] * len(completions)
        for name, value in columns.items()
        if name not in (CONVERSATIONAL, COMPLETION) and (name, value) != ("answer", None)
    }
    if conversational:
        prompt = [{"role": m.role, "content": m.content} for m in example.messages]
        prompts = [[dict(message) for message in prompt] for _ in completions]
        replies = [[_as_trl_has_it(message) for message in dialogue] for dialogue in dialogues]
    else:
        prompts = [example.messages[-1].content for _ in completions]
        replies = list(completions)
    ids = [list(one) for one in completion_ids]
    return {**arguments, "prompts": prompts, "completions": replies, "completion_ids": ids}


def _as_trl_has_it(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return body | ({"name": message.name} if message.name is not None else {})


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _names(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names)))
