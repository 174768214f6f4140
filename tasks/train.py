"""Tasks `begin` (checkpoint 0), `fine_tune` (a segment of the warm start) and `train` (a round)."""

from prefect import task

from marin_rl.runtime import runtime_for
from marin_rl.storage.runs import RunRef
from marin_rl.types import SlotRef
from tasks.options import STAGE, as_state, in_thread, open_run


@task(task_run_name="begin", **STAGE)
async def begin(run: RunRef, warm: SlotRef | None) -> SlotRef:
    """Commit checkpoint 0, from the warm start `warm` where the run has one."""
    return as_state(await in_thread(runtime_for(open_run(run)).init_policy))


@task(task_run_name="fine_tune[step-{step_from:05d}]", **STAGE)
async def fine_tune(run: RunRef, step_from: int) -> SlotRef:
    """Play the segment of the warm start that begins at a step, and commit its checkpoint."""
    return as_state(await in_thread(runtime_for(open_run(run)).run_sft_segment, step_from))


@task(task_run_name="train[round-{round:05d}]", **STAGE)
async def train(run: RunRef, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
    """Train on a round's batches, and commit checkpoint `round + 1`."""
    return as_state(
        await in_thread(runtime_for(open_run(run)).train_round, round, batches, checkpoint)
    )
