"""Episodes of several turns, with tools too, against the embedded server with a real engine."""

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from support.fakes import served_policy
from support.models import tiny_model
from support.servers import serving

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import EnvironmentConfig, InferenceConfig, PolicyConfig
from marin_rl.environments.echo import Echo
from marin_rl.environments.episode import Episode, StepResult, Tool
from marin_rl.environments.tool_class import ToolClass, ToolOptions, ToolsOverExamples
from marin_rl.errors import StalePolicy
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.dialects import Read
from marin_rl.inference.client.policy_client import PolicyClient, client_of
from marin_rl.inference.generation import GenerationRequest
from marin_rl.rollouts.assemble import RolloutMaker
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.episode import EpisodeDriver
from marin_rl.rollouts.tool_turns import ToolTurns
from marin_rl.rollouts.trajectories import GroupRequest, Trajectory
from marin_rl.serving.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import Example, Message, RewardComponent, Sampling, ServedPolicy, Turn

DIGEST = "0123456789abcdef"
SAID = Message(role="assistant", content="")
AGAIN = (Message(role="user", content="again"),)
BRIDGE = TemplateBridge(PolicyConfig())
# A model of random weights hardly ever samples its end token, so turns end at any vowel or stop.
SAMPLING = Sampling(max_tokens=24, seed=5, stop=tuple("aeiouAEIOU!?.,;:"))
CONTEXT = 256  # a token is a character
TOOL_TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for message in messages %}{{ '<|' + message.role + '|>' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TOKENIZER = character_tokenizer()
TOKENIZER.chat_template = TOOL_TEMPLATE
NOWHERE = "http://127.0.0.1:1/v1"  # no server is there
FORCED = 2  # turns that must call


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


class Desk:
    """Two tools, one of which raises for one of its two arguments."""

    def reset(self, seed: int) -> str:
        self.calls: list[str] = []
        return f"desk {seed}"

    def double(self, number: Literal[1, 2]) -> int:
        """Double a number."""
        self.calls.append("double")
        return 2 * number

    async def spell(self, word: Literal["ab", "no"]) -> str:
        """Spell a word."""
        self.calls.append("spell")
        if word == "no":
            raise ValueError("no such word")
        return "-".join(word)

    def get_reward(self) -> float:
        return float(len(self.calls))


class Forcing(PolicyClient):
    """A client whose first turns must call a tool; it keeps what was sent and answered."""

    log: list[tuple[dict[str, Any], dict[str, Any]]]

    async def _send(
        self, session: str, path: str, body: dict[str, Any], read: Read
    ) -> list[ChatAnswer]:
        results = sum(message["role"] == "tool" for message in body["messages"])
        if results < FORCED:
            body = body | {"tool_choice": "required", "parallel_tool_calls": False}
            for tool in body["tools"]:  # a model of random weights would add keys without end
                parameters = tool["function"]["parameters"] | {"additionalProperties": False}
                tool["function"] = tool["function"] | {"parameters": parameters}

        def read_and_keep(data: bytes) -> list[ChatAnswer]:
            self.log.append((body, json.loads(data)))
            return read(data)

        return await super()._send(session, path, body, read_and_keep)


class Bridge(TemplateBridge):
    """A bridge of the tokenizer of these tests."""

    def __init__(self) -> None:
        super().__init__(PolicyConfig())
        self._tokenizer.__dict__["tokenizer"] = TOKENIZER


class Turns(ToolTurns):
    """Calls by the tokenizer of these tests."""

    def __init__(self) -> None:
        super().__init__(PolicyConfig(), EnvironmentConfig())
        self._tokenizer.__dict__["tokenizer"] = TOKENIZER


def desk() -> ToolsOverExamples:
    tool_class = ToolClass(kind=Desk, arguments={}, options=ToolOptions())
    tool_class.check()
    environment = ToolsOverExamples(tool_class)
    environment.workers = 0  # the class is of this file: it is played in this process
    return environment


def policy_at(url: str, model: str) -> ServedPolicy:
    return served_policy(url, model, weight_version=3, parameters_digest=DIGEST)


def driver_of(
    client: PolicyClient, policy: ServedPolicy, environment: ToolsOverExamples, turns: Turns
) -> EpisodeDriver:
    return EpisodeDriver(
        client=client,
        policy=policy,
        environment=environment,
        settings=EnvironmentConfig(),
        bridge=Bridge(),
        turns_max=8,
        context_length=CONTEXT,
        tool_turns=turns,
    )


def play(
    server: PolicyServer, request: GroupRequest, environment: ToolsOverExamples
) -> tuple[list[Trajectory], list[tuple[dict[str, Any], dict[str, Any]]]]:
    policy = policy_at(server.base_url, server.model_id)

    async def run() -> Any:
        async with Forcing(endpoints=policy.endpoints, model=policy.model) as client:
            client.log = []
            driver = driver_of(client, policy, environment, Turns())
            return await driver.play_group(request), client.log

    return asyncio.run(run())


def said(call_name: str, arguments: dict[str, Any]) -> str:
    if call_name == "double":
        return str(2 * arguments["number"])
    return "a-b" if arguments["word"] == "ab" else "{'error': 'no such word'}"


@pytest.mark.slow
def test_a_dialogue_of_two_tools_has_exact_ids_and_real_results() -> None:
    environment = desk()
    example = environment.example(0, 3, "train")
    sampling = Sampling(max_tokens=100, seed=89)
    request = GroupRequest(group_id="g", example=example, size=3, sampling=sampling)
    with serving(parameters_digest=DIGEST, context_length=CONTEXT, tokenizer=TOKENIZER) as server:
        trajectories, log = play(server, request, environment)
    bridge, tools = Bridge(), environment.tool_class.schemas
    messages = [{"role": "user", "content": "desk 3"}]
    text = ChatTemplate(TOOL_TEMPLATE, TOKENIZER.special_tokens_map).render(
        Conversation(messages=messages, tools=[*map(dict, tools)], opening=True)
    )
    names = set[str]()
    for trajectory in trajectories:
        assert trajectory.fault is None
        assert len(trajectory.turns) == FORCED + 1
        first = trajectory.turns[0].answer.prompt_token_ids
        assert first.tolist() == TOKENIZER.encode(text.text, add_special_tokens=False)
        dialogue = list(trajectory.messages)
        for number, (turn, later) in enumerate(pairwise(trajectory.turns)):
            (call,), (result,) = turn.completion.tool_calls, turn.result.messages
            names.add(call.name)
            assert (call.id, result.tool_call_id) == (f"c{number:04d}0000",) * 2
            assert result.content == said(call.name, json.loads(call.arguments))
            assert turn.completion.text == ""
            calls = turn.completion.tool_calls
            dialogue.append(Message(role="assistant", content="", tool_calls=calls))
            sampled = turn.completion.token_ids
            ids = [turn.answer.prompt_token_ids, sampled]
            ids.append(bridge(dialogue, int(sampled[-1]), turn.result.messages, tools))
            assert later.answer.prompt_token_ids.tolist() == np.concatenate(ids).tolist()
            dialogue += turn.result.messages
        assert trajectory.reward == FORCED
        assert trajectory.turns[-1].result.done
    assert names == {"double", "spell"}, "these seeds call both"
    for body, answer in log:
        assert [tool["function"]["name"] for tool in body["tools"]] == ["double", "spell"]
        for choice in answer["choices"]:
            assert (choice["finish_reason"] == "tool_calls") == bool(
                choice["message"].get("tool_calls")
            )
    # on disk: the call as it was sampled, its name and id, and the result with both
    maker = RolloutMaker(policy_at(NOWHERE, "policy"), request, datetime.now(UTC))
    reward = (RewardComponent(name="steps", value=float(FORCED)),)
    rollout = maker.sampled(0, trajectories[0], reward)
    asked, called, answered, *_ = rollout.turns
    assert asked.content == "desk 3"
    assert called.content.startswith("<tool_call>\n{")
    assert (called.tool_name, called.tool_call_id) == (answered.tool_name, "c00000000")
    assert (answered.role, answered.tool_call_id) == ("tool", "c00000000")
    assert (called.tool_calls[0].name, answered.cut) == (called.tool_name, False)
    model_s = [called.timing.queue_s, called.timing.prefill_s, called.timing.decode_s]
    assert all(seconds is not None and seconds >= 0 for seconds in model_s)
    assert called.timing.environment_s is not None
    assert rollout.reward == FORCED
    assert int(rollout.loss_mask.sum()) == rollout.n_completion_tokens


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
        assert (one.fault, one.finish_reason, one.text) == (
            other.fault,
            other.finish_reason,
            other.text,
        )
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.answer.prompt_token_ids.tolist() == b.answer.prompt_token_ids.tolist()
            assert a.completion.token_ids.tolist() == b.completion.token_ids.tolist()
            np.testing.assert_allclose(a.completion.logprobs, b.completion.logprobs, atol=1e-5)
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
