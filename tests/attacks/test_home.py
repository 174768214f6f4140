"""Homes that cannot be written, or are not there: each is a warning, never the end of a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import temporary_settings
from support.cases import others_slow
from support.run_factories import configuration

from marin_rl.storage.runs import Run
from marin_rl.trust import remembered, try_to_remember

HOMES = ["/dev/null", "/proc", "file", None]
OWN_FOLDERS = (
    "HOME", "MARIN_RL_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
)  # fmt: skip


def homeless(home: str | None, folder: Path) -> dict[str, str]:
    """The environment of a process with this home; `file` is a file in `folder`."""
    (folder / "file").write_text("no folder")
    kept = {key: value for key, value in os.environ.items() if key not in OWN_FOLDERS}
    if home is None:
        return kept
    return {**kept, "HOME": str(folder / "file") if home == "file" else home}


@pytest.mark.parametrize("home", others_slow(HOMES[:3], HOMES[0]))
def test_no_home_for_compiled_programs_is_a_warning(home: str, tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(); "
        "from marin_rl.compilation import enable_compilation_cache as enable; print(enable())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=homeless(home, tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr
    assert "MARIN_RL_COMPILATION_CACHE" in done.stderr


def test_a_home_that_cannot_be_written_is_a_warning_and_no_history(tmp_path, caplog, monkeypatch):
    from flows import server

    (tmp_path / "file").write_bytes(b"")
    home = {"home": tmp_path / "file" / "home"}
    monkeypatch.setattr(server._log, "handlers", [caplog.handler])
    with temporary_settings(updates=home):
        own = server._environment(str(tmp_path / "spare"))
    assert own["PREFECT_HOME"] == str(tmp_path / "spare")
    database = f"sqlite+aiosqlite:///{tmp_path}/spare/prefect.db"
    assert own["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == database
    assert "Prefect keeps no history of this run: " in caplog.text


@pytest.mark.parametrize("home", others_slow(HOMES[:3], HOMES[0]))
def test_a_run_that_cannot_be_remembered_is_a_warning(home, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", homeless(home, tmp_path)["HOME"])
    run = Run.create_or_open(configuration(str(tmp_path / "runs")))
    assert remembered(run) is None
    try_to_remember(run)
    assert "XDG_STATE_HOME" in caplog.text
    assert remembered(run) is None
