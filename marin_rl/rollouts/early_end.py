"""Sampling that ends as soon as enough groups are finished (`asynchrony.select: first_done`).

What is not finished by then is cancelled, and stands in the shard as rollouts without tokens. The
groups that end first are those of short answers, so this favours them: `selection/length_bias`.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any

from marin_rl.rollouts.assemble import RolloutMaker
from marin_rl.rollouts.trajectories import GroupRequest
from marin_rl.types import RolloutGroup, ServedPolicy


async def first_done(
    sampling: Sequence[Coroutine[Any, Any, RolloutGroup]],
    requests: Sequence[GroupRequest],
    policy: ServedPolicy,
    count: int,
    members_min: int,
) -> list[RolloutGroup]:
    """Groups in the order of `requests`, once `count` of them are finished with enough members.

    Raises what a group raises, after cancelling the others.
    """
    began, tasks = datetime.now(UTC), [asyncio.ensure_future(each) for each in sampling]
    try:
        pending = set(tasks)
        while pending and _finished(tasks, members_min) < count:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [
        _unfinished(policy, request, began) if task.cancelled() else task.result()
        for task, request in zip(tasks, requests, strict=True)
    ]


def _finished(tasks: Sequence["asyncio.Task[RolloutGroup]"], members_min: int) -> int:
    """Number of groups that ended with at least `members_min` members that did not fail."""
    groups = [task.result() for task in tasks if task.done()]
    counts = [sum(r.status in ("complete", "truncated") for r in g.rollouts) for g in groups]
    return sum(count >= members_min for count in counts)


def _unfinished(policy: ServedPolicy, request: GroupRequest, began: datetime) -> RolloutGroup:
    maker = RolloutMaker(policy, request, began)
    return RolloutGroup(
        group_id=request.group_id,
        example=request.example,
        rollouts=tuple(maker.unfinished(index) for index in range(request.size)),
        group_size=request.size,
    )
