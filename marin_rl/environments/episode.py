"""Episodes: one attempt of a model at one example, turn by turn.

Owns the protocol that `rollouts.episode` drives, and the adapter that makes a one-shot problem an
episode of one step. Leaves out sampling (`rollouts.episode`), the processes that episodes live in
(`episode_pool`), and the scoring of a finished group (`scoring`).
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from marin_rl.environments.base import Environment
from marin_rl.finite import reward_number
from marin_rl.types import Example, Message, NamedReward, Turn

Tool = Mapping[str, Any]  # a function's JSON schema, as OpenAI's `tools` have it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Answer of an environment to one turn of the model.

    `messages` are what the model reads before its next turn: a user's words or the results of
    tools. `reward` is received at the turn's last token: a number, or numbers by name that add up,
    of which None is left out. An episode without any is scored once it is finished, together with
    its group, by `Environment.score`. With `scored` it is scored so in any case, and the score is
    added to the rewards of its steps.
    """

    messages: tuple[Message, ...] = ()
    reward: float | Mapping[str, float | None] | None = None
    done: bool = False
    scored: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if isinstance(self.reward, Mapping):
            parts = {name: _checked(value, f"{name}: ") for name, value in self.reward.items()}
            object.__setattr__(self, "reward", parts)
            _checked(self.received, "the sum of its parts: ")
        else:
            object.__setattr__(self, "reward", _checked(self.reward))

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
        """The reward as one number; None where there is none."""
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

    Each method may be `async` or not.
    """

    def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """The messages of the first prompt, and the tools that may be called."""
        ...

    async def step(self, turn: Turn) -> StepResult:
        """Take in a turn of the model. May raise any exception, which costs this episode alone."""
        ...

    async def close(self) -> None:
        """Release what the episode holds. Called once, however the episode ended."""
        ...


@runtime_checkable
class HasEpisodes(Protocol):
    """Optional part of an environment: episodes of several turns."""

    def episode(self, example: Example) -> Episode:
        """A new episode that starts from `example`."""
        ...


@runtime_checkable
class OffersTools(Protocol):
    """Optional part of an environment with episodes: the tools that every one of them offers.

    They are checked against the policy's chat template before a run starts; tools that an episode
    returns from `start` alone are checked there.
    """

    def tools_offered(self) -> Sequence[Tool]:
        """Schemas of the tools."""
        ...


@runtime_checkable
class AsksPolicy(Protocol):
    """Optional part of an environment with episodes: the policy plays others in them as well.

    Where `asks_policy` is True, the example that an episode is made of has `POLICY` in its
    metadata: the `endpoints` (base URLs that end in /v1) and the id of the `model` that plays, and
    the `sampling` of the group. The example that is stored does not have it.
    """

    @property
    def asks_policy(self) -> bool:
        """True where episodes ask the policy."""
        ...


POLICY = "policy"


def function_tool(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """The schema of a tool; `parameters` is a JSON schema of its arguments."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def user_message(text: str) -> tuple[Message, ...]:
    """Text of an environment as a message of the user."""
    return (Message(role="user", content=text),)


async def settled(value: Any) -> Any:
    """The value itself, or what it awaits: methods of episodes may be `async` or not."""
    return await value if inspect.isawaitable(value) else value


def checked_result(result: Any) -> StepResult:
    """`result`, if it is one. Raises ValueError."""
    if not isinstance(result, StepResult):
        raise ValueError(f"expected a StepResult of a step, found {result!r:.80}")
    return result


class OneShot:
    """A problem as an episode of one step: the example's messages, one completion, the end."""

    def __init__(self, example: Example) -> None:
        self._example = example

    def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """The example's messages, without tools."""
        return self._example.messages, ()

    async def step(self, turn: Turn) -> StepResult:
        """The end: the completion is scored with its group."""
        return StepResult(done=True)

    async def close(self) -> None:
        """Release nothing."""


def episode_of(environment: Environment, example: Example) -> Episode:
    """A new episode of an example: the environment's own, or its problem in one step."""
    return (
        environment.episode(example) if isinstance(environment, HasEpisodes) else OneShot(example)
    )
