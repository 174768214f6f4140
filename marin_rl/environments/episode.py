"""Episodes: one attempt of a model at one example, turn by turn; or sampled by the environment.

Owns the protocol that `rollouts.episode` drives, and the adapter that makes a one-shot problem an
episode of one step. An environment that samples by itself is asked for the rollouts of an example,
with the address of the policy, and returns messages, each with the ids that it added to the
sequence (`FinishedRollout`). Leaves out sampling (`rollouts.episode`), the processes that episodes
live in (`episode_pool`), and the scoring of a finished group (`scoring`).
"""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, ToolFault
from marin_rl.finite import LOGPROB_MIN, fit_logprobs, reward_number
from marin_rl.types import Example, Message, NamedReward, Role, Sampling, ToolCall, Turn

Tool = Mapping[str, Any]  # a function's JSON schema, as OpenAI's `tools` have it
Opening = tuple[Sequence[Message], Sequence[Tool]]
Conversation = tuple[list[Message], Sequence[Tool]]  # messages, and the tools that they offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start of an episode: the messages of the first prompt, and the tools."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Answer of an environment to one turn of the model.

    `messages` are what the model reads before its next turn: a user's words or the results of
    tools. `reward` is received at the turn's last token: a number, or numbers by name that add up,
    of which None is left out. An episode without any is scored once it is finished, together with
    its group, by `Environment.score`. With `scored` it is scored so in any case, and the score is
    added to the rewards of its steps. Where the environment says `own_prompts`, `messages` may go
    on from an earlier turn of the model, `parent`, counted from 0; None: from this one. In place of
    messages, `opening` begins another conversation in a segment of its own. A turn that is not
    `trained` is context of those that go on from it. `end` names the end of an episode that is done
    and has another one than `stop`; `shown` are messages of the end that people read, and no model.
    """

    messages: tuple[Message, ...] = ()
    reward: float | Mapping[str, float | None] | None = None
    done: bool = False
    scored: bool = False
    opening: Start | None = None
    parent: int | None = None
    trained: bool = True
    end: str | None = None
    shown: tuple[Message, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if isinstance(self.reward, Mapping):
            parts = {name: _checked(value, f"{name}: ") for name, value in self.reward.items()}
            object.__setattr__(self, "reward", parts)
            _checked(self.received, "the sum of its parts: ")
        else:
            object.__setattr__(self, "reward", _checked(self.reward))

    def after(self, played: "Sequence[Conversation]") -> "Conversation":
        """The next conversation, out of those `played`. ValueError for an unknown `parent`."""
        if self.opening is not None:
            return list(self.opening.messages), self.opening.tools
        number = len(played) - 1 if self.parent is None else self.parent
        if not 0 <= number < len(played):
            raise ValueError(f"parent: expected one of {len(played)} turns, found {number}")
        dialogue, tools = played[number]
        return [*dialogue, *self.messages], tools

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages that the next prompt has for the first time in its segment."""
        return self.messages if self.opening is None else self.opening.messages

    @property
    def rewards(self) -> tuple[NamedReward, ...]:
        """Parts of the reward by name; none where it is a number."""
        if not isinstance(self.reward, Mapping):
            return ()
        return tuple(
            NamedReward(name=name, value=value)
            for name, value in self.reward.items()
            if value is not None
        )

    @property
    def received(self) -> float | None:
        if not isinstance(self.reward, Mapping):
            return self.reward
        return float(sum(part.value for part in self.rewards)) if self.rewards else None


def _checked(value: float | None, part: str = "") -> float | None:
    """Return a reward that can be trained on. Raises ValueError, which names its part."""
    try:
        return None if value is None else reward_number(value, "reward of a step")
    except ValueError as error:
        raise ValueError(f"{part}{error}") from None


@runtime_checkable
class Episode(Protocol):
    """Episode of a member of a group. Members start alike and know nothing of each other.

    `start` gives the messages of the first prompt, and the tools that may be called. `step` takes
    in a turn of the model; any exception costs this episode alone. Where the environment says
    `own_prompts`, a turn of the role `system` says why no turn follows the messages that it gave
    last: it may give others, or end. `close` releases what the episode holds, and is called once,
    however the episode ended. Each may be `async` or not.
    """

    def start(self) -> Opening | Awaitable[Opening]: ...

    def step(self, turn: Turn) -> StepResult | Awaitable[StepResult]: ...

    def close(self) -> Awaitable[None] | None: ...


# Faults that a worker names to its parent, which raises them again.
FAULTS = {"unavailable": EndpointUnavailable, "tool": ToolFault, "timeout": EnvironmentTimeout}
POLICY = "policy"  # in the metadata of an example: see `Environment.asks_policy`


def function_tool(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def user_message(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


async def settled(value: Any) -> Any:
    """The value itself, or what it awaits: methods of episodes may be `async` or not."""
    return await value if inspect.isawaitable(value) else value


class OneShot:
    """A problem as an episode of one step: the example's messages, one completion, the end."""

    def __init__(self, example: Example) -> None:
        self._example = example

    def start(self) -> Opening:
        return self._example.messages, ()

    async def step(self, turn: Turn) -> StepResult:
        return StepResult(done=True)

    async def close(self) -> None:
        """Release nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAddress:
    """Address of a served policy, and the sampling of a group of rollouts from it.

    `endpoints` are base URLs that end in /v1. A request for `model` is refused by the server once
    it has other weights. `sampling` has an entry for each member, with a seed of its own.
    `api_key_variable` names the environment variable that has the key, if the server wants one.
    """

    endpoints: tuple[str, ...]
    model: str
    tokenizer: str
    sampling: tuple[Sampling, ...]
    api_key_variable: str
    context_length: int
    turns_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMessage:
    """Message of a rollout, and the ids that it added to the sequence.

    A message that the policy sampled has a logprob (nats, of the sampling distribution) for each of
    its last `len(logprobs)` ids: those were sampled, others are the chat template's. The others of
    a rollout have no logprobs. A message with `begins_segment` starts a new sequence: the ids of
    messages before it are not part of its prompt.
    """

    role: Role
    content: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    begins_segment: bool = False

    @property
    def sampled(self) -> bool:
        return len(self.logprobs) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """Rollout that an environment has sampled and scored.

    `reward` is a number, or numbers by name that add up. `truncated` says that a limit ended it.
    """

    messages: tuple[FinishedMessage, ...]
    reward: float | Mapping[str, float]
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


def check_numbers(rollout: FinishedRollout) -> None:
    """Raise ValueError for a logprob or a reward that cannot be trained on, or no reward."""
    for number, message in enumerate(rollout.messages):
        logprobs = np.asarray(message.logprobs, np.float64)
        if not np.isfinite(logprobs).all():
            raise ValueError(f"message {number}: expected finite logprobs")
        if not fit_logprobs(logprobs).all():
            raise ValueError(
                f"message {number}: expected logprobs of at most 0 and at least {LOGPROB_MIN:g}, "
                f"found {logprobs.min()} to {logprobs.max()}"
            )
    reward = rollout.reward
    values = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    if not values:
        raise ValueError(f"expected a finite reward, found {reward!r:.80}")
    reward_number(sum(reward_number(value, "reward") for value in values), "reward")
