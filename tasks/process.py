"""Task `process`: a round's rollouts become training batches and dispositions."""

from prefect import task

from marin_rl.batching.build import build_round
from marin_rl.storage.runs import RunRef
from marin_rl.types import SlotRef
from tasks.options import STAGE, in_thread, opened, told


@task(task_run_name="process[round-{round:05d}]", **STAGE)
async def process(run: RunRef, round: int, rollouts: SlotRef) -> SlotRef:
    """Filter, compute advantages, pad into batches, commit."""
    return told(await in_thread(build_round, opened(run), round, rollouts))
