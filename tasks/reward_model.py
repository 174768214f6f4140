"""Tasks `prepare` (a reward model's pairs) and `fit` (a segment of its training)."""

from prefect import task

from marin_rl.runtime import runtime_for
from marin_rl.storage.runs import RunRef
from marin_rl.types import SlotRef
from tasks.options import STAGE, as_state, in_thread, open_run


@task(task_run_name="prepare", **STAGE)
async def prepare(run: RunRef) -> SlotRef:
    """Check, tokenize and commit the preference pairs."""
    return as_state(await in_thread(runtime_for(open_run(run)).prepare_pairs))


@task(task_run_name="fit[step-{step_from:05d}]", **STAGE)
async def fit(run: RunRef, step_from: int, pairs: SlotRef) -> SlotRef:
    """Play the segment of the training that begins at a step, and commit its checkpoint."""
    return as_state(
        await in_thread(runtime_for(open_run(run)).run_reward_segment, step_from, pairs)
    )
