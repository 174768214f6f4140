"""Checkpoints that are written while the process goes on: the order of what is committed stays."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from marin_rl.config import Config
from marin_rl.errors import CommitConflict, CorruptObject, StorageError, StoreUnavailable
from marin_rl.storage import written_behind
from marin_rl.storage.checkpoints import commit_checkpoint, restore_checkpoint
from marin_rl.storage.commits import (
    commit_manifest,
    commit_slot,
    manifest_of,
    new_attempt,
    new_manifest,
    read_manifest,
    ref_of,
)
from marin_rl.storage.runs import Run, checkpoint_slot, committed_checkpoint
from marin_rl.storage.written_behind import end_writes, write_behind

SLOT, LATER = checkpoint_slot(3), checkpoint_slot(4)


@pytest.fixture
def run(tmp_path):
    run = Run.create_or_open(Config(root=str(tmp_path)))
    yield run
    end_writes(run.folder.url)


def commit(run, tree, slot=SLOT):
    return commit_checkpoint(
        run, slot, tree, content={}, parents=(), totals={"loss": 0.5}, extra={}, behind=True
    )


def later(run):
    return commit_slot(run.store, LATER, attempt=new_attempt(), fingerprint="f")


def test_the_reference_is_that_of_what_is_committed(run):
    tree = {"weight": np.arange(60_000, dtype=np.float32)}
    ref = commit(run, tree)
    assert (ref.reused, ref.summary) == (False, {"loss": 0.5})
    assert manifest_of(run.store, ref).sha256 == ref.sha256
    assert committed_checkpoint(run, 3) == ref
    np.testing.assert_array_equal(restore_checkpoint(run, ref, tree)["weight"], tree["weight"])


def test_reads_of_the_slot_and_all_commits_wait(run):
    may_write, told = threading.Event(), list[str]()
    manifest = new_manifest(SLOT, attempt=new_attempt(), fingerprint="f")

    def work():
        assert may_write.wait(60)
        told.append("written")
        assert commit_manifest(run.store, manifest).sha256 == manifest.sha256

    def reads():
        assert read_manifest(run.store, SLOT) is not None
        told.append("read")

    def commits():
        later(run)
        told.append("committed")

    write_behind(run.store.url_of(SLOT), manifest, work)
    assert manifest_of(run.store, ref_of(manifest)) is manifest
    assert read_manifest(run.store, LATER) is None  # another slot: nothing to wait for
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(reads), threads.submit(commits)]
        may_write.set()
        for each in waiting:
            each.result(60)
    assert told[0] == "written"
    assert sorted(told) == ["committed", "read", "written"]


@pytest.fixture
def busy():
    """The thread that writes is busy: who waits for a write does it."""
    done = threading.Event()
    written_behind._thread.submit(done.wait, 60)
    yield
    done.set()


def test_a_write_that_failed_is_tried_again_by_who_waits(run, busy):
    failures = [StoreUnavailable("no answer")]
    manifest = new_manifest(SLOT, attempt=new_attempt(), fingerprint="f")

    def work():
        if failures:
            raise failures.pop()
        commit_manifest(run.store, manifest)

    write_behind(run.store.url_of(SLOT), manifest, work)
    with pytest.raises(StoreUnavailable):
        later(run)
    assert not run.store.list(LATER)
    later(run)
    assert committed_checkpoint(run, 3) == ref_of(manifest)


def test_a_disk_that_fills_up_meanwhile_fails_what_waits(run, busy):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # a limit of files stands for the disk
    tree = {"weight": np.random.default_rng(0).standard_normal((300, 300))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        ref = commit(run, tree)
        with pytest.raises(StorageError, match=r"write 720\d\d\d bytes"):
            later(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    later(run)
    assert committed_checkpoint(run, 3) == ref


def test_arrays_that_change_before_they_are_written_are_refused(run, busy):
    tree = {"weight": np.zeros(10, np.float32)}
    commit(run, tree)
    tree["weight"][0] = 1
    with pytest.raises(CorruptObject, match=r"its arrays changed while they were written"):
        later(run)
    assert not [key for key in run.store.list(SLOT) if key.endswith("manifest.json")]


def test_another_process_that_commits_meanwhile_ends_this_one(run, busy):
    ref = commit(run, {"weight": np.zeros(10, np.float32)})
    other = replace(manifest_of(run.store, ref), attempt=new_attempt())
    run.store.put_if_absent(f"{SLOT}/manifest.json", other.to_json())
    with pytest.raises(CommitConflict, match="committed by another process meanwhile"):
        later(run)


def test_writes_that_fail_at_the_end_of_a_run_are_given_up(run, busy, caplog):
    tree = {"weight": np.zeros(10, np.float32)}
    commit(run, tree)
    tree["weight"][0] = 1
    end_writes(f"{run.folder.url}-2")  # another run's
    assert "is not committed: " not in caplog.text
    end_writes(run.folder.url)
    assert "is not committed: " in caplog.text
    assert committed_checkpoint(run, 3) is None
    later(run)
