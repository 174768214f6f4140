"""One round of the rl-loop, stage after stage; `ahead` plays stages of several rounds at once."""

from collections.abc import Sequence

from prefect import task

from marin_rl.rounds import transfer_metrics
from marin_rl.storage.runs import RunRef
from marin_rl.types import ServedPolicy, SlotRef
from tasks.generate import evaluate, extend, generate, seal
from tasks.options import GROUP, StageRunner, open_run
from tasks.process import process, publish
from tasks.train import serve, train


@task(name="round", task_run_name="round-{round:05d}", **GROUP)
async def run_round(run: RunRef, round: int, checkpoint: SlotRef) -> SlotRef:
    """Run a round: sample with checkpoint `round`, learn, and return checkpoint `round + 1`."""
    config = open_run(run).config
    stages = StageRunner(config.flow)
    policy = await stages.run(serve, run, round, checkpoint)
    if round % config.evaluation.every_rounds == 0:
        await stages.run(evaluate, run, round, policy)
    rollouts = await sample(stages, run, round, policy)
    trained, updates = await learn(stages, run, round, checkpoint, rollouts)
    measured = {**stages.seconds, **transfer_metrics(policy.transfer, updates)}
    await stages.run(publish, run, round, trained, measured)
    return trained


async def sample(stages: StageRunner, run: RunRef, round: int, policy: ServedPolicy) -> SlotRef:
    """Sample and seal a round's rollouts with a served policy: needs no trainer."""
    config, parts = open_run(run).config, list[SlotRef]()
    shards: Sequence[int] = range(config.rollouts.shards_per_round)
    while shards:
        parts += await stages.each(generate, [(run, round, shard, policy) for shard in shards])
        shards = await stages.run(extend, run, round, parts) if config.samples_on else ()
    return await stages.run(seal, run, round, parts, policy)


async def learn(
    stages: StageRunner, run: RunRef, round: int, checkpoint: SlotRef, rollouts: SlotRef
) -> tuple[SlotRef, int]:
    """Train on sealed rollouts from checkpoint `round`: needs no endpoint.

    Returns the next checkpoint, and the number of updates.
    """
    batches = await stages.run(process, run, round, rollouts)
    trained = await stages.run(train, run, round, batches, checkpoint)
    return trained, int(batches.summary["steps"]) * open_run(run).config.training.epochs
