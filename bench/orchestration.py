"""Seconds per round that go into Prefect and into committing files, and whether rounds slow down.

A trivial round has every task and commits every slot of a real one (two shards, sealed rollouts,
batches with dispositions, a checkpoint of three files, metrics), each a few bytes; no model, no
sampling. It is measured with Prefect and, in the same invocation, as plain calls. Prints a table
and writes bench/results/orchestration.json.

    python bench/orchestration.py --rounds 1000
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from machine import print_head
from prefect import flow, task

from flows.reports import quieten
from flows.server import prefect_api
from marin_rl.config import Config, FlowConfig, parse_config
from marin_rl.storage.commits import (
    commit_manifest,
    commit_object,
    fingerprint,
    new_attempt,
    new_manifest,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import (
    Run,
    RunRef,
    batches_slot,
    checkpoint_slot,
    rollouts_slot,
    shard_key,
)
from marin_rl.storage.tables.metrics import write_round_metrics
from marin_rl.types import SlotRef
from tasks.options import GROUP, STAGE, StageRunner, as_state, in_thread, open_run

SHARDS = 2
EDGE = 50
RESULTS = Path(__file__).resolve().parent / "results"


def slot(run: Run, name: str, parents: Sequence[SlotRef], files: int) -> SlotRef:
    """Commit a slot of `files` small parts and a manifest."""
    attempt, parts = new_attempt(), []
    for number in range(files):
        part = f"part-{number}-{attempt}"
        run.store.put_part(f"{name}/{part}", part.encode())
        parts.append(part_of(part, part.encode()))
    manifest = new_manifest(
        name, attempt=attempt, fingerprint=fingerprint("bench", {}), parts=parts
    )
    return ref_of(commit_manifest(run.store, manifest))


def shard(run: Run, round: int, number: int) -> SlotRef:
    """Commit a shard of a few bytes."""
    key, attempt = shard_key(round, number), new_attempt()
    data = commit_object(
        run.store,
        key,
        attempt.encode(),
        attempt=attempt,
        fingerprint="bench",
        identify=lambda found: (found.decode(), "bench"),
    )
    return SlotRef(slot=key, sha256=f"{round:032}{number:032}", summary={"bytes": len(data)})


def metrics_of(run: Run, round: int) -> SlotRef:
    """Commit a row of metrics."""
    return write_round_metrics(run, round, {"reward": 0.5, "loss": 1.0, "lr": 1e-3})


@task(task_run_name="serve[round-{round:05d}]", **STAGE)
async def serve(run: RunRef, round: int, checkpoint: SlotRef) -> SlotRef:
    """Nothing but the task."""
    return SlotRef(slot=f"served-{round}", sha256=f"{round:064}")


@task(task_run_name="generate[round-{round:05d}/shard-{number:04d}]", **STAGE)
async def generate(run: RunRef, round: int, number: int, policy: SlotRef) -> SlotRef:
    """One small object."""
    return as_state(await in_thread(shard, open_run(run), round, number))


@task(task_run_name="seal[round-{round:05d}]", **STAGE)
async def seal(run: RunRef, round: int, shards: list[SlotRef]) -> SlotRef:
    """One manifest."""
    return as_state(await in_thread(slot, open_run(run), rollouts_slot(round), shards, 0))


@task(task_run_name="process[round-{round:05d}]", **STAGE)
async def process(run: RunRef, round: int, rollouts: SlotRef) -> SlotRef:
    """Two parts and a manifest."""
    return as_state(await in_thread(slot, open_run(run), batches_slot(round), [rollouts], 2))


@task(task_run_name="train[round-{round:05d}]", **STAGE)
async def train(run: RunRef, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
    """Metrics, three parts and a manifest."""
    await in_thread(metrics_of, open_run(run), round)
    return as_state(await in_thread(slot, open_run(run), checkpoint_slot(round + 1), [batches], 3))


@task(name="round", task_run_name="round-{round:05d}", **GROUP)
async def play(run: RunRef, round: int, checkpoint: SlotRef) -> SlotRef:
    """A round of flows/rl_loop.py with trivial stages."""
    stages = StageRunner(FlowConfig())
    policy = await stages.run(serve, run, round, checkpoint)
    parts = await stages.each(generate, [(run, round, n, policy) for n in range(SHARDS)])
    rollouts = await stages.run(seal, run, round, parts)
    batches = await stages.run(process, run, round, rollouts)
    return await stages.run(train, run, round, batches, checkpoint)


async def plain(run: RunRef, round: int, checkpoint: SlotRef) -> SlotRef:
    """The same files without Prefect."""
    where = open_run(run)
    parts = [shard(where, round, number) for number in range(SHARDS)]
    rollouts = slot(where, rollouts_slot(round), parts, 0)
    batches = slot(where, batches_slot(round), [rollouts], 2)
    metrics_of(where, round)
    return slot(where, checkpoint_slot(round + 1), [batches], 3)


async def timed(
    play_one: Callable[[RunRef, int, SlotRef], Awaitable[SlotRef]], run: Run, rounds: int
) -> list[tuple[float, float]]:
    """Wall and CPU seconds of each round."""
    checkpoint, seconds = slot(run, checkpoint_slot(0), [], 3), []
    reference = run.reference
    for round in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        checkpoint = await play_one(reference, round, checkpoint)
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds


@flow(name="bench-orchestration", persist_result=False)
async def loop(root: str, rounds: int) -> list[tuple[float, float]]:
    """The rounds under Prefect."""
    quieten()
    return await timed(play, new_run(root, "prefect"), rounds)


def new_run(root: str, name: str) -> Run:
    """A run of the default configuration."""
    config: Config = parse_config({"root": root, "run_id": name})
    return Run.create_or_open(config)


def summary(seconds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Seconds per round: all, the first and the last `EDGE`."""
    edge = min(EDGE, len(seconds) // 2)
    wall, cpu = ([pair[which] for pair in seconds] for which in (0, 1))
    return {
        "rounds": len(wall),
        "mean": statistics.fmean(wall),
        "median": statistics.median(wall),
        "p99": sorted(wall)[int(0.99 * len(wall))],
        "worst": max(wall),
        "first_median": statistics.median(wall[:edge]),
        "last_median": statistics.median(wall[-edge:]),
        "cpu_mean": statistics.fmean(cpu),
        "first_cpu_mean": statistics.fmean(cpu[:edge]),
        "last_cpu_mean": statistics.fmean(cpu[-edge:]),
    }


def main() -> None:
    """Measure both, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--root", help="folder for the files; default: a temporary one")
    options = parser.parse_args()
    print_head()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        files = asyncio.run(timed(plain, new_run(root, "plain"), min(options.rounds, 200)))
        with prefect_api() as connection:
            began = time.perf_counter()
            both = asyncio.run(loop(root, options.rounds))
            wall = time.perf_counter() - began
    result: dict[str, Any] = {
        "files": summary(files),
        "files_and_prefect": summary(both),
        "outside_the_rounds_s": wall - sum(seconds for seconds, _ in both),
        "api": connection.url,
        "load": load,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "orchestration.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name in ("files", "files_and_prefect"):
        print(name, {key: round(value, 4) for key, value in result[name].items()})
    print(f"load before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
