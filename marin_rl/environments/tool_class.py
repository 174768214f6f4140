"""A class whose public methods are tools, by TRL's contract: `environment.name: envs.py:MyTools`.

    reset(**row) -> str | None   begins an episode; a text is appended to the last message
    get_reward() -> float        optional: the reward of the finished episode
    every other public method    a tool: its schema comes from its type hints and its docstring

An instance is made per episode. What a method returns is the tool's result, an exception is its
text, and a turn without calls ends the episode. Owns the options, the class's rows and the turns;
leaves out schemas (`tool_schemas`), files of rows (`chat`) and where episodes run.
"""

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.chat import Chat, ChatOptions
from marin_rl.environments.episode import Episode, StepResult, Tool, settled
from marin_rl.environments.prompt_files import CONVERSATIONAL, Columns, metadata_of, read_row
from marin_rl.environments.reward_functions import FunctionScored, RewardOption
from marin_rl.environments.tool_schemas import VARIADIC, ToolMethod
from marin_rl.errors import ConfigError, InputError
from marin_rl.finite import number
from marin_rl.types import Example, Message, RewardComponent, Split, ToolCall, Turn

# What a class may define besides tools. TRL has the first two; rows may come from `example`.
RESERVED = frozenset({"reset", "get_reward", "example", "close"})
OUTPUT_CHARACTERS_MAX = 16_384
ERROR_CHARACTERS_MAX = 2_000

_log = logging.getLogger(__name__)


class MalformedCallOptions(Section):
    """Options of environments with tools: the answer to a call that is malformed."""

    malformed: Literal["error_text", "end", "penalty"] = Field(
        default="error_text",
        description="answer to a call that is not well-formed or names no tool: its error as a "
        "tool's text, the end of the episode, or its error and `malformed_penalty`",
    )
    malformed_penalty: float = Field(
        default=0.1, ge=0, le=1e6, description="subtracted from the reward of such a turn"
    )


class ToolOptions(MalformedCallOptions, ChatOptions):
    """Options of a class of tools: those of `chat`, and the arguments of the class."""

    path: str = Field(
        default="",
        description="rows for `reset`: as `path` of `chat`; without it they come from the class's "
        "own `example`, or `reset` takes a `seed`",
    )
    reward: RewardOption | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None,
        description="FILE.py:function or module:function, or a list of such, as of `chat`; added "
        "to `get_reward`; null: `get_reward` alone",
    )


def is_tool_class(kind: type) -> bool:
    """Return True for a class by TRL's contract: it has `reset`, and is no environment itself."""
    return callable(getattr(kind, "reset", None)) and not hasattr(kind, "score")


@dataclass(frozen=True)
class ToolClass:
    """A user's class with the arguments of its instances, and its environment's settings."""

    kind: type
    arguments: Mapping[str, Any]
    options: ToolOptions
    config: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    @property
    def characters_max(self) -> int:
        return self.config.tool_output_characters_max or OUTPUT_CHARACTERS_MAX

    @property
    def name(self) -> str:
        return self.kind.__name__

    @cached_property
    def tools(self) -> dict[str, ToolMethod]:
        """Tools by name, in alphabetical order. Raises ConfigError."""
        methods = inspect.getmembers(self.kind, inspect.isroutine)
        return {
            name: ToolMethod(name, function)
            for name, function in methods
            if not name.startswith("_") and name not in RESERVED
        }

    @cached_property
    def schemas(self) -> tuple[Tool, ...]:
        return tuple(tool.schema for tool in self.tools.values())

    @property
    def rewards_itself(self) -> bool:
        return callable(getattr(self.kind, "get_reward", None))

    def make(self) -> Any:
        return self.kind(**self.arguments)

    def check(self) -> None:
        """Raise ConfigError for a class without tools, without a reward, or without rows."""
        if not self.tools:
            raise ConfigError(
                f"environment.name: {self.name} has no public method besides "
                f"{', '.join(sorted(RESERVED))}: expected at least one tool"
            )
        if not self.rewards_itself and self.options.reward is None:
            raise ConfigError(
                f"environment.name: {self.name} has no reward: expected a method `get_reward`, or "
                "a function named by environment.options.reward"
            )
        has_rows = self.options.path or hasattr(self.kind, "example")
        if not has_rows and "seed" not in self._reset.parameters and not self._takes_all:
            raise ConfigError(
                f"environment.name: {self.name} has no rows: expected environment.options.path, a "
                "method `example(seed, index, split)` that returns one, or a `reset` that takes a "
                "`seed`"
            )

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Raise InputError unless a row has what `reset` needs."""
        if missing := [name for name in self.columns_needed if name not in row]:
            raise InputError(
                f"{where}: {self.name}.reset needs {', '.join(missing)}, but the columns of the "
                f"row are {', '.join(row) or 'none'}"
            )

    @property
    def columns_needed(self) -> list[str]:
        """Parameters of `reset` without a default."""
        return [
            name
            for name, item in list(self._reset.parameters.items())[1:]  # without self
            if item.default is item.empty and item.kind not in VARIADIC
        ]

    def arguments_of_reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row that `reset` takes: all of them where it has `**`."""
        if self._takes_all:
            return dict(row)
        return {name: value for name, value in row.items() if name in self._reset.parameters}

    @property
    def _reset(self) -> inspect.Signature:
        return inspect.signature(self.kind.reset)

    @property
    def _takes_all(self) -> bool:
        return any(item.kind is item.VAR_KEYWORD for item in self._reset.parameters.values())


class HasTools(FunctionScored):
    """The part of an environment that a class of tools makes."""

    tool_class: ToolClass

    def episode(self, example: Example) -> Episode:
        return ToolEpisode(self.tool_class, example)

    def tools_offered(self) -> Sequence[Tool]:
        return self.tool_class.schemas

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        # without a function: of an episode that ended before its reward
        if self.tool_class.options.reward is None:
            return (RewardComponent(name=self.tool_class.name, value=0.0),)
        return super().score(example, completion)


class ToolsOverRows(HasTools, Chat):
    """A class of tools whose rows come from a file."""

    def __init__(self, config: EnvironmentConfig, tool_class: ToolClass) -> None:
        super().__init__(config, tool_class.options)
        self.tool_class = tool_class
        self.name = tool_class.name
        self.reward_name = self.reward_name or tool_class.name

    def load_examples(self) -> None:
        super().load_examples()
        example = self.example(0, 0, "train" if self.size else "eval")
        self.tool_class.check_row(row_of(example), self._path)
        rows = self._loaded.rows
        # the prompt and the answer go by other names too, which the reading of rows knows
        needed = frozenset(self.tool_class.columns_needed) - {"prompt", "answer"}
        for index, row in enumerate(rows.scan(needed) if needed else ()):
            if not needed <= row.keys():
                self.tool_class.check_row({"prompt": "", "answer": "", **row}, rows.place(index))


class ToolsOverExamples(HasTools):
    """A class of tools that makes its rows itself."""

    def __init__(self, tool_class: ToolClass) -> None:
        super().__init__(tool_class.options, tool_class.name)
        self.tool_class = tool_class
        self.name = tool_class.name
        self.version = str(getattr(tool_class.kind, "version", "1"))

    def load_examples(self) -> None:
        self.tool_class.check_row(row_of(self.example(0, 0, "train")), self.name)

    def example(self, seed: int, index: int, split: Split) -> Example:
        row: Mapping[str, Any] = {"seed": seed + index}
        if hasattr(self.tool_class.kind, "example"):
            row = self._maker.example(seed, index, split)
        where = f"{self.name}.example({seed}, {index}, {split!r})"
        if not isinstance(row, Mapping):
            raise InputError(f"{where}: expected a row, a mapping of columns, found {row!r:.80}")
        row = {"prompt": "", **row}
        try:
            read = read_row(row, Columns())
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        answer = None if read.answer is None else str(read.answer)
        metadata = metadata_of(row, read, Columns(), where)
        return self.make_example(
            read.messages, answer, seed=seed, index=index, split=split, metadata=metadata
        )

    def demonstration(self, example: Example) -> str | None:
        return None

    @cached_property
    def _maker(self) -> Any:
        return self.tool_class.make()


def row_of(example: Example) -> dict[str, Any]:
    """Return the columns that an example was made of, as TRL passes them to `reset`."""
    row = {name: value for name, value in example.metadata.items() if name != CONVERSATIONAL}
    if example.answer is not None:
        row.setdefault("answer", example.answer)
    prompt: Any = [{"role": m.role, "content": m.content} for m in example.messages]
    if CONVERSATIONAL not in example.metadata and len(prompt) == 1:
        prompt = prompt[0]["content"]
    return {"prompt": prompt, **row}


class ToolEpisode:
    """An episode of a class of tools: each call of a turn is a call of a method, in order."""

    def __init__(self, tool_class: ToolClass, example: Example) -> None:
        self._class, self._example = tool_class, example
        self._instance: Any = None
        self._turns = 0
        # the environment's score is added to what the steps are worth
        self._scored = tool_class.options.reward is not None or not tool_class.rewards_itself

    def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        self._instance = self._class.make()
        arguments = self._class.arguments_of_reset(row_of(self._example))
        observation = self._instance.reset(**arguments)
        if not isinstance(observation, str | None):
            raise ValueError(
                f"{self._class.name}.reset: expected a text or None, found {observation!r:.80}"
            )
        messages = list(self._example.messages)
        if observation is not None:
            last = messages[-1]
            messages[-1] = replace(last, content=last.content + observation)
        return tuple(messages), self._class.schemas

    async def step(self, turn: Turn) -> StepResult:
        """Call the tools of a turn. Without calls the episode is over, and has its reward."""
        self._turns += 1
        texts = [await self._answer(call) for call in turn.tool_calls]
        messages = [
            self._message(call, text)
            for call, (text, _) in zip(turn.tool_calls, texts, strict=True)
        ]
        wrong = sum(malformed for _, malformed in texts)
        if turn.malformed is not None:  # it has no id, so it gets one
            wrong += 1
            words = f"this call could not be read: {turn.malformed[:200]!r}; expected JSON with a "
            error = _error(words + "name and arguments")
            call_id = f"x{self._turns:08d}"
            messages.append(Message(role="tool", content=error, tool_call_id=call_id, name="error"))
        options = self._class.options
        ends = not messages or (wrong and options.malformed == "end")
        penalty = -options.malformed_penalty if wrong and options.malformed == "penalty" else None
        reward = None
        if self._class.rewards_itself and (ends or self._turns == self._class.config.turns_max):
            reward = number(await settled(self._instance.get_reward()))
        values = [value for value in (reward, penalty) if value is not None]
        return StepResult(
            messages=() if ends else tuple(messages),
            reward=sum(values) if values else None,
            done=bool(ends),
            scored=self._scored,
            info={"malformed": wrong} if wrong else {},
        )

    async def close(self) -> None:
        close = getattr(self._instance, "close", None)
        if callable(close):
            await settled(close())

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        """Return the text of a call's result, and True for a malformed call: no tool was called."""
        tool = self._class.tools.get(call.name)
        if tool is None:
            known = ", ".join(self._class.tools)
            return _error(f"Tool {call.name} not found: there are {known}"), True
        try:
            arguments = tool.checked(json.loads(call.arguments))
        except (ValueError, RecursionError) as error:
            return _error(error), True
        try:
            method: Callable[..., Any] = getattr(self._instance, call.name)
            return _text_of(await settled(method(**arguments))), False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an exception is the tool's text
            return _error(error), False

    def _message(self, call: ToolCall, text: str) -> Message:
        kept = text[: self._class.characters_max]
        return Message(
            role="tool",
            content=kept.encode(errors="backslashreplace").decode(),
            tool_call_id=call.id,
            name=call.name,
            cut=len(kept) < len(text),
        )


def _error(error: object) -> str:
    text = str(error) or type(error).__name__
    return str({"error": text[:ERROR_CHARACTERS_MAX]})


def _text_of(value: Any) -> str:
    """Return what a tool returned as text, as TRL does. Raises TypeError for what has none."""
    if isinstance(value, list) and value:
        blocks = [v for v in value if isinstance(v, Mapping) and v.get("type") == "text"]
        if len(blocks) == len(value) and all("text" in block for block in blocks):
            return "".join(block["text"] for block in blocks)
    kind = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        # its address in memory would be all that the text says, another in each run
        raise TypeError(f"the tool returned a {kind.__name__}, which has no text")
    return str(value)
