"""Shards that end with the first finished groups: which are waited for, and what the others are."""

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.fakes import FakePolicyServer, served_policy
from support.flow_runs import DEBUG

from marin_rl.config import load_config
from marin_rl.environments.echo import Echo
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.generate import generate_shard, shard_requests
from marin_rl.storage.runs import Run, shard_key
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from schemas.tables import UNFINISHED

MODEL = served_model_id("policy", 0, "ab" * 32)
SETTINGS = (
    "rollouts.groups_per_round=2",
    "rollouts.shards_per_round=1",
    "asynchrony.over_sampling.factor=2",
    "asynchrony.over_sampling.select=first_done",
    "inference.request_attempts_max=1",
)


def sampled(tmp_path: Path, server: FakePolicyServer, *settings: str) -> list[str]:
    """The statuses of the groups of a shard, a letter per member."""
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *SETTINGS, *settings]))
    asyncio.run(generate_shard(run, 0, 0, served_policy(server.url, MODEL)))
    groups = groups_of(decode_shard(run.store.read(shard_key(0, 0))))
    for group in groups:
        for rollout in group.rollouts:
            lost = rollout.finish_reason == UNFINISHED
            assert (rollout.status == "aborted") == lost
            assert len(rollout.token_ids) == 0 or not lost
    return ["".join(rollout.status[0] for rollout in group.rollouts) for group in groups]


def seeds(tmp_path: Path) -> list[int]:
    """The seeds of the shard's groups, in order."""
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *SETTINGS]))
    requests = shard_requests(run, 0, 0, Echo(run.config.environment))
    return [request.sampling.seed or 0 for request in requests]


def test_a_shard_waits_for_as_many_groups_as_the_round_takes_of_it(tmp_path: Path) -> None:
    slow, free = {seeds(tmp_path)[0], seeds(tmp_path)[2]}, threading.Event()
    with FakePolicyServer(MODEL) as server:

        def fault(body: Mapping[str, Any]) -> str | None:
            if body["seed"] in slow:
                free.wait(60)
            return None

        server.fault = fault
        try:
            assert sampled(tmp_path, server) == ["aaaa", "cccc", "aaaa", "cccc"]
        finally:
            free.set()


def test_a_group_that_failed_is_none_of_the_first(tmp_path: Path) -> None:
    first = seeds(tmp_path)[0]
    with FakePolicyServer(MODEL) as server:
        server.fault = lambda body: "503" if body["seed"] == first else None
        statuses = sampled(tmp_path, server)
    assert statuses.count("cccc") >= 2
    assert statuses[0] in ("eeee", "aaaa")
