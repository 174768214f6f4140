"""The flow "evaluate": one committed checkpoint of a run answers held-out examples.

    checkpoint r ──► serve ──► evaluate ──► evals/round-r

`rl-loop` does the same for the checkpoint it ends with.
"""

import asyncio

from prefect import flow

from flows.server import prefect_api
from flows.session import HEAVY, Source, named, settled, working_on
from marin_rl.config import Config
from marin_rl.errors import ObjectMissing
from marin_rl.storage.runs import (
    RunRef,
    checkpoint_slot,
    committed,
    evals_slot,
    latest_checkpoint,
    round_of,
)
from marin_rl.types import SlotRef
from tasks.evaluate import evaluate
from tasks.options import Attempts, opened
from tasks.serve import serve


@flow(name="evaluate", flow_run_name=named, persist_result=False)
async def evaluate_run(
    config: Source,
    run_id: str | None = None,
    overrides: list[str] | None = None,
    round: int | None = None,
) -> SlotRef:
    """Evaluate checkpoint `round` of a run, or its latest. Raises ObjectMissing without one."""
    with working_on(settled(config, run_id, overrides)) as reference:
        run = opened(reference)
        found = latest_checkpoint(run) if round is None else committed(run, checkpoint_slot(round))
        if found is None:
            which = "any" if round is None else f"{round}"
            raise ObjectMissing(
                f"run {run.run_id!r} has no committed checkpoint {which}: `marin-rl status "
                f"{run.run_id}` shows which there are"
            )
        return await measure(reference, found)


async def measure(run: RunRef, checkpoint: SlotRef) -> SlotRef:
    """Serve and evaluate a checkpoint, unless its evaluation is committed."""
    round = round_after(checkpoint)
    if (found := committed(opened(run), evals_slot(round))) is not None:
        return found
    attempt = Attempts(opened(run).config.flow)
    policy = await attempt(serve, run, round, checkpoint)
    return await attempt(evaluate, run, round, policy)


def round_after(checkpoint: SlotRef) -> int:
    """The round that samples from a checkpoint."""
    round = round_of(checkpoint.slot.rpartition("/")[2])
    assert round is not None, f"expected a slot of a checkpoint, found {checkpoint.slot}"
    return round


def start(config: Config, round: int | None = None) -> SlotRef:
    """Run the flow in this process; `flows.server` says with which Prefect API."""
    with prefect_api(warm=HEAVY):
        return asyncio.run(evaluate_run(config.model_dump(mode="json"), round=round))
