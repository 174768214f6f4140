"""Killed with SIGKILL in any stage and started again, a run ends in the same files and weights.

The parent only watches the run's folder and kills when it sees what a stage leaves behind; the
program itself knows nothing of being tested. One run is killed in one stage after the other.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from debug_run import REPOSITORY, ROUNDS, SHARDS, Played, debug

from marin_rl.config import Config
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.rollouts import iter_shards
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    committed,
    evals_slot,
    rollouts_slot,
    sft_slot,
)

TIMEOUT_S = 120

PROGRAM = """
import json, sys
from flows.rl_loop import start
from marin_rl.config import parse_config
start(parse_config(json.loads(sys.argv[1])))
"""

# What the parent waits for before it kills: the first trace of a stage's work.
TRACES: Mapping[str, str] = {
    "sft": "sft/step-00002/manifest.json",
    "begin": "checkpoints/round-00000/*",
    "evaluate": "evals/round-00000/*",
    "generate": "rollouts/round-00000/shard-*.parquet",
    "seal": "rollouts/round-00001/manifest.json",
    "process": "batches/round-00001/batches-*",
    "train": "checkpoints/round-00002/*",
    "publish": "checkpoints/round-00003/manifest.json",
}


def spawn(config: Config, api: str) -> subprocess.Popen[bytes]:
    """The loop in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, config.model_dump_json()],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_API_URL": api},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that must end well."""
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, told.decode()[-3000:]


def kill_when(process: subprocess.Popen[bytes], seen: Callable[[], bool], delay_s: float) -> None:
    """SIGKILL the process `delay_s` after `seen` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not seen() and process.poll() is None:
        assert time.monotonic() < deadline, "the stage never began"
        time.sleep(0.0005)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def trace(folder: Path, stage: str) -> Callable[[], bool]:
    """Whether the first trace of a stage is there."""
    return lambda: next(folder.glob(TRACES[stage]), None) is not None


def summaries(config: Config) -> dict[str, object]:
    """What every slot of the run says of itself, metrics included; times and attempts differ."""
    run = Run.create_or_open(config)
    names = [sft_slot(2), sft_slot(4), *map(checkpoint_slot, range(ROUNDS + 1))]
    for round in range(ROUNDS):
        names += [rollouts_slot(round), batches_slot(round), evals_slot(round)]
    return {name: ref.summary for name in names if (ref := committed(run, name))}


def samples(config: Config) -> list[pa.Table]:
    """What was sampled, bit by bit, shard by shard."""
    run = Run.create_or_open(config)
    columns = ("rollout_id", "token_ids", "logprobs", "reward", "policy_digest")
    return [table for round in range(ROUNDS) for table in iter_shards(run, round, columns)]


def parameters(config: Config) -> list[str]:
    """Digests of the parameters after every round."""
    run = Run.create_or_open(config)
    refs = [committed(run, checkpoint_slot(round)) for round in range(ROUNDS + 1)]
    return [manifest_of(run.store, ref).extra["parameters_digest"] for ref in refs if ref]


def check_killed_at(stages: Sequence[str], played: Played, api: str, root: Path) -> None:
    """Kill one run at the stages in order, finish it, and compare it with the unharmed one."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"delays from seed {seed}")
    delays = random.Random(seed)
    config = debug(root)
    folder = root / config.run_id
    for stage in stages:
        process = spawn(config, api)
        kill_when(process, trace(folder, stage), delays.choice([0.0, delays.uniform(0, 0.1)]))
    finish(spawn(config, api))
    assert summaries(config) == summaries(played.config)
    assert samples(config) == samples(played.config)
    assert parameters(config) == parameters(played.config)
    for round in range(ROUNDS):
        visible = (folder / rollouts_slot(round)).glob("shard-*.parquet")
        assert len(list(visible)) == SHARDS


def test_killed_while_generating_and_while_training(
    api: str, played: Played, tmp_path: Path
) -> None:
    check_killed_at(["generate", "train"], played, api, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*TRACES])
def test_killed_in_each_stage(stage: str, api: str, played: Played, tmp_path: Path) -> None:
    check_killed_at([stage], played, api, tmp_path)


@pytest.mark.slow
def test_killed_in_all_stages_one_after_the_other(api: str, played: Played, tmp_path: Path) -> None:
    check_killed_at([*TRACES], played, api, tmp_path)
