"""Episodes of several turns against the fake server: exact ids, spans, masks, rewards, faults."""

import ast
import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakes import (
    END,
    FakePolicyServer,
    bridge,
    echo_script,
    logprob_of,
    prompt_ids,
    served_policy,
)

from marin_rl.batching.turns import Turns, with_turns
from marin_rl.config import Config, EnvironmentConfig, load_config
from marin_rl.environments.echo import Echo
from marin_rl.environments.episode import Episode, StepResult
from marin_rl.errors import InputError
from marin_rl.inference.client.dialects import TextDialect
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.clients import policy_client
from marin_rl.rollouts.episode import Bridge
from marin_rl.rollouts.generate import SamplingJob, sample_groups
from marin_rl.rollouts.trajectories import GroupRequest, turn_seed
from marin_rl.storage.tables.rollouts import decode_shard, encode_shard, groups_of
from marin_rl.types import Example, Message, Rollout, RolloutGroup, Sampling, ServedPolicy, Turn

DIGEST = "ab" * 32
MODEL = served_model_id("policy", 4, DIGEST)
SEED = 100
SECOND = "now say lemon"


class TwoTurns:
    """Asks for two words; rewards 1 and then 2 for saying them."""

    def __init__(self, example: Example) -> None:
        self.example = example
        self.seen: list[str] = []
        self.closed = False

    def start(self) -> tuple[Sequence[Message], Sequence[Any]]:
        return self.example.messages, ()

    async def step(self, turn: Turn) -> StepResult:
        self.seen.append(turn.content)
        if len(self.seen) == 1:
            right = float(turn.content == self.example.answer)
            return StepResult(messages=(Message(role="user", content=SECOND),), reward=right)
        return StepResult(reward=2.0 * (turn.content == "lemon"), done=True)

    async def close(self) -> None:
        assert not self.closed
        self.closed = True


class Raising(TwoTurns):
    """Fails in the second step of the episode that says its first word right."""

    async def step(self, turn: Turn) -> StepResult:
        result = await super().step(turn)
        if result.done and self.seen[0] == self.example.answer:
            raise RuntimeError("the table fell over")
        return result


class Endless(TwoTurns):
    """Never ends, and never rewards a step."""

    async def step(self, turn: Turn) -> StepResult:
        return StepResult(messages=(Message(role="user", content="again"),))


class Tooled(TwoTurns):
    """Offers a tool."""

    def start(self) -> tuple[Sequence[Message], Sequence[Any]]:
        return self.example.messages, ({"type": "function", "function": {"name": "look"}},)


class Dialogue(Echo):
    """The environment `echo`, with episodes of a kind."""

    def __init__(self, kind: type[TwoTurns]) -> None:
        super().__init__(EnvironmentConfig(name="echo"))
        self.kind = kind
        self.made: list[TwoTurns] = []

    def episode(self, example: Example) -> Episode:
        self.made.append(self.kind(example))
        return self.made[-1]


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    with FakePolicyServer(MODEL) as fake:
        yield fake


def policy_of(server: FakePolicyServer) -> ServedPolicy:
    return served_policy(server.url, MODEL, weight_version=4, parameters_digest=DIGEST)


def configured(overrides: Sequence[str] = ()) -> Config:
    # characters of the fake server are tokens: room for the longest dialogue, unless a test says so
    room = ["policy.context_length=4096", "batching.length_buckets=[4096]"]
    return load_config(
        "configs/debug.yaml", ["inference.request_attempts_max=1", *room, *overrides]
    )


def play(
    server: FakePolicyServer,
    environment: Dialogue,
    *,
    size: int = 3,
    max_tokens: int = 16,
    joined: Bridge = bridge,
    overrides: Sequence[str] = (),
    connect: Callable[..., PolicyClient] = PolicyClient,
) -> RolloutGroup:
    """One sampled and scored group."""
    request = GroupRequest(
        group_id="g",
        example=environment.example(0, 3, "train"),
        size=size,
        sampling=Sampling(max_tokens=max_tokens, seed=SEED),
    )
    config, policy = configured(overrides), policy_of(server)
    job = SamplingJob(
        config=config,
        policy=policy,
        environment=environment,
        progress=ProgressEvent(run_id="r", stage="generate", round=4),
        bridge=joined,
    )
    (group,) = asyncio.run(sample_groups(job, [request], policy_client(config, policy, connect)))
    return group


def check_two_turns(rollout: Rollout, example: Example) -> None:
    """Compare every array and turn of a rollout with the token-in, token-out rule."""
    (asked,) = example.messages
    seed = SEED + rollout.index_in_group
    first, second = (echo_script(asked.content, seed), echo_script(SECOND, turn_seed(seed, 1)))
    prompt = prompt_ids([{"role": "user", "content": asked.content}])
    parts = [
        prompt,
        [*first.encode(), END],
        bridge([], END, [Message(role="user", content=SECOND)]).tolist(),
    ]
    parts.append([*second.encode(), END])
    assert rollout.token_ids.tolist() == [token for part in parts for token in part]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    mask = [bit for bit, part in zip((0, 1, 0, 1), parts, strict=True) for _ in part]
    assert rollout.loss_mask.tolist() == mask
    logprobs = [
        logprob_of(token, place) if bit else 0.0
        for bit, part in zip((0, 1, 0, 1), parts, strict=True)
        for place, token in enumerate(part)
    ]
    assert rollout.logprobs.tobytes() == np.array(logprobs, np.float32).tobytes()
    rewards = [float(first == example.answer), 2.0 * (second == "lemon")]
    assert [(t.role, t.content, t.start, t.end, t.reward) for t in rollout.turns] == [
        ("user", asked.content, 0, ends[0], None),
        ("assistant", first, ends[0], ends[1], rewards[0]),
        ("user", SECOND, ends[1], ends[2], None),
        ("assistant", second, ends[2], ends[3], rewards[1]),
    ]
    assert (rollout.status, rollout.finish_reason) == ("complete", "stop")
    assert rollout.reward == sum(rewards)
    assert [(c.name, c.value) for c in rollout.reward_components] == [("steps", sum(rewards))]
    assert rollout.n_completion_tokens == sum(mask)
    assert rollout.n_prompt_tokens == len(mask) - sum(mask)


def test_a_dialogue_goes_on_from_the_exact_ids_of_the_turns_before(server):
    environment = Dialogue(TwoTurns)
    group = play(server, environment)
    for rollout in group.rollouts:
        check_two_turns(rollout, group.example)
    # the first turns are one request, and every later turn is one of its own, with its own seed
    first, *later = server.requests
    assert first["n"] == 3
    assert "tokens" not in first
    assert sorted(body["seed"] for body in later) == sorted(
        turn_seed(SEED + i, 1) for i in range(3)
    )
    assert {tuple(body["tokens"]) for body in later} == {
        tuple(r.token_ids[: r.turns[-1].start].tolist()) for r in group.rollouts
    }
    assert [len(body["messages"]) for body in later] == [3, 3, 3]
    assert len(environment.made) == 3
    assert all(episode.closed for episode in environment.made)


def test_an_endpoint_without_the_chat_route_for_ids_is_asked_for_plain_completions() -> None:
    """As vLLM's own server: the same turns, by its route of completions."""
    with FakePolicyServer(MODEL, has_chat_tokens=False) as server:
        group = play(server, Dialogue(TwoTurns))
    for rollout in group.rollouts:
        check_two_turns(rollout, group.example)
    later = [body for body in server.requests if "prompt" in body]
    assert len(later) == 3
    assert {body["logprobs"] for body in later} == {0}
    # each member that asked before the first refusal came asked twice
    assert len(server.requests) <= 1 + 2 * len(later)


def test_a_dialogue_comes_back_from_a_shard(server: FakePolicyServer) -> None:
    group = play(server, Dialogue(TwoTurns))
    data = encode_shard(
        [group],
        run_id="r",
        round=4,
        shard=0,
        attempt="a",
        replica="",
        fingerprint="f",
        policy=policy_of(server),
    )
    table = decode_shard(data)
    (read,) = groups_of(table)
    for rollout in read.rollouts:
        check_two_turns(rollout, group.example)
    # two turns of each rollout are trained on, and what the first received is not the last's
    turns = Turns.of(with_turns(table))
    assert np.diff(turns.offset_n).tolist() == [2, 2, 2]
    first_rewards = [rollout.turns[1].reward for rollout in group.rollouts]
    assert turns.early_n.tolist() == turns.reward_U[::2].tolist() == first_rewards


def test_an_episode_that_raises_costs_one_rollout(server: FakePolicyServer) -> None:
    environment = Dialogue(Raising)
    group = play(server, environment)
    right = [
        echo_script(group.example.messages[0].content, SEED + i) == group.example.answer
        for i in range(3)
    ]
    assert sorted(right) == [False, True, True]
    for rollout, fails in zip(group.rollouts, right, strict=True):
        if fails:
            fault = "RewardFault: RuntimeError: the table fell over (test_episode.py, line "
            assert (rollout.error or "").startswith(fault)
            assert (rollout.status, len(rollout.token_ids)) == ("error", 0)
        else:
            check_two_turns(rollout, group.example)
    assert all(episode.closed for episode in environment.made)


def test_an_endpoint_that_renders_again_is_refused(server: FakePolicyServer) -> None:
    server.extra = {"prompt_token_ids": [1, 2, 3]}
    group = play(server, Dialogue(TwoTurns))
    assert all((r.error or "").startswith("BadResponse: expected the") for r in group.rollouts)


def test_an_endless_episode_ends_and_is_scored_by_the_environment(server):
    turns_max = 5
    limit = f"environment.turns_max={turns_max}"
    group = play(server, Dialogue(Endless), size=1, overrides=[limit])
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.finish_reason) == ("truncated", "max_turns")
    assert (
        sum(turn.role == "assistant" for turn in rollout.turns) == turns_max == len(server.requests)
    )
    assert [component.name for component in rollout.reward_components] == ["echo"]
    assert [turn.reward for turn in rollout.turns[:-1]] == [None] * (len(rollout.turns) - 1)
    assert rollout.turns[-1].reward == rollout.reward


@pytest.mark.parametrize(
    "reward", [float("inf"), {"a": 1.0, "b": float("nan")}, {"a": None, "b": float("inf")}]
)
def test_a_step_takes_finite_numbers_alone(reward: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a finite reward of a step, found (nan|inf)"):
        StepResult(reward=reward)


def test_a_dialogue_ends_where_its_context_is_full(server: FakePolicyServer) -> None:
    group = play(server, Dialogue(Endless), size=2, overrides=["policy.context_length=64"])
    for rollout in group.rollouts:
        assert (rollout.status, rollout.finish_reason) == ("truncated", "context")
        assert 0 < len(rollout.token_ids) <= 64
    # the last turns are asked for what is left of the 64 tokens
    room = [64 - len(body["tokens"]) for body in server.requests if "tokens" in body]
    asked = [body["max_tokens"] for body in server.requests if "tokens" in body]
    assert asked == [min(16, left) for left in room]


def test_tools_that_a_template_cannot_carry_are_refused_before_sampling(server):
    with pytest.raises(InputError, match=r"tools look, but .* no tool calls in a form"):
        play(server, Dialogue(Tooled))
    assert server.requests == []


def test_an_endpoint_of_texts_is_asked_with_messages(server: FakePolicyServer) -> None:
    group = play(
        server, Dialogue(TwoTurns), connect=partial(PolicyClient, dialect=TextDialect()), size=2
    )
    for rollout in group.rollouts:
        assert [turn.role for turn in rollout.turns] == ["user", "assistant"] * 2
        assert len(rollout.token_ids) == 0
        assert rollout.reward is not None
    assert not any("tokens" in body for body in server.requests)


def test_turns_of_a_member_have_seeds_of_their_own() -> None:
    seeds = [turn_seed(seed, turn) for seed in range(50) for turn in range(1, 20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**48 for seed in seeds)
    assert turn_seed(7, 0) == 7


def test_only_episodes_ask_the_client_for_samples() -> None:
    """One caller samples: rollouts of every kind go through the driver.

    Sampling in pieces proves first that an endpoint goes on from exact ids. The canary asks for one
    completion to prove which weights an endpoint has; `env try` plays episodes of texts that belong
    to no run; a teacher behind an endpoint scores what was sampled, and its one token is dropped.
    """
    top = Path(__file__).parents[2]
    callers = {
        path.relative_to(top).as_posix()
        for room in ("marin_rl", "flows", "tasks")
        for path in (top / room).rglob("*.py")
        if re.search(r"\.chat\b|client\.answer\b", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr in ("chat", "answer")
        and (node.attr == "chat" or ast.unparse(node) == "client.answer")
    }
    assert callers == {
        "marin_rl/integrations/textarena.py",  # moves of the other player, as texts
        "marin_rl/rollouts/teaching.py",
        "marin_rl/rollouts/episode.py",
        "marin_rl/rollouts/partial.py",
        "marin_rl/rollouts/trial.py",
        "marin_rl/serving/weights/canary.py",
    }
