"""Every way in which an episode may end has its name in the rows."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fakes
from support.fakes import FakePolicyServer, served_policy

from marin_rl.config import Config, load_config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.episode_pool import pools
from marin_rl.errors import BridgeFault
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.clients import policy_client
from marin_rl.rollouts.generate import SamplingJob, sample_groups, shard_requests
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import decode_shard, encode_shard

MODEL = served_model_id("policy", 0, "ab" * 32)
ENVIRONMENT = """
import asyncio

from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.episode import StepResult
from marin_rl.errors import ToolFault
from marin_rl.types import Message, RewardComponent

KINDS = KINDS_OF_THE_TEST

class Ends(BaseEnvironment):
    def example(self, seed, index, split):
        kind = KINDS[index % len(KINDS)]
        return self.make_example(f"say {kind}", kind, seed=seed, index=index, split=split)

    def score(self, example, completion):
        return (RewardComponent(name="length", value=float(len(completion))),)

    def episode(self, example):
        return Talk(example)

class Talk:
    def __init__(self, example):
        self.example = example

    def start(self):
        if self.example.answer == "unbegun":
            raise KeyError("no start")
        return self.example.messages, ()

    async def step(self, turn):
        match self.example.answer:
            case "done":
                return StepResult(done=True)
            case "hang":
                await asyncio.sleep(3600)
            case "broken":
                raise ToolFault("the calculator is gone")
            case "raise":
                raise KeyError("who knows")
            case "wide":
                return StepResult(messages=(Message(role="user", content="w" * 5000),))
            case "much":
                return StepResult(messages=(Message(role="user", content="m" * 3000),))
            case "cut":
                return StepResult(messages=(Message(role="user", content="c" * 40),))
        return StepResult(messages=(Message(role="user", content=f"again {self.example.answer}"),))

    async def close(self):
        pass
"""
# By kind of episode: the reason that it ended, its status, and the sampled turns that it has.
ENDS = {
    "done": ("stop", "complete", 1),
    "endless": ("max_turns", "truncated", 3),
    "wide": ("context", "truncated", 1),
    "much": ("length", "truncated", 1),  # environment.tokens_max
    "cut": ("length", "truncated", 2),  # sampling.max_tokens
    "broken-bridge": ("bridge", "truncated", 1),
    "hang": ("timeout", "error", 1),
    "broken": ("tool_error", "error", 1),
    "raise": ("environment_error", "error", 1),
    "unbegun": ("environment_error", "error", 0),
    "refused": ("aborted", "error", 1),
    "ended": ("abort", "aborted", 1),
}


def configured(folder: Path) -> Config:
    code = ENVIRONMENT.replace("KINDS_OF_THE_TEST", repr(list(ENDS)))
    (folder / "ends.py").write_text(code)
    (folder / "run.yaml").write_text(
        f"run_id: ends\nrounds: 1\nroot: {folder / 'runs'}\n"
        "environment: {name: ends.py:Ends, turns_max: 3, tokens_max: 2000, step_timeout_s: 1,\n"
        "  reward_timeout_s: 60}\n"
        "policy: {init: random, context_length: 4096}\n"
        "batching: {length_buckets: [4096]}\n"
        f"rollouts: {{groups_per_round: {len(ENDS)}, group_size: 2, shards_per_round: 1}}\n"
        "inference: {request_attempts_max: 1}\n"
        "sampling: {max_tokens: 20}\nevaluation: {examples: 1}\n"
    )
    return load_config(str(folder / "run.yaml"))


def bridge(dialogue: Any, last_id: int, messages: Any, tools: Any = ()) -> np.ndarray:
    if "broken-bridge" in messages[0].content:
        raise BridgeFault("the chat template cannot go on")
    return fakes.bridge(dialogue, last_id, messages, tools)


def fault(body: Mapping[str, Any]) -> str | None:
    words = str(body["messages"])
    if "refused" in words and "tokens" in body:
        return "reject"
    return "abort" if "ended" in words else None


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    config = configured(tmp_path)
    run, environment = Run.create_or_open(config), environment_of(config)
    with FakePolicyServer(MODEL) as server:
        server.fault = fault
        policy = served_policy(server.url, MODEL)
        requests = shard_requests(run, 0, 0, environment)
        event = ProgressEvent(run_id="ends", stage="generate", round=0)
        job = SamplingJob(
            config=config, policy=policy, environment=environment, progress=event, bridge=bridge
        )
        groups = asyncio.run(sample_groups(job, requests, policy_client(config, policy)))
    data = encode_shard(
        groups, run_id="ends", round=0, shard=0, attempt="a", replica="", fingerprint="f",
        policy=policy,
    )  # fmt: skip
    yield decode_shard(data).to_pylist()
    pools.close()


def test_every_end_is_in_the_rows_by_its_name(rows: list[dict[str, Any]]) -> None:
    ended = {
        row["answer"]: (
            row["finish_reason"],
            row["status"],
            sum(turn["role"] == "assistant" for turn in row["turns"]),
        )
        for row in rows
    }
    assert ended == ENDS
    for row in rows:
        failed = row["status"] in ("error", "aborted")
        assert (row["reward"] is None) == failed
        assert (row["error"] is not None) == (row["status"] == "error")
        assert (len(row["token_ids"]) > 0) == (row["status"] != "error")
