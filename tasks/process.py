"""Task `process`: a round's rollouts become training batches and dispositions."""

from prefect import task

from marin_rl.batching.build import build_round
from marin_rl.storage.runs import RunRef
from marin_rl.types import SlotRef
from tasks.options import STAGE, as_state, in_thread, open_run


@task(task_run_name="process[round-{round:05d}]", **STAGE)
async def process(run: RunRef, round: int, rollouts: SlotRef) -> SlotRef:
    """Filter, compute advantages, pad into batches, commit."""
    return as_state(await in_thread(build_round, open_run(run), round, rollouts))
