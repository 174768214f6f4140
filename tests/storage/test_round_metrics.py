"""Round metrics: one row per round, the first attempt's, on every backend."""

import json
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.run_factories import configuration

from marin_rl.storage.runs import Run, metrics_key
from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.tables.metrics import read_metrics, write_round_metrics
from marin_rl.storage.tables.parquet import FETCHES_MAX


def test_rows_come_back_in_order_on_every_backend(root: tuple[str, dict[str, Any]]) -> None:
    run = Run.create_or_open(configuration(root[0], storage_options=root[1]))
    assert read_metrics(run).num_rows == 0
    write_round_metrics(run, 10, {"loss": 0.5, "eval/accuracy": 0.25})
    ref = write_round_metrics(run, 2, {"loss": 1.0, "rewards/format/mean": -1.0})
    assert ref.slot == metrics_key(2)
    assert read_metrics(run).to_pylist() == [
        {
            "run_id": "run",
            "round": 2,
            "loss": 1.0,
            "rewards/format/mean": -1.0,
            "eval/accuracy": None,
        },
        {
            "run_id": "run",
            "round": 10,
            "loss": 0.5,
            "rewards/format/mean": None,
            "eval/accuracy": 0.25,
        },
    ]
    assert read_metrics(run, [10])["loss"].to_pylist() == [0.5]


def test_rows_of_a_bucket_are_fetched_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier in the store: one fetch after another would wait at it for ever."""
    run = Run.create_or_open(configuration(f"memory://{uuid.uuid4().hex}"))
    for round in range(2 * FETCHES_MAX):
        write_round_metrics(run, round, {"loss": float(round)})
    read, all_there = MemoryStore.read, threading.Barrier(FETCHES_MAX, timeout=30)

    def waiting(self: MemoryStore, key: str) -> bytes:
        all_there.wait()
        return read(self, key)

    monkeypatch.setattr(MemoryStore, "read", waiting)
    assert read_metrics(run)["loss"].to_pylist() == list(range(2 * FETCHES_MAX))


def test_the_first_attempt_is_believed(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    first = write_round_metrics(run, 0, {"loss": 1.0})
    second = write_round_metrics(run, 0, {"loss": 2.0})
    assert second == first
    assert second.reused
    assert second.summary == {"loss": 1.0}, "as committed"
    assert read_metrics(run)["loss"].to_pylist() == [1.0]


def test_undefined_names_are_refused(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    with pytest.raises(ValueError, match=r"found my_metric$"):
        write_round_metrics(run, 0, {"loss": 1.0, "my_metric": 2.0})
    assert read_metrics(run).num_rows == 0


def test_lines_are_appended_once_after_any_kill(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    file = tmp_path / "run" / "metrics.jsonl"
    write_round_metrics(run, 0, {"loss": 1.0})
    write_round_metrics(run, 0, {"loss": 9.0})
    file.write_text(file.read_text() + '{"round": 1, "lo')
    write_round_metrics(run, 1, {"loss": 0.5})
    lines = file.read_text().splitlines()
    assert lines[1] == '{"round": 1, "lo'
    rows = [json.loads(line) for line in (lines[0], lines[2])]
    assert rows == [
        {"round": 0, "run_id": "run", "loss": 1.0},
        {"round": 1, "run_id": "run", "loss": 0.5},
    ]


def test_a_line_lost_between_commit_and_append_is_written_later(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    file = tmp_path / "run" / "metrics.jsonl"
    write_round_metrics(run, 0, {"loss": 1.0})
    file.unlink()
    write_round_metrics(run, 0, {"loss": 2.0})
    assert [json.loads(line)["loss"] for line in file.read_text().splitlines()] == [1.0]


def test_the_lines_can_be_switched_off(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path), trackers={"jsonl": False}))
    write_round_metrics(run, 0, {"loss": 1.0})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
