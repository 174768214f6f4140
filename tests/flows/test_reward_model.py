"""Flows over pairs: killed and resumed to the same bits, and a judge that teaches a policy."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import printed_seed
from support.flow_runs import REPOSITORY, debug
from support.word_forms import write_prompts

import flows.reward_model
import flows.rl_loop
from marin_rl import Learned, learn
from marin_rl.analysis.status import metric_rows
from marin_rl.config import Config, parse_config
from marin_rl.rollouts.rewards import pairs_of_run
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, committed, preference_slot, reward_model_slot
from marin_rl.storage.tables.pairs import write_pairs
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.types import Message, PreferencePair

PROGRAM = """
import json, sys
from flows.{section} import start
from marin_rl.config import parse_config
start(parse_config(json.loads(sys.argv[1])))
"""

SLOTS = {"reward_model": reward_model_slot, "preference": preference_slot}
TIMEOUT_S = 240


def spawn_program(program: str, config: Config, api: str) -> subprocess.Popen[bytes]:
    """A Python program that is given a configuration as JSON."""
    return subprocess.Popen(
        [sys.executable, "-c", program, config.model_dump_json()],
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


def said(root: Path) -> Path:
    """Pairs in which `ok` is better than `no`."""
    pairs = [
        PreferencePair(
            id=f"{number}",
            messages=(Message(role="user", content=f"say {number}"),),
            chosen="ok",
            rejected="no",
        )
        for number in range(40)
    ]
    write_pairs(root / "pairs.jsonl", pairs)
    return root / "pairs.jsonl"


def learned(config: Config, section: str) -> list[tuple[str, object]]:
    """The parameters and the numbers of every segment."""
    run = Run.create_or_open(config)
    refs = [committed(run, SLOTS[section](step)) for step in (10, 20, 30)]
    assert all(refs)
    return [(manifest_of(run.store, ref).extra["parameters_digest"], ref.summary) for ref in refs]


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly() -> None:
    """None is: a judge and its policy learn with the programs that users have."""


@pytest.mark.slow
@pytest.mark.parametrize("section", SLOTS)
def test_killed_in_its_second_segment_it_ends_in_the_same_bits(api, tmp_path, section):
    pairs = f"{section}.pairs={said(tmp_path)}"
    steps = f"{section}.steps=30", f"{section}.steps_per_checkpoint=10"
    whole = debug(tmp_path / "whole", "policy.init=random", pairs, *steps)
    killed = debug(tmp_path / "killed", "policy.init=random", pairs, *steps)
    program = PROGRAM.format(section=section)
    finish(spawn_program(program, whole, api))
    folder = tmp_path / "killed" / killed.run_id
    process = spawn_program(program, killed, api)
    first = folder / SLOTS[section](10) / "manifest.json"
    kill_when(process, first.exists, random.Random(printed_seed()).uniform(0, 0.2))
    finish(spawn_program(program, killed, api))
    assert learned(killed, section) == learned(whole, section)


TASK = {
    "policy": {
        "init": "sft",
        "context_length": 32,
        "model": {"hidden_size": 64, "layers": 2, "kv_heads": 4, "intermediate_size": 128},
    },
    "sampling": {"max_tokens": 8},
    "rollouts": {"groups_per_round": 64, "group_size": 8},
    "inference": {"engine": {"slots": 256, "chunk_steps": 8, "prefill_rows": 32}},
    "batching": {"length_buckets": [32]},
    "objective": {"surrogate": "reinforce"},
    "training": {"learning_rate": 1e-3, "warmup_steps": 0, "microbatch_sequences": 128},
    "sft": {"steps": 80, "learning_rate": 4e-3, "warmup_steps": 10, "steps_per_checkpoint": 80},
    "evaluation": {"every_rounds": 100, "examples": 64},
}


def task(root: Path, name: str, **sections: object) -> Config:
    options = {"path": str(root / "prompts.jsonl"), "reward": "support.word_forms:bare"}
    environment = {"name": "chat", "options": options}
    tree = {**TASK, "environment": environment, **sections}
    return parse_config({**tree, "root": str(root), "run_id": name})


@pytest.mark.slow
@pytest.mark.usefixtures("api")
def test_a_judge_of_a_runs_rollouts_teaches_a_policy_what_the_run_was_paid_for(tmp_path):
    write_prompts(tmp_path / "prompts.jsonl")
    flows.rl_loop.start(task(tmp_path, "teacher", rounds=2))
    pairs = pairs_of_run(Run.open(str(tmp_path), "teacher"), component="reward")
    write_pairs(tmp_path / "pairs.parquet", pairs)
    learning = {
        "pairs": str(tmp_path / "pairs.parquet"), "held_out_fraction": 0.25, "steps": 40,
        "steps_per_checkpoint": 40, "learning_rate": 1e-3,
    }  # fmt: skip
    begun = TASK["policy"] | {
        "init": "checkpoint",
        "checkpoint": str(tmp_path / "teacher/checkpoints/round-00000"),
    }
    judge = flows.reward_model.start(task(tmp_path, "judge", policy=begun, reward_model=learning))
    print(len(pairs), judge.summary)
    assert judge.summary["reward_model/held_out_accuracy"] > 0.9
    alone = {"checkpoint": str(tmp_path / "judge" / judge.slot), "environment_weight": 0.0}
    environment = task(tmp_path, "any").environment.model_dump() | {"reward_model": alone}
    flows.rl_loop.start(task(tmp_path, "student", rounds=6, policy=begun, environment=environment))
    run = Run.open(str(tmp_path), "student")
    rows = [row for row in metric_rows(run) if row.get("reward") is not None]
    truth = [row["rewards/reward/mean"] for row in rows]
    felt = [row["rewards/reward_model/mean"] for row in rows]
    print(truth, felt, [row["reward"] for row in rows])
    assert felt == pytest.approx([row["reward"] for row in rows])
    assert felt[-1] > felt[0] + 0.2
    assert truth[-1] > truth[0] + 0.1
    assert all(audit.balanced for audit in audit_run(run))


@pytest.mark.slow
@pytest.mark.usefixtures("api")
def test_a_notebook_learns_from_pairs_within_its_event_loop(tmp_path: Path) -> None:
    pairs = {"pairs": str(said(tmp_path)), "steps": 20, "steps_per_checkpoint": 10}
    policy = {"init": "random", "context_length": 32, "model": {"hidden_size": 32, "layers": 1}}
    source = {"root": str(tmp_path), "run_id": "mine", "policy": policy, "preference": pairs}

    async def cell() -> Learned:
        return learn("preference", source, {"preference.learning_rate": 3e-3})

    learned = asyncio.run(cell())
    assert learned.checkpoint == f"{tmp_path}/mine/preference/step-00020"
    assert learned.metrics["preference/held_out_accuracy"] == 1.0
    assert asyncio.run(cell()) == learned  # which is there by now
