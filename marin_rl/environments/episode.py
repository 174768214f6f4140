"""Episodes: one attempt of a model at one example, turn by turn.

Owns the protocol that `rollouts.episode` drives, and the adapter that makes a one-shot problem an
episode of one step. Leaves out sampling (`rollouts.episode`) and the scoring of a finished group,
which happens in worker processes (`scoring`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from marin_rl.environments.base import Environment
from marin_rl.types import Example, Message, Turn

Tool = Mapping[str, Any]  # a function's JSON schema, as OpenAI's `tools` have it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Answer of an environment to one turn of the model.

    `messages` are what the model reads before its next turn: a user's words or the results of
    tools. `reward` is received at the turn's last token; an episode without any is scored once it
    is finished, together with its group, by `Environment.score`.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"expected a finite reward of a step, found {self.reward!r}")


@runtime_checkable
class Episode(Protocol):
    """Episode of a member of a group. Members start alike and know nothing of each other."""

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
