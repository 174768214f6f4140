"""Tasks of files alone: `process` makes a round's batches, `publish` closes a trained round.

`publish` also prunes old checkpoints.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache

from prefect import task

from marin_rl.batching.build import build_round
from marin_rl.errors import StorageError
from marin_rl.rounds import close_round
from marin_rl.storage.runs import Run, RunRef
from marin_rl.storage.upkeep.gc import retire
from marin_rl.types import SlotRef
from tasks.options import STAGE, as_state, in_thread, open_run

_log = logging.getLogger(__name__)


@task(task_run_name="process[round-{round:05d}]", **STAGE)
async def process(run: RunRef, round: int, rollouts: SlotRef) -> SlotRef:
    """Filter, compute advantages, pad into batches, commit."""
    return as_state(await in_thread(build_round, open_run(run), round, rollouts))


@task(task_run_name="publish[round-{round:05d}]", **STAGE)
async def publish(
    run: RunRef, round: int, trained: SlotRef, measured: Mapping[str, float]
) -> SlotRef:
    """Close the round that `trained` ended; `measured` are its `timing_s/*` and `weights/*`."""
    closed = await in_thread(close_round, open_run(run), round, measured)
    await in_thread(prune_old, open_run(run))
    return as_state(closed)


def prune_old(run: Run) -> None:
    """Apply retention without ever ending the run: what cannot be pruned now is retried next round.

    The cause may be another run's folder, damaged or written by newer software.
    """
    try:
        retire(run)
    except StorageError as error:
        _warn(run.run_id, str(error))


@lru_cache(maxsize=64)
def _warn(run_id: str, why: str) -> None:
    """Log each cause once, not once per round."""
    _log.warning(
        "run %s goes on, but gives up no old checkpoints: %s. What is named there may belong to a "
        "fork of this run, which needs them: mend it, move it out of the root, or upgrade",
        run_id,
        why,
    )
