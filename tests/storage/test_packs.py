"""Packs of a stream: chains that are created once, and rounds that take groups out of them."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_factories import audit_round
from support.streams import Streaming, made, settings

from marin_rl.batching.build import build_round
from marin_rl.errors import CommitConflict, CorruptObject
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.layout import STREAM, pack_key, pack_of, stream_key
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.intakes import (
    STALE,
    Entry,
    Intake,
    Settled,
    intake_in,
    intake_manifest,
    read_intake,
)
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.tables.stream import StreamedGroup
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect
from marin_rl.storage.upkeep.streams import waiting_rollouts

NUMBERS = range(4)
PACK, NEXT_PACK = (pack_key(NUMBERS, sequence) for sequence in (0, 1))


@pytest.fixture
def streaming(tmp_path: Path) -> Streaming:
    return Streaming(tmp_path, groups=4)


def faults(run: Run) -> list[str]:
    report = check_run(run.config.root, run.run_id)
    return [fault.kind for fault in report.faults if not fault.harmless]


def test_names_say_among_which_numbers_a_pack_has_its_groups() -> None:
    assert pack_key(range(100, 200), 3) == f"{STREAM}/groups-00000100-00000199-03.parquet"
    assert pack_of(pack_key(range(100, 200), 3)) == range(100, 200)
    assert pack_of(stream_key(100)) is None


def test_a_group_that_two_workers_sample_is_in_one_pack(streaming: Streaming) -> None:
    ours, theirs = streaming.chain(0), streaming.chain(0)
    ours.append(made([1, 3]))
    theirs.append(made([0, 1]))
    ours.append(made([0, 2]))
    assert [sorted(group.number for group in groups) for groups in packs_of(streaming)] == [
        [1, 3],
        [0],
        [2],
    ]
    assert ours.finished == {*NUMBERS}
    again = streaming.chain(0)
    assert (again.finished, again.length) == ({*NUMBERS}, 3)
    again.append(made([0, 1, 2, 3]))
    assert again.length == 3, "nothing is left to commit"


def packs_of(streaming: Streaming) -> list[tuple[StreamedGroup, ...]]:
    streaming.stream.look()
    return [groups for _, groups in sorted(streaming.stream.objects.items())]


def test_a_round_of_packs_is_the_round_of_objects(tmp_path: Path) -> None:
    """The same groups give the same shards and batches, however they were committed."""
    rows, totals = [], []
    for packed in (False, True):
        streaming = Streaming(tmp_path / str(packed), groups=4)
        if packed:
            chain = streaming.chain(0)
            chain.append(made([3, 0]))
            chain.append(made([1]))
            streaming.put((2, 0))  # of a worker that commits each group by itself
        else:
            streaming.put(*((number, 0) for number in (3, 0, 1, 2)))
        run = streaming.run
        sealed = streaming.sealed(0, streaming.take(0))
        build_round(run, 0, sealed)
        (table,) = iter_shards(run, 0)
        rows.append(table.drop_columns(["attempt", "replica"]))
        totals.append(committed_manifest(run.store, "batches/round-00000").totals)
        assert audit_round(run, 0).balanced
        assert faults(run) == []
    assert rows[0].equals(rows[1])
    assert totals[0] == totals[1]


def test_a_record_names_packs_once_and_ranges_of_their_groups(streaming: Streaming) -> None:
    streaming.chain(0).append(made(NUMBERS))
    streaming.take(0)
    extra = committed_manifest(streaming.run.store, "intakes/round-00000").extra
    (object_,) = extra["objects"]
    assert object_[0] == PACK.rpartition("/")[2]
    assert extra["groups"] == [[0, 0, 4, 0, ""]]
    assert [entry.number for entry in read_intake(streaming.run, 0).taken] == [*NUMBERS]


def test_gc_keeps_a_pack_until_all_of_its_chunk_is_settled(streaming: Streaming) -> None:
    run = streaming.run
    streaming.chain(0).append(made([0, 1, 2]))
    streaming.chain(1).append(made([4, 5]))
    streaming.sealed(0, streaming.take(0))
    assert [entry.number for entry in read_intake(run, 0).taken] == [0, 1, 2, 4]
    assert collect(run).garbage == (), "groups 3 and 5 are no round's yet"
    assert waiting_rollouts(run) == 8 + 2, "the sealed round is not processed; group 5 waits"
    streaming.chain(0, 1).append(made([3], 1))
    streaming.chain(1, 1).append(made([6, 7], 1))
    streaming.sealed(1, streaming.take(1))
    assert {item.key for item in collect(run).garbage} == {
        PACK, NEXT_PACK, pack_key(range(4, 8), 0), pack_key(range(4, 8), 1),
    }  # fmt: skip
    assert not streaming.waiting(2), "what is settled is not taken again"
    streaming.chain(0).append(made([0]))  # a late worker
    assert not streaming.waiting(2)


def test_a_lost_pack_is_one_clear_error(streaming: Streaming) -> None:
    run = streaming.run
    streaming.chain(0).append(made(NUMBERS))
    intake, data = streaming.take(0), run.store.read(PACK)
    run.store.delete(PACK)
    with pytest.raises(CorruptObject, match=r"group 0, 1, 2, 3 is gone.*restore the file"):
        streaming.sealed(0, intake)
    assert faults(run) == ["missing"]
    run.store.put_part(PACK, data[:-1])
    with pytest.raises(CorruptObject, match="expected SHA-256"):
        streaming.sealed(0, intake)
    run.store.put_part(PACK, data)
    assert streaming.sealed(0, intake).summary["rows"] == 8, "nothing is lost"


def test_a_pack_of_a_worker_with_other_settings_is_refused(streaming: Streaming) -> None:
    streaming.chain(0, fingerprint="e" * 64).append(made([0]))
    with pytest.raises(CommitConflict, match="worker w sampled it with other settings"):
        streaming.waiting(0)
    with pytest.raises(CommitConflict, match="sampled with other settings"):
        streaming.chain(0)


def test_a_pack_with_groups_of_another_chunk_is_refused(streaming: Streaming) -> None:
    streaming.chain(0).append(made([4]))
    with pytest.raises(CorruptObject, match="expected groups 0 to 3, found 'stream/group-0"):
        streaming.waiting(0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=12))
def test_a_record_is_read_back_as_it_was(drawn: list[tuple[int, int, bool]]) -> None:
    """Whatever the objects that groups are in, their policies, and why they are dropped."""
    entries = tuple(
        Entry(number, f"{sequence if packed else number:064x}", version, STALE * (version == 0),
              pack_key(range(12), sequence).rpartition("/")[2] if packed else "")
        for number, (sequence, version, packed) in enumerate(drawn)
    )  # fmt: skip
    settled = Settled(floor=len(entries))
    intake = Intake(round=0, groups=entries, settled=settled, waiting=3)
    manifest = intake_manifest(in_memory(), intake)
    assert intake_in(manifest) == intake


def test_a_record_of_an_older_version_has_groups_one_by_one() -> None:
    manifest = intake_manifest(in_memory(), Intake(round=0, groups=(), settled=Settled(floor=2)))
    groups = [[0, "a" * 64, 3, ""], [1, "b" * 64, 0, STALE]]
    extra = {**manifest.extra, "intake": 1, "groups": groups}
    read = intake_in(replace(manifest, extra=extra)).groups
    assert read == (Entry(0, "a" * 64, 3), Entry(1, "b" * 64, 0, STALE))


@cache
def in_memory() -> Run:
    return Run.create_or_open(settings("memory://packs"))


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 3, 2, 0, ""]],  # numbers that the pack cannot have
        [[1, 0, 1, 0, ""]],  # no such object
        [[-1, 0, 1, 0, ""]],
        [[0, 0, 10**12, 0, ""]],
        [[0, 0, 1, 0]],
    ],
)
def test_a_record_that_contradicts_itself_is_refused(groups: list[list[object]]) -> None:
    intake = Intake(round=0, groups=(), settled=Settled(floor=9))
    manifest = intake_manifest(in_memory(), intake)
    objects = [[PACK.rpartition("/")[2], "0" * 64]]
    extra = {**manifest.extra, "intake": 2, "objects": objects, "groups": groups}
    with pytest.raises(CorruptObject, match="expected an intake of groups"):
        intake_in(replace(manifest, extra=extra))
