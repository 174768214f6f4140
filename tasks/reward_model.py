"""Tasks `prepare` (a reward model's pairs) and `fit` (a segment of its training)."""

from prefect import task

from marin_rl.resident import resident
from marin_rl.storage.runs import RunRef
from marin_rl.types import SlotRef
from tasks.options import STAGE, in_thread, opened, told


@task(task_run_name="prepare", **STAGE)
async def prepare(run: RunRef) -> SlotRef:
    """Check, tokenize and commit the preference pairs."""
    return told(await in_thread(resident(opened(run)).prepare_pairs))


@task(task_run_name="fit[step-{step_from:05d}]", **STAGE)
async def fit(run: RunRef, step_from: int, pairs: SlotRef) -> SlotRef:
    """Play the segment of the training that begins at a step, and commit its checkpoint."""
    return told(await in_thread(resident(opened(run)).run_reward_segment, step_from, pairs))
