"""Runs: created once, continued under the same content, locked, and read back from their slots."""

import json
import os
import pickle
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.fake_stores import FakeGCS
from support.fault_injection import Operations, inject_faults

from marin_rl.config import Config, parse_config
from marin_rl.errors import (
    ConfigError,
    CorruptObject,
    NewerSchema,
    ObjectMissing,
    RootUnfit,
    RunLocked,
    StorageError,
)
from marin_rl.storage import run_progress, runs
from marin_rl.storage.commits import commit_manifest, new_manifest
from marin_rl.storage.runs import Run, RunRef
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.storage.stores.locks import Holder, holder_in
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.training.reprocess import reprocess_round
from schemas.manifests import sealed_json


@pytest.fixture
def config(store_url: str, store_options: dict[str, Any]) -> Config:
    return configured(store_url, storage_options=store_options)


def configured(root: str, **keys: Any) -> Config:
    return parse_config({"root": root, "run_id": "run-1", **keys})


@pytest.fixture
def local(tmp_path: Path) -> Run:
    """A new run in a local folder."""
    return Run.create_or_open(configured(str(tmp_path)))


def commit(run: Run, *slots: str, **totals: float) -> None:
    for slot in slots:
        manifest = new_manifest(slot, attempt="a", fingerprint="f", totals=totals)
        commit_manifest(run.store, manifest)


# --- identity ----------------------------------------------------------------------------------


def test_a_run_is_created_once_and_opened_after(config: Config) -> None:
    run = Run.create_or_open(config)
    first = run.store.read("run.json")
    record = json.loads(first)
    assert record["format"] == "marin-rl/run"
    assert record["version"] == 1
    assert parse_config(record["config"]) == config
    assert record["seeds"] == {"run": 0}
    assert {"package", "git"} >= set(record["code"]) >= {"package"}
    assert "numpy" in record["libraries"]
    assert run.store.list() == ["run.json"]

    again = Run.create_or_open(config)
    assert again.store.read("run.json") == first
    assert again.config == config == Run.open(config.root, "run-1", config.storage_options).config
    assert runs.runs_under(config.root, config.storage_options) == ["run-1"]


def test_another_content_is_refused_key_by_key(config: Config) -> None:
    Run.create_or_open(config)
    other = configured(
        config.root,
        storage_options=config.storage_options,
        seed=7,
        rounds=99,
        training={"learning_rate": 1e-4},
    )
    with pytest.raises(ConfigError) as caught:
        Run.create_or_open(other)
    text = str(caught.value)
    assert "run 'run-1' exists with another content" in text
    assert "\n  seed: 0 -> 7\n  training.learning_rate: 0.0003 -> 0.0001\n" in text
    if "://" in config.root:  # only a local folder can be given to `run`
        assert text.endswith("give the values that it was started with.")
    else:
        assert text.endswith(f"\n  marin-rl run {config.root}/run-1")
    assert "rounds: 10 -> 99" not in text


@pytest.mark.parametrize(
    ("recorded", "named"),
    [
        ({"over_sampling_factor": 2, "select": "best"}, "asynchrony.select=best"),
        (
            {"curriculum": "weights", "curriculum_weights": {"0": {"echo": 1}}},
            "asynchrony.curriculum=weights",
        ),
    ],
)
def test_a_run_of_a_withdrawn_key_is_read_and_not_gone_on_with(tmp_path, recorded, named):
    config = configured(str(tmp_path), asynchrony={"max_staleness": 1})
    Run.create_or_open(config)
    file = tmp_path / "run-1" / "run.json"
    record = json.loads(file.read_bytes())
    record["config"]["asynchrony"] |= recorded
    del record["digest"]
    file.write_bytes(sealed_json(record))
    kept = {"over_sampling": {"factor": 2.0}} if "select" in recorded else {}
    run = Run.open(str(tmp_path), "run-1")
    assert run.config.model_dump()["asynchrony"] == {"max_staleness": 1, **kept}
    assert check_run(str(tmp_path), "run-1").faults == ()
    for refused in (
        lambda: Run.create_or_open(run.config),
        lambda: reprocess_round(run, 0, ["objective.clip_high=0.3"]),
    ):
        with pytest.raises(ConfigError, match=f"begun with {named}, which was withdrawn"):
            refused()


def test_many_differences_are_counted(tmp_path: Path) -> None:
    Run.create_or_open(configured(str(tmp_path)))
    training = {
        "learning_rate": 1e-4, "beta1": 0.8, "beta2": 0.8, "epsilon": 1e-6, "weight_decay": 0.1,
        "warmup_steps": 3, "gradient_clip_norm": 2.0, "epochs": 2,
    }  # fmt: skip
    options = {"letters_min": 1, "text": "long " * 1000}
    other = configured(
        str(tmp_path), seed=7, training=training, environment={"name": "echo", "options": options}
    )
    with pytest.raises(ConfigError) as caught:
        Run.create_or_open(other)
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if " -> " in line]) == 8
    assert any(re.fullmatch(r"  and [2-9] more", line) for line in lines)
    assert max(map(len, lines)) <= 300


def test_free_keys_of_the_given_config_hold_for_this_process(tmp_path: Path) -> None:
    Run.create_or_open(configured(str(tmp_path), rounds=5))
    more = configured(str(tmp_path), rounds=50, flow={"retries": 9})
    run = Run.create_or_open(more)
    assert (run.config.rounds, run.config.flow.retries) == (50, 9)
    assert Run.open(str(tmp_path), "run-1").config.rounds == 5, "what was written never changes"
    assert Run.of(run.reference).config == run.config


def test_two_creators_with_different_contents_cannot_both_win(tmp_path: Path) -> None:
    barrier, outcomes = threading.Barrier(4), []

    def create(seed: int) -> None:
        barrier.wait(30)
        try:
            outcomes.append(Run.create_or_open(configured(str(tmp_path), seed=seed)).config.seed)
        except ConfigError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=create, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
    losers = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(losers) == 3
    assert all(f"seed: {winner} -> " in text for text in losers)


def test_a_reference_names_the_run_in_json(config: Config) -> None:
    run = Run.create_or_open(
        parse_config(
            config.model_dump()
            | {
                "rounds": 12,
                "inference": {"canary_tolerance": 1e-7, "endpoints": ["http://h:1/v1"]},
                "trackers": {"tensorboard": "logs: here # and 'there'"},
            }
        )
    )
    ref = run.reference
    assert set(ref.free) == {
        "rounds=12",
        "inference.canary_tolerance=1e-07",
        'inference.endpoints=["http://h:1/v1"]',
        """trackers.tensorboard="logs: here # and 'there'\"""",
    }
    as_json = json.dumps(asdict(ref))
    fields = json.loads(as_json)
    assert Run.of(RunRef(**(fields | {"free": tuple(fields["free"])}))).config == run.config
    assert len(as_json) < 1000


def test_a_reference_holds_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ref = Run.create_or_open(configured("runs")).reference
    assert ref.root == str(tmp_path / "runs")
    monkeypatch.chdir("/")
    assert Run.of(ref).store.list() == ["run.json"]


def test_a_run_survives_pickling(config: Config) -> None:
    run = Run.create_or_open(config)
    copy = pickle.loads(pickle.dumps(run))
    assert copy.config == run.config
    assert copy.store.read("run.json") == run.store.read("run.json")


def test_a_run_that_is_not_there_names_those_that_are(config: Config) -> None:
    Run.create_or_open(config)
    with pytest.raises(ObjectMissing, match=r"no run 'run-2' under .*; found there: run-1"):
        Run.open(config.root, "run-2", config.storage_options)


def test_an_empty_root_says_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match="found there: nothing"):
        Run.open(str(tmp_path / "none"), "run-1")


def test_an_unfit_root_is_refused_before_anything_is_written(gcs: FakeGCS) -> None:
    gcs.honours_preconditions = False
    unfit = configured("gs://bucket/unfit", storage_options=gcs.options)
    with pytest.raises(RootUnfit, match="does not honour create-if-absent"):
        Run.create_or_open(unfit)
    assert open_store("gs://bucket/unfit", gcs.options).list() == []


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"{", CorruptObject, "run.json: expected a JSON object"),
        (sealed_json({"format": "marin-rl/run", "version": 9}), NewerSchema, "version 9 is newer"),
    ],
)
def test_an_unreadable_run_json_is_refused(tmp_path, data, error, message):
    open_store(str(tmp_path)).put_part("run-1/run.json", data)
    with pytest.raises(error, match=message):
        Run.create_or_open(configured(str(tmp_path)))
    assert (tmp_path / "run-1" / "run.json").read_bytes() == data


def test_seeds_depend_on_the_run_and_every_part(tmp_path: Path) -> None:
    one = Run.create_or_open(configured(str(tmp_path), run_id="a", seed=1))
    same = Run.open(str(tmp_path), "a")
    others = [
        Run.create_or_open(configured(str(tmp_path), run_id="b", seed=1)).seed_of("x", 3, "y"),
        Run.create_or_open(configured(str(tmp_path), run_id="c", seed=2)).seed_of("x", 3, "y"),
        one.seed_of("x", 4, "y"),
        one.seed_of("x", 3),
        one.seed_of("x", "3", "y"),
        one.seed_of("x3", "y"),
    ]
    assert one.seed_of("x", 3, "y") == same.seed_of("x", 3, "y")
    assert len({one.seed_of("x", 3, "y"), *others}) == 7
    seeds = [one.seed_of(i) for i in range(2000)]
    assert all(0 <= seed < 2**48 for seed in seeds)
    assert max(seeds) > 2**47 > min(seeds)


# --- lock --------------------------------------------------------------------------------------

HOLD = """
import sys
from marin_rl.storage.runs import Run
with Run.open(sys.argv[1], "run-1").lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(local: Run) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the run."""
    command = [sys.executable, "-c", HOLD, local.config.root]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_sees_which_process_locks_the_run(local, holder):
    with (
        pytest.raises(RunLocked, match=f"being worked on by process {holder.pid} on this machine"),
        local.lock(),
    ):
        pass


def test_a_killed_holder_holds_nothing(local: Run, holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait()
    with local.lock():
        found = holder_in(local.store.local_path(".lock") or Path())
        assert found == Holder(os.getpid(), platform.node())


def test_the_owner_of_a_lock_is_checked_on_its_own_machine_alone(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    assert holder_in(lock) is None

    def told(text: str) -> tuple[str, bool]:
        lock.write_text(text)
        found = holder_in(lock)
        assert found is not None
        return str(found), found.alive

    assert told(f"{os.getpid()} {platform.node()}\n") == (f"process {os.getpid()}", True)
    assert told(f"999999999 {platform.node()}\n") == ("process 999999999", False)
    assert told("999999999 another\n") == ("process 999999999 on another", True)
    assert told("999999999\n") == ("process 999999999", False)  # as older software signed
    for text in ("", "half"):
        lock.write_text(text)
        assert holder_in(lock) is None


def test_a_holder_of_another_machine_is_named_with_it(local: Run) -> None:
    with local.lock():
        (local.store.local_path(".lock") or Path()).write_text("17 another\n")
        with pytest.raises(RunLocked, match="being worked on by process 17 on another: wait"):
            local.lock().__enter__()


def test_the_lock_can_be_taken_again_once_it_is_let_go(local: Run) -> None:
    for _ in range(2):
        with local.lock(), pytest.raises(RunLocked, match=str(os.getpid())), local.lock():
            pass
    with pytest.raises(ZeroDivisionError), local.lock():
        _ = 1 / 0
    with local.lock():
        pass


def test_a_run_folder_that_is_gone_is_a_storage_error(local: Run) -> None:
    (Path(local.config.root) / "run-1" / "run.json").unlink()
    (Path(local.config.root) / "run-1").rmdir()
    with pytest.raises(StorageError, match="cannot write"), local.lock():
        pass


def test_object_stores_are_not_locked() -> None:
    run = Run.create_or_open(configured("memory://locks"))
    with run.lock(), run.lock():
        pass
    assert run.store.list() == ["run.json"]


# --- slots and progress ------------------------------------------------------------------------


def test_names_of_slots() -> None:
    assert runs.round_name(12) == "round-00012"
    assert runs.shard_key(12, 3) == "rollouts/round-00012/shard-0003.parquet"
    assert runs.rollouts_slot(12) == "rollouts/round-00012"
    assert runs.batches_slot(12) == "batches/round-00012"
    assert runs.checkpoint_slot(12) == "checkpoints/round-00012"
    assert runs.evals_slot(12) == "evals/round-00012"
    assert runs.metrics_key(12) == "metrics/round-00012.parquet"
    assert runs.sft_slot(250) == "sft/step-00250"
    assert runs.round_of("round-00012") == runs.round_of("round-00012.parquet") == 12
    assert runs.round_of("round-123456") == 123456
    assert runs.round_of("round-12") is None
    assert runs.round_of(".round-00012") is None


def test_progress_is_which_slots_are_committed(config: Config) -> None:
    run = Run.create_or_open(config)
    assert run_progress.progress(run) == {}
    assert runs.latest_checkpoint(run) is None
    commit(run, "checkpoints/round-00000", rows=3)
    for shard in range(3):
        run.store.put_part(runs.shard_key(0, shard), b"PAR1")
    run.store.put_part("rollouts/round-00000/.shard-0003.parquet.12.tmp", b"PA")
    commit(run, "rollouts/round-00000", "batches/round-00000", "evals/round-00000")
    run.store.put_part(runs.metrics_key(0), b"PAR1")
    run.store.put_part("checkpoints/round-00001/attempt-x/data", b"not committed")
    run.store.put_part(runs.shard_key(1, 0), b"PAR1")
    run.store.put_part("metrics/notes.txt", b"not a round")

    everything = {"rollouts": True, "batches": True, "evaluation": True, "metrics": True}
    assert run_progress.progress(run) == {
        0: run_progress.RoundProgress(round=0, shards=3, checkpoint=True, **everything),
        1: run_progress.RoundProgress(round=1, shards=1),
    }
    latest = runs.latest_checkpoint(run)
    assert latest is not None
    assert latest == runs.committed_checkpoint(run, 0)
    assert (latest.slot, latest.reused) == ("checkpoints/round-00000", True)
    assert latest.summary == {"rows": 3.0}
    assert runs.committed_checkpoint(run, 1) is None


def test_the_latest_checkpoint_is_the_highest_round_not_the_last_name(local: Run) -> None:
    commit(local, *(runs.checkpoint_slot(round) for round in (2, 99_999, 100_000)))
    local.store.put_part("checkpoints/round-100001/attempt/data", b"")
    latest = runs.latest_checkpoint(local)
    assert latest is not None
    assert latest.slot == "checkpoints/round-100000"


def test_the_latest_warm_start(local: Run) -> None:
    assert runs.latest_sft(local) is None
    commit(local, "sft/step-00250", "sft/step-00500")
    local.store.put_part("sft/step-00750/attempt/data", b"")
    latest = runs.latest_sft(local)
    assert latest is not None
    assert latest.slot == "sft/step-00500"


def test_the_cost_of_a_round_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Storage operations of a round: after 1,000 rounds as many as before."""
    with inject_faults(Operations()) as counted:
        local = Run.create_or_open(configured(str(tmp_path / "runs")))

    def ask(round: int) -> int:
        before = counted.count
        assert runs.committed(local, runs.rollouts_slot(round)) is None
        assert runs.committed_checkpoint(local, round) is not None
        latest = runs.latest_checkpoint(local)
        assert latest is not None
        assert latest.slot == runs.checkpoint_slot(round)
        return counted.count - before

    operations = []
    for round in range(1000):
        folder = Path(local.config.root, "run-1", runs.checkpoint_slot(round))
        folder.mkdir(parents=True)  # 1,000 slots without 1,000 syncs of the disk
        manifest = new_manifest(runs.checkpoint_slot(round), attempt="a", fingerprint="f")
        (folder / "manifest.json").write_bytes(manifest.to_json())
        if round in (5, 50, 500, 999):
            operations.append(ask(round))
    assert operations[0] > 0
    assert operations == [operations[0]] * 4
