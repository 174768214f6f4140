"""Killed with SIGKILL in any stage and started again, a run ends in the same files and weights.

Who kills only watches the run's folder and does it when it sees what a stage leaves behind; the
run knows nothing of being tested. One run is killed in one stage after the other.
"""

import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from support.cases import printed_seed
from support.flow_runs import ROUNDS, SHARDS, ForkServer, Played, debug

from marin_rl.config import Config
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    committed,
    evals_slot,
    rollouts_slot,
    sft_slot,
)
from marin_rl.storage.tables.rollouts import iter_shards

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


def summaries(config: Config) -> dict[str, object]:
    """Totals of every slot of the run, metrics included; times and attempts differ."""
    run = Run.create_or_open(config)
    names = [sft_slot(2), sft_slot(4), *map(checkpoint_slot, range(ROUNDS + 1))]
    for round in range(ROUNDS):
        names += [rollouts_slot(round), batches_slot(round), evals_slot(round)]
    return {name: ref.summary for name in names if (ref := committed(run, name))}


def samples(config: Config) -> list[pa.Table]:
    """Sampled rows, bit by bit, shard by shard."""
    run = Run.create_or_open(config)
    columns = ("rollout_id", "token_ids", "logprobs", "reward", "policy_digest")
    return [table for round in range(ROUNDS) for table in iter_shards(run, round, columns)]


def parameters(config: Config) -> list[str]:
    """Digests of the parameters after every round."""
    run = Run.create_or_open(config)
    refs = [committed(run, checkpoint_slot(round)) for round in range(ROUNDS + 1)]
    return [manifest_of(run.store, ref).extra["parameters_digest"] for ref in refs if ref]


def check_killed_at(
    stages: Sequence[str], played: Played, fork_server: ForkServer, root: Path
) -> None:
    """Kill one run at the stages in order, finish it, and compare it with the unharmed one."""
    delays = random.Random(printed_seed())
    config = debug(root)
    folder = root / config.run_id
    for stage in stages:
        delay_s = delays.choice([0.0, delays.uniform(0, 0.1)])
        ended = fork_server.run(config, trace=(folder, TRACES[stage], delay_s))
        # What is left to do after the last trace may be done before its delay is over.
        assert ended == [-signal.SIGKILL] or (stage, ended) == ("publish", [0]), fork_server.said()
    assert fork_server.run(config) == [0], fork_server.said()
    assert summaries(config) == summaries(played.config)
    assert samples(config) == samples(played.config)
    assert parameters(config) == parameters(played.config)
    for round in range(ROUNDS):
        visible = (folder / rollouts_slot(round)).glob("shard-*.parquet")
        assert len(list(visible)) == SHARDS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_in_all_stages_one_after_the_other(
    fork_server: ForkServer, played: Played, tmp_path: Path
) -> None:
    """Kills of a real process, which the crash states of test_every_operation.py leave out."""
    check_killed_at([*TRACES], played, fork_server, tmp_path)
