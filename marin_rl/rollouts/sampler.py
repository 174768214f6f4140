"""Sampling of one group: its members are played, scored, and committed where the log takes them.

A log has the groups, or members of groups, that are durable before their shard, and says when
enough have ended; the base commits nothing and waits for all. Members of a group with dialogues end
at different times: a process that is killed then costs the members that it was playing. Leaves out
how a member is played (`episode`), the stream's log (`streaming`), and which groups a shard has
(`generate`).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from marin_rl.environments.scoring import Scorer
from marin_rl.errors import EnvironmentTimeout
from marin_rl.progress import ProgressEvent, publish
from marin_rl.rollouts.assemble import RolloutMaker
from marin_rl.rollouts.episode import EpisodeDriver
from marin_rl.rollouts.rollout_producer import RolloutProducer
from marin_rl.rollouts.trajectories import (
    REQUEST_FAULTS,
    GroupRequest,
    Interrupted,
    Trajectory,
    all_ended,
    score_group,
)
from marin_rl.storage.runs import Run, round_name
from marin_rl.storage.tables.group_log import GroupLog
from marin_rl.storage.tables.group_queue import GroupQueue
from marin_rl.types import Rollout, RolloutGroup, ServedPolicy

PUSH_TIMEOUT_S = 3600.0
POLL_S = 0.2

Members = Mapping[int, Rollout]  # of a group, by index
Sampling = Sequence[Coroutine[Any, Any, RolloutGroup]]
Collect = Callable[[Sampling], Coroutine[Any, Any, list[RolloutGroup]]]


async def first_done(
    sampling: Sampling,
    *,
    policy: ServedPolicy,
    requests: Sequence[GroupRequest],
    count: int,
    members_min: int,
) -> list[RolloutGroup]:
    """Groups in order, once `count` are finished (`over_sampling.select: first_done`).

    A finished group has at least `members_min` members that did not fail; what is cancelled stands
    there as rollouts without tokens. The groups that end first are those of short answers, so this
    favours them: `selection/length_bias`. Raises what a group raises, after cancelling the others.
    """
    began, tasks = datetime.now(UTC), [asyncio.ensure_future(each) for each in sampling]
    finished, pending = 0, set(tasks)
    try:
        while pending and finished < count:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                valid = sum(r.status in ("complete", "truncated") for r in task.result().rollouts)
                finished += valid >= members_min
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    groups = list[RolloutGroup]()
    for task, request in zip(tasks, requests, strict=True):
        if not task.cancelled():
            groups.append(task.result())
            continue
        maker = RolloutMaker(policy, request, began)
        groups.append(request.group_of(tuple(map(maker.unfinished, range(request.size)))))
    return groups


class EarlyGroups:
    """Log of the groups of a shard, which commits none of them early.

    `collect` waits until enough have ended, such as `first_done`; None waits for all.
    """

    takes_groups = False  # groups may be committed without the rest of their shard
    takes_members = False  # and members without the rest of their group

    def __init__(self, collect: Collect | None = None) -> None:
        self._collect = collect

    def read(self, group_ids: Sequence[str]) -> Mapping[str, Members]:
        return {}

    def commit(self, group: RolloutGroup) -> Members:
        return {}

    async def collect(self, sampling: Sampling) -> list[RolloutGroup]:
        """Groups in order, once enough have ended; interrupted groups are left out."""
        if self._collect is not None:
            return await self._collect(sampling)
        groups = await all_ended(sampling)
        return [group for group in groups if not isinstance(group, Interrupted)]


class CommittedMembers(EarlyGroups):
    """Log of a shard that commits members as they end, each in a chain of its group."""

    takes_groups = takes_members = True

    def __init__(self, log: GroupLog, collect: Collect | None = None) -> None:
        super().__init__(collect)
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


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples and scores groups; `finished` are members that `log` had, by group and index."""

    driver: EpisodeDriver | RolloutProducer
    scorer: Scorer
    count: Callable[[RolloutGroup], None]
    log: EarlyGroups
    finished: Mapping[str, Mapping[int, Rollout]]

    async def sample(self, request: GroupRequest) -> RolloutGroup:
        """Complete a group: sample the members that are not finished yet."""
        environment, sampling = self.driver.environment, request.sampling
        tokens = min(sampling.max_tokens, environment.new_tokens_max or sampling.max_tokens)
        stop = (*sampling.stop, *environment.stop)
        request = replace(request, sampling=replace(sampling, max_tokens=tokens, stop=stop))
        members = dict(self.finished.get(request.group_id, {}))
        missing = tuple(index for index in range(request.size) if index not in members)
        if missing:
            asked = replace(request, members=missing) if members else request
            members |= await _PlayedGroup(self, asked).play()
        group = request.group_of(tuple(members[index] for index in range(request.size)))
        self.count(group)
        return group


@dataclass(slots=True)
class _PlayedGroup:
    """Members of a group that are played: scored as they end, and committed where the log does."""

    sampler: GroupSampler
    request: GroupRequest
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    rollouts: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    waiting: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def play(self) -> dict[int, Rollout]:
        """The members that are asked for, by index.

        They are committed as they end, where the log takes members; but members of one turn end
        together, and a score that compares members needs all of them.
        """
        driver, request = self.sampler.driver, self.request
        try:
            if (
                self.sampler.log.takes_members
                and isinstance(driver, EpisodeDriver)
                and driver.environment.has_episodes
                and driver.turns_max > 1
                and not await self.sampler.scorer.scores_groups()
            ):
                trajectories = await driver.play_group(request, self._ended)
            else:
                trajectories = await driver.play_group(request)
        except REQUEST_FAULTS as error:
            maker = self._maker()
            return {index: maker.failed(index, error) for index in request.indices} | self.rollouts
        await self._settle(dict(zip(request.indices, trajectories, strict=True)))
        return self.rollouts

    async def _ended(self, index: int, trajectory: Trajectory) -> None:
        """Settle a member that has ended, together with all that ended in the meantime."""
        self.waiting[index] = trajectory
        async with self.lock:
            ended, self.waiting = self.waiting, {}
            await self._settle(ended)

    async def _settle(self, ended: Mapping[int, Trajectory]) -> None:
        """Score members that are not settled yet, and commit the successful ones.

        Where a score depends on the other members, a group is committed whole or not at all.
        """
        ended = {i: trajectory for i, trajectory in ended.items() if i not in self.rollouts}
        if not ended:
            return
        scorer, log, request = self.sampler.scorer, self.sampler.log, self.request
        trajectories = list(ended.values())
        scores = await score_group(scorer, request.example, trajectories)
        maker = self._maker()
        scored = zip(ended.items(), scores, strict=True)
        played = {i: maker.sampled(i, trajectory, score) for (i, trajectory), score in scored}
        good = tuple(r for r in played.values() if r.status not in ("error", "aborted"))
        commits = log.takes_groups and bool(good)
        if commits and len(good) < request.size:
            commits = not await scorer.scores_groups()
        if commits:
            # another process may have been first, also with members that are still played here
            played |= await asyncio.to_thread(log.commit, request.group_of(good))
        self.rollouts |= played

    def _maker(self) -> RolloutMaker:
        return RolloutMaker(self.sampler.driver.policy, self.request, self.started_at)


@dataclass(slots=True)
class ProgressMeter:
    """Counts groups as they are done, and publishes progress."""

    event: ProgressEvent
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)

    def count(self, group: RolloutGroup) -> None:
        self.done += 1
        self.tokens += sum(rollout.n_completion_tokens for rollout in group.rollouts)
        self.rewards += [r.reward for r in group.rollouts if r.reward is not None]
        elapsed = max(time.monotonic() - self.began, 1e-9)
        metrics = {"perf/tokens_per_second": self.tokens / elapsed}
        if self.rewards:
            metrics["reward"] = sum(self.rewards) / len(self.rewards)
        publish(replace(self.event, done=self.done, metrics=metrics))


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
