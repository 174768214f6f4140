"""Thousands of episodes at once in one event loop."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.fakes import served_policy

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.echo import Echo
from marin_rl.environments.episode import Episode, StepResult, Tool
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.protocol import ChatClient, ChatRequest, served_model_id
from marin_rl.rollouts.episode import EpisodeDriver
from marin_rl.rollouts.trajectories import GroupRequest, all_of
from marin_rl.types import Example, Message, Sampling, Turn

EPISODES, GROUP = 3000, 100
DIGEST = "ab" * 32
POLICY = served_policy("http://127.0.0.1:1/v1", served_model_id("policy", 0, DIGEST))


class Meeting(Echo):
    """An environment whose first steps wait until all episodes have come to theirs."""

    workers = 0

    def __init__(self) -> None:
        super().__init__(EnvironmentConfig(name="echo"))
        self.present, self.complete = 0, asyncio.Event()

    def episode(self, example: Example) -> Episode:
        return Guest(self, example)


class Guest:
    """Two turns, the first of which meets all others."""

    def __init__(self, meeting: Meeting, example: Example) -> None:
        self._meeting, self._example, self._turns = meeting, example, 0

    def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        return self._example.messages, ()

    async def step(self, turn: Turn) -> StepResult:
        self._turns += 1
        if self._turns == 2:
            return StepResult(reward=1.0, done=True)
        self._meeting.present += 1
        if self._meeting.present == EPISODES:
            self._meeting.complete.set()
        await self._meeting.complete.wait()
        return StepResult(messages=(Message(role="user", content="again"),))

    async def close(self) -> None:
        pass


class OneToken(ChatClient):
    """A client whose completions are one token."""

    model = POLICY.model

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        sample = Completion(
            text="a",
            token_ids=np.ones(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            finish_reason="stop",
        )
        ids = np.ones(3, np.int32) if request.prompt_ids is None else request.prompt_ids
        return ChatAnswer(
            model=POLICY.model, prompt_token_ids=ids, completions=(sample,) * request.n
        )


@pytest.mark.slow
def test_thousands_of_episodes_wait_side_by_side() -> None:
    """None gets further before all of them have come, so all are open at the same time."""

    async def play() -> list[Any]:
        environment = Meeting()
        driver = EpisodeDriver(
            client=OneToken(),
            policy=POLICY,
            environment=environment,
            settings=EnvironmentConfig(name="echo"),
            bridge=lambda dialogue, last_id, messages, tools: np.full(2, 7, np.int32),
            turns_max=8,
            context_length=64,
        )
        requests = [
            GroupRequest(
                group_id=f"g{number}",
                example=environment.example(0, number, "train"),
                size=GROUP,
                sampling=Sampling(max_tokens=1, seed=number),
            )
            for number in range(EPISODES // GROUP)
        ]
        return await all_of(driver.play_group(request) for request in requests)

    trajectories = [t for group in asyncio.run(play()) for t in group]
    assert len(trajectories) == EPISODES
    assert {(t.finish_reason, t.reward, len(t.turns)) for t in trajectories} == {("stop", 1.0, 2)}
