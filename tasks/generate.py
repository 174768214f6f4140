"""Tasks that sample: `generate` (a shard), `seal` (a round's manifest), `evaluate` (a policy).

`sample` commits groups of a stream. `generate_on_pool`, `sample_on_pool` and `evaluate_on_pool`
have the workers of a Prefect work pool do the same.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prefect import task

from marin_rl.batching.build import further_shards
from marin_rl.errors import ConfigError, WorkerLost
from marin_rl.progress import ProgressEvent, publish
from marin_rl.rollouts.curriculum import sampling_record
from marin_rl.rollouts.evaluate import evaluate_round
from marin_rl.rollouts.generate import committed_shard, generate_shard
from marin_rl.rollouts.rewards import RewardScorer
from marin_rl.rollouts.streaming import sample_chunk, watch_target
from marin_rl.rollouts.teaching import Teacher
from marin_rl.rollouts.trajectories import Interruption
from marin_rl.runtime import runtime_for
from marin_rl.storage.runs import Run, RunRef, committed, evals_slot
from marin_rl.storage.tables.intakes import Settled
from marin_rl.storage.tables.rollouts import seal_round
from marin_rl.storage.tables.stream import chunk_size
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.types import ServedPolicy, SlotRef
from tasks.fan_out import EVALUATE, GENERATE_SHARDS, SAMPLE_CHUNK, play_on_pool, pooled
from tasks.options import STAGE, as_state, in_thread, open_run


@task(task_run_name="generate[round-{round:05d}/shard-{shard:04d}]", **STAGE)
async def generate(run: RunRef, round: int, shard: int, policy: ServedPolicy) -> SlotRef:
    opened = await in_thread(_opened, run, policy)
    judges = await _judges(opened)
    return as_state(await generate_shard(opened, round, shard, policy, *judges))


@task(task_run_name="sample[chunk-{chunk:06d}]", **STAGE)
async def sample(
    run: RunRef,
    chunk: int,
    policy: ServedPolicy,
    worker: str,
    floor: int,
    interruption: Interruption,
) -> int:
    """Sample, score and commit groups of the stream, those below number `floor` aside.

    Once `interruption` is requested, what is unfinished is kept, where it can be gone on with;
    where another machine gave the chunk out, that comes by the run's root.
    """
    opened, settled = await in_thread(_opened, run, policy), Settled(floor=floor)
    sampling = sample_chunk(opened, chunk, policy, worker, settled, interruption)
    if not run.code:
        return await sampling
    # Given out by another machine, whose requests to end come by the root.
    watching = asyncio.ensure_future(watch_target(opened, policy, interruption))
    try:
        return await sampling
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@task(task_run_name="extend[round-{round:05d}]", **STAGE)
async def extend(run: RunRef, round: int, shards: list[SlotRef]) -> list[int]:
    """Numbers of the shards that are still to be sampled, where a round needs more groups."""
    return await in_thread(further_shards, open_run(run), round, shards)


@task(task_run_name="seal[round-{round:05d}]", **STAGE)
async def seal(run: RunRef, round: int, shards: list[SlotRef], policy: ServedPolicy) -> SlotRef:
    """Commit the manifest that names every shard of the round, and the policy they came from."""
    opened, version = open_run(run), policy.weight_version
    chosen = await in_thread(sampling_record, opened, round, shards, version)
    sealed = await in_thread(seal_round, opened, round, shards, (policy.checkpoint,), chosen)
    return as_state(sealed)


@task(task_run_name="evaluate[round-{round:05d}]", **STAGE)
async def evaluate(run: RunRef, round: int, policy: ServedPolicy) -> SlotRef:
    """Commit the evaluation of checkpoint `round`, and publish its `eval/*` metrics."""
    opened = await in_thread(_opened, run, policy)
    evaluated = await evaluate_round(opened, round, policy)
    _publish(run, round, evaluated)
    return as_state(evaluated)


@task(name="generate-on-pool", task_run_name="generate[round-{round:05d}/{shards}]", **STAGE)
async def generate_on_pool(
    run: RunRef, round: int, shards: list[int], policy: ServedPolicy
) -> list[SlotRef]:
    """Have a worker of the pool commit some shards; those that are committed are not given out."""
    opened = open_run(run)
    judges = await _judges(opened)
    refs = {shard: await committed_shard(opened, round, shard, policy, *judges) for shard in shards}
    missing = [shard for shard, ref in refs.items() if ref is None]
    if missing:
        name = f"{run.run_id}-{round:05d}-shard-{missing[0]:04d}"
        shape = {"round": round, "shards": missing}
        await _played(GENERATE_SHARDS, opened, name, run, policy, shape)
        for shard in missing:
            refs[shard] = await committed_shard(opened, round, shard, policy, *judges)
    done = [ref for ref in refs.values() if ref is not None]
    if len(done) < len(shards):
        raise WorkerLost(
            f"the flow run of shards {missing} of round {round} ended, but the store has only "
            f"{len(done)} of {len(shards)}: do workers and trainer use one root, "
            f"{opened.store.url}?"
        )
    return done


@task(name="sample-on-pool", task_run_name="sample[chunk-{chunk:06d}]", **STAGE)
async def sample_on_pool(
    run: RunRef, chunk: int, policy: ServedPolicy, worker: str, floor: int
) -> list[int]:
    """Have a worker of the pool commit the groups of a chunk; the number of its groups."""
    opened, name = open_run(run), f"{run.run_id}-chunk-{chunk:06d}"
    shape = {"chunk": chunk, "worker": worker, "floor": floor}
    await _played(SAMPLE_CHUNK, opened, name, run, policy, shape)
    return [chunk_size(opened.config)]


@task(name="evaluate-on-pool", task_run_name="evaluate[round-{round:05d}]", **STAGE)
async def evaluate_on_pool(run: RunRef, round: int, policy: ServedPolicy) -> list[SlotRef]:
    """Have a worker of the pool commit the evaluation of checkpoint `round`."""
    opened, slot = open_run(run), evals_slot(round)
    if await in_thread(committed, opened, slot) is None:
        name = f"{run.run_id}-{round:05d}-evaluate"
        await _played(EVALUATE, opened, name, run, policy, {"round": round})
    evaluated = await in_thread(committed, opened, slot)
    if evaluated is None:
        raise WorkerLost(
            f"the flow run of the evaluation of round {round} ended, but "
            f"{opened.store.url_of(slot)} is not committed: do workers and trainer use one root?"
        )
    _publish(run, round, evaluated)
    return [evaluated]


async def _played(
    flow: str, opened: Run, name: str, run: RunRef, policy: ServedPolicy, shape: dict[str, Any]
) -> None:
    parameters = {"run": asdict(run), "policy": asdict(policy), **shape}
    await play_on_pool(flow, opened.config.flow, name, parameters)


def _opened(run: RunRef, policy: ServedPolicy) -> Run:
    """The run, where this process may sample for the machine that gave it out.

    Raises ConfigError for other code or another tokenizer.
    """
    opened = open_run(run)
    if not run.code:
        return opened
    ours = TokenizerIdentity.of(runtime_for(opened).tokenizer)
    for what in ("tokenizer", "chat_template"):
        actual, expected = getattr(ours, f"{what}_digest"), getattr(policy, f"{what}_digest")
        if actual != expected:
            raise ConfigError(
                f"this worker has another {what.replace('_', ' ')} than the trainer of "
                f"{run.run_id!r}: expected digest {expected[:12]}, found {actual[:12]}; copy "
                "policy.tokenizer there"
            )
    return opened


async def _judges(opened: Run) -> tuple[RewardScorer | None, Teacher | None]:
    """The reward model and the teacher of a run, as far as it has them."""
    if opened.config.environment.reward_model is None and opened.config.rollout_teacher is None:
        return None, None
    runtime = runtime_for(opened)
    return await in_thread(runtime.reward_scorer), await in_thread(runtime.teacher)


def _publish(run: RunRef, round: int, evaluated: SlotRef) -> None:
    metrics = evaluated.summary
    publish(ProgressEvent(run_id=run.run_id, stage="evaluate", round=round, metrics=metrics))


def _of_shards(calls: Sequence[Sequence[Any]]) -> Sequence[Any]:
    run, round, _, policy = calls[0]
    return run, round, [call[2] for call in calls], policy


pooled[generate.name] = generate_on_pool, _of_shards
# A request to end early is no parameter: `watch_target` sees it in the root.
pooled[sample.name] = sample_on_pool, lambda calls: calls[0][:-1]
pooled[evaluate.name] = evaluate_on_pool, lambda calls: calls[0]
