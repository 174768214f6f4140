"""Tasks of the runtime: what trains, and `serve`, which puts the trained policy behind endpoints.

`begin` commits checkpoint 0, `fine_tune` a segment of the warm start, `train` a round; `prepare`
and `fit` commit the pairs of a reward model or a policy, and a segment of its training.
"""

from prefect import task

from marin_rl.runtime import runtime_for
from marin_rl.storage.runs import RunRef
from marin_rl.types import PairSection, ServedPolicy, SlotRef
from tasks.options import STAGE, as_state, in_thread, open_run


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
