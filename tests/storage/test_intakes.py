"""Streams of groups and the intakes of rounds: by hand, and the laws of what a round takes."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_factories import audit_round
from support.streams import Streaming, put_alone, settings

from marin_rl.batching.build import build_round
from marin_rl.errors import CommitConflict
from marin_rl.rollouts.streaming import (
    Claimant,
    group_id_of,
    open_chunks,
    open_groups_max,
    under_way,
)
from marin_rl.storage.layout import STREAM, stream_key
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.intakes import (
    STALE,
    Entry,
    Settled,
    commit_intake,
    decide,
    read_intake,
)
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.tables.stream import GroupStream, StreamedGroup, numbers_of
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, retire
from marin_rl.storage.upkeep.streams import waiting_rollouts

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def streamed(number: int, version: int, *, differs: bool = True) -> StreamedGroup:
    return StreamedGroup(
        number=number,
        sha256=f"{number:064x}",
        version=version,
        rollouts=2,
        differs=differs,
    )


def numbers(entries: Sequence[Entry]) -> list[int]:
    return [entry[0] for entry in entries]


def test_a_round_takes_the_oldest_groups_within_the_bound() -> None:
    """By policy and number; what is too old is dropped, and what is settled is not seen again."""
    groups = [streamed(5, 3), streamed(9, 2), streamed(4, 3), streamed(7, 1), streamed(0, 2)]
    intake = decide(3, groups, Settled(floor=1), settings())
    assert intake is not None
    assert numbers(intake.taken) == [9, 4]
    assert [(e[0], e[3]) for e in intake.dropped] == [(7, STALE)]
    assert intake.waiting == 1
    assert intake.settled == Settled(floor=1, above=frozenset({9, 4, 7}))


def test_too_few_groups_are_waited_for() -> None:
    assert decide(0, [streamed(0, 0)], Settled(), settings()) is None


def test_with_wait_a_round_waits_for_groups_that_would_be_too_old_for_the_next() -> None:
    groups, config = [streamed(0, 2), streamed(1, 2)], settings(sampler="windowed_wait")
    assert decide(2, groups, Settled(), config, under_way=[1]) is None
    assert decide(2, groups, Settled(), config, under_way=[2]) is not None
    assert decide(2, groups, Settled(), settings(), under_way=[1]) is not None
    ended = decide(2, groups, Settled(), config, under_way=[1], ended=True)
    assert ended is not None


def test_with_dynamic_sampling_groups_that_do_not_differ_are_taken_and_not_counted() -> None:
    config = settings(dynamic_sampling=3)
    flat = [streamed(number, 0, differs=False) for number in range(5)]
    assert decide(0, [*flat, streamed(5, 0)], Settled(), config) is not None, "short"
    two = [streamed(5, 0), streamed(6, 0), streamed(7, 0)]
    intake = decide(0, [*flat[:3], *two], Settled(), config)
    assert intake is not None
    assert numbers(intake.taken) == [0, 1, 2, 5, 6]


@given(st.lists(st.sets(st.integers(0, 30)), max_size=6))
def test_settled_numbers_are_those_that_were_added(parts: list[set[int]]) -> None:
    settled, expected = Settled(), set[int]()
    for part in parts:
        settled, expected = settled.with_numbers(part), expected | part
    assert {number for number in range(40) if number in settled} == expected
    assert settled.floor + len(settled.above) == len(expected)
    assert settled.floor not in settled


@given(st.data())
def test_groups_are_taken_once_and_are_never_too_old(data: st.DataObject) -> None:
    """Whatever is seen at each moment: stale listings cost freshness alone."""
    config, settled, seen = settings(groups=3), Settled(), set[int]()
    there = [streamed(number, number // 4) for number in range(24)]
    for round in range(6):
        visible = data.draw(st.sets(st.sampled_from(range(24))))
        intake = decide(round, [there[n] for n in visible], settled, config)
        if intake is None:
            continue
        assert all(round - version <= 1 for _, _, version, why, _ in intake.groups if not why)
        assert len(intake.taken) == 3
        assert seen.isdisjoint(numbers(intake.groups))
        seen.update(numbers(intake.groups))
        settled = intake.settled


@pytest.mark.parametrize(
    ("version", "taken", "most", "expected"),
    [
        (0, 0, None, 4),  # rounds 0 and 1, of two groups each
        (0, 1, None, 2),  # round 1
        (0, 2, None, 0),  # round 2 would find them too old
        (2, 2, None, 4),  # after a recovery as without
        (2, 2, 2, 2),  # limits.max_inflight_groups
        (9, 9, None, 2),  # the last round
        (9, 10, None, 0),
    ],
)
def test_no_more_groups_are_open_than_rounds_can_take(version, taken, most, expected):
    config = settings(limits={"max_inflight_groups": most})
    assert open_groups_max(config, version, taken) == expected


def test_groups_that_no_round_can_take_any_more_give_their_room_to_others(tmp_path: Path) -> None:
    run = Run.create_or_open(settings(str(tmp_path)))
    stream = GroupStream(run)
    for chunk, version in enumerate((0, 0, 1)):
        assert stream.claim(chunk, "w", version, NOW)
    stream.groups = {number: streamed(number, 0) for number in range(6)}
    assert first_open(stream, Settled(), claimant("w", most=4)) is None
    fresh = replace(claimant("w", most=4), oldest=1)
    assert first_open(stream, Settled(), fresh) == 3
    assert first_open(stream, Settled(), replace(fresh, most=0)) is None
    assert first_open(stream, Settled(), replace(fresh, most=1)) is None
    assert first_open(stream, Settled(floor=6), replace(fresh, most=1)) == 3


def first_open(stream: GroupStream, settled: Settled, claimant: Claimant) -> int | None:
    return next(open_chunks(stream, settled, claimant), None)


def claimant(worker: str, *busy: int, most: int = 4, now: datetime = NOW) -> Claimant:
    return Claimant(worker=worker, most=most, now=now, busy=busy)


def test_workers_claim_chunks_and_leave_those_of_others_alone(tmp_path: Path) -> None:
    run = Run.create_or_open(settings(str(tmp_path)))
    mine, other = GroupStream(run), GroupStream(run)
    assert first_open(mine, Settled(), claimant("a")) == 0
    assert mine.claim(0, "a", 0, NOW)
    assert not other.claim(0, "b", 0, NOW), "the first claim stays"
    other.look()
    assert first_open(other, Settled(), claimant("b")) == 1
    assert other.claim(1, "b", 0, NOW)
    mine.look()
    assert first_open(mine, Settled(), claimant("a", 0)) is None, "two chunks of two are 4 groups"
    assert first_open(mine, Settled(), claimant("a")) == 0, "after a restart its own goes on"
    later = NOW + timedelta(seconds=3601)
    assert first_open(mine, Settled(), claimant("c", now=later)) == 0
    assert first_open(mine, Settled(), claimant("c", most=0, now=later)) is None
    assert first_open(mine, Settled(), claimant("c", 0, most=2, now=later)) is None
    assert under_way(mine, Settled(), NOW) == [0, 0]
    assert under_way(mine, Settled(floor=2), later) == []


def test_clocks_that_are_a_day_apart_cost_work_and_nothing_else(tmp_path: Path) -> None:
    run = Run.create_or_open(settings(str(tmp_path)))
    for days in (-1, 1):
        stream = GroupStream(run)
        stream.look()
        moment = NOW + timedelta(days=days)
        assert first_open(stream, Settled(), claimant("a", now=moment)) == 0
        assert stream.claim(0, f"worker{days}", 0, moment)
    stream.look()
    assert stream.claims[0].number == 1


@pytest.fixture
def streaming(tmp_path: Path) -> Streaming:
    return Streaming(tmp_path)


def test_everything_after_an_intake_follows_from_it(streaming: Streaming) -> None:
    run = streaming.run
    streaming.put((0, 0), (3, 0), (1, 0))
    intake = streaming.take(0)
    streaming.put((2, 0))  # came too late for the round
    sealed = streaming.sealed(0, intake)
    build_round(run, 0, sealed)
    (rows,) = iter_shards(run, 0, ["group_id", "round", "shard", "policy_version_min"])
    assert rows["group_id"].to_pylist() == [group_id_of(n) for n in (0, 0, 1, 1)]
    assert set(rows["round"].to_pylist()) == {0}
    assert audit_round(run, 0).balanced
    assert waiting_rollouts(run) == 4
    assert streaming.take(0) == intake
    assert streaming.sealed(0, intake) == sealed
    assert [f for f in check_run(run.config.root, run.run_id).faults if not f.harmless] == []


def test_gc_deletes_what_sealed_rounds_have_collected(streaming: Streaming) -> None:
    run = streaming.run
    streaming.put((0, 0), (1, 0), (2, 0))
    streaming.stream.claim(0, "w", 0, NOW)
    streaming.stream.claim(1, "w", 0, NOW)
    intake = streaming.take(0)
    assert collect(run).garbage == (), "the round is not sealed"
    assert waiting_rollouts(run) == 6
    streaming.sealed(0, intake)
    assert sorted(item.key.rpartition("/")[2] for item in collect(run).garbage) == [
        "claim-00000000-00.json", "group-00000000.parquet", "group-00000001.parquet",
    ]  # fmt: skip
    assert waiting_rollouts(run) == 4 + 2, "the sealed round waits to be processed"
    streaming.put((0, 0))  # a late worker
    streaming.put((3, 1))
    assert numbers(read_intake(run, 0).taken) == [0, 1]
    assert sorted(streaming.waiting(1)) == [2, 3]


def test_a_run_that_is_played_deletes_what_its_sealed_rounds_have(streaming: Streaming) -> None:
    run = streaming.run
    streaming.put((0, 0), (1, 0), (2, 0), (3, 0))
    streaming.stream.claim(0, "w", 0, NOW)
    intake = streaming.take(0)
    retire(run)
    assert len(run.store.list(STREAM)) == 5, "the round is not sealed"
    streaming.sealed(0, intake)
    later = streaming.take(1)
    retire(run)
    kept = {stream_key(2), stream_key(3)}
    assert set(run.store.list(STREAM)) == kept, "round 1 is not sealed"
    assert streaming.sealed(1, later).summary["rows"] == 4


def test_the_first_intake_of_two_processes_is_that_of_both(streaming: Streaming) -> None:
    streaming.put((0, 0), (1, 0))
    first = decide(0, streaming.waiting(0).values(), Settled(), streaming.run.config)
    streaming.put((2, 0))
    assert first is not None
    ours = commit_intake(streaming.run, first)
    other = replace(first, groups=first.groups[:1], settled=Settled(floor=1))
    assert commit_intake(streaming.run, other) == ours
    assert numbers(read_intake(streaming.run, 0).taken) == [0, 1]


def test_a_worker_of_another_run_is_refused_by_its_name(streaming, tmp_path):
    foreign = Run.create_or_open(
        settings(str(tmp_path), groups=3).model_copy(update={"run_id": "b"})
    )
    put_alone(foreign, 0, 0, worker="node-8")
    streaming.run.store.put_part(stream_key(0), foreign.store.read(stream_key(0)))
    with pytest.raises(CommitConflict, match="node-8 sampled it for run 'b', expected 'run'"):
        streaming.waiting(0)


def test_chunks_are_the_size_of_a_shard() -> None:
    assert list(numbers_of(settings(groups=5), 1)) == [5, 6, 7, 8, 9]
