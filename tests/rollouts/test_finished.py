"""Environments that return finished rollouts: what a run makes of them, and what it refuses."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.scripted_policies import record, write_tokenizer
from support.templates import QWEN

from marin_rl.config import Config, load_config
from marin_rl.errors import InputError
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.storage.runs import Run
from marin_rl.types import Rollout

PULL = """
import os
import random
import sys
import time
from dataclasses import replace

from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.finished import FinishedMessage, FinishedRollout
from marin_rl.errors import EndpointUnavailable, RewardFault
from marin_rl.types import RewardComponent

ASK = FinishedMessage(role="user", content="ask", token_ids=[10, 11])


def said(logprobs=(-0.5, -1.0), ids=(12, 13, 14), **fields):
    return FinishedMessage(
        role="assistant", content="said", token_ids=ids, logprobs=logprobs, **fields
    )


class Pull(BaseEnvironment):
    def __init__(self, kinds: str):
        self.kinds = kinds.split(",")

    def example(self, seed, index, split):
        kind = self.kinds[index % len(self.kinds)]
        return self.make_example("ask", kind, seed=seed, index=index, split=split)

    def score(self, example, completion):
        raise AssertionError("rollouts have their rewards")

    async def rollouts(self, example, policy):
        assert policy.model.startswith("policy@00000")
        assert len({sampling.seed for sampling in policy.sampling}) == len(policy.sampling)
        kind = example.answer
        return [self.rollout(kind, n) for n in range(len(policy.sampling) - (kind == "few"))]

    def rollout(self, kind, n):
        print("nothing that the other side reads")
        random.seed(1)
        match kind:
            case "blocks":
                time.sleep(60)
            case "ends":
                os._exit(3)
            case "raises":
                raise KeyError("out of order")
            case "away":
                raise EndpointUnavailable("the server is away")
            case "fault":
                return RewardFault("no luck") if n else self.good(kind, n)
            case "one is good":
                wrong = [self.good("nan", n), replace(self.good(kind, n), info={"a": {1}}), "text"]
                return wrong[n - 1] if n else self.good(kind, n)
        return self.good(kind, n)

    def good(self, kind, n):
        messages, reward = (ASK, said()), {"right": 0.5, "short": n / 4}
        match kind:
            case "two turns":
                more = FinishedMessage(role="user", content="more", token_ids=[15])
                messages = (ASK, said(), more, said())
            case "two segments":
                again = FinishedMessage(
                    role="user", content="ask", token_ids=[10, 11], begins_segment=True
                )
                messages = (ASK, said(), again, said())
            case "nan":
                messages = (ASK, said([float("nan"), -1.0]))
            case "positive":
                messages = (ASK, said([0.5, -1.0]))
            case "vocabulary":
                messages = (ASK, said(ids=(12, 13, 9999)))
            case "many":
                messages = (ASK, said([-1.0] * 4))
            case "user":
                user = FinishedMessage(role="user", content="a", token_ids=[1], logprobs=[-1.0])
                messages = (ASK, user)
            case "nothing":
                messages = (ASK,)
            case "no prompt":
                messages = (said([-1.0, -1.0, -1.0]),)
            case "long":
                messages = (ASK, said([-1.0] * 300, [9] * 300))
            case "reward":
                reward = float("inf")
        return FinishedRollout(messages=messages, reward=reward, truncated=n == 3)
"""

REFUSED = {
    "nan": "message 1: expected finite logprobs",
    "reward": "expected a finite reward, found inf",
    "positive": "expected logprobs of at most 0",
    "vocabulary": "expected ids below .*, found 9999",
    "many": "expected a logprob for each sampled id, found 4 for 3 ids",
    "user": "a message of user has sampled ids",
    "nothing": "expected a message that was sampled, found none",
    "no prompt": "expected ids of a prompt before the first sampled id",
    "long": "expected at most 256, policy.context_length",
    "few": "the environment returned 3 rollouts: expected 4",
    "raises": r"KeyError: 'out of order' \(.*line",
    "away": "EndpointUnavailable: the server is away",
}
TOGETHER = ("good", "two turns", "two segments", "fault", "one is good", *REFUSED)


def configuration(folder: Path, *kinds: str) -> Config:
    """A run whose round has a group of each kind."""
    write_tokenizer(folder / "tokenizer", QWEN, "<|im_end|>")
    (folder / "pull.py").write_text(PULL)
    values = {
        "run_id": "pull",
        "rounds": 1,
        "root": str(folder / "runs"),
        "policy": {"tokenizer": str(folder / "tokenizer"), "context_length": 256},
        "environment": {
            "name": "pull.py:Pull",
            "options": {"kinds": ",".join(kinds)},
            "step_timeout_s": 1.0 if "blocks" in kinds else 100.0,
        },
        "rollouts": {"groups_per_round": len(kinds), "group_size": 4, "shards_per_round": 1},
        "sampling": {"max_tokens": 16},
    }
    (folder / "pull.yaml").write_text(yaml.safe_dump(values))
    return load_config(folder / "pull.yaml")


Groups = dict[str, tuple[Rollout, ...]]


def recorded(folder: Path, *kinds: str) -> tuple[Run, Groups]:
    """A run, and the rollouts of its groups by their kinds, committed as those of any run."""
    run, groups = record(configuration(folder, *kinds), lambda messages, member: "never asked")
    return run, {str(group.example.answer): group.rollouts for group in groups}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Groups]:
    """Groups of one run, and of one process, of every kind that costs neither."""
    return recorded(tmp_path_factory.mktemp("played"), *TOGETHER)


@pytest.fixture
def groups(played: tuple[Run, Groups]) -> Groups:
    return played[1]


def test_finished_rollouts_keep_tokens_logprobs_and_named_rewards(groups: Groups) -> None:
    first, *_, last = groups["good"]
    assert first.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert np.allclose(first.logprobs, [0, 0, 0, -0.5, -1.0])
    assert [(turn.role, turn.content) for turn in first.turns] == [
        ("user", "ask"),
        ("assistant", "said"),
    ]
    assert (first.reward, last.reward) == (0.5, 1.25)
    assert [(part.name, part.value) for part in last.turns[-1].rewards] == [
        ("right", 0.5),
        ("short", 0.75),
    ]
    assert (first.finish_reason, last.finish_reason) == ("stop", "length")
    assert (first.status, last.status) == ("complete", "truncated")


def test_turns_and_segments_are_joined_as_those_of_episodes(groups: Groups) -> None:
    one, *_ = groups["two turns"]
    assert one.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 12, 13, 14]
    assert one.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert one.segment_lengths is None
    one, *_ = groups["two segments"]
    assert one.segment_lengths == (5, 5)
    assert one.loss_mask.tolist() == [0, 0, 0, 1, 1] * 2


@pytest.mark.parametrize(("kind", "expected"), REFUSED.items())
def test_rollouts_that_cannot_be_trained_on_are_kept_with_their_reason(groups, kind, expected):
    check_refused(groups[kind], expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ends", "the environment ended its process"),
        pytest.param("blocks", "took longer than 1 s", marks=pytest.mark.slow),
    ],
)
def test_rollouts_whose_process_is_lost_are_kept_with_the_reason(tmp_path, kind, expected):
    _, groups = recorded(tmp_path, kind)
    check_refused(groups[kind], expected)


def check_refused(members: tuple[Rollout, ...], expected: str) -> None:
    """Check that no member has tokens or a reward, and each the expected reason."""
    assert len(members) == 4
    for member in members:
        assert (member.status, member.reward, len(member.token_ids)) == ("error", None, 0)
        (reason,) = {member.error}
        assert reason is not None
        assert re.search(expected, reason)


def test_a_fault_costs_its_own_rollout(groups: Groups) -> None:
    first, *others = groups["fault"]
    assert first.status == "complete"
    assert {other.error for other in others} == {"RewardFault: no luck"}


def test_a_rollout_that_no_process_can_send_costs_itself_alone(groups: Groups) -> None:
    first, *others = groups["one is good"]
    assert first.status == "complete"
    reasons = ("expected finite logprobs", "not JSON serializable", "expected a FinishedRollout")
    for other, reason in zip(others, reasons, strict=True):
        assert other.status == "error"
        assert reason in str(other.error)


def test_they_are_not_played_again(played: tuple[Run, Groups]) -> None:
    run, _ = played
    with pytest.raises(InputError, match="sampled its rollouts by itself"):
        replay_rollouts(run, 0)
