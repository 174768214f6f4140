"""Tasks of the process that trains: from a round's rollouts to its checkpoint, served and closed.

`begin` commits checkpoint 0, `fine_tune` a segment of the warm start, `train` a round; `prepare`
and `fit` commit the pairs of a reward model or a policy, and a segment of its training. `serve`
puts the trained policy behind endpoints. Of files alone, `process` makes a round's batches, and
`publish` closes a trained round and prunes old checkpoints. Where rounds take groups of a stream,
`take` commits the intake of a round, `collect` and `seal_taken` the rollouts that it names.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache, partial

from prefect import task

from marin_rl.batching.build import build_round
from marin_rl.errors import StorageError
from marin_rl.rollouts.streaming import take_groups
from marin_rl.rounds import close_round
from marin_rl.runtime import runtime_for
from marin_rl.storage.runs import Run, RunRef
from marin_rl.storage.tables.intakes import collect_shard
from marin_rl.storage.tables.rollouts import seal_round
from marin_rl.storage.upkeep.gc import retire
from marin_rl.types import PairSection, ServedPolicy, SlotRef
from tasks.options import STAGE, as_state, in_thread, open_run

_log = logging.getLogger(__name__)


@task(task_run_name="begin", **STAGE)
async def begin(run: RunRef, warm: SlotRef | None) -> SlotRef:
    return as_state(await in_thread(runtime_for(open_run(run)).init_policy))


@task(task_run_name="fine_tune[step-{step_from:05d}]", **STAGE)
async def fine_tune(run: RunRef, step_from: int) -> SlotRef:
    return as_state(await in_thread(runtime_for(open_run(run)).run_sft_segment, step_from))


@task(task_run_name="train[round-{round:05d}]", **STAGE)
async def train(run: RunRef, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
    return as_state(
        await in_thread(runtime_for(open_run(run)).train_round, round, batches, checkpoint)
    )


@task(task_run_name="prepare", **STAGE)
async def prepare(run: RunRef, section: PairSection) -> SlotRef:
    return as_state(await in_thread(runtime_for(open_run(run)).prepare_pairs, section))


@task(task_run_name="fit[step-{step_from:05d}]", **STAGE)
async def fit(run: RunRef, section: PairSection, step_from: int, pairs: SlotRef) -> SlotRef:
    work = runtime_for(open_run(run)).run_pair_segment
    return as_state(await in_thread(work, section, step_from, pairs))


@task(task_run_name="serve[round-{round:05d}]", **STAGE)
async def serve(run: RunRef, round: int, checkpoint: SlotRef) -> ServedPolicy:
    """Put checkpoint `round` behind the OpenAI protocol; new weights replace the last round's."""
    return await in_thread(runtime_for(open_run(run)).serve, checkpoint)


@task(task_run_name="take[round-{round:05d}]", **STAGE)
async def take(run: RunRef, round: int, ended: bool) -> SlotRef | None:  # noqa: FBT001 - a task's
    """Commit which groups of the stream a round takes; None where there are too few so far.

    `ended` says that no further ones are sampled.
    """
    taken = await in_thread(partial(take_groups, ended=ended), open_run(run), round)
    return None if taken is None else as_state(taken)


@task(task_run_name="collect[round-{round:05d}/shard-{shard:04d}]", **STAGE)
async def collect(run: RunRef, round: int, shard: int, intake: SlotRef) -> SlotRef:
    return as_state(await in_thread(collect_shard, open_run(run), round, shard, intake))


@task(task_run_name="seal[round-{round:05d}]", **STAGE)
async def seal_taken(run: RunRef, round: int, shards: list[SlotRef], intake: SlotRef) -> SlotRef:
    """Commit the manifest that names every shard of the round, and the intake they came from."""
    return as_state(await in_thread(seal_round, open_run(run), round, shards, (intake,)))


@task(task_run_name="process[round-{round:05d}]", **STAGE)
async def process(run: RunRef, round: int, rollouts: SlotRef) -> SlotRef:
    return as_state(await in_thread(build_round, open_run(run), round, rollouts))


@task(task_run_name="publish[round-{round:05d}]", **STAGE)
async def publish(
    run: RunRef, round: int, trained: SlotRef, measured: Mapping[str, float]
) -> SlotRef:
    """Close the round that `trained` ended; `measured` are its `timing_s/*` and `weights/*`."""
    closed = await in_thread(close_round, open_run(run), round, measured)
    await in_thread(prune_old, open_run(run))
    return as_state(closed)


def prune_old(run: Run) -> None:
    """Apply retention without ever ending the run: what cannot be pruned now is retried next round.

    The cause may be another run's folder, damaged or written by newer software.
    """
    try:
        retire(run)
    except StorageError as error:
        _warn(run.run_id, str(error))


@lru_cache(maxsize=64)
def _warn(run_id: str, why: str) -> None:
    """Log each cause once, not once per round."""
    _log.warning(
        "run %s goes on, but gives up no old checkpoints: %s. What is named there may belong to a "
        "fork of this run, which needs them: mend it, move it out of the root, or upgrade",
        run_id,
        why,
    )
