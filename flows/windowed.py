"""Rounds that take finished groups of a stream (`asynchrony.sampler: windowed`).

    sampling of a chunk   needs room: groups that are claimed and not taken are bounded
    intake of round r     needs as many finished groups, of policies within the bound of staleness
    training of round r   needs its intake, and nothing else of the stream
    closing of round r    needs checkpoint r + 1, and the evaluation of checkpoint r if one is due

Sampling goes on by the latest checkpoint, whatever round is trained. What a round takes is recorded
by its intake once, so that a killed run ends in what its intakes say.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prefect.exceptions import Pause

from flows.ahead import Rounds, Seconds, Trained, reported, run_together
from flows.evaluate import round_after
from flows.rounds import learn
from flows.session import pause_if_suspended
from marin_rl.errors import StorageError
from marin_rl.inference.client.fleet_sources import sampling_board
from marin_rl.rollouts.intake import is_ready
from marin_rl.rollouts.interruption import Interruption
from marin_rl.rollouts.streaming import (
    Claimant,
    begun_by,
    now_utc,
    open_chunks,
    open_groups_max,
)
from marin_rl.storage.runs import RunRef, committed, evals_slot, rollouts_slot
from marin_rl.storage.sampling_target import SamplingTarget
from marin_rl.storage.tables.intakes import intake_ref, settled_before
from marin_rl.storage.tables.stream import GroupStream
from marin_rl.types import ServedPolicy, SlotRef
from tasks.generate import evaluate, sample
from tasks.options import StageRunner, in_thread
from tasks.process import collect, seal_taken, take
from tasks.train import serve

WORKER = "flow"  # of the flow's own claims: it goes on with them after a restart
POLL_S = 0.2
POLL_SHARE = 0.1  # of the time that looking at a large stream may take


async def play_windowed(run: RunRef, checkpoint: SlotRef) -> SlotRef:
    """Play the rounds after `checkpoint`; return the last checkpoint.

    Where sampling fails, rounds that have their groups are still trained and closed. Raises what
    failed first.
    """
    rounds = _WindowedRounds(run, checkpoint)
    await run_together(*rounds.work())
    return await rounds.last()


@dataclass
class _Sampling:
    """State of the sampling: the policy, chunks under way, and what the transfers cost."""

    stream: GroupStream
    version: int = -1
    policy: ServedPolicy | None = None
    chunks: dict[int, "asyncio.Task[Any]"] = field(default_factory=dict)
    interruption: Interruption = field(default_factory=Interruption)  # of these chunks
    transfer: dict[str, float] = field(default_factory=dict)
    idle_s: float = 0.0
    looking_s: float = 0.0


class _WindowedRounds(Rounds):
    """Rounds that take their groups of a stream, which is sampled at the same time."""

    def __init__(self, run: RunRef, checkpoint: SlotRef) -> None:
        super().__init__(run, checkpoint)
        self._latest = checkpoint  # what is sampled by next
        self._taken = self._first - 1  # the last round that took its groups
        self._ended = False  # sampling
        self._sampling = _Sampling(GroupStream(self._opened))

    def work(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the coroutines that sample, train and close the rounds."""
        return self._sample(), self._train_rounds(), self._close_rounds()

    async def _sample(self) -> None:
        sampling = self._sampling
        try:
            with reported(self._evaluated):
                while self._taken + 1 < self._rounds.stop:
                    await pause_if_suspended()
                    await self._newest_policy(sampling)
                    await self._fill(sampling)
                    await self._wait(sampling)
                await self._evaluate_until(self._rounds.stop)
        except Pause:
            await self._drain(sampling, pausing=True)
            raise
        finally:
            self._ended = True
            for chunk in sampling.chunks.values():
                chunk.cancel()
            await asyncio.gather(*sampling.chunks.values(), return_exceptions=True)
            with suppress(StorageError):  # what sampling failed by is raised
                await self._aim(None)

    async def _newest_policy(self, sampling: _Sampling) -> None:
        """Serve the latest checkpoint, once what earlier ones sample is finished.

        With `in_flight_updates` at once: what is under way goes on with it.
        """
        version = round_after(self._latest)
        if version == sampling.version:
            return
        if not self._config.in_flight_updates:
            await self._drain(sampling)
        await self._evaluate_until(version)
        stages = StageRunner(self._config.flow)
        policy = await self._served(stages, version, needed=True)
        assert policy is not None, "it was needed"
        await self._aim(policy)
        sampling.policy, sampling.version = policy, version

    async def _aim(self, policy: ServedPolicy | None) -> None:
        """Tell nodes on other machines which policy to sample by; None has them end early.

        Raises StorageError.
        """
        if self._config.flow.runner == "local":
            return
        checkpoint = self._latest if policy is None else policy.checkpoint
        target = SamplingTarget(checkpoint=checkpoint, open=policy is not None)
        await in_thread(sampling_board(self._opened).write, target)

    async def _drain(self, sampling: _Sampling, *, pausing: bool = False) -> None:
        """Wait for the chunks under way: no group is of two policies.

        Where completions are sampled in pieces, for the pieces under way: the next policy goes on.
        With `pausing` chunks end at the next border of groups, or of pieces, on every machine.
        """
        sampling.interruption.request(between_groups=pausing)
        await self._aim(None)
        chunks = [*sampling.chunks.values()]
        for ended in await asyncio.gather(*chunks, return_exceptions=pausing):
            if isinstance(ended, BaseException) and not isinstance(ended, Pause):
                raise ended  # a task that ends in a suspended flow run raises Pause
        sampling.chunks.clear()
        sampling.interruption = Interruption()

    async def _evaluate_until(self, version: int) -> None:
        """Serve and evaluate checkpoints before `version` whose evaluation is due."""
        for number in range(self._first, version):
            if self._is_due(number) and committed(self._opened, evals_slot(number)) is None:
                await self._served(StageRunner(self._config.flow), number, needed=False)
            self._evaluated.give_once(number, None)

    async def _served(
        self, stages: StageRunner, version: int, *, needed: bool
    ) -> ServedPolicy | None:
        due = self._is_due(version) and committed(self._opened, evals_slot(version)) is None
        policy = None
        if needed or due:
            policy = await stages.run(serve, self._run, version, await self._version(version))
            self._sampling.transfer = dict(policy.transfer)
        if due:
            await stages.run(evaluate, self._run, version, policy)
        self._evaluated.give_once(version, None)
        return policy

    async def _fill(self, sampling: _Sampling) -> None:
        """Claim and begin chunks while there is room."""
        if len(sampling.chunks) >= self._config.flow.shards_in_flight_max:
            return
        settled = await in_thread(settled_before, self._opened, self._taken + 1)
        began = time.monotonic()
        await in_thread(sampling.stream.look)
        sampling.looking_s = time.monotonic() - began
        taken = self._taken + 1
        assert sampling.policy is not None, "a policy is served first"
        claimant = Claimant(
            worker=WORKER,
            most=open_groups_max(self._config, sampling.version, taken),
            now=now_utc(),
            oldest=taken - self._config.staleness_rounds_max,
            busy={*sampling.chunks},
        )
        for chunk in open_chunks(sampling.stream, settled, claimant):
            await self._begin(sampling, chunk, claimant, settled.floor)
            if len(sampling.chunks) >= self._config.flow.shards_in_flight_max:
                return

    async def _begin(self, sampling: _Sampling, chunk: int, claimant: Claimant, floor: int) -> None:
        """Claim a chunk, and sample it unless another worker was first."""
        version = begun_by(sampling.stream, chunk, claimant)
        begun = sampling.version if version is None else version
        if await in_thread(sampling.stream.claim, chunk, WORKER, begun, claimant.now):
            stages = StageRunner(self._config.flow)
            called = chunk, sampling.policy, WORKER, floor, sampling.interruption
            call = stages.run(sample, self._run, *called)
            sampling.chunks[chunk] = asyncio.ensure_future(call)

    async def _wait(self, sampling: _Sampling) -> None:
        """Wait for a chunk to end, or for a moment. Raises what a chunk failed by."""
        began = time.monotonic()
        if sampling.chunks:
            await asyncio.wait(
                sampling.chunks.values(), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
        else:
            await asyncio.sleep(_pause_s(sampling.looking_s))
            sampling.idle_s += time.monotonic() - began
        for chunk, task in [*sampling.chunks.items()]:
            if task.done():
                del sampling.chunks[chunk]
                task.result()

    async def _train_rounds(self) -> None:
        with reported(self._trained):
            checkpoint = self._checkpoint
            for round in self._rounds:
                await self._may_train(round)
                checkpoint = await self._train_round(round, checkpoint)
                self._latest = checkpoint

    async def _train_round(self, round: int, checkpoint: SlotRef) -> SlotRef:
        stages = StageRunner(self._config.flow)
        rollouts, idle_s = await self._rollouts(stages, round)
        self._taken = round
        trained = asyncio.Event()
        reading = asyncio.ensure_future(self._read_ahead(round + 1, trained))
        sampler_idle_s, self._sampling.idle_s = self._sampling.idle_s, 0.0
        try:
            checkpoint, updates = await learn(stages, self._run, round, checkpoint, rollouts)
        finally:
            trained.set()
            await asyncio.wait([reading])
        seconds = {
            **stages.seconds,
            "timing_s/trainer_idle": idle_s,
            "timing_s/sampler_idle": sampler_idle_s,
        }
        self._trained.give(round, Trained(checkpoint=checkpoint, updates=updates, seconds=seconds))
        reading.result()
        return checkpoint

    async def _read_ahead(self, round: int, trained: asyncio.Event) -> None:
        """Read groups as they come in, until the round before is trained."""
        while not trained.is_set() and round in self._rounds:
            began = time.monotonic()
            await in_thread(is_ready, self._opened, round)
            with suppress(TimeoutError):
                async with asyncio.timeout(_pause_s(time.monotonic() - began)):
                    await trained.wait()

    async def _rollouts(self, stages: StageRunner, round: int) -> tuple[SlotRef, float]:
        """The sealed rollouts of a round, and the seconds that training waited for them."""
        if (sealed := committed(self._opened, rollouts_slot(round))) is not None:
            return sealed, 0.0
        intake, idle_s = await self._intake(stages, round)
        shards = range(self._config.rollouts.shards_per_round)
        parts = await stages.each(collect, [(self._run, round, shard, intake) for shard in shards])
        return await stages.run(seal_taken, self._run, round, parts, intake), idle_s

    async def _intake(self, stages: StageRunner, round: int) -> tuple[SlotRef, float]:
        began = time.monotonic()
        intake = intake_ref(self._opened, round)
        while intake is None:
            ended, looked = self._ended, time.monotonic()
            if await in_thread(partial(is_ready, ended=ended), self._opened, round):
                intake = await stages.run(take, self._run, round, ended)
            elif ended:
                raise asyncio.CancelledError  # what sampling failed by is raised in its place
            else:
                await asyncio.sleep(_pause_s(time.monotonic() - looked))
        return intake, time.monotonic() - began

    async def _sampling_of(self, round: int) -> tuple[Seconds, Mapping[str, float]]:
        return {}, self._sampling.transfer


def _pause_s(looking_s: float) -> float:
    """Seconds until the next look at the stream, of which the last one took `looking_s`."""
    return max(POLL_S, looking_s / POLL_SHARE)
