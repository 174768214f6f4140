"""A stage that Prefect retries in a living process asks for the members that are missing."""

import asyncio
from pathlib import Path
from typing import Any

from prefect import flow
from support.fakes import FakePolicyServer, served_policy
from support.flow_runs import DEBUG

from flows.server import quieten
from marin_rl.config import FlowConfig, load_config
from marin_rl.environments.echo import Echo
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.generate import shard_requests
from marin_rl.storage.runs import Run, shard_key
from marin_rl.storage.tables.rollouts import decode_shard
from marin_rl.types import SlotRef
from tasks.generate import generate
from tasks.options import StageRunner

GROUPS, SIZE = 3, 4
SETTINGS = (
    f"rollouts.groups_per_round={GROUPS}",
    f"rollouts.group_size={SIZE}",
    "rollouts.shards_per_round=1",
    "rollouts.commit_groups=true",
    "rollouts.errors_max_fraction=0.1",
    "inference.request_attempts_max=1",
)


def test_a_retried_stage_samples_the_missing_members_alone(api: str, tmp_path: Path) -> None:
    """One group is refused, and two members of another end without a reason to stop."""
    model = served_model_id("policy", 0, "ab" * 32)
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *SETTINGS]))
    requests = shard_requests(run, 0, 0, Echo(run.config.environment))
    seeds = [request.sampling.seed or 0 for request in requests]
    refused, aborted = seeds[0], {seeds[1] + 1, seeds[1] + 3}
    with FakePolicyServer(model) as server:
        answer, tries = server.answer, list[dict[str, Any]]()

        def failing(body: Any, fault: str | None) -> dict[str, Any]:
            response = answer(body, fault)
            for choice in response["choices"]:
                if body["n"] == SIZE and body["seed"] + choice["index"] in aborted:
                    choice["finish_reason"] = "abort"
            return response

        def fault(body: Any) -> str | None:
            tries.append(dict(body))
            return "503" if body["seed"] == refused and len(tries) <= GROUPS else None

        server.answer = failing  # pyright: ignore[reportAttributeAccessIssue]
        server.fault = fault

        @flow(name="test", persist_result=False)
        async def sampling() -> SlotRef:
            quieten()
            stages = StageRunner(FlowConfig(retries=1, retry_delay_s=0.01))
            return await stages.run(generate, run.reference, 0, 0, served_policy(server.url, model))

        asyncio.run(sampling())
    first, again = tries[:GROUPS], tries[GROUPS:]
    assert sorted(body["seed"] for body in first) == sorted(seeds)
    assert {(body["seed"], body["n"]) for body in again} == {
        (refused, SIZE),
        *((seed, 1) for seed in aborted),
    }
    assert len(again) == 1 + len(aborted)
    rows = decode_shard(run.store.read(shard_key(0, 0)), ["status"])
    assert rows["status"].to_pylist() == ["complete"] * (GROUPS * SIZE)
