"""Rounds that take finished groups of a stream (`asynchrony.sampler: windowed`).

    sampling of a chunk   needs room: groups that are claimed and not taken are bounded
    intake of round r     needs as many finished groups, of policies within the bound of staleness

Sampling goes on by the latest checkpoint, whatever round is trained. What a round takes is recorded
by its intake once, so that a killed run ends in what its intakes say.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from prefect.exceptions import Pause

from flows.play import Rounds, Seconds, Taken, reported
from flows.session import pause_if_suspended
from marin_rl.errors import StorageError
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.rollouts import streaming
from marin_rl.rollouts.trajectories import Interruption
from marin_rl.storage.fleet import SamplingTarget
from marin_rl.storage.runs import RunRef, committed, evals_slot, rollouts_slot
from marin_rl.storage.tables.intakes import intake_ref, settled_before
from marin_rl.storage.tables.stream import GroupStream
from marin_rl.types import ServedPolicy, SlotRef
from tasks.generate import sample
from tasks.options import StageRunner, in_thread
from tasks.train import collect, seal_taken, take

WORKER = "flow"  # of the flow's own claims: it goes on with them after a restart
POLL_S = 0.2
POLL_SHARE = 0.1  # of the time that looking at a large stream may take


class Window(Rounds):
    """Rounds that take their groups of a stream, which is sampled at the same time."""

    def __init__(self, run: RunRef, checkpoint: SlotRef) -> None:
        super().__init__(run, checkpoint)
        self._taken = self._first - 1  # the last round that took its groups
        self._ended = False  # sampling
        self._stream = GroupStream(self._opened)
        self._chunks: dict[int, asyncio.Task[Any]] = {}  # under way
        self._interruption = Interruption()  # of these chunks
        self._sampled_by: ServedPolicy | None = None
        self._idle_s = self._looking_s = 0.0

    async def _fill(self) -> None:
        try:
            with reported(self._evaluated):
                while self._taken + 1 < self._rounds.stop:
                    await pause_if_suspended()
                    await self._take_up_newest_policy()
                    await self._begin_chunks()
                    await self._wait()
                await self._evaluate_until(self._rounds.stop)
        except Pause:
            await self._drain(pausing=True)
            raise
        finally:
            self._ended = True
            for chunk in self._chunks.values():
                chunk.cancel()
            await asyncio.gather(*self._chunks.values(), return_exceptions=True)
            with suppress(StorageError):  # what sampling failed by is raised
                await self._aim(None)

    async def _take_up_newest_policy(self) -> None:
        """Serve the latest checkpoint, once what earlier ones sample is finished.

        With `in_flight_updates` at once: what is under way goes on with it.
        """
        version = self._latest.number
        if self._sampled_by is not None and version == self._sampled_by.weight_version:
            return
        if not self._config.in_flight_updates:
            await self._drain()
        await self._evaluate_until(version)
        policy = await self._served(StageRunner(self._config.flow), version, needed=True)
        assert policy is not None, "it was needed"
        await self._aim(policy)
        self._sampled_by = policy

    async def _aim(self, policy: ServedPolicy | None) -> None:
        """Tell nodes on other machines which policy to sample by; None has them end early."""
        if self._config.flow.runner == "local":
            return
        checkpoint = self._latest if policy is None else policy.checkpoint
        target = SamplingTarget(checkpoint=checkpoint, open=policy is not None)
        await in_thread(board_of(self._config.inference, self._opened.folder).direct, target)

    async def _drain(self, *, pausing: bool = False) -> None:
        """Wait for the chunks under way: no group is of two policies.

        Where completions are sampled in pieces, for the pieces under way: the next policy goes on.
        With `pausing` chunks end at the next border of groups, or of pieces, on every machine.
        """
        self._interruption.request(between_groups=pausing)
        await self._aim(None)
        for ended in await asyncio.gather(*self._chunks.values(), return_exceptions=pausing):
            if isinstance(ended, BaseException) and not isinstance(ended, Pause):
                raise ended  # a task that ends in a suspended flow run raises Pause
        self._chunks.clear()
        self._interruption = Interruption()

    async def _evaluate_until(self, version: int) -> None:
        for number in range(self._first, version):
            if self._is_due(number) and committed(self._opened, evals_slot(number)) is None:
                await self._served(StageRunner(self._config.flow), number, needed=False)
            self._evaluated.give(number, None)

    async def _begin_chunks(self) -> None:
        most = self._config.flow.shards_in_flight_max
        if len(self._chunks) >= most:
            return
        taken = self._taken + 1
        settled = await in_thread(settled_before, self._opened, taken)
        began = time.monotonic()
        await in_thread(self._stream.look)
        self._looking_s = time.monotonic() - began
        policy = self._sampled_by
        assert policy is not None, "a policy is served first"
        claimant = streaming.Claimant(
            worker=WORKER,
            most=streaming.open_groups_max(self._config, policy.weight_version, taken),
            now=streaming.now_utc(),
            oldest=taken - self._config.staleness_rounds_max,
            busy={*self._chunks},
        )
        for chunk in streaming.open_chunks(self._stream, settled, claimant):
            version = streaming.begun_by(self._stream, chunk, claimant)
            begun = policy.weight_version if version is None else version
            # Another worker may have been first.
            if await in_thread(self._stream.claim, chunk, WORKER, begun, claimant.now):
                called = chunk, policy, WORKER, settled.floor, self._interruption
                call = StageRunner(self._config.flow).run(sample, self._run, *called)
                self._chunks[chunk] = asyncio.ensure_future(call)
            if len(self._chunks) >= most:
                return

    async def _wait(self) -> None:
        """Wait for a chunk to end, or for POLL_S. Raises the error of a failed chunk."""
        began = time.monotonic()
        if self._chunks:
            await asyncio.wait(
                self._chunks.values(), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
        else:
            await asyncio.sleep(_pause_s(self._looking_s))
            self._idle_s += time.monotonic() - began
        for chunk, task in [*self._chunks.items()]:
            if task.done():
                del self._chunks[chunk]
                task.result()

    async def _take(self, round: int) -> Taken:
        stages, idle_s = StageRunner(self._config.flow), 0.0
        rollouts = committed(self._opened, rollouts_slot(round))
        if rollouts is None:
            began = time.monotonic()
            intake = intake_ref(self._opened, round)
            while intake is None:
                ended, looked = self._ended, time.monotonic()
                if await in_thread(partial(streaming.is_ready, ended=ended), self._opened, round):
                    intake = await stages.run(take, self._run, round, ended)
                elif ended:
                    raise asyncio.CancelledError  # what sampling failed by is raised in its place
                else:
                    await asyncio.sleep(_pause_s(time.monotonic() - looked))
            idle_s = time.monotonic() - began
            shards = range(self._config.rollouts.shards_per_round)
            calls = [(self._run, round, shard, intake) for shard in shards]
            parts = await stages.each(collect, calls)
            rollouts = await stages.run(seal_taken, self._run, round, parts, intake)
        self._taken = round
        waited = {"timing_s/trainer_idle": idle_s, "timing_s/sampler_idle": self._idle_s}
        self._idle_s = 0.0
        return Taken(rollouts=rollouts, waited=waited, stages=stages)

    @asynccontextmanager
    async def _while_trained(self, round: int) -> AsyncIterator[None]:
        """Read groups as they come in, until the round is trained."""
        trained = asyncio.Event()
        reading = asyncio.ensure_future(self._read_ahead(round + 1, trained))
        try:
            yield
        finally:
            trained.set()
            # What cannot be read now is an error of the round that takes it.
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_ahead(self, round: int, trained: asyncio.Event) -> None:
        while not trained.is_set() and round in self._rounds:
            began = time.monotonic()
            await in_thread(streaming.is_ready, self._opened, round)
            with suppress(TimeoutError):
                async with asyncio.timeout(_pause_s(time.monotonic() - began)):
                    await trained.wait()

    async def _sampling_of(self, round: int) -> tuple[Seconds, Mapping[str, float]]:
        return {}, self._transfer


def _pause_s(looking_s: float) -> float:
    """Seconds until the next look at the stream; the last look took `looking_s`."""
    return max(POLL_S, looking_s / POLL_SHARE)
