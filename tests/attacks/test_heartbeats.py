"""Signed heartbeats that are put back, once others may have the addresses of their servers."""

import asyncio
import dataclasses
import socket
from pathlib import Path

import numpy as np
import pytest
from support.fakes import END, FakePolicyServer
from support.policy_runs import small_run

from marin_rl.errors import FleetEmpty
from marin_rl.inference.client.fleet import FleetOptions
from marin_rl.inference.client.fleet_sources import EndpointSource
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.storage.fleet import FLEET, TARGET_KEY, FleetBoard, Heartbeat, Identity, Target
from marin_rl.types import Message, Sampling

RUN = "0" * 64
MODEL = served_model_id("policy", 3, "0123456789abcdef")
MESSAGES = (Message(role="user", content="a prompt of the run"),)
IDENTITY = Identity(run_sha256=RUN, code=RUN, tokenizer=RUN, chat_template=RUN, settings={})


def asks_for(version: int, session: str) -> Target:
    return Target(
        run_sha256=RUN, version=version, through=version + 1, parameters_digest=RUN, session=session
    )


def beat(name: str, url: str, answers: Target) -> Heartbeat:
    """A heartbeat of a server that serves what the target asks for."""
    return Heartbeat(
        server=name * 16,
        url=url,
        model=MODEL,
        weight_version=answers.version,
        parameters_digest=RUN,
        labels={},
        **dataclasses.asdict(IDENTITY),
        beat=1,
        slots=8,
        busy=0,
        queued=0,
        tokens_per_second=0.0,
        started_at=9.0,
        beat_at=9.0,
        session=answers.session,
        target_version=answers.version,
    )


def sample(board: FleetBoard, samples: int, within_s: float = 60.0) -> list[np.ndarray]:
    async def use() -> list[np.ndarray]:
        source = EndpointSource(["registered"], board, IDENTITY, version=3)
        fleet = FleetOptions(probe_s=0.02, timeout_s=within_s)
        async with PolicyClient(source=source, fleet=fleet, model=MODEL, api_key="token") as client:
            seeds = (Sampling(max_tokens=8, seed=seed) for seed in range(samples))
            answers = [await client.chat(MESSAGES, 1, sampling) for sampling in seeds]
        return [answer.completions[0].token_ids for answer in answers]

    return asyncio.run(use())


@pytest.mark.parametrize(
    "then",
    [asks_for(2, "today"), asks_for(3, "yesterday"), asks_for(9, "yesterday")],
    ids=["an earlier round", "the same round before a pause", "a later round before a fork"],
)
def test_the_address_of_an_old_heartbeat_is_never_reached(tmp_path: Path, then: Target) -> None:
    folder = small_run(tmp_path).folder
    board = FleetBoard(folder, "token")
    with socket.create_server(("127.0.0.1", 0)) as anyone, FakePolicyServer(MODEL) as live:
        anyone.setblocking(False)
        url = f"http://127.0.0.1:{anyone.getsockname()[1]}/v1"
        key = f"{FLEET}/{'a' * 16}.heartbeat.json"
        board.aim(then)
        board.announce(beat("a", url, then))
        old, old_target = folder.read(key), folder.read(TARGET_KEY)
        board.withdraw("a" * 16)

        now = asks_for(3, "today")
        board.aim(now)
        board.announce(beat("b", live.url, now))
        folder.replace(key, old)
        assert [ids.tolist()[-1] for ids in sample(board, 8)] == [END] * 8
        assert live.requests
        with pytest.raises(BlockingIOError):
            anyone.accept()

        if then.version < now.version:
            folder.replace(TARGET_KEY, old_target)
            with pytest.raises(FleetEmpty, match="the target of the run is version 2"):
                sample(board, 1, 0.5)
        board.aim(dataclasses.replace(now, session="tomorrow"))
        with pytest.raises(FleetEmpty, match="older than this start of the trainer"):
            sample(board, 1, 0.5)
        with pytest.raises(BlockingIOError):
            anyone.accept()
