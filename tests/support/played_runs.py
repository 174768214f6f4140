"""Runs that the library plays, round by round, as the flow's tasks call it: no orchestrator."""

import asyncio

from marin_rl.batching.build import build_round
from marin_rl.rollouts.evaluate import evaluate_round
from marin_rl.rollouts.generate import generate_shard
from marin_rl.rounds import Stopwatch, close_round, transfer_metrics
from marin_rl.runtime import RunRuntime
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import seal_round
from marin_rl.types import SlotRef


def play_round(
    runtime_for: RunRuntime, run: Run, round: int, checkpoint: SlotRef, *, evaluated: bool = False
) -> SlotRef:
    """One round from its first checkpoint, which is evaluated if that is asked; the next one."""
    watch, policy = Stopwatch(), runtime_for.serve(checkpoint)
    if evaluated:
        asyncio.run(evaluate_round(run, round, policy))
    shards = range(run.config.rollouts.shards_per_round)

    async def generate() -> list[SlotRef]:
        return await asyncio.gather(*(generate_shard(run, round, n, policy) for n in shards))

    parts = asyncio.run(generate())
    watch.lap("generate")
    batches = build_round(run, round, seal_round(run, round, parts, (checkpoint,)))
    trained = runtime_for.train_round(round, batches, checkpoint)
    steps = int(batches.summary["steps"])
    close_round(run, round, watch.metrics() | transfer_metrics(policy.transfer, steps))
    return trained


def play_two_rounds(run: Run, *, evaluated: bool = False) -> None:
    """A run's first two rounds; `evaluated` says whether that comes before them."""
    runtime_for = RunRuntime(run)
    try:
        checkpoint = runtime_for.init_policy()
        for round in range(2):
            first = evaluated and round == 0
            checkpoint = play_round(runtime_for, run, round, checkpoint, evaluated=first)
    finally:
        runtime_for.close()
