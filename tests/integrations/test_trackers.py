"""Trackers repeat what events measured, and a broken one never stops a run."""

import io
import logging
import struct
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from marin_rl.config import Config, parse_config
from marin_rl.integrations import trackers as boards
from marin_rl.integrations.trackers import Board, Tracker, Trackers, open_trackers
from marin_rl.progress import ProgressEvent, listening, publish


class Remembering:
    """Tracker that keeps its arguments."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


class Broken(Remembering):
    """Fails at its second row."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        if len(self.rows) == 2:
            raise OSError("no space left on the board")


def on(*trackers: Tracker) -> Trackers:
    return Trackers([Board(type(item).__name__, lambda item=item: item) for item in trackers])


def config(**trackers: object) -> Config:
    return parse_config({"run_id": "tracked", "trackers": trackers})


def event(stage: str, round: int | None, done: int = 0, **metrics: float) -> ProgressEvent:
    return ProgressEvent(run_id="r", stage=stage, round=round, done=done, metrics=metrics)  # type: ignore[arg-type]


def test_rounds_evaluations_and_warm_start_steps_are_tracked_and_nothing_else() -> None:
    board = Remembering()
    trackers = on(board)
    with listening(trackers.listen):
        publish(event("sft", None, 250, loss=2.0))
        publish(event("generate", 0, 1, reward=0.9))
        publish(event("round", 0, 1, reward=0.5))
        publish(event("evaluate", 1, 1, accuracy=0.25))
        publish(event("round", 1))
    publish(event("round", 2, reward=0.5))
    trackers.close()
    assert board.rows == [(250, {"loss": 2.0}), (0, {"reward": 0.5}), (1, {"accuracy": 0.25})]


def test_a_tracker_that_fails_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Remembering(), Broken()
    trackers = on(bad, good)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            trackers.log({"reward": 1.0}, step)
        trackers.close()
    assert [step for step, _ in good.rows] == [0, 1, 2, 3, 4]
    assert [step for step, _ in bad.rows] == [0, 1]
    assert (good.closed, bad.closed) == (1, 0)
    (line,) = caplog.messages
    assert line == "tracker Broken failed and is left out: OSError: no space left on the board"


class Stuck(Remembering):
    """Takes its first row for as long as the test lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.let_go.wait(60)


def test_a_tracker_that_hangs_delays_nothing(monkeypatch, caplog):
    """It loses rows, is named once, and is not waited for beyond the limit."""
    monkeypatch.setattr(boards, "ROWS_WAITING_MAX", 3)
    monkeypatch.setattr(boards, "CLOSING_S", 0.5)
    full, slow, good = Stuck(), Stuck(), Remembering()
    trackers = on(full)
    for step in range(100):
        trackers.log({"reward": 1.0}, step)
    trackers.close()
    trackers = on(slow, good)
    trackers.log({"reward": 1.0}, 7)
    deadline = time.monotonic() + 60
    while not good.rows and time.monotonic() < deadline:  # the limit is for the slow one
        time.sleep(0.001)
    trackers.close()
    full.let_go.set()
    slow.let_go.set()
    assert [step for step, _ in good.rows] == [7]
    assert caplog.messages == [
        "tracker Stuck failed and is left out: it is 3 rows behind",
        "tracker Stuck failed and is left out: it did not finish within 0.5 s",
    ]


def test_without_configuration_there_is_no_tracker() -> None:
    assert open_trackers(config())._boards == []


def test_a_tracker_that_cannot_be_opened_is_left_out(tmp_path, caplog):
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    trackers = open_trackers(config(tensorboard=str(occupied)))
    trackers.log({"reward": 1.0}, 0)
    trackers.close()
    assert "tracker TensorBoard failed and is left out" in caplog.text


METRICS = {"reward": 0.5, "eval/pass@1": 1.0, "rewards/exact match/mean": 0.25, "timing_s/round": 2}


def test_tensorboard_gets_scalars_by_round_under_their_own_names(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    trackers = open_trackers(config(tensorboard=str(tmp_path)))
    trackers.log(METRICS, 3)
    trackers.close()
    (file,) = (tmp_path / "tracked").iterdir()
    found: dict[str, tuple[int, float]] = {}
    data = io.BytesIO(file.read_bytes())
    while header := data.read(12):  # of a TFRecord: its length, and a checksum of that
        event = event_pb2.Event.FromString(data.read(struct.unpack("<Q", header[:8])[0]))
        data.read(4)
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
    assert found == {name: (3, value) for name, value in METRICS.items()}


class Fragile:
    """A board of another package: opens, logs or closes as the test says, else remembers."""

    Settings = dict

    def __init__(self, fails: str) -> None:
        self._fails, self.rows = fails, []

    def init(self, **options: object) -> "Fragile":
        self._maybe("init")
        self.options = options
        return self

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._maybe("log")
        self.rows.append((step, dict(metrics)))

    def finish(self) -> None:
        self._maybe("finish")

    def _maybe(self, what: str) -> None:
        if what == self._fails:
            raise RuntimeError(f"cannot {what}")


@pytest.mark.parametrize("name", ["Trackio", "WandB"])
@pytest.mark.parametrize("fails", ["", "init", "log", "finish"])
def test_boards_get_the_same_names_and_are_never_in_the_way(name, fails, monkeypatch, caplog):
    board, package = Fragile(fails), name.lower()
    monkeypatch.setitem(sys.modules, package, board)  # type: ignore[arg-type]
    trackers = open_trackers(config(**{f"{package}_project": "project"}))
    trackers.log(METRICS, 3)
    trackers.close()
    row = (3, METRICS) if name == "Trackio" else (None, {**METRICS, "step": 3})
    assert board.rows == ([row] if fails in ("", "finish") else [])
    assert (f"tracker {name} failed" in caplog.text) == bool(fails)
    if fails != "init":
        assert (board.options["name"], board.options["resume"]) == ("tracked", "allow")


@pytest.mark.slow
def test_trackio_keeps_rows_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
    for step in (3, 4):  # the second time continues the run
        trackers = open_trackers(config(trackio_project="project"))
        trackers.log({"completions/mean_length": 7.5}, step)
        trackers.close()
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("project", "tracked")
    assert [(row["step"], row["completions/mean_length"]) for row in rows] == [(3, 7.5), (4, 7.5)]


@pytest.mark.slow
def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trackers = open_trackers(config(wandb_project="project"))
    trackers.log({"reward": 0.5}, 3)
    trackers.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # wandb's own process writes the file when it gets to it
    while b"reward" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"reward" in file.read_bytes()
