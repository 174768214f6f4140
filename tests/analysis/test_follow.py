"""Looking again and again: only what is new is read, on a bucket as on a disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_stores import FakeGCS, fake_gcs
from support.run_factories import add_round, shown_run

from marin_rl.analysis.status import Followed, metric_rows
from marin_rl.pages.document import RunPage
from marin_rl.storage.runs import Run

ROUNDS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[FakeGCS]:
    with fake_gcs() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def run(server: FakeGCS) -> Run:
    """A run in a bucket, followed from another machine for all that a reader can know."""
    server.objects["bucket"].clear()
    return shown_run("gs://bucket/runs", rounds=ROUNDS, storage_options=server.options)


def test_another_look_at_a_bucket_reads_nothing_again(server: FakeGCS, run: Run) -> None:
    """However many rounds there are."""
    page = RunPage(run)
    assert page.page().rounds[-1].round == ROUNDS - 1
    server.faults.clear()
    shown = page.page()
    assert server.faults.count <= 16
    add_round(run, ROUNDS)
    assert len(page.page().rounds) == len(shown.rounds) + 1


def test_rows_that_are_followed_are_those_that_are_read_at_once(run: Run) -> None:
    followed = Followed(run)
    followed.rows(followed.progress())
    add_round(run, ROUNDS)

    def filled(rows: object) -> list[dict[str, object]]:
        assert isinstance(rows, list)
        return [{k: v for k, v in row.items() if v is not None} for row in rows]

    assert filled(followed.rows(followed.progress())) == filled(metric_rows(run))


def test_a_run_deleted_and_begun_again_is_shown_as_a_new_one(tmp_path: Path) -> None:
    run = shown_run(tmp_path, rounds=3)
    page = RunPage(run)
    page.page()
    shutil.rmtree(tmp_path / run.run_id)
    shown_run(tmp_path, rounds=1)
    assert [item.round for item in page.page().rounds] == [0]
