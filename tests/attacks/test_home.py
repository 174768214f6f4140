"""Homes that cannot be written, or are not there: each is a warning, never the end of a command."""

from pathlib import Path

import pytest
from prefect.settings import temporary_settings
from support.run_factories import configuration

from marin_rl.compilation import enable_compilation_cache
from marin_rl.storage.runs import Run
from marin_rl.trust import remembered, try_to_remember

OWN_FOLDERS = (
    "MARIN_RL_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME",
)  # fmt: skip


@pytest.fixture(params=["/dev/null", "/proc", "file"])
def homeless(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is no folder, or in which none can be made."""
    (tmp_path / "file").write_text("no folder")
    for name in OWN_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / request.param))


@pytest.mark.usefixtures("homeless")
def test_no_home_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert enable_compilation_cache.__wrapped__() is None  # which is kept otherwise
    assert "MARIN_RL_COMPILATION_CACHE" in caplog.text
    run = Run.create_or_open(configuration(str(tmp_path / "runs")))
    assert remembered(run) is None
    try_to_remember(run)
    assert "XDG_STATE_HOME" in caplog.text
    assert remembered(run) is None


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
