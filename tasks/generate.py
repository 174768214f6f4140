"""Tasks that sample: `generate` (a shard), `seal` (a round's manifest), `evaluate` (a policy)."""

from prefect import task

from marin_rl import progress
from marin_rl.batching.build import further_shards
from marin_rl.rollouts.evaluate import evaluate_round
from marin_rl.rollouts.generate import generate_shard
from marin_rl.rollouts.streaming import sample_chunk
from marin_rl.runtime import runtime_for
from marin_rl.storage.runs import RunRef
from marin_rl.storage.tables.intakes import Settled
from marin_rl.storage.tables.rollouts import seal_round
from marin_rl.types import ServedPolicy, SlotRef
from tasks.options import STAGE, as_state, in_thread, open_run


@task(task_run_name="generate[round-{round:05d}/shard-{shard:04d}]", **STAGE)
async def generate(run: RunRef, round: int, shard: int, policy: ServedPolicy) -> SlotRef:
    """Sample, score and commit one shard."""
    opened = open_run(run)
    learned = opened.config.environment.reward_model is not None
    scorer = await in_thread(runtime_for(opened).reward_scorer) if learned else None
    return as_state(await generate_shard(opened, round, shard, policy, scorer))


@task(task_run_name="sample[chunk-{chunk:06d}]", **STAGE)
async def sample(run: RunRef, chunk: int, policy: ServedPolicy, worker: str, floor: int) -> int:
    """Sample, score and commit groups of the stream, those below number `floor` aside."""
    return await sample_chunk(open_run(run), chunk, policy, worker, Settled(floor=floor))


@task(task_run_name="extend[round-{round:05d}]", **STAGE)
async def extend(run: RunRef, round: int, shards: list[SlotRef]) -> list[int]:
    """Numbers of the shards that are still to be sampled, where a round needs more groups."""
    return await in_thread(further_shards, open_run(run), round, shards)


@task(task_run_name="seal[round-{round:05d}]", **STAGE)
async def seal(run: RunRef, round: int, shards: list[SlotRef], policy: ServedPolicy) -> SlotRef:
    """Commit the manifest that names every shard of the round, and the policy they came from."""
    sealed = await in_thread(seal_round, open_run(run), round, shards, (policy.checkpoint,))
    return as_state(sealed)


@task(task_run_name="evaluate[round-{round:05d}]", **STAGE)
async def evaluate(run: RunRef, round: int, policy: ServedPolicy) -> SlotRef:
    """Commit the evaluation of checkpoint `round`, and publish its `eval/*` metrics."""
    evaluated = await evaluate_round(open_run(run), round, policy)
    progress.publish(
        progress.ProgressEvent(
            run_id=run.run_id, stage="evaluate", round=round, metrics=evaluated.summary
        )
    )
    return as_state(evaluated)
