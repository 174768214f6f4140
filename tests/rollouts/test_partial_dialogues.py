"""Dialogues in pieces: the same turns as undisturbed ones, whichever process goes on with them."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from rollouts.scripted_pieces import MODEL, FirstPieces, ScriptedClient, settings, text_of
from support.cases import others_slow
from support.fakes import served_policy
from support.flow_runs import DEBUG
from support.servers import serving
from support.streams import groups_in

from marin_rl.config import EnvironmentConfig, load_config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.echo import Echo
from marin_rl.environments.episode import Episode, StepResult, Tool
from marin_rl.errors import ConfigError
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.generate import SamplingJob, sample_groups
from marin_rl.rollouts.partial import piecewise
from marin_rl.rollouts.streaming import sample_chunk, stream_requests
from marin_rl.storage.layout import STREAM
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.group_log import partials_of_stream
from marin_rl.storage.upkeep.streams import unfinished_groups
from marin_rl.types import Example, Message, Rollout, RolloutGroup, Turn

GROUPS = range(2)
TURNS = 4


class Answers:
    """Answers each turn with its length and its number; the third turn has no reward."""

    def __init__(self, example: Example, mood: str = "", turns: int = TURNS) -> None:
        self._example, self._mood, self._turns, self._said = example, mood, turns, list[str]()

    def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        return self._example.messages, ()

    async def step(self, turn: Turn) -> StepResult:
        self._said.append(turn.content)
        number, letters = len(self._said), sum(map(len, self._said))
        said = Message(role="user", content=f"{self._mood}{number}: {letters}")
        done = number == self._turns
        reward = None if number == 3 else letters / 8
        return StepResult(messages=() if done else (said,), reward=reward, done=done)

    async def close(self) -> None:
        pass


class Talks(Echo):
    """The environment `echo` as dialogues; each process may have its own mood and length."""

    def __init__(self, mood: str = "", turns: int = TURNS) -> None:
        super().__init__(EnvironmentConfig(name="echo"))
        self._mood, self._turns = mood, turns

    def episode(self, example: Example) -> Episode:
        return Answers(example, self._mood, self._turns)


def bridge(
    _dialogue: Sequence[Message], _last: int, messages: Sequence[Message], _tools: Sequence[Tool]
) -> np.ndarray:
    """Ids of the messages' characters."""
    return np.array([ord(c) for message in messages for c in message.content] + [7], np.int32)


def played(
    run: Run,
    client: ScriptedClient,
    environment: Talks,
    version: int = 0,
    *,
    pieces: bool = True,
    oldest: int = 0,
) -> list[RolloutGroup]:
    """Groups that one process finishes, from what is committed of them on."""
    policy = served_policy("http://127.0.0.1:1/v1", MODEL, weight_version=version)
    requests = stream_requests(run, GROUPS, environment)
    partial = piecewise(
        client, requests, log=partials_of_stream(run, "f", policy, "w"), tokens=3, decode=text_of,
        interruption=client.interruption, oldest=oldest,
    )  # fmt: skip
    progress = ProgressEvent(run_id="", stage="generate", round=0)
    job = SamplingJob(
        config=run.config, policy=policy, environment=environment, progress=progress, bridge=bridge
    )
    return asyncio.run(sample_groups(job, requests, partial if pieces else client))


def members(groups: Sequence[RolloutGroup]) -> dict[str, Rollout]:
    return {rollout.rollout_id: rollout for group in groups for rollout in group.rollouts}


def check_same(rollouts: Mapping[str, Rollout], expected: Mapping[str, Rollout]) -> None:
    """Check that two samplings are the same bits: ids, logprobs, rewards, and every turn."""
    assert rollouts.keys() == expected.keys()
    for name, rollout in rollouts.items():
        other = expected[name]
        assert rollout.token_ids.tolist() == other.token_ids.tolist()
        assert rollout.loss_mask.tolist() == other.loss_mask.tolist()
        assert rollout.logprobs.tobytes() == other.logprobs.tobytes()
        assert (rollout.reward, rollout.finish_reason) == (other.reward, other.finish_reason)
        turns, others = (
            [(t.role, t.content, t.start, t.end, t.reward) for t in each.turns]
            for each in (rollout, other)
        )
        assert turns == others


@pytest.mark.parametrize("pieces_max", others_slow([1, 2, 3, 5, 8, 13], 5))
def test_dialogues_that_are_interrupted_end_as_undisturbed_ones(tmp_path, pieces_max):
    whole = Run.create_or_open(settings(tmp_path / "whole"))
    expected = played(whole, ScriptedClient(), Talks(), pieces=False)
    turns = [sum(t.role == "assistant" for t in r.turns) for r in members(expected).values()]
    assert max(turns) == TURNS
    run, groups, processes = Run.create_or_open(settings(tmp_path / "left")), [], 0
    while len(groups) < len(GROUPS):
        groups = played(run, ScriptedClient(pieces_max=pieces_max), Talks())
        processes += 1
        assert processes < 400, "each process gets on by a piece"
    assert processes > 1
    check_same(members(groups), members(expected))


def reasons(run: Run) -> list[str]:
    """Why members of unfinished groups began again, as the parts say."""
    policy = served_policy("", MODEL)
    names = [request.group_id for request in stream_requests(run, GROUPS, Talks())]
    chains = partials_of_stream(run, "f", policy, "w").read(names)
    rows = [r for chain in chains.values() for part in chain for r in part.rollouts]
    return [rollout.error for rollout in rows if rollout.error]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Talks("otherwise "), "the environment's messages before turn 2 are others"),
        (Talks(turns=1), "the episode ended (stop) after turn 1, and went on"),
    ],
)
def test_a_member_whose_environment_answers_otherwise_begins_again(tmp_path, other, reason, caplog):
    """As one that was never begun before, and its parts say why."""
    run = Run.create_or_open(settings(tmp_path / "left"))
    assert played(run, ScriptedClient(pieces_max=28), Talks()) == []
    logging.getLogger("marin_rl.rollouts.partial_members").addHandler(caplog.handler)
    groups = played(run, ScriptedClient(), other)
    assert reason in caplog.text
    assert any(reason in each for each in reasons(run))
    assert unfinished_groups(run).begun_again == len(reasons(run))
    whole = Run.create_or_open(settings(tmp_path / "whole"))
    check_same(members(groups), members(played(whole, ScriptedClient(), other, pieces=False)))


GAME = (
    "environment.name=game",
    "environment.options={game: guess, turns_max: 4}",
    "sampling.stop=[a, e, i, o, u, A, E, I, O, U, '!', '.', ',', ' ']",
    "policy.context_length=256",
    "batching.length_buckets=[64, 128, 256]",
)


@pytest.mark.slow
@pytest.mark.bits
def test_games_of_the_engine_that_are_interrupted_end_in_the_same_bits(tmp_path: Path) -> None:
    with serving(weight_version=0, parameters_digest="ab" * 32) as server:
        policy = served_policy(server.base_url, server.model_id)
        whole = Run.create_or_open(settings(tmp_path / "whole", *GAME))
        count = asyncio.run(sample_chunk(whole, 0, policy, "w"))
        expected = members(groups_in(whole, range(count)))
        assert any(sum(t.role == "assistant" for t in r.turns) > 1 for r in expected.values())
        run, processes = Run.create_or_open(settings(tmp_path / "left", *GAME)), 0
        while asyncio.run(sample_chunk(run, 0, policy, "w", None, FirstPieces(6))) < count:
            processes += 1
            assert processes < 60
        assert processes > 1
        assert any("partial-" in key for key in run.store.list(STREAM))
        check_same(members(groups_in(run, range(count))), expected)


OUTSIDE = """
from marin_rl.environments.echo import Echo


class Outside(Echo):
    name = "outside"
    replayable = False
"""


def test_environments_with_effects_outside_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    config = DEBUG.read_text().replace("name: echo", "name: outside.py:Outside")
    (tmp_path / "run.yaml").write_text(config)
    window = ["asynchrony.sampler=windowed", "asynchrony.max_staleness=2"]
    items = [f"root={tmp_path}", *window, "asynchrony.partial_tokens=true"]
    loaded = load_config(tmp_path / "run.yaml", items)
    with pytest.raises(ConfigError, match=r"says `replayable = False`: its steps have effects"):
        environment_of(loaded)
