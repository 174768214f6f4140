"""Status of runs: the stage from slots alone, warnings by rule, and looks that read what is new."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_stores import FakeGCS, fake_gcs
from support.fault_injection import Operations, inject_faults
from support.run_factories import (
    FINGERPRINT,
    add_checkpoint,
    add_round,
    commit_round,
    configuration,
    group,
    policy,
    sample,
    shown_run,
    whole_run,
)

from marin_rl.analysis.status import (
    Followed,
    Stage,
    Unreadable,
    each_run,
    metric_rows,
    run_status,
    stage_of,
)
from marin_rl.analysis.warnings import NewWarnings, warnings_of
from marin_rl.batching.build import build_round
from marin_rl.errors import StorageError, StoreUnavailable
from marin_rl.pages.document import RunPage
from marin_rl.progress import ProgressEvent
from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run, latest_checkpoint
from marin_rl.storage.tables.rollouts import commit_shard


def test_the_open_round_is_the_last_that_was_sampled_and_not_trained(tmp_path: Path) -> None:
    run = whole_run(str(tmp_path), 2)
    assert run_status(str(tmp_path), "run").in_progress == "nothing"
    sample(run, 2, 0, latest_checkpoint(run) or pytest.fail("no checkpoint"))
    assert run_status(str(tmp_path), "run").in_progress == "round 2: 1/2 shards"


class Barred(Operations):
    """Folders that may not be looked into, or not at the moment."""

    def __init__(self, error: StorageError) -> None:
        super().__init__()
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
        assert seen() == [Unreadable(run_id="barred", error="StorageError: cannot read it"), "run"]
    with inject_faults(Barred(StoreUnavailable("later"))), pytest.raises(StoreUnavailable):
        seen()


def stage_now(run: Run) -> Stage:
    return stage_of(run, progress(run))


def test_the_stage_is_the_first_thing_that_is_not_committed(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path), shards=2, rounds=1))
    stage = lambda: stage_now(run).text
    assert stage() == "loading the policy"
    add_checkpoint(run, 0)
    assert stage() == "generating round 0 (0 of 2)"
    commit_shard(run, 0, 0, [group("0a", [0.0, 1.0])], FINGERPRINT, policy(0))
    assert stage() == "generating round 0 (1 of 2)"
    sealed = commit_round(run, 0, [[group("0a", [0.0, 1.0])], [group("0b", [0.0, 1.0])]])
    assert stage() == "processing round 0"
    build_round(run, 0, sealed)
    assert stage() == "training on round 0"
    add_checkpoint(run, 1)
    assert (stage_now(run).text, stage_now(run).ended) == ("complete", True)


def test_a_warm_start_counts_its_steps(tmp_path: Path) -> None:
    run = Run.create_or_open(
        configuration(str(tmp_path), policy={"init": "sft"}, sft={"steps": 450})
    )
    assert stage_now(run).text == "warm start, steps (0 of 450)"
    slot = "sft/step-00225"
    commit_manifest(
        run.store, new_manifest(slot, attempt=new_attempt(), fingerprint=FINGERPRINT, parts=())
    )
    assert stage_now(run).text == "warm start, steps (225 of 450)"


def test_a_dead_process_is_reported(tmp_path: Path) -> None:
    run = shown_run(tmp_path)
    lock = run.store.local_path(".lock")
    assert lock is not None
    for holder, gone in (
        (f"{os.getpid()}\n", False),
        ("999999999 another\n", False),  # a process of another machine cannot be looked at
        ("999999999\n", True),
    ):
        lock.write_text(holder)
        warnings = run_status(str(tmp_path), "shown").warnings
        expected = "process 999999999, which held the run, is gone"
        assert any(warning.startswith(expected) for warning in warnings) == gone


def rows(**columns: list[float]) -> list[dict[str, Any]]:
    count = max(len(values) for values in columns.values())
    return [
        {"round": index, **{name: values[index] for name, values in columns.items()}}
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"mismatch_kl": [1e-5, 0.02]}, "round 1: sampler and trainer disagree: mismatch KL 0.02"),
        ({"rollouts/errors": [0.0, 0.5]}, "round 1: 50% of the rollouts failed"),
        ({"frac_reward_zero_std": [0.9, 0.95]}, "round 1: 95% of the groups carry no signal"),
        ({"updates/skipped": [0.0, 2.0]}, "round 1: 2 updates were not finite"),
        ({"entropy": [2.0, 0.1]}, "entropy fell to 5.0% of what it was"),
        ({"entropy": [2.0, 0.0]}, "entropy is gone (0): samples of a group are alike, nothing can"),
        ({"frac_reward_zero_std": [0.0, 1.0]}, "round 1: nothing can be learned: within every"),
        ({"completions/clipped_ratio": [0.0, 1.0]}, "round 1: every completion is cut off at"),
    ],
)
def test_warnings(columns: dict[str, list[float]], words: str) -> None:
    (found,) = warnings_of(rows(reward=[0.5, 0.5], **columns))
    assert found.startswith(words)


def test_a_kind_of_warning_is_announced_once_when_it_is_first_seen() -> None:
    told: list[str] = []
    new = NewWarnings("run", told.append)
    shares = [1.0, 1.0, 0.0, 0.95, 0.9, 1.0]
    for round, share in enumerate(shares):
        metrics = {"reward": 0.5, "frac_reward_zero_std": share}
        new.listen(ProgressEvent(run_id="other", stage="round", round=round, metrics=metrics))
        new.listen(ProgressEvent(run_id="run", stage="train", round=round, metrics=metrics))
        assert len(told) == [0, 1, 1, 1, 2, 2][round]
        new.listen(ProgressEvent(run_id="run", stage="round", round=round, metrics=metrics))
    assert "`marin-rl rollouts run` shows" in told[0]
    assert [text[:35] for text in told] == [
        "round 0: nothing can be learned: wi",
        "round 3: 95% of the groups carry no",
    ]


@pytest.mark.parametrize("more", [True, False])
def test_few_held_out_examples_are_announced_once_where_there_are_more(*, more: bool) -> None:
    told: list[str] = []
    new = NewWarnings("run", told.append, more_examples=more)
    for round in range(3):
        metrics = {"reward": 0.5, "eval/accuracy": 1 / 11, "eval/examples": 11.0}
        new.listen(ProgressEvent(run_id="run", stage="round", round=round, metrics=metrics))
    expected = "held-out accuracy 9.1 % (95 % CI 2–38 %, n = 11)"  # noqa: RUF001
    assert [text.startswith(expected) for text in told] == ([True] if more else [])


def test_reward_up_and_held_out_flat_is_suspicious_and_both_up_is_not() -> None:
    reward = [index / 20 for index in range(20)]
    flat = rows(reward=reward, **{"eval/accuracy": [0.5] * 20})
    assert "is the reward being hacked?" in warnings_of(flat)[0]
    assert warnings_of(rows(reward=reward, **{"eval/accuracy": reward})) == []
    # Nearly all held-out answers are right: their share wavers, and has no room to rise.
    full = [0.97] * 10 + [0.96] * 10
    assert warnings_of(rows(reward=reward, **{"eval/accuracy": full})) == []
    fallen = rows(reward=reward, **{"eval/accuracy": [0.97] * 10 + [0.9] * 10})
    assert "is the reward being hacked?" in warnings_of(fallen)[0]
    assert warnings_of([]) == []


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
