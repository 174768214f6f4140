"""gc: what it takes, what it never takes, and whom it asks first."""

import os
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from support.fault_injection import Operations, inject_faults
from support.run_factories import FILES, checkpoint, configuration, evaluate, play, whole_run

from marin_rl.config import RetentionConfig
from marin_rl.errors import CommitExpired, ConfigError, CorruptObject, ObjectMissing, StorageError
from marin_rl.storage.commits import (
    ATTEMPT_LIFETIME_S,
    commit_manifest,
    new_attempt,
    new_manifest,
    read_manifest,
)
from marin_rl.storage.run_progress import as_continued, best_checkpoints, ends_early, evaluated
from marin_rl.storage.runs import Run, checkpoint_slot, committed, latest_checkpoint
from marin_rl.storage.tables.tombstones import commit_tombstone
from marin_rl.storage.upkeep.forks import borrowed_from, fork_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import CLOCKS_APART_S, Collection, collect, retire, rule_of

ROUNDS = 5
KEEP = RetentionConfig(checkpoints_last=2, checkpoints_every=3)
SOON = datetime.now(UTC) + timedelta(hours=20)  # also where the tests run an hour later


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    whole_run(str(root), ROUNDS, evaluated=(2,))
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Run:
    shutil.copytree(made / "run", tmp_path / "run")
    return Run.open(str(tmp_path), "run")


def told(found: Collection) -> list[tuple[str, str]]:
    return [(item.reason, item.key) for item in found.garbage]


def everything(run: Run) -> list[str]:
    return [key for key in run.folder.list() if key != ".lock"]


def has_arrays(run: Run, round: int) -> bool:
    """True if every array of a checkpoint is there."""
    found = read_manifest(run.store, checkpoint_slot(round))
    assert found is not None
    names = [part.name for part in found[0].parts if "/" in part.name]
    there = run.store.list(checkpoint_slot(round))
    return len(names) == len(FILES) and all(f"{found[0].slot}/{n}" in there for n in names)


def test_a_whole_run_has_no_garbage(run: Run) -> None:
    before = everything(run)
    assert collect(run).garbage == ()
    assert everything(run) == before


def test_leftovers_of_a_late_attempt_in_a_committed_slot_are_deleted(run: Run) -> None:
    before, attempt = everything(run), new_attempt()
    keys = [
        f"batches/round-00001/batches-{attempt}-0000.parquet",
        f"batches/round-00001/dispositions-{attempt}.parquet",
        f"checkpoints/round-00002/{attempt}/d/array",
        f"checkpoints/round-00002/scores-{attempt}-0000.parquet",
    ]
    for key in keys:
        run.store.put_part(key, b"12345")
    found = collect(run, dry_run=True)
    assert told(found) == [("unreferenced", key) for key in keys]
    assert found.bytes == 20
    assert set(everything(run)) == {*before, *keys}  # nothing was deleted
    assert told(collect(run)) == told(found)
    assert everything(run) == before
    folder = run.store.local_path(f"checkpoints/round-00002/{attempt}")
    assert folder is not None
    assert not folder.exists()


def test_an_attempt_that_did_not_commit_goes_once_its_process_is_gone(run: Run) -> None:
    keys = [
        f"batches/round-00005/batches-{new_attempt()}-0000.parquet",
        f"checkpoints/round-00006/{new_attempt()}/d/array",
    ]
    for key in keys:
        run.store.put_part(key, b"1")
    assert collect(run).garbage == ()  # so young that it may be of another machine
    with run.lock():
        found = collect(run, now=SOON)
        assert found.live
        assert found.garbage == ()
    assert told(collect(run, now=SOON)) == [("uncommitted", key) for key in keys]


def test_without_locks_an_attempt_is_deleted_once_it_cannot_commit() -> None:
    run = whole_run("memory://gc-uncommitted", 1)
    key = f"batches/round-00001/batches-{new_attempt()}-0000.parquet"
    run.store.put_part(key, b"1")
    now = datetime.now(UTC)
    dead = timedelta(seconds=ATTEMPT_LIFETIME_S + CLOCKS_APART_S)
    assert collect(run, now=now + dead - timedelta(seconds=60)).garbage == ()
    assert told(collect(run, now=now + dead + timedelta(seconds=60))) == [("uncommitted", key)]


def test_an_attempt_as_old_as_that_commits_no_more(run: Run) -> None:
    old = datetime.now(UTC) - timedelta(seconds=ATTEMPT_LIFETIME_S + 1)
    attempt = f"{old:%Y%m%dT%H%M%S}-0123456789abcdef"
    late = new_manifest("batches/round-00009", attempt=attempt, fingerprint="f")
    with pytest.raises(CommitExpired, match=r"began 69120\d s ago, expected less than 691200 s"):
        commit_manifest(run.store, late)
    assert committed(run, "batches/round-00009") is None
    # What another attempt committed is adopted all the same.
    winner = new_manifest("batches/round-00009", attempt=new_attempt(), fingerprint="f")
    assert commit_manifest(run.store, winner) == winner
    assert commit_manifest(run.store, late) == winner


def test_temporary_files_of_killed_writers_go_by_age(run: Run) -> None:
    old = "rollouts/round-00001/.shard-0000.parquet.0123456789abcdef.tmp"
    young = "metrics/.round-00009.parquet.0123456789abcdef.tmp"
    for key in (old, young, ".probe-0123456789abcdef"):
        run.store.put_part(key, b"1234")
    for key in (old, ".probe-0123456789abcdef"):
        path = run.store.local_path(key)
        assert path is not None
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    assert told(collect(run)) == [("temporary", ".probe-0123456789abcdef"), ("temporary", old)]
    assert young in everything(run)


def test_files_that_are_not_ours_and_shards_stay(run: Run) -> None:
    kept = [
        "batches/round-00001/notes.txt",
        "rollouts/round-00001/shard-0007.parquet",
        "rollouts/round-00009/shard-0000.parquet",
        "exports/round-00001/model.safetensors",
        "README",
    ]
    for key in kept:
        run.store.put_part(key, b"mine")
    assert collect(run, KEEP, now=SOON + timedelta(days=99), dry_run=True).skipped == ()
    collect(run, now=SOON + timedelta(days=99))
    assert set(kept) <= set(everything(run))


def test_retention_keeps_the_last_and_every_nth(run: Run) -> None:
    before = everything(run)
    found = collect(run, KEEP)
    gone = {key.split("/")[1] for _, key in told(found)}
    assert gone == {"round-00001", "round-00002"}  # of 0 … 5: 4 and 5 are last, 0 and 3 every third
    assert {item.reason for item in found.garbage} == {"retention"}
    tombs = {f"checkpoints/round-0000{n}/pruned.json" for n in (1, 2)}
    assert set(everything(run)) == {*before, *tombs} - {item.key for item in found.garbage}
    assert [has_arrays(run, number) for number in range(6)] == [
        True,
        False,
        False,
        True,
        True,
        True,
    ]
    latest = latest_checkpoint(run)
    assert latest is not None
    assert latest.slot == checkpoint_slot(5)
    scores = [key for key in everything(run) if "round-00002/scores-" in key]
    assert len(scores) == 1
    assert collect(run, KEEP).garbage == ()
    checked = check_run(run.config.root, "run")
    assert (checked.whole, checked.faults, checked.pruned) == (True, (), len(found.garbage))


def test_leftovers_of_a_killed_gc_are_deleted_next_time(run: Run) -> None:
    manifest = read_manifest(run.store, checkpoint_slot(1))
    assert manifest is not None
    commit_tombstone(run.store, manifest[0], {})
    assert check_run(run.config.root, "run").whole
    found = collect(run)  # without any rule
    assert {key.split("/")[1] for _, key in told(found)} == {"round-00001"}


def test_reference_checkpoints_are_kept(tmp_path: Path) -> None:
    held = {"kl_coefficient": 0.1, "reference": "refreshed", "reference_every_rounds": 3}
    run = whole_run(str(tmp_path), ROUNDS, shards=1, objective=held)
    gone = {key.split("/")[1] for _, key in told(collect(run, rule_of(run, 2, None)))}
    assert gone == {"round-00000", "round-00001", "round-00002"}


def test_a_fork_keeps_what_it_reaches(run: Run) -> None:
    fork = fork_run(run, 2, "fork")
    assert list(borrowed_from(run).reaches) == ["fork"]
    play(fork, 2, latest_checkpoint(fork) or pytest.fail("no checkpoint"))
    gone = {key.split("/")[1] for _, key in told(collect(run, rule_of(run, 2, None)))}
    assert gone == {"round-00003"}
    assert all(has_arrays(fork, number) for number in range(4))
    assert collect(fork, rule_of(fork, 2, None)).garbage == ()  # its first checkpoints are not its
    shutil.rmtree(Path(run.config.root, "fork"))
    gone = {key.split("/")[1] for _, key in told(collect(run, rule_of(run, 2, None)))}
    assert gone == {"round-00000", "round-00001", "round-00002"}


def started_from(run: Run, slot: str) -> None:
    """A neighbour of `run` that is configured to start from one of its slots."""
    policy = {"init": "checkpoint", "checkpoint": f"{run.config.root}/run/{slot}"}
    other = run.config.model_copy(
        update={"run_id": "other", "policy": run.config.policy.model_copy(update=policy)}
    )
    Run.create_or_open(other)


@pytest.mark.parametrize("end", ["", "/", "/manifest.json", "/manifest.json/"])
def test_a_run_that_starts_from_a_checkpoint_keeps_it(run: Run, end: str) -> None:
    started_from(run, f"checkpoints/round-00001{end}")
    gone = {key.split("/")[1] for _, key in told(collect(run, rule_of(run, 2, None)))}
    assert gone == {"round-00000", "round-00002", "round-00003"}


def test_a_neighbour_that_cannot_be_read_may_be_a_fork(run: Run) -> None:
    folder = Path(run.config.root, "neighbour")
    folder.mkdir()
    (folder / "run.json").write_text("{")
    Path(run.config.root, "a file").write_text("of somebody")
    assert collect(run).garbage == ()  # nothing but retention needs to know
    found = collect(run, KEEP)
    assert found.garbage == ()
    assert "neighbour/run.json" in found.unread


class Barred(Operations):
    """Folders that may not be looked into."""

    def next(self, name: str, url: str) -> str | None:
        if "/barred" in url or "/lost+found" in url:
            raise StorageError(f"cannot read {url}: permission denied")
        return None


def test_a_folder_that_may_not_be_looked_into_counts_if_it_may_be_a_fork(run: Run) -> None:
    root = Path(run.config.root)
    (root / "lost+found").mkdir()
    with inject_faults(Barred()):
        assert collect(Run.open(run.config.root, "run"), KEEP).garbage
        (root / "barred").mkdir()
        with pytest.raises(StorageError, match="barred"):
            borrowed_from(Run.open(run.config.root, "run"))


def test_a_neighbour_that_vanishes_while_it_is_read_is_absent(run: Run) -> None:
    class Vanishing(Operations):
        def next(self, name: str, url: str) -> str | None:
            if name == "read" and url.endswith("gone/run.json"):
                shutil.rmtree(Path(run.config.root, "gone"))
            return None

    fork_run(run, 1, "gone")
    with inject_faults(Vanishing()):
        assert collect(Run.open(run.config.root, "run"), rule_of(run, 2, None)).garbage
    assert not borrowed_from(run).reaches


def test_a_fork_by_the_name_of_a_run_that_is_known_is_seen(tmp_path: Path) -> None:
    """Cached knowledge of a name is no ground to delete anything."""
    run = whole_run(str(tmp_path), 3, retention={"checkpoints_last": 2})
    fork_run(run, 0, "fork")
    retire(run)
    assert [has_arrays(run, number) for number in range(4)] == [True, False, True, True]
    shutil.rmtree(tmp_path / "fork")
    fork_run(run, 2, "fork")
    play(run, 3, latest_checkpoint(run) or pytest.fail("no checkpoint"))
    retire(run)
    assert has_arrays(run, 2)


def test_a_slot_whose_manifest_cannot_be_read_is_let_alone(run: Run) -> None:
    path = run.store.local_path("checkpoints/round-00001/manifest.json")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    before = everything(run)
    found = collect(run, rule_of(run, 2, None), now=SOON, dry_run=True)
    assert found.skipped == ("checkpoints/round-00001",)
    assert "round-00001" not in {key.split("/")[1] for _, key in told(found)}
    assert everything(run) == before


def test_without_a_readable_rule_everything_is_kept(run: Run) -> None:
    path = run.store.local_path(f"checkpoints/round-0000{ROUNDS}/manifest.json")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    run = replace(run, config=run.config.model_copy(update={"retention": KEEP}))
    found = collect(run)
    assert (found.garbage, found.skipped) == ((), (f"checkpoints/round-0000{ROUNDS}",))
    with pytest.raises(CorruptObject, match=f"round-0000{ROUNDS}"):
        rule_of(run, last=5)


@pytest.mark.parametrize(
    "lost",
    [
        ("checkpoints/round-00001",),  # others were made from it
        (f"checkpoints/round-0000{ROUNDS}",),  # the final policy: metrics say that it was trained
        ("evals/round-00002",),  # metrics have what it measured
        (f"batches/round-0000{ROUNDS - 1}", f"checkpoints/round-0000{ROUNDS}"),  # a closed round
    ],
)
def test_slots_that_lost_their_manifests_are_let_alone(run: Run, lost: tuple[str, ...]) -> None:
    """The rest of a slot stays, since its manifest may be in a backup."""
    for slot in lost:
        run.store.delete(f"{slot}/manifest.json")
    before = everything(run)
    assert collect(run, now=SOON).skipped == lost
    assert everything(run) == before


@pytest.mark.parametrize("how", ["fork", "start"])
def test_a_checkpoint_that_another_run_alone_proves_is_let_alone(tmp_path: Path, how: str) -> None:
    run = whole_run(str(tmp_path), 0)
    fork_run(run, 0, "fork") if how == "fork" else started_from(run, checkpoint_slot(0))
    run.store.delete("checkpoints/round-00000/manifest.json")
    before = everything(run)
    assert collect(run, now=SOON).skipped == ("checkpoints/round-00000",)
    assert everything(run) == before
    shutil.rmtree(tmp_path / ("fork" if how == "fork" else "other"))
    assert collect(run, now=SOON).skipped == ()
    assert everything(run) == ["run.json"]


def test_a_dry_run_takes_no_lock(run: Run) -> None:
    class Starting(Operations):
        def next(self, name: str, url: str) -> str | None:
            with run.lock():  # as a flow does that begins meanwhile
                return None

    assert not collect(run, dry_run=True).live
    assert ".lock" not in run.folder.list()
    with run.lock():
        assert collect(run, dry_run=True).live
    with inject_faults(Starting()):
        assert not collect(Run.open(run.config.root, "run"), dry_run=True).live


def test_the_rule_of_the_configuration_is_asked_after_every_round(tmp_path: Path) -> None:
    run = whole_run(str(tmp_path), 3, retention={"checkpoints_last": 2})
    with run.lock():  # as the flow does that plays it
        retire(run)
    assert [has_arrays(run, number) for number in range(4)] == [False, False, True, True]
    keeping = whole_run(str(tmp_path / "other"), 3)
    retire(keeping)
    assert all(has_arrays(keeping, number) for number in range(4))


def test_the_best_checkpoint_stays_until_another_is_better(tmp_path: Path) -> None:
    rule = {"checkpoints_last": 2, "best": "eval/accuracy"}
    run = Run.create_or_open(configuration(str(tmp_path), shards=2, groups=2, retention=rule))
    start, kept = checkpoint(run, 0), []
    for round, accuracy in enumerate([0.25, 0.75, 0.75, 0.5, 1.0, 0.0]):
        evaluate(run, round, start, accuracy)
        start = play(run, round, start)
        retire(run)
        kept.append([number for number in range(round + 2) if has_arrays(run, number)])
    # The first of equals; the one before goes with the round after a better one.
    assert kept == [[0, 1], [1, 2], [1, 2, 3], [1, 3, 4], [4, 5], [4, 5, 6]]
    assert collect(run, rule_of(run)).garbage == ()
    assert not check_run(run.config.root, run.run_id).faults
    assert best_checkpoints(evaluated(run, "eval/accuracy")) == [0, 1, 4]
    with pytest.raises(ConfigError, match=r"found 'eval/other'; they have eval/accuracy"):
        collect(run, RetentionConfig(checkpoints_last=2, best="eval/other"))


@pytest.mark.parametrize(
    ("accuracies", "ends"),
    [
        ({0: 0.5, 2: 0.5, 4: 0.25}, {4}),  # two since the first, which is the best of equals
        ({0: 0.5, 2: 0.25, 4: 0.75, 6: 0.5}, set()),
        ({0: 0.5, 1: 0.9, 2: 0.6, 4: 0.7}, set()),  # 1 was evaluated by hand
        ({0: 0.5, 2: 0.25}, set()),
    ],
)
def test_a_run_ends_by_evaluations_that_were_due(tmp_path, accuracies, ends):
    rule = {"patience": 2, "every_rounds": 2}
    run = Run.create_or_open(configuration(str(tmp_path), evaluation=rule))
    start = checkpoint(run, 0)
    for number, accuracy in accuracies.items():
        evaluate(run, number, start, accuracy)
        # What came later, as to an attempt that was killed, changes no earlier decision.
        assert {n for n in range(number + 1) if ends_early(run, run.config, n)} == {
            n for n in ends if n <= number
        }


def test_the_rule_is_that_of_the_latest_continuation(tmp_path: Path) -> None:
    begun = whole_run(str(tmp_path), 3, retention={"checkpoints_last": 2, "checkpoints_every": 9})
    retention = RetentionConfig(checkpoints_last=50, checkpoints_every=9)
    continued = Run.create_or_open(begun.config.model_copy(update={"retention": retention}))
    assert rule_of(Run.open(str(tmp_path), "run")).checkpoints_last == 2
    checkpoint(continued, 4, extra=as_continued(continued))
    run = Run.open(str(tmp_path), "run")
    assert rule_of(run) == retention
    assert collect(run).garbage == ()
    assert rule_of(run, last=5) == RetentionConfig(checkpoints_last=5, checkpoints_every=9)
    assert rule_of(run, every=3) == RetentionConfig(checkpoints_last=50, checkpoints_every=3)


def test_a_fork_does_not_go_by_its_parents_rule(tmp_path: Path) -> None:
    retention = {"checkpoints_last": 50}
    parent = Run.create_or_open(configuration(str(tmp_path), retention=retention))
    checkpoint(parent, 0, extra=as_continued(parent))
    fork = fork_run(parent, 0, "fork", ["retention.checkpoints_last=3"])
    assert rule_of(fork).checkpoints_last == 3


def test_rules_that_mean_nothing_are_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="checkpoints_every is 3, which means nothing"):
        rule_of(run, None, 3)
    with pytest.raises(ConfigError, match="greater than or equal to 2"):
        rule_of(run, 1, None)


def test_a_checkpoint_written_twice_keeps_its_winner(run: Run) -> None:
    start = committed(run, checkpoint_slot(0))
    assert start is not None
    again = checkpoint(run, 0)
    assert again.reused
    assert again.sha256 == start.sha256
    found = collect(run)
    assert {item.reason for item in found.garbage} == {"unreferenced"}
    assert has_arrays(run, 0)


def test_arrays_that_retention_took_are_missed_by_that_name(tmp_path: Path) -> None:
    from marin_rl.storage.checkpoints import commit_checkpoint, restore_checkpoint

    run, tree = whole_run(str(tmp_path), 0), {"parameters": {"weight": np.arange(6.0)}}
    refs = [
        commit_checkpoint(
            run, checkpoint_slot(n), tree, content={}, parents=[], totals={}, extra={}
        )
        for n in (1, 2, 3)
    ]
    collect(run, rule_of(run, 2, None))
    restored = restore_checkpoint(run, refs[1], tree)
    assert restored["parameters"]["weight"].tolist() == list(range(6))
    with pytest.raises(ObjectMissing, match="pruned by the run's retention"):
        restore_checkpoint(run, refs[0], tree)
