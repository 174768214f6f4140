"""Rounds of the rl-loop: in turn, or with sampling ahead (`asynchrony.max_staleness`, here L).

    sampling of round s   needs checkpoint max(0, s - L)
    training of round r   needs its rollouts
    closing of round r    needs checkpoint r + 1, and the evaluation of checkpoint r if one is due

With L = 0 a round is one task that calls those of its stages, and is closed while the next one
samples. Otherwise three coroutines play the rounds in order and wait for each other at these places
alone: one fills with rollouts, one takes those of a round and trains, one closes. `InOrder` takes
by number: the policy of a round follows from its number (a fork counts from its first checkpoint in
place of 0), so nothing else has to be recorded. Leaves out rounds that take groups of a stream
(`window`). A killed run ends in what an undisturbed one ends in.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prefect import task
from prefect.exceptions import Pause

from flows.evaluate import measure
from flows.session import pause_if_suspended
from marin_rl.rounds import overlap_metrics, transfer_metrics
from marin_rl.storage import layout
from marin_rl.storage.run_progress import ends_early
from marin_rl.storage.runs import RunRef, committed, committed_checkpoint
from marin_rl.types import ServedPolicy, SlotRef
from tasks.generate import evaluate, extend, generate, seal
from tasks.options import GROUP, StageRunner, open_run
from tasks.train import process, publish, serve, train

Value = TypeVar("Value")
Seconds = Mapping[str, float]


async def play_in_turn(run: RunRef, checkpoint: SlotRef) -> SlotRef:
    """Play the rounds after `checkpoint` one after the other; return the last checkpoint.

    A round is closed while the next one samples, as its checkpoint is written then.
    """
    config = open_run(run).config
    closing: asyncio.Future[SlotRef] | None = None
    try:
        for round in range(checkpoint.number, config.rounds):
            await pause_if_suspended()
            if config.evaluation.patience and round % config.evaluation.every_rounds == 0:
                await measure(run, checkpoint)
                if ends_early(open_run(run), config, round):
                    break
            checkpoint, measured = await run_round(run, round, checkpoint)
            if closing is not None:
                await closing
            stages = StageRunner(config.flow)
            closing = asyncio.ensure_future(stages.run(publish, run, round, checkpoint, measured))
    finally:
        if closing is not None:
            await closing
    return checkpoint


@task(name="round", task_run_name="round-{round:05d}", **GROUP)
async def run_round(run: RunRef, round: int, checkpoint: SlotRef) -> tuple[SlotRef, Seconds]:
    """Run a round: sample with checkpoint `round` and learn.

    Returns checkpoint `round + 1`, and measurements of the round.
    """
    config = open_run(run).config
    stages = StageRunner(config.flow)
    policy = await stages.run(serve, run, round, checkpoint)
    if round % config.evaluation.every_rounds == 0:
        await stages.run(evaluate, run, round, policy)
    rollouts = await sample(stages, run, round, policy)
    trained, updates = await learn(stages, run, round, checkpoint, rollouts)
    return trained, {**stages.seconds, **transfer_metrics(policy.transfer, updates)}


async def sample(stages: StageRunner, run: RunRef, round: int, policy: ServedPolicy) -> SlotRef:
    """Sample and seal a round's rollouts with a served policy: needs no trainer."""
    config, parts = open_run(run).config, list[SlotRef]()
    shards: Sequence[int] = range(config.rollouts.shards_per_round)
    while shards:
        parts += await stages.each(generate, [(run, round, shard, policy) for shard in shards])
        shards = await stages.run(extend, run, round, parts) if config.samples_on else ()
    return await stages.run(seal, run, round, parts, policy)


async def learn(
    stages: StageRunner, run: RunRef, round: int, checkpoint: SlotRef, rollouts: SlotRef
) -> tuple[SlotRef, int]:
    """Train on sealed rollouts from checkpoint `round`: needs no endpoint.

    Returns the next checkpoint, and the number of updates.
    """
    batches = await stages.run(process, run, round, rollouts)
    trained = await stages.run(train, run, round, batches, checkpoint)
    return trained, int(batches.summary["steps"]) * open_run(run).config.training.epochs


class Results(Generic[Value]):
    """Futures by number, which one coroutine sets and others await."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[Value]] = {}
        self._error: BaseException | None = None

    def give(self, number: int, value: Value) -> None:
        if not self._future(number).done():
            self._future(number).set_result(value)

    def fail(self, error: BaseException) -> None:
        """Fail all results that are not there, now and later."""
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


@contextmanager
def reported(*results: Results[Any]) -> Iterator[None]:
    """Fail these results with the error that ends the block."""
    try:
        yield
    except BaseException as error:
        for each in results:
            each.fail(error)
        raise


async def run_together(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines, of which the first samples; where another fails, sampling is cancelled.

    Where another ends because the flow run was suspended, sampling ends by itself, with nothing
    lost. Raises what failed first.
    """
    sampling, *others = (asyncio.ensure_future(each) for each in work)

    def failed(ended: "asyncio.Future[None]") -> None:
        if not ended.cancelled() and not isinstance(ended.exception(), Pause | None):
            sampling.cancel()

    for each in others:
        each.add_done_callback(failed)
    try:
        outcomes = await asyncio.gather(sampling, *others, return_exceptions=True)
    finally:
        for each in (sampling, *others):
            each.cancel()
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    # A cancelled coroutine is the effect of another's error, unless all were.
    for error in sorted(errors, key=lambda error: isinstance(error, asyncio.CancelledError)):
        raise error


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The sealed rollouts of a round, `timing_s/*` of the wait, and the stages of its training."""

    rollouts: SlotRef
    waited: Seconds
    stages: StageRunner


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The checkpoint that a round ended in, its number of updates, and seconds of its stages."""

    checkpoint: SlotRef
    updates: int
    seconds: Seconds


class Rounds(ABC):
    """Rounds of a run after a checkpoint, played by three coroutines that share results."""

    def __init__(self, run: RunRef, checkpoint: SlotRef) -> None:
        opened = open_run(run)
        self._run, self._opened, self._config = run, opened, opened.config
        self._first = checkpoint.number
        self._rounds = range(self._first, opened.config.rounds)
        self._latest = checkpoint
        self._trained, self._evaluated = Results[Trained](), Results[None]()
        self._closed = Results[None]()
        self._policy: tuple[int, ServedPolicy | None] = -1, None  # of a version, if it is served
        self._transfer: Mapping[str, float] = {}  # measurements of the last weight transfer

    async def play(self) -> SlotRef:
        """Play the rounds; return the last checkpoint.

        Where sampling fails, what is sampled is still trained and closed; where training or closing
        fails, all end. Raises what failed first.
        """
        await run_together(self._fill(), self._train_rounds(), self._close_rounds())
        return await self._version(max(self._first, self._rounds.stop))

    @abstractmethod
    async def _fill(self) -> None:
        """Sample for all rounds, and evaluate checkpoints."""

    @abstractmethod
    async def _take(self, round: int) -> Taken:
        """Wait for the rollouts of a round."""

    @abstractmethod
    async def _sampling_of(self, round: int) -> tuple[Seconds, Mapping[str, float]]:
        """Seconds of a round's sampling, and the measurements of its weight transfer."""

    def _while_trained(self, round: int) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def _train_rounds(self) -> None:
        with reported(self._trained):
            for round in self._rounds:
                # A crash leaves few rounds to be closed again.
                if (behind := round - self._config.max_staleness - 1) >= self._first:
                    await self._closed.of(behind)
                taken = await self._take(round)
                async with self._while_trained(round):
                    checkpoint, updates = await learn(
                        taken.stages, self._run, round, self._latest, taken.rollouts
                    )
                seconds = {**taken.stages.seconds, **taken.waited}
                trained = Trained(checkpoint=checkpoint, updates=updates, seconds=seconds)
                self._trained.give(round, trained)
                self._latest = checkpoint

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

    def _is_due(self, version: int) -> bool:
        return version % self._config.evaluation.every_rounds == 0

    async def _version(self, version: int) -> SlotRef:
        if version > self._first:
            return (await self._trained.of(version - 1)).checkpoint
        existing = committed_checkpoint(self._opened, version)
        assert existing is not None, "checkpoints before one that is committed are"
        return existing

    async def _served(
        self, stages: StageRunner, version: int, *, needed: bool
    ) -> ServedPolicy | None:
        """Serve a checkpoint once, where it is needed or to be evaluated; evaluate it if due."""
        seen, policy = self._policy
        if seen == version and (policy is not None or not needed):
            return policy
        due = self._is_due(version) and committed(self._opened, layout.evals_slot(version)) is None
        policy = None
        if needed or due:
            policy = await stages.run(serve, self._run, version, await self._version(version))
            self._transfer = policy.transfer
        if due:
            await stages.run(evaluate, self._run, version, policy)
        self._evaluated.give(version, None)
        self._policy = version, policy
        return policy


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The rollouts of a round, seconds of its stages, and the cost of the weight transfer."""

    rollouts: SlotRef
    seconds: Seconds
    transfer: Mapping[str, float]


class InOrder(Rounds):
    """Rounds whose number decides the checkpoint that samples them."""

    def __init__(self, run: RunRef, checkpoint: SlotRef) -> None:
        super().__init__(run, checkpoint)
        ancestors = self._opened.ancestors
        self._origin = ancestors[-1].through_round if ancestors else 0
        self._sampled = Results[Sampled]()

    async def _fill(self) -> None:
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
        sealed = committed(self._opened, layout.rollouts_slot(round))
        policy = await self._served(stages, version, needed=sealed is None)
        if sealed is None:
            assert policy is not None, "it was needed"
            sealed = await sample(stages, self._run, round, policy)
        return Sampled(
            rollouts=sealed,
            seconds={**stages.seconds, "timing_s/sampler_idle": idle_s},
            transfer=policy.transfer if policy else {},
        )

    async def _take(self, round: int) -> Taken:
        began = time.monotonic()
        rollouts = (await self._sampled.of(round)).rollouts
        waited = {"timing_s/trainer_idle": time.monotonic() - began}
        return Taken(rollouts=rollouts, waited=waited, stages=StageRunner(self._config.flow))

    async def _sampling_of(self, round: int) -> tuple[Seconds, Mapping[str, float]]:
        sampled = await self._sampled.of(round)
        return sampled.seconds, sampled.transfer

    def _version_of(self, round: int) -> int:
        return max(self._origin, round - self._config.max_staleness)
