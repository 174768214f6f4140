"""Episodes of two turns against the embedded server: token in, token out, with a real engine."""

import asyncio
from collections.abc import Sequence

import numpy as np
from support.servers import serving

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.echo import Echo
from marin_rl.environments.episode import Episode, StepResult, Tool
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.generation import GenerationRequest
from marin_rl.rollouts.episode import EpisodeDriver, GroupRequest, Trajectory
from marin_rl.serving.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import Example, Message, Sampling, ServedPolicy, SlotRef, Turn

DIGEST = "0123456789abcdef"
AGAIN = (Message(role="user", content="again"),)
TOKENIZER = character_tokenizer()
# A model of random weights hardly ever samples its end token, so turns end at any vowel.
SAMPLING = Sampling(max_tokens=24, seed=5, stop=tuple("aeiouAEIOU!?.,;: "))


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


def bridge(messages: Sequence[Message]) -> np.ndarray:
    """The built-in template after a turn that ended without its end token."""
    text = "".join(f"<|{message.role}|>{message.content}" for message in messages)
    ids = TOKENIZER(f"<|end|>{text}<|assistant|>", add_special_tokens=False)["input_ids"]
    return np.array(ids, np.int32)


def play(server: PolicyServer, request: GroupRequest, environment: EchoTwice) -> list[Trajectory]:
    policy = ServedPolicy(
        endpoints=(server.base_url,),
        model=server.model_id,
        weight_version=3,
        parameters_digest=DIGEST,
        tokenizer_digest="",
        chat_template_digest="",
        checkpoint=SlotRef(slot="checkpoints/round-00003", sha256=""),
    )

    async def run() -> list[Trajectory]:
        async with PolicyClient(endpoints=policy.endpoints, model=policy.model) as client:
            driver = EpisodeDriver(
                client=client, policy=policy, environment=environment, bridge=bridge
            )
            return await driver.play_group(request)

    return asyncio.run(run())


def test_a_second_turn_is_what_the_engine_samples_after_the_exact_ids_of_the_first() -> None:
    environment = EchoTwice(EnvironmentConfig(name="echo"))
    example = environment.example(0, 0, "train")
    request = GroupRequest(group_id="g", example=example, size=4, sampling=SAMPLING)
    with serving(parameters_digest=DIGEST) as server:
        trajectories = play(server, request, environment)
        assert [trajectory.fault for trajectory in trajectories] == [None] * 4
        dialogues = [t.turns for t in trajectories if len(t.turns) == 2]
        assert len(dialogues) >= 2, "these seeds end their first turns at a stop string"
        for first, second in dialogues:
            prompt, sampled = first.answer.prompt_token_ids, first.completion.token_ids
            ids = np.concatenate([prompt, sampled, bridge(AGAIN)])
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
