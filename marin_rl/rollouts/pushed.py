"""The generate stage of runs whose groups are pushed (`rollouts.source: pushed`).

A shard waits for the groups at its own places in the queue, which earlier rounds cannot have
taken, and has their rows. `marin-rl serve-trajectories` commits them, before this process asks for
them or while it waits.
"""

import asyncio
import time
from dataclasses import replace

import pyarrow as pa

from marin_rl.errors import EnvironmentTimeout
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.runs import Run, round_name
from marin_rl.storage.tables.group_queue import GroupQueue

PUSH_TIMEOUT_S = 3600.0
POLL_S = 0.2


async def pushed_groups(
    run: Run, round: int, shard: int, progress: ProgressEvent
) -> list[pa.Table]:
    """Wait for all groups of a shard; the rows of each, in order.

    Publishes `progress` as each is there. Raises EnvironmentTimeout where none comes for
    `rollouts.push_timeout_s`, CorruptObject, StoreUnavailable.
    """
    limit_s = run.config.rollouts.push_timeout_s or PUSH_TIMEOUT_S
    queue = GroupQueue(run)
    tables, rewards = list[pa.Table](), list[float]()
    for place in queue.places(round, shard):
        deadline = time.monotonic() + limit_s
        while (table := await asyncio.to_thread(queue.rows, place)) is None:
            if time.monotonic() > deadline:
                raise EnvironmentTimeout(
                    f"{round_name(round)}, shard {shard}: expected {progress.total} pushed groups, "
                    f"found {len(tables)}, and no other for {limit_s:g} s "
                    "(rollouts.push_timeout_s): is `marin-rl serve-trajectories` running, and are "
                    "environments registered there? Continue the run once they are"
                )
            await asyncio.sleep(POLL_S)
        tables.append(table)
        rewards += table["reward"].to_pylist()
        metrics = {"reward": sum(rewards) / len(rewards)}
        publish(replace(progress, done=len(tables), metrics=metrics))
    return tables
