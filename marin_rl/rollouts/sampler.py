"""Sampling of one group: its members are played, scored, and committed where the log takes them.

Members of a group with dialogues end at different times, so each may be durable before the others
have ended: a process that is killed then costs the members that it was playing. Leaves out how a
member is played (`episode`), the log (`early_groups`), and which groups a shard has (`generate`).
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from marin_rl.environments.episode import HasEpisodes
from marin_rl.environments.scoring import Scorer
from marin_rl.errors import MarinRLError
from marin_rl.progress import ProgressEvent, publish
from marin_rl.rollouts.assemble import RolloutMaker
from marin_rl.rollouts.early_groups import EarlyGroups
from marin_rl.rollouts.episode import EpisodeDriver
from marin_rl.rollouts.finished import FinishedDriver
from marin_rl.rollouts.trajectories import REQUEST_FAULTS, GroupRequest, Trajectory, score_group
from marin_rl.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples and scores groups; `finished` are members that `log` had, by group and index."""

    driver: EpisodeDriver | FinishedDriver
    scorer: Scorer
    count: Callable[[RolloutGroup], None]
    log: EarlyGroups
    finished: Mapping[str, Mapping[int, Rollout]]

    async def sample(self, request: GroupRequest) -> RolloutGroup:
        """A group: its finished members, and those that are still missing."""
        members = dict(self.finished.get(request.group_id, {}))
        missing = tuple(index for index in range(request.size) if index not in members)
        if missing:
            asked = replace(request, members=missing) if members else request
            members |= await self._played(asked)
        group = request.group_of(tuple(members[index] for index in range(request.size)))
        self.count(group)
        return group

    async def _played(self, request: GroupRequest) -> dict[int, Rollout]:
        """The members that are asked for, by index."""
        ended = _EndedMembers(self, request)
        try:
            if isinstance(self.driver, EpisodeDriver) and await self._commits_members(self.driver):
                trajectories = await self.driver.play_group(request, ended.add)
            else:
                trajectories = await self.driver.play_group(request)
        except REQUEST_FAULTS as error:
            return ended.failed(error) | ended.rollouts
        await ended.settle(dict(zip(request.indices, trajectories, strict=True)))
        return ended.rollouts

    async def _commits_members(self, driver: EpisodeDriver) -> bool:
        """Return True where members are committed as they end.

        Members of one turn end together, and a score that compares members needs all of them.
        """
        if not self.log.takes_members:
            return False
        several = isinstance(driver.environment, HasEpisodes) and driver.turns_max > 1
        return several and not await self.scorer.scores_groups()

    async def committed(
        self, request: GroupRequest, played: Mapping[int, Rollout]
    ) -> Mapping[int, Rollout]:
        """Commit members that did not fail; what is committed of them, by index.

        Where a score depends on the other members, a group is committed whole or not at all.
        """
        good = tuple(r for r in played.values() if r.status not in ("error", "aborted"))
        if not self.log.takes_groups or not good:
            return {}
        if len(good) < request.size and await self.scorer.scores_groups():
            return {}
        return await asyncio.to_thread(self.log.commit, request.group_of(good))


@dataclass(slots=True)
class _EndedMembers:
    """Members of a group that have ended: scored, and committed where the log takes them."""

    sampler: GroupSampler
    request: GroupRequest
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    rollouts: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    waiting: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def add(self, index: int, trajectory: Trajectory) -> None:
        """Settle a member that has ended, with those that end while others are settled."""
        self.waiting[index] = trajectory
        async with self.lock:
            ended, self.waiting = self.waiting, {}
            await self.settle(ended)

    async def settle(self, ended: Mapping[int, Trajectory]) -> None:
        """Score members that are not settled yet, and commit them."""
        ended = {i: trajectory for i, trajectory in ended.items() if i not in self.rollouts}
        if not ended:
            return
        trajectories = list(ended.values())
        scores = await score_group(self.sampler.scorer, self.request.example, trajectories)
        maker = self._maker()
        scored = zip(ended.items(), scores, strict=True)
        played = {i: maker.sampled(i, trajectory, score) for (i, trajectory), score in scored}
        committed = await self.sampler.committed(self.request, played)
        # another process may have been first, also with members that are still played here
        self.rollouts |= {**played, **committed}

    def failed(self, error: MarinRLError) -> dict[int, Rollout]:
        maker = self._maker()
        return {index: maker.failed(index, error) for index in self.request.indices}

    def _maker(self) -> RolloutMaker:
        return RolloutMaker(self.sampler.driver.policy, self.request, self.started_at)


@dataclass(slots=True)
class Meter:
    """Counts groups as they are done, and publishes progress."""

    event: ProgressEvent
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)

    def count(self, group: RolloutGroup) -> None:
        """Add a finished group to the totals, and publish them."""
        self.done += 1
        self.tokens += sum(rollout.n_completion_tokens for rollout in group.rollouts)
        self.rewards += [r.reward for r in group.rollouts if r.reward is not None]
        elapsed = max(time.monotonic() - self.began, 1e-9)
        metrics = {"perf/tokens_per_second": self.tokens / elapsed}
        if self.rewards:
            metrics["reward"] = sum(self.rewards) / len(self.rewards)
        publish(replace(self.event, done=self.done, metrics=metrics))
