"""Looking again and again: only what is new is read, on a bucket as on a disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_stores import FakeGCS, fake_gcs
from support.run_factories import add_round, shown_run

from marin_rl.analysis.status import metric_rows
from marin_rl.analysis.watch import Watched, look_at
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
    """Neither the terminal's nor the page's, however many rounds there are."""
    watched, page = Watched("gs://bucket/runs", server.options), RunPage(run)
    first = watched.one(run.run_id)
    assert page.page().rounds[-1].round == ROUNDS - 1
    server.faults.clear()
    again = watched.one(run.run_id)
    assert (again.rows, again.samples) == (first.rows, first.samples)
    looked = server.faults.count
    shown = page.page()
    turned = server.faults.count - looked
    assert looked <= 14
    assert turned <= 16
    add_round(run, ROUNDS)
    later = watched.one(run.run_id)
    assert [row["round"] for row in later.rows] == list(range(ROUNDS + 1))
    assert later.rows[:ROUNDS] == first.rows
    assert len(page.page().rounds) == len(shown.rounds) + 1


def test_rows_that_are_followed_are_those_that_are_read_at_once(run: Run) -> None:
    root, options = run.config.root, dict(run.config.storage_options)
    watched = Watched(root, options)
    watched.one(run.run_id)
    add_round(run, ROUNDS)

    def filled(rows: object) -> list[dict[str, object]]:
        assert isinstance(rows, list)
        return [{k: v for k, v in row.items() if v is not None} for row in rows]

    assert filled(watched.one(run.run_id).rows) == filled(metric_rows(run))


def test_a_run_deleted_and_begun_again_is_shown_as_a_new_one(tmp_path: Path) -> None:
    run = shown_run(tmp_path, rounds=3)
    watched, page = Watched(str(tmp_path)), RunPage(run)
    watched.one(run.run_id)
    page.page()
    shutil.rmtree(tmp_path / run.run_id)
    again = shown_run(tmp_path, rounds=1)
    seen = watched.one(run.run_id)
    assert (seen.trained, len(seen.rows)) == (1, 1)
    assert [item.round for item in page.page().rounds] == [0]
    assert look_at(str(tmp_path), again.run_id).rows == seen.rows
