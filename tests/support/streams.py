"""Runs whose groups are put into a stream by hand, an object each or packed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.run_factories import checkpoint, configuration, group, policy

from marin_rl.config import Config
from marin_rl.rollouts.streaming import group_id_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.intakes import (
    Seen,
    collect_shard,
    commit_intake,
    decide,
    settled_before,
)
from marin_rl.storage.tables.packs import PackChain
from marin_rl.storage.tables.rollouts import seal_round
from marin_rl.storage.tables.stream import GroupStream, numbers_of
from marin_rl.types import RolloutGroup, SlotRef

FINGERPRINT = "f" * 64


def settings(root: str = "memory://none", groups: int = 2, **asynchrony: Any) -> Config:
    window = {"max_staleness": 1, "sampler": "windowed", **asynchrony}
    return configuration(
        root, groups=groups, rollouts={"group_size": 2}, asynchrony=window, shards=1
    )


def stream_of(run: Run) -> GroupStream:
    """The stream of a run as it is now."""
    stream = GroupStream(run)
    stream.look()
    return stream


class Streaming:
    """A run whose groups are put into the stream by hand."""

    def __init__(self, root: Path | str, **asynchrony: Any) -> None:
        self.run = Run.create_or_open(settings(str(root), **asynchrony))
        self.stream = GroupStream(self.run, fingerprint=FINGERPRINT)
        self.start = checkpoint(self.run, 0)

    def put(self, *placed: tuple[int, int]) -> None:
        """Commit groups by number and policy version."""
        for number, version in placed:
            made = group(group_id_of(number), [0.0, 1.0], version=version)
            self.stream.commit(number, made, policy(version), "w")

    def seen(self, round: int) -> Seen:
        self.stream.look()
        self.stream.read(settled_before(self.run, round))
        return Seen(groups=self.stream.groups.values())

    def take(self, round: int) -> SlotRef:
        settled = settled_before(self.run, round)
        intake = decide(round, self.seen(round), settled, self.run.config)
        assert intake is not None
        return commit_intake(self.run, intake)

    def sealed(self, round: int, intake: SlotRef) -> SlotRef:
        return seal_round(self.run, round, [collect_shard(self.run, round, 0, intake)], [intake])

    def chain(self, chunk: int, version: int = 0, fingerprint: str = FINGERPRINT) -> PackChain:
        """The packs of a chunk, as a worker knows them that has read what is there."""
        numbers = numbers_of(self.run.config, chunk)
        chain = PackChain(
            run=self.run,
            numbers=numbers,
            policy=policy(version),
            fingerprint=fingerprint,
            worker="w",
        )
        chain.read()
        return chain


def made(numbers: Sequence[int], version: int = 0) -> list[RolloutGroup]:
    """Groups of a stream by their numbers."""
    return [group(group_id_of(number), [0.0, 1.0], version=version) for number in numbers]
