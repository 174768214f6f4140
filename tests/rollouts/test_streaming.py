"""Chunks of a stream whose groups are committed together (`asynchrony.limits.commit_every_s`)."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakePolicyServer, Script, echo_script, served_policy
from support.streams import made, stream_of

from marin_rl.config import load_config
from marin_rl.environments.checks import environment_of
from marin_rl.errors import CommitConflict
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.progress import ProgressEvent, listening
from marin_rl.rollouts.streaming import CHUNK, group_id_of, sample_chunk
from marin_rl.storage.layout import STREAM, pack_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.group_log import groups_of_chunk
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from marin_rl.storage.tables.stream import numbers_of
from marin_rl.types import RolloutGroup, ServedPolicy


class HeldServer(FakePolicyServer):
    """Answers what `holds` names once `released` is set, and the rest once `others` is.

    `asked` is set by the first request that waits for `released`. `others` is set from the start.
    """

    def __init__(
        self,
        model: str,
        script: Script = echo_script,
        *,
        holds: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        super().__init__(model, script)
        self.holds = holds
        self.released, self.others = threading.Event(), threading.Event()
        self.asked = threading.Event()
        self.others.set()

    def answer(self, body: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        """The chat completion, once its event is set."""
        held = self.holds(body)
        if held:
            self.asked.set()
        assert (self.released if held else self.others).wait(60)
        return super().answer(body, fault)


async def until(happened: Callable[[], bool]) -> None:
    """Wait for something, at most a minute."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    await asyncio.to_thread(wait)


MODEL = served_model_id("policy", 0, "ab" * 32)


def created(root: Path, *items: str) -> Run:
    window = ("asynchrony.sampler=windowed", "asynchrony.max_staleness=1")
    whole = "rollouts.shards_per_round=1"
    items = (f"root={root}", *window, whole, *items)
    return Run.create_or_open(load_config("configs/debug.yaml", [*items]))


def packs_in(run: Run) -> list[str]:
    return sorted(key for key in run.store.list(STREAM) if pack_of(key) is not None)


def groups_packed(run: Run) -> dict[str, RolloutGroup]:
    tables = [decode_shard(run.store.read(key)) for key in packs_in(run)]
    groups = [group for table in tables for group in groups_of(table)]
    assert len({group.group_id for group in groups}) == len(groups), "each is in one pack"
    return {group.group_id: group for group in groups}


@pytest.fixture
def server() -> Iterator[HeldServer]:
    with HeldServer(MODEL, holds=lambda _: False) as running:
        yield running
        running.released.set()


@pytest.fixture
def run(tmp_path: Path, server: HeldServer) -> Run:
    run = created(tmp_path, "asynchrony.limits.commit_every_s=0.02")
    last = numbers_of(run.config, 0)[-1]
    environment = environment_of(run.config)
    example = environment.example(run.config.environment.train_seed, last, "train")
    slow = example.messages[-1].content
    server.holds = lambda body: "messages" in body and body["messages"][-1]["content"] == slow
    return run


def policy_of(server: HeldServer) -> ServedPolicy:
    return served_policy(server.url, MODEL)


def count_packed(run: Run) -> int:
    return len(stream_of(run).groups)


def test_groups_that_ended_do_not_wait_for_a_slow_one(run, server, tmp_path):
    """And they are those that a run commits one by one."""
    size = len(numbers_of(run.config, 0))

    async def sampled() -> int:
        sampling = asyncio.ensure_future(sample_chunk(run, 0, policy_of(server), "w"))
        await until(lambda: count_packed(run) == size - 1)
        server.released.set()
        return await sampling

    assert asyncio.run(sampled()) == size
    packed = groups_packed(run)
    assert 2 <= len(packs_in(run)) <= size
    alone = created(tmp_path / "alone")
    asyncio.run(sample_chunk(alone, 0, policy_of(server), "w"))
    for group in groups_packed(alone).values():
        for ours, theirs in zip(packed[group.group_id].rollouts, group.rollouts, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert ours.reward == theirs.reward
    asked = len(server.requests)
    assert asyncio.run(sample_chunk(run, 0, policy_of(server), "x")) == size
    assert len(server.requests) == asked, "nothing is sampled again"


def test_groups_that_ended_are_committed_when_sampling_is_cancelled(run, server):
    run = created(Path(run.config.root), "asynchrony.limits.commit_every_s=600")
    numbers, ended = numbers_of(run.config, 0), threading.Event()

    def listen(event: ProgressEvent) -> None:
        if event.done == len(numbers) - 1:
            ended.set()

    async def cancelled() -> None:
        sampling = asyncio.ensure_future(sample_chunk(run, 0, policy_of(server), "w"))
        assert await asyncio.to_thread(ended.wait, 60)
        assert packs_in(run) == [], "ten minutes have not passed"
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling

    with listening(listen):
        asyncio.run(cancelled())
    assert sorted(groups_packed(run)) == [group_id_of(number) for number in numbers[:-1]]


def test_a_commit_that_is_refused_ends_the_sampling(run: Run, server: HeldServer) -> None:
    """A worker with other settings was first; a group is still under way when that is seen."""
    numbers, policy = numbers_of(run.config, 0), policy_of(server)
    foreign = groups_of_chunk(run, numbers, "e" * 64, policy, "node-7")
    server.others.clear()

    async def refused() -> None:
        sampling = asyncio.ensure_future(sample_chunk(run, 0, policy, "w"))
        await until(lambda: bool(server.requests))  # by then the chunk was read
        await asyncio.to_thread(foreign.complete, CHUNK, made(numbers[:1]))
        server.others.set()
        with pytest.raises(CommitConflict, match="is committed with fingerprint eee"):
            await sampling

    asyncio.run(refused())
    assert not server.released.is_set(), "no group was waited for"
