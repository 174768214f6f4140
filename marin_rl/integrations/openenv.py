"""Environments on servers of OpenEnv: `environment.name: openenv`, `options: {url: http://…}`.

The server's protocol is spoken here, so OpenEnv is installed where the server runs and nowhere
else. Members of a group share one first observation: the first of them keeps its session, and the
others get theirs when they first act. So a group is played to its end also by a server that has
fewer sessions than the group has members.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from weakref import WeakValueDictionary

from pydantic import Field

from marin_rl.config import EnvironmentConfig, OneOrMany, Section
from marin_rl.environments.base import RewardedElsewhere
from marin_rl.environments.episode import StepResult, Tool, function_tool, user_message
from marin_rl.environments.registry import parse_options, register
from marin_rl.errors import ConfigError, RewardFault
from marin_rl.finite import reward_number
from marin_rl.integrations.hosted import HeldOutRows, HttpAddress
from marin_rl.integrations.openenv_session import (
    ActionRefused,
    ServerFacts,
    Session,
    open_session,
    server_facts,
)
from marin_rl.isolated.worker import uncharged
from marin_rl.types import Example, Message, Split, ToolCall, Turn
from marin_rl.user_code import SPEC_PATTERN, load

# Fields of an observation that are its text, the first that is there.
TEXT_FIELDS = ("message", "text", "prompt", "question", "content", "output", "result")
MCP_FIELDS = frozenset({"tool_name", "arguments"})  # of the action that calls an MCP tool
ACT = "act"  # the tool whose arguments are an action


class OpenEnvOptions(Section):
    """Options of `openenv`."""

    url: Annotated[tuple[HttpAddress, ...], OneOrMany] = Field(
        min_length=1,
        description="address of a server, such as http://127.0.0.1:8000, or a list of addresses "
        "of servers of the same environment",
    )
    action_field: str | None = Field(
        default=None,
        description="field of an action that a completion's text becomes; null: the only field of "
        "an action if it is a text, else an action is a call of a tool",
    )
    reset: dict[str, Any] = Field(default={}, description="arguments of reset, in addition to seed")
    path: str | None = Field(
        default=None,
        description="file of JSON lines with arguments of reset, a row per example; null: examples "
        "differ by their seeds alone",
    )
    eval_fraction: float = Field(
        default=0.1, gt=0, lt=1, description="share of the rows kept for evaluation"
    )
    seeds: int | None = Field(
        default=None, ge=1, description="number of different examples without rows; null: no end"
    )
    instructions: str = Field(
        default="",
        description="text before the first observation: the rules, the form of an action",
    )
    to_text: str | None = Field(
        default=None,
        pattern=SPEC_PATTERN,
        description="FILE.py:function or module:function of (observation, info) that returns what "
        "the model reads; null: the first of the fields "
        f"{', '.join(TEXT_FIELDS)} that is a text, else JSON",
    )
    capacity_wait_s: float = Field(
        default=600.0, ge=0, le=86_400, description="time to wait for a session of a full server"
    )


@register("openenv", OpenEnvOptions, server=True)
class OpenEnv(RewardedElsewhere):
    """Rewards each step as the environment on the server does."""

    name = "openenv"

    def __init__(self, config: EnvironmentConfig) -> None:
        self.options = parse_options(OpenEnvOptions, config)
        self.timeout_s = config.step_timeout_s or config.reward_timeout_s
        # a session is only waited for, in this process; a function of the user could block it
        self.workers = 0 if self.options.to_text is None else 1
        self._openings: WeakValueDictionary[tuple[int, str], _Opening] = WeakValueDictionary()

    def load_examples(self) -> None:
        described = {url: server_facts(url) for url in self.options.url}
        self.facts, *others = described.values()
        if any(other.action != self.facts.action for other in others):
            raise ConfigError(
                "environment.options.url: expected servers of one environment, found different "
                f"actions: {', '.join(described)}"
            )
        self.version = f"1+openenv.{self.facts.name}.{self.facts.version}"
        self.text_field = _text_field(self.facts, self.options.action_field)
        self.size, self.rows_digest, self._rows = self.options.seeds, None, None
        if (path := self.options.path) is not None:
            self._rows = rows = HeldOutRows(path, self.options.eval_fraction)
            self.size, self.eval_size, self.rows_digest = rows.size, rows.eval_size, rows.digest
            self.version += f"+{rows.digest}"

    def tools_offered(self) -> Sequence[Tool]:
        tools = [
            function_tool(
                tool["name"],
                tool.get("description") or tool["name"],
                tool.get("inputSchema") or tool.get("input_schema") or {"type": "object"},
            )
            for tool in self.facts.tools
        ]
        if self.acts_by_call:  # the tool whose arguments are the fields of an action
            action, kept = self.facts.action, ("type", "properties", "required", "$defs")
            schema = {name: value for name, value in action.items() if name in kept}
            schema["properties"] = _fields_of(action)
            words = action.get("description") or "Take an action."
            tools.append(function_tool(ACT, words, schema))
        return tools

    @property
    def acts_by_tools(self) -> bool:
        fields = _fields_of(self.facts.action)
        return bool(self.facts.tools) and (not fields or fields.keys() >= MCP_FIELDS)

    @property
    def acts_by_call(self) -> bool:
        return self.text_field is None and not self.acts_by_tools

    def example(self, seed: int, index: int, split: Split) -> Example:
        arguments, options = dict(self.options.reset), self.options
        if self._rows is not None:
            arguments |= self._rows.row(seed, index, split)
        elif options.seeds is not None:
            index %= options.seeds
        return self.make_example(
            options.instructions or self.facts.name,
            seed=seed,
            index=index,
            split=split,
            metadata={"reset": arguments},
        )

    def episode(self, example: Example) -> "OpenEnvEpisode":
        return OpenEnvEpisode(self, example)

    def opening(self, example: Example) -> "_Opening":
        """The start that the episodes of an example share, for as long as one of them lives."""
        key = id(asyncio.get_running_loop()), example.example_id
        return self._openings.setdefault(key, _Opening())

    def text_of(self, answer: Mapping[str, Any]) -> str:
        observation = {k: v for k, v in answer["observation"].items() if k != "metadata"}
        if self.options.to_text is not None:
            return str(load(self.options.to_text, "to_text")(observation, _info_of(answer)))
        texts = (observation.get(name) for name in TEXT_FIELDS)
        text = next((text for text in texts if isinstance(text, str)), None)
        return json.dumps(observation) if text is None else text


class _Opening:
    """First observation of an example, once one of its episodes has begun."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.text: str | None = None


class OpenEnvEpisode:
    """An environment between its reset and its end."""

    def __init__(self, environment: OpenEnv, example: Example) -> None:
        self._environment, self._example = environment, example
        self._session: Session | None = None
        self._tools = {tool["function"]["name"] for tool in environment.tools_offered()}

    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """The instructions and the first observation, and the tools of the environment."""
        environment = self._environment
        self._opening = environment.opening(self._example)
        with uncharged():  # also while another member waits for room
            async with self._opening.lock:
                if self._opening.text is None:
                    self._opening.text = await self._begin()
        text, instructions = self._opening.text, environment.options.instructions
        shown = f"{instructions}\n\n{text}" if instructions else text
        return user_message(shown), environment.tools_offered()

    async def step(self, turn: Turn) -> StepResult:
        if self._session is None and (text := await self._begin()) != self._opening.text:
            raise RewardFault(
                "reset with one seed gave two observations, so the members of a group cannot be "
                f"compared: {self._opening.text!r:.80} and {text!r:.80}; expected an environment "
                "whose reset takes `seed`, or a to_text that leaves out what differs"
            )
        if turn.tool_calls or turn.malformed is not None or self._environment.text_field is None:
            return await self._tool_turn(turn)
        try:
            answer = await self._live.step({str(self._environment.text_field): turn.content})
        except ActionRefused as error:
            return StepResult(messages=user_message(f"no action: {error}"), reward=0.0)
        done = bool(answer.get("done"))
        if done:
            await self.close()  # others may wait for it, long before this group is over
        return StepResult(
            messages=() if done else user_message(self._environment.text_of(answer)),
            reward=_reward_of(answer),
            done=done,
            info=_info_of(answer),
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def _live(self) -> Session:
        assert self._session is not None, "begun first"
        return self._session

    async def _begin(self) -> str:
        """Open a session, and return the text of its first observation."""
        options, seed = self._environment.options, self._example.seed
        first = seed % len(options.url)
        with uncharged():  # requests and the wait for a session have separate limits
            self._session, answer = await open_session(
                (*options.url[first:], *options.url[:first]),
                {"seed": seed, **self._example.metadata["reset"]},
                self._environment.timeout_s,
                options.capacity_wait_s,
            )
        if answer.get("done"):
            await self.close()
            raise RewardFault("the environment ended the episode before its first turn")
        return self._environment.text_of(answer)

    async def _tool_turn(self, turn: Turn) -> StepResult:
        if not turn.tool_calls:
            if self._environment.acts_by_tools and turn.malformed is None:
                return StepResult(done=True)
            expected = f"expected a call of {', '.join(sorted(self._tools))}"
            return StepResult(messages=user_message(expected), reward=0.0)
        messages, rewards, info = list[Message](), list[float | None](), dict[str, Any]()
        for call in turn.tool_calls:
            text, answer = await self._called(call)
            messages.append(
                Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
            )
            rewards.append(_reward_of(answer))
            info |= _info_of(answer)
            if answer.get("done"):
                await self.close()
                return StepResult(reward=_sum(rewards), done=True, info=info)
        return StepResult(messages=tuple(messages), reward=_sum(rewards), info=info)

    async def _called(self, call: ToolCall) -> tuple[str, Mapping[str, Any]]:
        """Text of a call's result for the model, and the answer of the step that it was, if any."""
        try:
            if call.name not in self._tools:
                raise ActionRefused(
                    f"there is no tool {call.name}: there are {', '.join(sorted(self._tools))}"
                )
            try:
                arguments = json.loads(call.arguments)
            except (ValueError, RecursionError) as error:
                raise ActionRefused(f"arguments that are no JSON: {error}") from None
            if not isinstance(arguments, dict):
                raise ActionRefused(f"expected arguments by name, found {arguments!r:.80}")
            if call.name == ACT and self._environment.acts_by_call:
                answer = await self._live.step(arguments)
            elif self._environment.acts_by_tools:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
                answer = await self._live.step(action)
                return _tool_text(answer["observation"]), answer
            else:
                return _tool_text(await self._live.call_tool(call.name, arguments)), {}
        except ActionRefused as error:
            return f"error: {error}", {"reward": 0.0}
        return self._environment.text_of(answer), answer


def _reward_of(answer: Mapping[str, Any]) -> float | None:
    reward = answer.get("reward")
    try:
        return None if reward is None else reward_number(reward, "reward")
    except ValueError as error:
        raise RewardFault(f"the reward of a step: {error}") from None


def _sum(rewards: Sequence[float | None]) -> float | None:
    values = [reward for reward in rewards if reward is not None]
    return sum(values) if values else None


def _info_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    return dict(answer.get("metadata") or {})


def _fields_of(action: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an action that say something; all actions of OpenEnv have `metadata` as well."""
    return {n: field for n, field in action.get("properties", {}).items() if n != "metadata"}


def _text_field(facts: ServerFacts, named: str | None) -> str | None:
    """The field of an action that is the completion's text. Raises ConfigError."""
    fields = _fields_of(facts.action)
    if named is None:
        texts = [name for name, field in fields.items() if field.get("type") == "string"]
        return texts[0] if len(fields) == len(texts) == 1 else None
    if fields.get(named, {}).get("type") != "string":
        raise ConfigError(
            f"environment.options.action_field: expected a text among the fields of an action of "
            f"{facts.name} ({', '.join(fields) or 'none'}), found {named!r}"
        )
    return named


def _tool_text(value: Any) -> str:
    """Text of an MCP result: its blocks of text, its data, or JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        if value.get("error"):
            error = value["error"]
            return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
        if "tool_name" in value:
            return _tool_text(value.get("result"))
        blocks = value.get("content")
        blocks = blocks if isinstance(blocks, list) else []
        parts = [block.get("text") for block in blocks if isinstance(block, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if texts:
            return "\n".join(texts)
        if "data" in value:
            return _tool_text(value["data"])
    return json.dumps(value)
