"""Episodes of several turns against the embedded server with a real engine."""

import asyncio
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from support.fakes import served_policy
from support.models import tiny_model
from support.servers import serving

from marin_rl.config import EnvironmentConfig, InferenceConfig, PolicyConfig
from marin_rl.environments.echo import Echo
from marin_rl.environments.episode import Episode, StepResult, Tool
from marin_rl.errors import StalePolicy
from marin_rl.inference.client.policy_client import client_of
from marin_rl.inference.generation import GenerationRequest
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


def test_a_second_turn_is_what_the_engine_samples_after_the_exact_ids_of_the_first() -> None:
    environment = EchoTwice(EnvironmentConfig(name="echo"))
    example = environment.example(0, 0, "train")
    request = GroupRequest(group_id="g", example=example, size=4, sampling=SAMPLING)
    with serving(parameters_digest=DIGEST) as server:
        trajectories = play_dialogues(server, request, environment)
        assert [trajectory.fault for trajectory in trajectories] == [None] * 4
        dialogues = [t.turns for t in trajectories if len(t.turns) == 2]
        assert len(dialogues) >= 2, "these seeds end their first turns at a stop string"
        for first, second in dialogues:
            prompt, sampled = first.answer.prompt_token_ids, first.completion.token_ids
            ids = np.concatenate(
                [prompt, sampled, BRIDGE((*example.messages, SAID), int(sampled[-1]), AGAIN)]
            )
            assert second.answer.prompt_token_ids.tolist() == ids.tolist()
            direct = server.engine.submit(
                GenerationRequest(prompt_ids=ids, sampling=second.sampling)
            ).result(timeout=120)
            (sample,) = direct.samples
            assert sample.token_ids.tolist() == second.completion.token_ids.tolist()
            np.testing.assert_allclose(sample.logprobs, second.completion.logprobs, atol=1e-5)
    # the first turns have the seeds of the members, the second ones seeds of their own
    seeds = [turn.sampling.seed for t in trajectories for turn in t.turns]
    assert len(set(seeds)) == len(seeds)


def assert_alike(ones: list[Trajectory], others: list[Trajectory]) -> None:
    """The same tokens, logprobs but for rounding, sampling and ends."""
    for one, other in zip(ones, others, strict=True):
        assert (one.fault, one.finish_reason) == (other.fault, other.finish_reason)
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.answer.prompt_token_ids.tolist() == b.answer.prompt_token_ids.tolist()
            assert a.completion.token_ids.tolist() == b.completion.token_ids.tolist()
            np.testing.assert_allclose(a.completion.logprobs, b.completion.logprobs, atol=1e-5)
            assert a.completion.text == b.completion.text
            assert a.completion.finish_reason == b.completion.finish_reason
            assert a.sampling == b.sampling


def test_other_ways_of_asking_give_the_same_dialogues() -> None:
    environment = EchoTwice(EnvironmentConfig(name="echo"))
    example = environment.example(0, 0, "train")
    request = GroupRequest(group_id="g", example=example, size=4, sampling=SAMPLING)
    with serving(parameters_digest=DIGEST, weight_version=3) as server:
        chat = play_dialogues(server, request, environment)
        sglang = play_dialogues(server, request, environment, route="sglang")
        assert_alike(chat, sglang)
        assert {turn.answer.weight_version for t in sglang for turn in t.turns} == {3}
        together = play_dialogues(server, request, environment, turns_per_request=64)
        assert_alike(chat, together)
        model = server.model_id
        server.updater.swap(tiny_model(seed=9), 4, "other")
        with pytest.raises(StalePolicy, match="but the endpoint has weights of version 4"):
            play_dialogues(server, request, environment, route="sglang", model=model)
    for turn in (turn for trajectory in together for turn in trajectory.turns):
        assert turn.answer.parameters_digest == DIGEST
        # the seconds of its own prompt, whether it shared a request or not
        assert None not in (turn.timing.queue_s, turn.timing.prefill_s, turn.timing.environment_s)
        assert (turn.timing.decode_s or 0) > 0
    ids = [t.turns[1].answer.request_id for t in together if len(t.turns) == 2]
    assert len(ids) >= 2, "these seeds end their first turns at a stop string"
    assert len(set(ids)) == 1, "second turns that are due together are one request"
