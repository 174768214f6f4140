"""Task `publish`: a trained round's metrics are committed and told to whoever watches."""

from collections.abc import Mapping

from prefect import task

from marin_rl.rounds import close_round
from marin_rl.storage.runs import RunRef
from marin_rl.types import SlotRef
from tasks.options import STAGE, in_thread, opened, told


@task(task_run_name="publish[round-{round:05d}]", **STAGE)
async def publish(
    run: RunRef, round: int, trained: SlotRef, seconds: Mapping[str, float]
) -> SlotRef:
    """Close the round that `trained` ended; `seconds` are its `timing_s/*`."""
    return told(await in_thread(close_round, opened(run), round, seconds))
