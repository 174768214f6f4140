"""Dialogues of two turns with the policy server of the tests."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from support.fakes import served_policy

from marin_rl.config import EnvironmentConfig, InferenceConfig, PolicyConfig
from marin_rl.environments.echo import Echo
from marin_rl.environments.episode import Episode, StepResult, Tool
from marin_rl.inference.client.policy_client import client_of
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.episode import EpisodeDriver
from marin_rl.rollouts.trajectories import GroupRequest, Trajectory
from marin_rl.serving.server import PolicyServer
from marin_rl.types import Example, Message, Sampling, Turn

DIGEST = "0123456789abcdef"
SAID = Message(role="assistant", content="")
AGAIN = (Message(role="user", content="again"),)
BRIDGE = TemplateBridge(PolicyConfig())
# A model of random weights hardly ever samples its end token, so turns end at any vowel or stop.
SAMPLING = Sampling(max_tokens=24, seed=5, stop=tuple("aeiouAEIOU!?.,;:"))


class Twice:
    """Asks again after the first turn, and ends after the second."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self._turns = 0

    def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        return self._example.messages, ()

    async def step(self, turn: Turn) -> StepResult:
        self._turns += 1
        done = self._turns == 2
        return StepResult(messages=() if done else AGAIN, reward=1.0, done=done)

    async def close(self) -> None:
        pass


class EchoTwice(Echo):
    """The environment `echo` as a dialogue."""

    def episode(self, example: Example) -> Episode:
        return Twice(example)


def play_dialogues(
    server: PolicyServer,
    request: GroupRequest,
    environment: EchoTwice,
    turns_per_request: int = 1,
    route: Literal["chat", "sglang", "vllm_generate"] = "chat",
    model: str = "",
) -> list[Trajectory]:
    """Play a group against a server; `turns_per_request` and `route` as in `inference`.

    `model` is the id that is asked for, by default that of the server.
    """
    policy = served_policy(
        server.base_url, model or server.model_id, weight_version=3, parameters_digest=DIGEST
    )

    async def run() -> list[Trajectory]:
        async with client_of(InferenceConfig(route=route), BRIDGE)(
            endpoints=policy.endpoints, model=policy.model, turns_per_request=turns_per_request
        ) as client:
            driver = EpisodeDriver(
                client=client,
                policy=policy,
                environment=environment,
                settings=EnvironmentConfig(name="echo"),
                bridge=BRIDGE,
                turns_max=8,
                context_length=64,
            )
            return await driver.play_group(request)

    return asyncio.run(run())
