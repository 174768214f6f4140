"""Runs whose groups are put into a stream by hand, an object each or packed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from support.run_factories import checkpoint, configuration, group, policy

from marin_rl.analysis.verify import verify_run
from marin_rl.config import Config
from marin_rl.rollouts.streaming import CHUNK, group_id_of
from marin_rl.storage.layout import STREAM, numbers_in, stream_key
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.group_log import WORKER, GroupLog, groups_of_chunk
from marin_rl.storage.tables.intakes import (
    collect_shard,
    commit_intake,
    decide,
    read_intake,
    settled_before,
)
from marin_rl.storage.tables.rollouts import (
    commit_groups,
    decode_shard,
    groups_of,
    iter_shards,
    seal_round,
)
from marin_rl.storage.tables.stream import GroupStream, StreamedGroup, numbers_of
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run
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


@dataclass(frozen=True)
class Chain:
    """The packs of one chunk."""

    log: GroupLog

    @property
    def length(self) -> int:
        return self.log.lengths[CHUNK]

    @property
    def finished(self) -> set[int]:
        """Numbers of the groups that it has."""
        return {int(name.rpartition("-")[2]) for name in self.log.group_ids.get(CHUNK, ())}

    def append(self, groups: Sequence[RolloutGroup]) -> None:
        """Commit those that are missing."""
        self.log.complete(CHUNK, groups)


def put_alone(
    run: Run, number: int, version: int, fingerprint: str = FINGERPRINT, worker: str = "w"
) -> None:
    """Commit a group by itself, as older versions did."""
    made = group(group_id_of(number), [0.0, 1.0], version=version)
    commit_groups(
        run, stream_key(number), [made], round=version, shard=0, fingerprint=fingerprint,
        policy=policy(version), stamp={WORKER: worker},
    )  # fmt: skip


class Streaming:
    """A run whose groups are put into the stream by hand."""

    def __init__(self, root: Path | str, **asynchrony: Any) -> None:
        self.run = Run.create_or_open(settings(str(root), **asynchrony))
        self.stream = GroupStream(self.run, fingerprint=FINGERPRINT)
        self.start = checkpoint(self.run, 0)

    def put(self, *placed: tuple[int, int]) -> None:
        """Commit groups by number and policy version."""
        for number, version in placed:
            put_alone(self.run, number, version)

    def waiting(self, round: int) -> dict[int, StreamedGroup]:
        """Groups that no round before this one has settled, by number."""
        self.stream.look()
        settled = settled_before(self.run, round)
        return {n: group for n, group in self.stream.groups.items() if n not in settled}

    def take(self, round: int) -> SlotRef:
        settled = settled_before(self.run, round)
        intake = decide(round, self.waiting(round).values(), settled, self.run.config)
        assert intake is not None
        return commit_intake(self.run, intake)

    def sealed(self, round: int, intake: SlotRef) -> SlotRef:
        return seal_round(self.run, round, [collect_shard(self.run, round, 0, intake)], [intake])

    def chain(self, chunk: int, version: int = 0, fingerprint: str = FINGERPRINT) -> Chain:
        """The packs of a chunk, as a worker knows them that has read what is there."""
        numbers = numbers_of(self.run.config, chunk)
        chain = Chain(groups_of_chunk(self.run, numbers, fingerprint, policy(version), "w"))
        chain.log.read([CHUNK])
        return chain


def groups_in(run: Run, numbers: Sequence[int]) -> list[RolloutGroup]:
    """The finished groups of a stream with these numbers, in order."""
    objects = [key for key in run.store.list(STREAM) if numbers_in(key)]
    groups = {
        int(group.group_id.rpartition("-")[2]): group
        for key in objects
        for group in groups_of(decode_shard(run.store.read(key)))
    }
    return [groups[number] for number in numbers if number in groups]


def made(numbers: Sequence[int], version: int = 0) -> list[RolloutGroup]:
    """Groups of a stream by their numbers."""
    return [group(group_id_of(number), [0.0, 1.0], version=version) for number in numbers]


def checked(config: Config) -> Run:
    """The finished run, after a check of its rounds, intakes, audit, metrics and files."""
    run = Run.open(config.root, config.run_id)
    rounds = range(config.rounds)
    assert [number for number, item in progress(run).items() if item.metrics] == [*rounds]
    seen = set[int]()
    for round in rounds:
        intake = read_intake(run, round)
        assert len(intake.taken) == config.rollouts.groups_per_round
        bound = config.staleness_rounds_max
        assert all(round - version <= bound for _, _, version, *_ in intake.taken)
        order = [(version, number) for number, _, version, *_ in intake.taken]
        assert order == sorted(order)
        assert seen.isdisjoint(number for number, *_ in intake.groups)
        seen.update(number for number, *_ in intake.groups)
        rows = pa.concat_tables(iter_shards(run, round, ["policy_version_min", "round"]))
        assert set(rows["round"].to_pylist()) == {round}
    assert all(item.balanced for item in audit_run(run))
    assert [finding.message for finding in verify_run(run) if finding.problem] == []
    faults = check_run(config.root, config.run_id).faults
    assert [fault for fault in faults if not fault.harmless] == []
    return run
