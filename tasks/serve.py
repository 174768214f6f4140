"""Task `serve`: the policy of a round can be asked for completions, and is proven to be it."""

from prefect import task

from marin_rl.runtime import runtime_for
from marin_rl.storage.runs import RunRef
from marin_rl.types import ServedPolicy, SlotRef
from tasks.options import STAGE, in_thread, open_run


@task(task_run_name="serve[round-{round:05d}]", **STAGE)
async def serve(run: RunRef, round: int, checkpoint: SlotRef) -> ServedPolicy:
    """Put checkpoint `round` behind the OpenAI protocol; new weights replace the last round's."""
    return await in_thread(runtime_for(open_run(run)).serve, checkpoint)
