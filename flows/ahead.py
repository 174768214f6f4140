"""Rounds that are sampled while earlier ones are trained (`asynchrony.max_staleness`, here L).

    sampling of round s   needs checkpoint max(0, s - L)
    training of round r   needs its rollouts
    closing of round r    needs checkpoint r + 1, and the evaluation of checkpoint r if one is due

Three coroutines play the rounds in order and wait for each other at these places alone. The policy
of a round follows from its number (a fork counts from its first checkpoint in place of 0), so
nothing else has to be recorded, and a killed run ends in what an undisturbed one ends in.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prefect.exceptions import Pause

from flows.evaluate import round_after
from flows.rounds import learn, sample
from flows.session import pause_if_suspended
from marin_rl.rounds import overlap_metrics, transfer_metrics
from marin_rl.storage.runs import (
    RunRef,
    committed,
    committed_checkpoint,
    evals_slot,
    rollouts_slot,
)
from marin_rl.types import ServedPolicy, SlotRef
from tasks.generate import evaluate
from tasks.options import StageRunner, open_run
from tasks.process import publish
from tasks.train import serve

Value = TypeVar("Value")
Seconds = dict[str, float]


class Results(Generic[Value]):
    """Results by number, which one coroutine gives and others wait for."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[Value]] = {}
        self._error: BaseException | None = None

    def give(self, number: int, value: Value) -> None:
        """Give the result of a number, once."""
        self._future(number).set_result(value)

    def give_once(self, number: int, value: Value) -> None:
        """Give the result of a number, unless there is one."""
        if not self._future(number).done():
            self.give(number, value)

    def fail(self, error: BaseException) -> None:
        """Give no more: all who wait for a result that is not there get the error."""
        self._error = error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)

    async def of(self, number: int) -> Value:
        """Wait for a result. Raises what `fail` was given."""
        return await asyncio.shield(self._future(number))

    def _future(self, number: int) -> "asyncio.Future[Value]":
        if number not in self._futures:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(asyncio.Future.exception)  # there may be none who waits
            if self._error is not None:
                future.set_exception(self._error)
            self._futures[number] = future
        return self._futures[number]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The rollouts of a round, seconds of its stages, and the cost of the weight transfer."""

    rollouts: SlotRef
    seconds: Seconds
    transfer: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The checkpoint that a round ended in, its number of updates, and seconds of its stages."""

    checkpoint: SlotRef
    updates: int
    seconds: Seconds


async def play_ahead(run: RunRef, checkpoint: SlotRef) -> SlotRef:
    """Play the rounds after `checkpoint`; return the last checkpoint.

    Where sampling fails, what is sampled is still trained and closed; where training or closing
    fails, all end. Raises what failed first.
    """
    rounds = _RoundsAhead(run, checkpoint)
    await run_together(*rounds.work())
    return await rounds.last()


async def run_together(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines, of which the first samples; where another fails, sampling is cancelled.

    Where another ends because the flow run was suspended, sampling ends by itself, with nothing
    lost. Raises what failed first.
    """
    sampling, *others = (asyncio.ensure_future(each) for each in work)
    for each in others:
        each.add_done_callback(lambda ended: failed(ended) and sampling.cancel())
    try:
        outcomes = await asyncio.gather(sampling, *others, return_exceptions=True)
    finally:
        for each in (sampling, *others):
            each.cancel()
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    # A cancelled coroutine is the effect of another's error, unless all were.
    for error in sorted(errors, key=lambda error: isinstance(error, asyncio.CancelledError)):
        raise error


def failed(ended: "asyncio.Future[None]") -> bool:
    """True if a coroutine ended by an error; being suspended is none."""
    return not ended.cancelled() and not isinstance(ended.exception(), Pause | None)


class Rounds(ABC):
    """Rounds of a run after a checkpoint, and results that the coroutines which play them share."""

    def __init__(self, run: RunRef, checkpoint: SlotRef) -> None:
        opened = open_run(run)
        self._run, self._opened, self._config = run, opened, opened.config
        self._checkpoint, self._first = checkpoint, round_after(checkpoint)
        self._rounds = range(self._first, opened.config.rounds)
        self._trained = Results[Trained]()
        self._evaluated = Results[None]()
        self._closed = Results[None]()

    async def last(self) -> SlotRef:
        """The checkpoint after the last round."""
        return await self._version(max(self._first, self._rounds.stop))

    async def _may_train(self, round: int) -> None:
        """Wait for an earlier round to be closed: a crash leaves few of them to be closed again."""
        if (behind := round - self._config.max_staleness - 1) >= self._first:
            await self._closed.of(behind)

    async def _close_rounds(self) -> None:
        ended = time.monotonic()
        with reported(self._closed):
            for round in self._rounds:
                trained = await self._trained.of(round)
                if self._is_due(round):
                    await self._evaluated.of(round)  # its metrics are the round's
                began, ended = ended, time.monotonic()
                seconds, transfer = await self._sampling_of(round)
                measured = {**seconds, **trained.seconds, "timing_s/round": ended - began}
                measured |= overlap_metrics(seconds, trained.seconds, ended - began)
                if transfer:
                    measured |= transfer_metrics(transfer, trained.updates)
                stages = StageRunner(self._config.flow)
                await stages.run(publish, self._run, round, trained.checkpoint, measured)
                self._closed.give(round, None)

    @abstractmethod
    async def _sampling_of(self, round: int) -> tuple[Seconds, Mapping[str, float]]:
        """Seconds of a round's sampling, and the measurements of its weight transfer."""

    def _is_due(self, version: int) -> bool:
        return version % self._config.evaluation.every_rounds == 0

    async def _version(self, version: int) -> SlotRef:
        """Wait for a checkpoint."""
        if version > self._first:
            return (await self._trained.of(version - 1)).checkpoint
        existing = committed_checkpoint(self._opened, version)
        assert existing is not None, "checkpoints before one that is committed are"
        return existing


class _RoundsAhead(Rounds):
    """Rounds that are sampled by the checkpoint that follows from their number."""

    def __init__(self, run: RunRef, checkpoint: SlotRef) -> None:
        super().__init__(run, checkpoint)
        ancestors = self._opened.ancestors
        self._origin = ancestors[-1].through_round if ancestors else 0
        self._sampled = Results[Sampled]()
        self._policy: tuple[int, ServedPolicy | None] = -1, None  # of a version, if it is served

    def work(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the coroutines that sample, train and close the rounds."""
        return self._sample_rounds(), self._train_rounds(), self._close_rounds()

    async def _sample_rounds(self) -> None:
        with reported(self._sampled, self._evaluated):
            for round in self._rounds:
                await pause_if_suspended()
                self._sampled.give(round, await self._sample_round(round))
            for version in range(self._version_of(self._rounds.stop), self._rounds.stop):
                await self._served(StageRunner(self._config.flow), version, needed=False)

    async def _sample_round(self, round: int) -> Sampled:
        stages, version = StageRunner(self._config.flow), self._version_of(round)
        began = time.monotonic()
        await self._version(version)
        idle_s = time.monotonic() - began
        sealed = committed(self._opened, rollouts_slot(round))
        policy = await self._served(stages, version, needed=sealed is None)
        if sealed is None:
            assert policy is not None, "it was needed"
            sealed = await sample(stages, self._run, round, policy)
        return Sampled(
            rollouts=sealed,
            seconds={**stages.seconds, "timing_s/sampler_idle": idle_s},
            transfer=dict(policy.transfer) if policy else {},
        )

    async def _served(
        self, stages: StageRunner, version: int, *, needed: bool
    ) -> ServedPolicy | None:
        """Serve a checkpoint once, where it is needed or to be evaluated; evaluate it if due."""
        seen, policy = self._policy
        if seen == version and (policy is not None or not needed):
            return policy
        due = self._is_due(version) and committed(self._opened, evals_slot(version)) is None
        policy = None
        if needed or due:
            checkpoint = await self._version(version)
            policy = await stages.run(serve, self._run, version, checkpoint)
        if due:
            await stages.run(evaluate, self._run, version, policy)
        if seen != version:
            self._evaluated.give(version, None)
        self._policy = version, policy
        return policy

    async def _train_rounds(self) -> None:
        with reported(self._trained):
            checkpoint = self._checkpoint
            for round in self._rounds:
                await self._may_train(round)
                began = time.monotonic()
                rollouts = (await self._sampled.of(round)).rollouts
                idle_s = time.monotonic() - began
                stages = StageRunner(self._config.flow)
                checkpoint, updates = await learn(stages, self._run, round, checkpoint, rollouts)
                seconds = {**stages.seconds, "timing_s/trainer_idle": idle_s}
                trained = Trained(checkpoint=checkpoint, updates=updates, seconds=seconds)
                self._trained.give(round, trained)

    async def _sampling_of(self, round: int) -> tuple[Seconds, Mapping[str, float]]:
        sampled = await self._sampled.of(round)
        return sampled.seconds, sampled.transfer

    def _version_of(self, round: int) -> int:
        """The checkpoint that samples a round."""
        return max(self._origin, round - self._config.max_staleness)


@contextmanager
def reported(*results: Results[Any]) -> Iterator[None]:
    """Give the error that ends the block to all who wait for these results."""
    try:
        yield
    except BaseException as error:
        for each in results:
            each.fail(error)
        raise
