"""Task `evaluate`: evaluate a served policy on the environment's evaluation examples."""

from prefect import task

from marin_rl import progress
from marin_rl.rollouts.evaluate import evaluate_round
from marin_rl.storage.runs import RunRef
from marin_rl.types import ServedPolicy, SlotRef
from tasks.options import STAGE, as_state, open_run


@task(task_run_name="evaluate[round-{round:05d}]", **STAGE)
async def evaluate(run: RunRef, round: int, policy: ServedPolicy) -> SlotRef:
    """Commit the evaluation of checkpoint `round`, and tell its `eval/*` metrics."""
    evaluated = await evaluate_round(open_run(run), round, policy)
    progress.publish(
        progress.ProgressEvent(
            run_id=run.run_id, stage="evaluate", round=round, metrics=evaluated.summary
        )
    )
    return as_state(evaluated)
