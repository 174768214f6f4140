"""Trackers repeat what events measured, and a broken one never stops a run."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from marin_rl.config import Config, parse_config
from marin_rl.progress import ProgressEvent, listening, publish
from marin_rl.trackers import Trackers, open_trackers


class Remembering:
    """Keeps what it was told."""

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


def config(**trackers: object) -> Config:
    return parse_config({"run_id": "tracked", "trackers": trackers})


def event(stage: str, round: int | None, done: int = 0, **metrics: float) -> ProgressEvent:
    return ProgressEvent(run_id="r", stage=stage, round=round, done=done, metrics=metrics)  # type: ignore[arg-type]


def test_rounds_evaluations_and_warm_start_steps_are_tracked_and_nothing_else() -> None:
    board = Remembering()
    trackers = Trackers([board])
    with listening(trackers.listen):
        publish(event("sft", None, 250, loss=2.0))
        publish(event("generate", 0, 1, reward=0.9))
        publish(event("round", 0, 1, reward=0.5))
        publish(event("evaluate", 1, 1, accuracy=0.25))
        publish(event("round", 1))
    publish(event("round", 2, reward=0.5))
    assert board.rows == [(250, {"loss": 2.0}), (0, {"reward": 0.5}), (1, {"accuracy": 0.25})]


def test_a_tracker_that_fails_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Remembering(), Broken()
    trackers = Trackers([bad, good])
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            trackers.log({"reward": 1.0}, step)
        trackers.close()
    assert [step for step, _ in good.rows] == [0, 1, 2, 3, 4]
    assert [step for step, _ in bad.rows] == [0, 1]
    assert (good.closed, bad.closed) == (1, 0)
    (line,) = caplog.messages
    assert line == "tracker Broken failed and is left out: OSError: no space left on the board"


def test_without_configuration_there_is_no_tracker() -> None:
    assert open_trackers(config())._live == []


def test_a_tracker_that_cannot_be_opened_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    trackers = open_trackers(config(tensorboard=str(occupied)))
    trackers.log({"reward": 1.0}, 0)
    assert "tracker TensorBoard failed and is left out" in caplog.text


def test_tensorboard_gets_scalars_by_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    trackers = open_trackers(config(tensorboard=str(tmp_path)))
    trackers.log({"completions/mean_length": 7.5}, 3)
    trackers.close()
    (file,) = (tmp_path / "tracked").iterdir()
    assert b"completions/mean_length" in file.read_bytes()


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
