"""A round done again gives the same bits; other settings differ as far as they should."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import full_logits
from support.policy_runs import play_round, play_two_rounds, small_config
from support.quick_programs import drop_quick_programs, quick_programs
from typer.testing import CliRunner

from marin_rl.batching.build import preview_round
from marin_rl.cli import app
from marin_rl.errors import ConfigError, InputError, ObjectMissing
from marin_rl.rollouts.replay import rescore_round
from marin_rl.runtime import RunRuntime
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint
from marin_rl.serving.weights.export import export_hf
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.rewards import read_rewards
from marin_rl.storage.upkeep.forks import fork_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, rule_of
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.replay import replay_round
from marin_rl.training.reprocess import reprocess_round

pytestmark = [pytest.mark.slow, pytest.mark.bits]

SETTINGS = (
    "policy.model.layers=1", "sampling.max_tokens=6", "training.learning_rate=1e-2",
    "training.warmup_steps=0", "training.epochs=2", "batching.sequences_per_step=8",
    "objective.kl_coefficient=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Quickly, but by the code that users' programs have: only that gives other processes' bits."""
    drop_quick_programs()
    with quick_programs(emitters=True):
        yield


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    run = Run.create_or_open(small_config(root, *SETTINGS))
    play_two_rounds(run)
    return root


@pytest.mark.parametrize(
    "other",
    [
        ("training.optimizer=muon",),
        ("training.optimizer=adamw_8bit", "policy.model.hidden_size=64"),
        ("training.optimizer=adamw_offload",),
        ("training.optimizer=adamw_8bit", "policy.lora.rank=16", "policy.model.hidden_size=256"),
    ],
)
def test_a_round_of_another_optimizer_done_again_gives_the_same_bits(tmp_path, other):
    further = *other, "checkpoints.optimizer_every_rounds=2"
    run = Run.create_or_open(small_config(tmp_path, *SETTINGS, *further))
    play_two_rounds(run)
    # The second begins with a checkpoint whose optimizer's state is found again.
    for round in (0, 1):
        assert replay_round(run, round).equal
    assert not check_run(run.config.root, run.run_id).faults


@pytest.fixture
def run(played: Path) -> Run:
    return Run.open(str(played), "debug")


def test_a_round_done_again_gives_the_same_bits(run: Run) -> None:
    before = run.store.list()
    for round in range(2):
        found = replay_round(run, round)
        assert found.equal
        assert found.digest == found.recorded_digest
        assert found.compared > 20
        assert (found.differing, dict(found.metrics), dict(found.changed)) == ((), {}, {})
    assert run.store.list() == before
    assert check_run(run.config.root, "debug").faults == ()


# A fork that runs Python code is refused once JAX has threads, so the child moves and starts again.
ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, {cores}); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
REPLAY = [sys.executable, "-m", "marin_rl", "replay-step", "debug", "--round", "0", "--json"]


def replayed(root: Path, cores: set[int], **environment: str) -> dict[str, Any]:
    """`marin-rl replay-step` in a process that starts on these cores."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", ON_CORES.format(cores=cores), *REPLAY[1:], "--root", str(root)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_process_that_starts_on_one_core_replays_what_two_did(played: Path) -> None:
    for cores in ({min(os.sched_getaffinity(0))}, os.sched_getaffinity(0)):
        found = replayed(played, cores)
        assert (found["equal"], found["differing"], found["changed"]) == (True, [], {})


def test_a_replay_starts_the_recorded_pool_and_names_what_it_cannot_have(played: Path) -> None:
    run = Run.open(str(played), "debug")
    recorded = committed_manifest(run.store, checkpoint_slot(1), "").extra["machine"]
    found = replayed(played, os.sched_getaffinity(0), NPROC="5")
    assert found["equal"]
    assert found["changed"] == {}
    # two devices need two threads, whatever is asked for
    four = "--xla_force_host_platform_device_count=4"
    named = replayed(played, os.sched_getaffinity(0), XLA_FLAGS=four)["changed"]
    assert named == {"threads": [recorded["threads"], "4"]}


def test_a_difference_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine: the same update, but of a learning rate that is a little off."""
    training = run.config.training.model_copy(update={"learning_rate": 1.001e-2})
    config = run.config.model_copy(update={"training": training})
    found = replay_round(Run(config=config, run_id=run.run_id, store=run.store), 0)
    assert not found.equal
    assert found.digest != found.recorded_digest
    largest = max(item.largest for item in found.differing if item.name.startswith("parameters"))
    assert 0 < largest < 1e-2
    assert found.metrics["lr"] == pytest.approx((0.01, 0.01001), rel=1e-3)


def test_a_pruned_round_is_compared_by_its_digest(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder.url, tmp_path / "debug")
    copy = Run.open(str(tmp_path), "debug")
    collect(copy, rule_of(copy, 2, None))  # the reference pins checkpoint 0
    assert replay_round(copy, 0).equal
    with pytest.raises(ObjectMissing, match="expected a trained round"):
        replay_round(copy, 2)


def test_a_fork_goes_on_and_its_shared_rounds_replay_as_its_parent_played(run, tmp_path):
    shutil.copytree(run.folder.url, tmp_path / "debug")
    fork = fork_run(Run.open(str(tmp_path), "debug"), 1, "fork", ["training.learning_rate=1e-3"])
    runtime = RunRuntime(fork)
    try:
        from marin_rl.storage.runs import latest_checkpoint

        start = latest_checkpoint(fork)
        assert start is not None
        play_round(runtime, fork, 1, start)
    finally:
        runtime.close()
    assert check_run(str(tmp_path), "fork").faults == ()
    assert [replay_round(fork, round).equal for round in range(2)] == [True, True]


def test_other_settings_move_rollouts_advantages_and_the_gradient(run: Run) -> None:
    same = reprocess_round(run, 1, [])
    assert (same.before, same.moved, same.settings) == (same.after, {}, ())
    assert same.advantages.largest == 0
    assert same.gradient is not None
    assert same.gradient.cosine == pytest.approx(1)
    assert same.gradient.norm_before == same.gradient.norm_after > 0
    doubled = reprocess_round(run, 1, ["objective.aggregation=sequence_mean_token_mean"])
    assert doubled.gradient is not None
    assert doubled.gradient.norm_after < doubled.gradient.norm_before
    assert 0.5 < (doubled.gradient.cosine or 0) <= 1 + 1e-6


def test_other_rewards_move_the_gradient(run, tmp_path, monkeypatch):
    (tmp_path / "rewards_of_replay.py").write_text(
        "def first(example, completion):\n    return float(ord(completion[:1] or ' ') % 7)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    shutil.copytree(run.folder.url, tmp_path / "debug")
    copy = Run.open(str(tmp_path), "debug")
    rescore_round(copy, 1, "rewards_of_replay:first", "first")
    before = copy.store.list()
    found = reprocess_round(copy, 1, ["objective.advantage=dr_grpo"], "first")
    assert copy.store.list() == before
    assert found.settings == ('objective.advantage: "rloo" -> "dr_grpo"',)
    assert found.before.rollouts == found.after.rollouts
    plain, other = (
        preview_round(copy, 1, copy.config, rewards).plan.decision.advantage_N
        for rewards in (None, read_rewards(copy, 1, "first"))
    )
    size = copy.config.rollouts.group_size  # dr_grpo is (n - 1) / n of rloo
    apart = np.abs(plain - (size - 1) / size * other)
    assert found.advantages.largest == pytest.approx(apart.max())
    assert found.advantages.mean == pytest.approx(apart.mean())
    assert apart.max() > 0.5
    assert found.gradient is not None
    assert found.gradient.cosine is not None
    assert abs(found.gradient.cosine) < 0.99


def test_settings_that_samples_depend_on_are_refused(run: Run) -> None:
    for setting in ("sampling.temperature=0.5", "policy.compute_dtype=bfloat16", "seed=3"):
        with pytest.raises(ConfigError, match="what was sampled depends on these"):
            reprocess_round(run, 1, [setting])


def test_a_checkpoint_becomes_a_folder_that_gives_the_same_logits(run: Run, tmp_path: Path) -> None:
    exported = export_hf(run, 1, tmp_path / "hf")
    assert exported.round == 1
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    models = read_checkpoint(run, 1).model, load_hf(tmp_path / "hf")
    logits = [full_logits(model, np.arange(7, 19, dtype=np.int32)) for model in models]
    assert np.abs(logits[0] - logits[1]).max() < 1e-4
    with pytest.raises(InputError, match="is not empty"):
        export_hf(run, 1, tmp_path / "hf")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file: expected a new folder"):
        export_hf(run, 1, tmp_path / "file")


def test_the_commands(run: Run, tmp_path: Path) -> None:
    def invoke(*arguments: str):
        runner = CliRunner(env={"COLUMNS": "200"})
        return runner.invoke(app, [*arguments, "--root", run.config.root])

    equal = invoke("replay-step", "debug", "--round", "1", "--json")
    assert (equal.exit_code, json.loads(equal.stdout)["equal"]) == (0, True)
    shown = invoke("reprocess", "debug", "--round", "1", "--set", "objective.advantage=grpo")
    assert "gradient cosine" in shown.output
    folder = tmp_path / "hf"
    assert invoke("export", "debug", "--hf", str(folder)).exit_code == 0
    assert (folder / "model.safetensors").exists()
    assert isinstance(invoke("export", "debug", "--round", "1").exception, ConfigError)
