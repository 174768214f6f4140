"""Groups that later rounds use again, by hand: which, how often, and what an audit says of them."""

import os
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from support.cases import others_slow
from support.run_factories import checkpoint, commit_round, configuration, group

from marin_rl.analysis.lineage import trace
from marin_rl.batching.build import build_round, preview_round
from marin_rl.batching.reuse import available
from marin_rl.config import Config
from marin_rl.errors import CorruptObject
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.tables.batches import read_batches, read_dispositions
from marin_rl.storage.upkeep.audit import Seen, audit_run, uses_offences
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.types import RolloutGroup, SlotRef
from schemas.tables import DISPOSITIONS

SMALL = {"group_size": 2}


def _config(root: str | os.PathLike[str], **replay: Any) -> Config:
    return configuration(
        os.fspath(root),
        groups=2,
        rollouts=SMALL,
        objective={"advantage": "dr_grpo"},
        batching={"staleness_rounds_max": 4},
        asynchrony={"replay": {"max_uses": 3, "window_rounds": 2, **replay}},
    )


def _group(name: str, round: int, spread: float = 1.0) -> RolloutGroup:
    return group(name, [0.0, spread], version=round)


def _play(run: Run, rounds: int, spreads: tuple[float, float] = (1.0, 3.0)) -> list[SlotRef]:
    """Rounds of two groups each, `a` and `b`, whose rewards are 0 and a spread."""
    refs = list[SlotRef]()
    for round in range(rounds):
        pair = zip("ab", spreads, strict=True)
        groups = [_group(f"{name}{round}", round, spread) for name, spread in pair]
        refs.append(build_round(run, round, commit_round(run, round, [groups])))
    return refs


def _used(run: Run, round: int) -> list[str]:
    """Groups that a round trained on, in the order of its dispositions."""
    rows = read_dispositions(run, round).to_pylist()
    return list(dict.fromkeys(r["group_id"] for r in rows if r["disposition"] == "consumed"))


@pytest.mark.parametrize(
    ("replay", "expected"),
    others_slow([
        # newest first: the groups of the round before, up to groups_per_round of them
        ({"groups": 3}, [["a0", "b0"], ["a0", "a1", "b1"], ["a1", "a2", "b2"]]),
        # the fewest uses first: of round 0, what round 1 left
        (
            {"groups": 3, "select": "by_group"},
            [["a0", "b0"], ["a0", "a1", "b1"], ["a1", "a2", "b2"]],
        ),
        # the largest advantages first, however old
        ({"groups": 2, "select": "prioritised"}, [["a0", "b0"], ["b0", "b1"], ["b1", "b2"]]),
        # two uses in all: never a third
        ({"groups": 4, "max_uses": 2}, [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]),
        ({"groups": 4, "window_rounds": 1}, [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]),
        ({}, [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]),
        ({"groups": 1}, [["a0"], ["a1"], ["a2"]]),
        ({"groups": 4}, [["a0", "b0"], ["a0", "b0", "a1", "b1"], ["a1", "b1", "a2", "b2"]]),
        ({"groups": 1, "select": "by_group"}, [["a0"], ["a1"], ["a2"]]),
        ({"groups": 1, "select": "prioritised"}, [["b0"], ["b1"], ["b2"]]),
    ], first=5, several=True),
)  # fmt: skip
def test_groups_are_used_again_in_the_configured_order(tmp_path, replay, expected):
    run = Run.create_or_open(_config(tmp_path, **replay))
    refs = _play(run, 4)
    assert _used(run, 0) == ["a0", "b0"]
    for round, again in enumerate(expected, start=1):
        assert _used(run, round) == [f"a{round}", f"b{round}", *again]
    reports = list(audit_run(run))
    assert [report.problems for report in reports] == [()] * 4
    assert [report.reused for report in reports] == [0, *(2 * len(again) for again in expected)]
    assert [report.generated for report in reports] == [4] * 4
    # a second time: the same slots; and the same choice where nothing is committed
    for round, ref in enumerate(refs):
        again = build_round(run, round, _sealed(run, round))
        assert (again.sha256, again.reused) == (ref.sha256, True)
        shown = preview_round(run, round, run.config)
        assert list(shown.rollout_ids) == read_dispositions(run, round)["rollout_id"].to_pylist()


def _sealed(run: Run, round: int) -> SlotRef:
    parent = committed_manifest(run.store, batches_slot(round)).parents[0]
    return SlotRef(slot=parent.slot, sha256=parent.sha256)


def test_a_round_is_trained_on_its_groups_and_then_on_those_of_earlier_rounds(tmp_path):
    run = Run.create_or_open(_config(tmp_path))
    ref = _play(run, 2)[1]
    (batch,) = read_batches(run, ref)
    names = ["a1/0", "a1/1", "b1/0", "b1/1", "a0/0", "a0/1", "b0/0", "b0/1"]
    assert [name for row in batch.rollout_ids for name in row] == names
    # r - mean(r): the same in both rounds
    rows = read_dispositions(run, 1).to_pylist()
    assert [row["advantage"] for row in rows] == [-0.5, 0.5, -1.5, 1.5] * 2
    assert [row["round_generated"] for row in rows] == [1] * 4 + [0] * 4
    expected = {
        "rollouts/generated": 4, "rollouts/consumed": 4, "replay/reused": 4, "replay/pool": 4,
        "replay/pool_enqueued": 2, "replay/pool_dequeued": 2, "replay/evicted_age": 0,
        "staleness/mean": 0.5, "staleness/max": 1, "env/echo/replay/pool": 4,
    }  # fmt: skip
    assert {name: ref.summary[name] for name in expected} == expected


class ReadingStore(MemoryStore):
    """A store that remembers which objects were read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.keys: list[str] = []

    def read(self, key: str) -> bytes:
        """Read an object."""
        self.keys.append(key)
        return super().read(key)


def test_dispositions_of_the_window_are_read_once() -> None:
    run = Run.create_or_open(_config(f"memory://{uuid.uuid4().hex}"))
    _play(run, 2)
    sealed = commit_round(run, 2, [[_group("a2", 2)]])
    store = ReadingStore(run.store.url)
    build_round(replace(run, store=store), 2, sealed)
    earlier = [key for key in store.keys if re.match(r"batches/round-0000[01]/", key)]
    assert len(earlier) == len(set(earlier)) == 4, "two manifests, and two dispositions"


def test_evictions_say_why(tmp_path: Path) -> None:
    """Round 2 uses the groups of round 0 a third time, and of round 1 a second time."""
    run = Run.create_or_open(_config(tmp_path, groups=4))
    *_, ref = _play(run, 3)
    assert ref.summary["replay/evicted_uses"] == 2
    assert ref.summary["replay/evicted_age"] == 0
    run = Run.create_or_open(_config(tmp_path / "few", groups=1))
    *_, ref = _play(run, 3)
    assert ref.summary["replay/evicted_age"] == 2
    assert ref.summary["env/echo/replay/evicted"] == 2


def test_groups_beyond_the_bound_of_staleness_are_not_used(tmp_path: Path) -> None:
    config = _config(tmp_path)
    old = pa.Table.from_pylist([_row("a", round=5, version=2)], schema=DISPOSITIONS)
    assert [group.group_id for group in available({5: old}, 6, config)] == ["a"]  # 4 rounds old
    assert available({5: old}, 7, config) == []


def _row(group_id: str, *, round: int, version: int = 0, name: str | None = None) -> dict[str, Any]:
    return {
        "rollout_id": name or f"{group_id}/0",
        "group_id": group_id,
        "round_generated": round,
        "environment": "echo",
        "policy_version_min": version,
        "policy_version_max": version,
        "disposition": "consumed",
        "advantage": 1.0,
    }


def _offences(run: Run, consumed: pa.Table, round: int, seen: Seen) -> dict[str, tuple[str, ...]]:
    """The offences that have names, as a report of an audit shows them."""
    frame = pl.DataFrame(pl.from_arrow(consumed))
    offences = uses_offences(run, frame, round, seen)
    return {kind: tuple(names) for kind, names in offences.items() if names}


def test_an_audit_counts_uses(tmp_path: Path) -> None:
    """Within three rounds, its own and two more; trained on there before."""
    run, seen = Run.create_or_open(_config(tmp_path)), Seen()
    consumed = pa.Table.from_pylist([_row("a", round=0)], schema=DISPOSITIONS)
    assert [_offences(run, consumed, round, seen) for round in range(3)] == [{}, {}, {}]
    assert _offences(run, consumed, 2, seen) == {"consumed in an earlier round": ("a/0 (round 2)",)}
    strange = "used again though never trained on, or outside of the window"
    other = pa.Table.from_pylist([_row("b", round=1)], schema=DISPOSITIONS)
    assert _offences(run, other, 2, seen) == {strange: ("b/0",)}
    late = pa.Table.from_pylist([_row("c", round=2)], schema=DISPOSITIONS)
    assert [_offences(run, late, round, seen) for round in (2, 5)] == [{}, {strange: ("c/0",)}]
    alone = Run.create_or_open(configuration(os.fspath(tmp_path / "alone")))
    assert _offences(alone, consumed, 0, plain := Seen()) == {}
    assert _offences(alone, consumed, 1, plain) == {
        "consumed in an earlier round": ("a/0 (round 0)",)
    }


def test_lineage_and_fsck_know_the_rounds_that_groups_come_from(tmp_path: Path) -> None:
    run = Run.create_or_open(_config(tmp_path))
    start = checkpoint(run, 0)
    assert start.slot
    _play(run, 2)
    graph = trace(run, 1)
    made_from = {edge.source for edge in graph.edges if edge.made == batches_slot(1)}
    assert made_from == {"rollouts/round-00001", "batches/round-00000"}
    assert {"a0/0", "a1/0", "rollouts/round-00000/shard-0000.parquet"} <= set(graph.nodes)
    faults = check_run(str(tmp_path), run.run_id).faults
    assert [f for f in faults if f.kind == "wrong parent" and "batches" in f.place] == []


def test_a_group_that_is_lost_is_named(tmp_path: Path) -> None:
    run = Run.create_or_open(_config(tmp_path))
    _play(run, 1)
    ref = commit_round(run, 1, [[_group("a1", 1), _group("b1", 1)]])
    # another round 0 than the one that was trained on: what fsck would find, too
    for key in run.store.list("rollouts/round-00000"):
        run.store.delete(key)
    commit_round(run, 0, [[_group("a0", 0), group("x", [0.0, 1.0])]])
    with pytest.raises(CorruptObject, match=r"expected the groups b0, which.*; run fsck"):
        build_round(run, 1, ref)
