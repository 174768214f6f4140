"""Status of runs: the open round, and one run that cannot be read among others."""

from pathlib import Path

import pytest
from support.fault_injection import Operations, Plan, inject_faults
from support.run_factories import sample, whole_run

from marin_rl.analysis.status import Unreadable, each_run, run_status
from marin_rl.errors import StorageError, StoreUnavailable
from marin_rl.storage.runs import latest_checkpoint


def test_the_open_round_is_the_last_that_was_sampled_and_not_trained(tmp_path: Path) -> None:
    run = whole_run(str(tmp_path), 2)
    assert run_status(str(tmp_path), "run").in_progress == "nothing"
    sample(run, 2, 0, latest_checkpoint(run) or pytest.fail("no checkpoint"))
    assert run_status(str(tmp_path), "run").in_progress == "round 2: 1/2 shards"


class Barred(Operations):
    """Folders that may not be looked into, or not at the moment."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(Plan())
        self._error = error

    def next(self, name: str, url: str) -> str | None:
        if "/barred" in url or "/lost+found" in url:
            raise self._error
        return None


def test_a_folder_that_may_not_be_looked_into_hides_no_run(tmp_path: Path) -> None:
    whole_run(str(tmp_path), 0)
    for name in ("barred", "lost+found"):
        (tmp_path / name).mkdir()

    def seen() -> list[str | Unreadable]:
        return each_run(str(tmp_path), lambda name: run_status(str(tmp_path), name).run_id)

    with inject_faults(Barred(StorageError("cannot read it"))):
        assert seen() == [
            Unreadable(run_id="barred", error="StorageError: cannot read it"),
            "run",
        ]
    with inject_faults(Barred(StoreUnavailable("later"))), pytest.raises(StoreUnavailable):
        seen()
