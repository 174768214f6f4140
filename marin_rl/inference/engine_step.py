"""One step of an engine: what it schedules, computes and hands out, and how requests end.

A step scores prompts, prefills or copies them, decodes a chunk, tells listeners, and resolves the
requests that are complete: each ends once, with its result, an error, or a cancellation. Leaves out
when a step is taken and by which weights (`engine`), and the programs (`runner`).
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import numpy as np

from marin_rl.errors import InferenceError, OutOfMemory
from marin_rl.inference.adapters import LoadedAdapter
from marin_rl.inference.batch import Chunk, RunningBatch
from marin_rl.inference.generation import Delta, GenerationResult, Job, Policy, RunningSequence
from marin_rl.inference.kv_cache import SHARE
from marin_rl.inference.pieces import Extension
from marin_rl.inference.programs import Limits
from marin_rl.inference.runner import NextChunk, Runner
from marin_rl.inference.scheduler import JobQueue, Prompts, Schedule, schedule
from marin_rl.machine import ENGINE_KEYS, device_lost, is_out_of_memory, out_of_memory

# While others decode, the prompts of a step may have as many tokens as this many chunks: a longer
# prefill would make the running sequences wait.
PREFILL_CHUNKS = 4

# Largest number of streams that get token by token, while nothing else runs.
STREAMS_BY_TOKEN = 4

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Counts since the start; durations in seconds.

    `tokens` were sampled and kept, `slot_steps` are the steps of all sequence slots, empty ones
    too, and `busy_slot_steps` those that sampled. `failed` requests ended with an error. Of
    prompts, `prefilled_tokens` were computed and `cached_tokens` read from what earlier requests
    left, by `continued_prompts`; `evicted_prefixes` were left, and lost to other requests. After
    swaps, `recomputed_tokens` of `recomputed_sequences` that were running were computed again.
    """

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    chunks: int = 0
    slot_steps: int = 0
    busy_slot_steps: int = 0
    prefilled_prompts: int = 0
    copied_prompts: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    continued_prompts: int = 0
    evicted_prefixes: int = 0
    recomputed_sequences: int = 0
    recomputed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    swaps: int = 0
    cancelled: int = 0
    failed: int = 0

    def snapshot(self) -> "EngineStats":
        return replace(self)


class PendingRequests:
    """Pending requests: `queue` has those with samples that wait; `changed` guards both."""

    def __init__(
        self, batch: RunningBatch, changed: threading.Condition, stats: EngineStats
    ) -> None:
        self.queue = JobQueue()
        self.jobs: dict[Job, None] = {}  # a set, in the order of submission
        self._batch = batch
        self._changed = changed
        self._stats = stats
        self._some_cancelled = False

    def add(self, job: Job) -> None:
        self.queue.append(job)
        self.jobs[job] = None
        self._stats.requests += 1
        self._stats.prompt_tokens += len(job.request.prompt_ids)

    @property
    def started(self) -> list[Job]:
        """Requests that have had a sequence slot, or their prompt scored."""
        # a copy: the engine's thread removes those that end
        return [job for job in list(self.jobs) if job.started_at]

    def adapters(self) -> set[LoadedAdapter]:
        """Adapters that requests run on or wait for, including unloaded ones."""
        # a copy: the engine's thread removes requests that end
        return {job.adapter for job in list(self.jobs) if job.adapter is not None}

    def note_cancelled(self, future: "Future[GenerationResult]") -> None:
        """Record that a future was cancelled; called on the thread that cancels it."""
        if future.cancelled():
            with self._changed:
                self._some_cancelled = True
                self._changed.notify_all()

    def drop_cancelled(self) -> None:
        """Release what cancelled requests have. On the engine's thread, under the lock."""
        if not self._some_cancelled:
            return
        self._some_cancelled = False
        # once each: some samples of a request may run while others wait
        jobs = dict.fromkeys((*self._batch.jobs(), *self.queue))
        cancelled = [job for job in jobs if job.future.cancelled()]
        self.queue.discard(cancelled)
        for job in cancelled:
            self._batch.release(job)
            self._end(job)

    def fail(self, jobs: list[Job], message: str, cause: Exception | None = None) -> None:
        """Fail requests. A library's error is the cause, not the message: it may name files."""
        # the queue is shared with submitters; slots are used only by the engine's thread
        with self._changed:
            self.queue.discard(jobs)
        for job in jobs:
            self._batch.release(job)
            if self._end(job):
                self._stats.failed += 1
                failure = InferenceError(message)
                failure.__cause__ = cause
                # Of memory the cause says what to change, and nothing of files.
                job.future.set_exception(cause if isinstance(cause, OutOfMemory) else failure)

    def resolve(self, job: Job, result: GenerationResult) -> None:
        if self._end(job):
            job.future.set_result(result)

    def _end(self, job: Job) -> bool:
        """Mark a job as ended; True if its future is to be resolved: once, unless cancelled."""
        if job.ended:
            return False
        job.ended = True
        self.jobs.pop(job, None)
        # from here on the future cannot be cancelled, so its result can be set without a race
        if job.future.set_running_or_notify_cancel():
            return True
        self._stats.cancelled += 1
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A chunk on its way: the sequences that it samples for, by a policy, and the call that waits.

    What it samples for sequences that end before it is read is dropped.
    """

    read: Callable[[], Chunk]
    policy: Policy
    sequences: list[tuple[int, RunningSequence]]


class EngineStep:
    """A step of an engine with the programs of `runner`.

    Where the plan is to go `ahead`, a step reads the chunk of the step before it, while the device
    computes its own: what ends a sequence is known a chunk late.
    """

    def __init__(
        self, runner: Runner, batch: RunningBatch, pending: PendingRequests, stats: EngineStats
    ) -> None:
        self._runner, self._batch, self._pending = runner, batch, pending
        self._stats = stats
        self._chunk_steps, self._slots = runner.plan.chunk_steps, runner.lanes.slots
        self._flight: Flight | None = None

    def plan(self, policy: Policy) -> Schedule:
        """Assign waiting samples to free sequence slots. Under the lock of the requests."""
        tokens = PREFILL_CHUNKS * self._slots * self._chunk_steps
        return schedule(
            self._pending.queue,
            self._batch,
            self._runner.lanes,
            policy.key,
            self._runner.bucket,
            # with nothing running no one waits, so every prompt may come in at once
            tokens if self._batch.active > 0 else math.inf,
            keeps_prefixes=self._runner.plan.keeps_prefixes,
        )

    @property
    def in_flight(self) -> bool:
        """True while a chunk is on its way that was not read yet."""
        return self._flight is not None

    def settle(self) -> None:
        """Wait for the chunk that is on its way, if one is, and hand out what it sampled."""
        with self._device_failures():
            self._land()

    def run(self, plan: Schedule, policy: Policy) -> None:
        self._notify_scheduled(plan, policy)
        with self._device_failures():
            if self._flight is not None and self._flight.policy is not policy:
                self._land()  # so that there is one copy of weights, and one cache to recompute
            self._runner.fit(self._batch.inputs, self._batch.begun, self._chunk_steps)
            # requests that `on_scheduled` refused have ended
            self._score(policy, [job for job in plan.to_score if not job.ended])
            if policy.recompute_kv_cache:
                self._recompute(policy)
            self._prefill(policy, plan)
            # between prefill and decode: a mask holds for the token that comes next
            for job, error in self._batch.constrain():
                self._pending.fail([job], "its constraint failed", error)
            last = self._flight
            if self._batch.active:
                self._flight = self._decode(policy)
                if last is not None:
                    self._hand_out(last)
            if (
                not self._runner.plan.ahead
                or self._batch.extras.needs_tokens
                or not self._batch.active
            ):
                self._land()

    def _land(self) -> None:
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._hand_out(flight)

    def _hand_out(self, flight: Flight) -> None:
        """Read a chunk, give its tokens to the listeners, and resolve finished requests."""
        started = time.monotonic()
        chunk = flight.read()
        self._stats.decode_s += time.monotonic() - started
        self._stats.slot_steps += chunk.slot_steps
        self._stats.busy_slot_steps += int(chunk.counts_S.sum())
        self._refuse_nonfinite(chunk, flight)
        keeps = self._runner.plan.keeps_prefixes
        added = self._batch.advance(chunk, flight.sequences, flight.policy, keeps=keeps)
        self._emit(added, flight.policy)

    @contextmanager
    def _device_failures(self) -> Iterator[None]:
        """Fail the requests that have begun where the device fails in the block."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            self._flight = None
            failure: Exception = error
            message, step = "the device failed", "a step of the engine"
            if is_out_of_memory(error):
                failure = out_of_memory(step, ENGINE_KEYS, error)
                _log.error("%s", failure)
            elif (lost := device_lost(step, error)) is not None:
                failure, message = lost, str(lost)
                _log.error("%s", message)
            else:
                _log.exception("a chunk failed on the device; its requests fail")
            self._pending.fail(self._pending.started, message, failure)
            # the failed program was given the caches to overwrite, so they are lost
            self._batch.kept.drop_all()
            self._runner.memory.release(caches=True)

    def _notify_scheduled(self, plan: Schedule, policy: Policy) -> None:
        """Call `on_scheduled` of every request that the step begins work for."""
        for job in dict.fromkeys((*plan.to_score, *plan.jobs)):
            if job.on_scheduled is None or job.future.cancelled():
                continue
            try:
                job.on_scheduled(policy.with_adapter(job.adapter))
            except Exception as error:  # noqa: BLE001 - a callback of the caller
                self._pending.fail([job], "it was refused when it got a slot", error)

    def _emit(self, added: list[tuple[Job, Delta]], policy: Policy) -> None:
        """Call the listeners with the new tokens, and resolve finished requests."""
        for job, delta in added:
            self._stats.tokens += len(delta.token_ids)
            if job.on_delta is None or job.ended or job.future.cancelled():
                continue
            try:
                job.on_delta(delta)
            except Exception as error:  # noqa: BLE001 - a callback of the caller
                _log.exception("a request's on_delta failed: the request fails")
                self._pending.fail([job], "its listener failed", error)
        # after every listener: a future never resolves before its last delta was delivered
        for job in dict.fromkeys(job for job, delta in added if delta.finish_reason):
            # samples of one request end in different chunks, and are handed out together
            if len(job.finished) == job.request.n and not job.ended:
                self._finish(job, policy)

    def _score(self, policy: Policy, jobs: list[Job]) -> None:
        for job in jobs:
            self._score_prompt(policy, job)
            if job.request.sampling.max_tokens == 0:
                job.prefilled_at = time.monotonic()
                job.finished = {
                    index: RunningSequence(job=job, index=index, finish_reason="length")
                    for index in range(job.request.n)
                }
                self._finish(job, policy)

    def _score_prompt(self, policy: Policy, job: Job) -> None:
        request = job.request
        job.prompt_scores = self._runner.score(
            policy, request.prompt_ids, request.top_logprobs, job.row
        )
        job.scored_by = policy.key

    def _recompute(self, policy: Policy) -> None:
        """Compute the caches of running sequences as those of prompts, where other weights did."""
        outdated = self._batch.outdated(policy.key)
        prefixes = [prefix for prefix in outdated if len(prefix.token_ids)]
        if not prefixes:
            return
        started, adapter_S = time.monotonic(), self._batch.inputs.adapter_S
        if self._runner.plan.keeps_prefixes:
            extensions = [Extension(one.seq_slot, 0, one.token_ids) for one in prefixes]
            self._runner.extend(policy, extensions, adapter_S)
        else:
            prompts: Prompts = {}
            for one in prefixes:
                place = self._runner.bucket(len(one.token_ids)), one.lane
                prompts.setdefault(place, []).append((one.token_ids, [one.seq_slot]))
            self._runner.prefill(policy, prompts, adapter_S)
        self._runner.wait()
        self._stats.prefill_s += time.monotonic() - started
        self._stats.recomputed_sequences += len(prefixes)
        self._stats.recomputed_tokens += sum(len(one.token_ids) for one in prefixes)

    def _prefill(self, policy: Policy, plan: Schedule) -> None:
        """Run each new prompt once in a lane, and copy its cache to where else it starts."""
        started = time.monotonic()
        if plan.prompts:
            self._runner.prefill(policy, plan.prompts, self._batch.inputs.adapter_S)
            prompts = [ids for own in plan.prompts.values() for ids, _ in own]
            self._stats.prefilled_prompts += len(prompts)
            self._stats.prefilled_tokens += sum(map(len, prompts))
        if plan.extensions:
            self._runner.extend(policy, plan.extensions, self._batch.inputs.adapter_S)
            self._stats.prefilled_prompts += len(plan.extensions)
            self._stats.prefilled_tokens += sum(len(one.token_ids) for one in plan.extensions)
        self._stats.cached_tokens += plan.cached_tokens
        self._stats.continued_prompts += plan.continued
        self._stats.evicted_prefixes = self._batch.evictions
        if plan.copies:
            self._runner.copy(plan.copies)
            self._stats.copied_prompts += len(plan.copies)
        if plan.jobs and self._flight is None:
            # JAX only queues the work: without this the prefill would count as time of decoding, as
            # it does behind a chunk that is on its way, for which nobody waits here
            self._runner.wait()
        now = time.monotonic()
        self._stats.prefill_s += now - started
        for job in plan.jobs:
            # samples may be scheduled in several steps: the first one's time counts
            job.prefilled_at = job.prefilled_at or now

    def _decode(self, policy: Policy) -> Flight:
        """Dispatch a chunk for the running sequences."""
        started = time.monotonic()
        extras = self._batch.extras
        # a constraint's mask holds for one token
        waiting = min(self._pending.queue.waiting, self._slots)
        # a reader of a stream sees every token; among many, returning to the host costs too much
        streams = not waiting and self._batch.streams_alone(STREAMS_BY_TOKEN)
        steps = 1 if extras.constrained or streams else self._chunk_steps
        # before every chunk: a sample that ended, or one that began, changes what neighbours share
        shared = self._batch.shared_positions(SHARE) if self._runner.plan.sharing else 0
        limits = Limits(np.int32(steps), np.int32(waiting), np.int32(shared))
        sequences, unread_S = self._batch.sequences(), self._batch.take_unread()
        chunk = NextChunk(self._batch.inputs, extras, limits, unread_S)
        read = self._runner.decode(policy, chunk)
        self._stats.decode_s += time.monotonic() - started
        self._stats.chunks += 1
        return Flight(read=read, policy=policy, sequences=sequences)

    def _refuse_nonfinite(self, chunk: Chunk, flight: Flight) -> None:
        """Fail requests whose logits are not finite, and clean their part of the cache."""
        bad = self._batch.not_finite(chunk, flight.sequences)
        if not bad:
            return
        # masked positions are multiplied by zero, and NaN times zero is NaN: the next sequence in
        # the slot would fail too
        _log.error("non-finite logits in %d sequence slots: their requests fail", len(bad))
        jobs = list(dict.fromkeys(bad.values()))
        self._pending.fail(jobs, "the model's logits are not finite")
        # numbers that are replaced below may lie in a kept prefix
        self._batch.kept.drop_all()
        self._runner.memory.forget_nonfinite()

    def _finish(self, job: Job, policy: Policy) -> None:
        if job.request.score_prompt and job.scored_by is not policy.key:
            self._score_prompt(policy, job)  # scores in the result are by the weights it names
        now = time.monotonic()
        policy = policy.with_adapter(job.adapter)
        version = policy.weight_version
        result = GenerationResult(
            samples=tuple(running.sample(version) for _, running in sorted(job.finished.items())),
            weight_version=version,
            parameters_digest=policy.parameters_digest,
            adapter_name=policy.adapter_name,
            queue_s=job.started_at - job.submitted_at,
            prefill_s=job.prefilled_at - job.started_at,
            decode_s=now - job.prefilled_at,
            prompt_scores=job.prompt_scores,
            cached_tokens=job.cached_tokens,
        )
        self._pending.resolve(job, result)
