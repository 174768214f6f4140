"""`publish` without a server: what retention meets among other runs never ends this one."""

import asyncio
from pathlib import Path

import pytest
from support.run_factories import whole_run

from marin_rl.storage.runs import checkpoint_slot, latest_checkpoint
from tasks.process import publish


def test_a_strangers_folder_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = whole_run(str(tmp_path), 4, retention={"checkpoints_last": 2})
    stranger = tmp_path / "stranger/run.json"
    stranger.parent.mkdir()
    stranger.write_text("{}")
    trained = latest_checkpoint(run)
    assert trained is not None

    def publish_again() -> list[str]:
        caplog.clear()
        asyncio.run(publish.fn(run.reference, 3, trained, {"timing_s/round": 1.0}))
        return [record.getMessage() for record in caplog.records]

    (told,) = publish_again()
    assert str(stranger) in told
    assert "mend it, move it out of the root, or upgrade" in told
    assert publish_again() == []  # once is enough
    assert not (tmp_path / "run" / checkpoint_slot(0) / "pruned.json").exists()
    stranger.unlink()
    assert publish_again() == []
    assert (tmp_path / "run" / checkpoint_slot(0) / "pruned.json").exists()
