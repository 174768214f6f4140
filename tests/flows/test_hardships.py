"""Hardships of a machine, short of a crash: a disk that is full or read-only, at
once or in the middle; a clock set back.

Each ends or bends the run; the same command again, once the trouble is over, ends in the same run.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from support.faults import Outcome, Undisturbed, committed_digests, outcome
from support.flow_runs import debug

from flows.rl_loop import start
from marin_rl.errors import StorageError
from marin_rl.progress import ProgressEvent, listening
from marin_rl.storage import commits

pytestmark = pytest.mark.slow

NOBODY = 65534


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk needs privileges that this process does not have")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def test_a_disk_that_is_full(api: str, undisturbed: Undisturbed, disk: Path) -> None:
    config = debug(disk)
    with pytest.raises(StorageError, match="the disk is full; free space there, then start the"):
        start(config)
    known = committed_digests(config)
    assert "run.json" in known
    with pytest.raises(StorageError, match="the disk is full"):
        start(config)
    remount(disk, "size=64m")
    start(config)
    assert known.items() <= committed_digests(config).items()
    assert undisturbed.expected.same_as(outcome(config)) == []


@contextmanager
def denied() -> Iterator[None]:
    """This process, inside the block, may read files of its own and write none."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One that others may look into, which pytest's own are not, nor root's where Prefect looks."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs privileges that this process does not have")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        monkeypatch.setenv("PREFECT_HOME", name)
        monkeypatch.setenv("PREFECT_PROFILES_PATH", f"{name}/profiles.toml")
        yield Path(name)


def test_permission_that_is_taken_away_in_the_middle(api, undisturbed, folder):
    config, known = debug(folder), dict[str, str]()

    with ExitStack() as stack:

        def after_a_round(event: ProgressEvent) -> None:
            if event.stage == "round" and not known:
                known.update(committed_digests(config))
                stack.enter_context(denied())

        stack.enter_context(listening(after_a_round))
        with pytest.raises(StorageError, match="permission denied; choose another root"):
            start(config)
    assert "metrics/round-00000.parquet" in known
    assert committed_digests(config) == known
    start(config)
    assert undisturbed.expected.same_as(outcome(config)) == []


class DayBefore(datetime):
    """A clock that was set back by a day."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(tz) - timedelta(days=1)


def test_a_clock_that_is_set_back(api, undisturbed, tmp_path, monkeypatch):
    config = debug(tmp_path)
    start(config.model_copy(update={"rounds": 1}))
    monkeypatch.setattr(commits, "datetime", DayBefore)  # whence attempts and manifests have it
    start(config)
    check_after_one_round(undisturbed, outcome(config))


def check_after_one_round(undisturbed: Undisturbed, found: Outcome) -> None:
    """As undisturbed, but that a first start of one round evaluated what it ended with."""
    evaluation = "evals/round-00001/manifest.json"
    assert evaluation in found.slots
    others = tuple(slot for slot in found.slots if slot != evaluation)
    assert undisturbed.expected.same_as(replace(found, slots=others)) == []
