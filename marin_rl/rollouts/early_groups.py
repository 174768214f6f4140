"""Groups that are there before their shard: a log of those that ended, and groups that are pushed.

A log says which groups, or members of groups, are committed already, and when enough have ended.
The base commits nothing and waits for all. Leaves out the stream's log (`streaming`).
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from marin_rl.errors import EnvironmentTimeout
from marin_rl.progress import ProgressEvent, publish
from marin_rl.rollouts.assemble import RolloutMaker
from marin_rl.rollouts.interruption import Interrupted, all_ended
from marin_rl.rollouts.trajectories import GroupRequest
from marin_rl.storage.runs import Run, round_name
from marin_rl.storage.tables.group_log import GroupLog
from marin_rl.storage.tables.group_queue import GroupQueue
from marin_rl.types import Rollout, RolloutGroup, ServedPolicy

PUSH_TIMEOUT_S = 3600.0
POLL_S = 0.2

Members = Mapping[int, Rollout]  # of a group, by index
Sampling = Sequence[Coroutine[Any, Any, RolloutGroup]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDone:
    """End of sampling once `count` groups are finished (`over_sampling.select: first_done`).

    A finished group has at least `members_min` members that did not fail. The groups that end first
    are those of short answers, so this favours them: `selection/length_bias`.
    """

    policy: ServedPolicy
    requests: Sequence[GroupRequest]
    count: int
    members_min: int

    async def __call__(self, sampling: Sampling) -> list[RolloutGroup]:
        """Groups in order; what is cancelled stands there as rollouts without tokens.

        Raises what a group raises, after cancelling the others.
        """
        began, tasks = datetime.now(UTC), [asyncio.ensure_future(each) for each in sampling]
        try:
            pending = set(tasks)
            while pending and self._finished(tasks) < self.count:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            self._unfinished(request, began) if task.cancelled() else task.result()
            for task, request in zip(tasks, self.requests, strict=True)
        ]

    def _finished(self, tasks: Sequence["asyncio.Task[RolloutGroup]"]) -> int:
        groups = [task.result() for task in tasks if task.done()]
        counts = [sum(r.status in ("complete", "truncated") for r in g.rollouts) for g in groups]
        return sum(count >= self.members_min for count in counts)

    def _unfinished(self, request: GroupRequest, began: datetime) -> RolloutGroup:
        maker = RolloutMaker(self.policy, request, began)
        return request.group_of(tuple(map(maker.unfinished, range(request.size))))


class EarlyGroups:
    """Log of the groups of a shard, which commits none of them early.

    `first_done` says when enough have ended; None waits for all.
    """

    takes_groups = False  # groups may be committed without the rest of their shard
    takes_members = False  # and members without the rest of their group

    def __init__(self, first_done: FirstDone | None = None) -> None:
        self._first_done = first_done

    def read(self, group_ids: Sequence[str]) -> Mapping[str, Members]:
        return {}

    def commit(self, group: RolloutGroup) -> Members:
        return {}

    async def collect(self, sampling: Sampling) -> list[RolloutGroup]:
        """Groups in order, once enough have ended; those that were interrupted are left out."""
        if self._first_done is not None:
            return await self._first_done(sampling)
        groups = await all_ended(sampling)
        return [group for group in groups if not isinstance(group, Interrupted)]


class CommittedMembers(EarlyGroups):
    """Log of a shard that commits members as they end, each in a chain of its group."""

    takes_groups = takes_members = True

    def __init__(self, log: GroupLog, first_done: FirstDone | None = None) -> None:
        super().__init__(first_done)
        self._log = log

    def read(self, group_ids: Sequence[str]) -> dict[str, dict[int, Rollout]]:
        """Members that are committed; the first object that has one counts."""
        return {
            group_id: {r.index_in_group: r for part in reversed(parts) for r in part.rollouts}
            for group_id, parts in self._log.read(group_ids).items()
        }

    def commit(self, group: RolloutGroup) -> Members:
        committed, _ = self._log.append(group.group_id, [group])
        return {r.index_in_group: r for each in committed for r in each.rollouts}


async def pushed_groups(
    run: Run, round: int, shard: int, progress: ProgressEvent
) -> list[pa.Table]:
    """Wait for all groups of a shard that are pushed; the rows of each, in order.

    `marin-rl serve-trajectories` commits them at places in the queue that no earlier round has.
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
