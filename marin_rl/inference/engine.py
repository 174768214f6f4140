"""The embedded engine: many requests, one batch of fixed shape, a thread of its own.

`Engine.submit` queues a request from any thread. The engine's own thread waits for work
(`_wait_for_work`, which lets requests that come together arrive) and then takes a step (`_step`):

1. `schedule` assigns waiting samples to free sequence slots, first come first served, and plans
   which prompts to run and which cached prefixes to copy (`scheduler`).
2. `_notify_scheduled` tells each request which weights will draw its first tokens.
3. `_score` computes logprobs of the prompts that asked for them.
4. `_prefill` runs each new prompt once in a lane, and copies its cache to the other slots; with a
   prefix cache it runs the part that the slot has not kept from the dialogue's last turn.
5. `RunningBatch.constrain` asks every constraint for the mask of its next token.
6. `_decode` runs a chunk of decode steps on the device, without returning to Python (`runner`).
7. `_refuse_nonfinite` fails requests whose logits are not finite.
8. `RunningBatch.advance` appends the chunk to its sequences and finds those that ended (`batch`);
   `_emit` calls the listeners, and resolves the requests that are complete.

New weights (`swap`) take the old ones' place between two steps, by a change of reference, and
adapters are written into their bank there (`adapter_loads`). Leaves
out what is computed (`runner` and what it calls) and HTTP.

The shapes of the compiled programs follow from the engine's configuration and from the length of a
request's own prompt, never from the load, and nothing is compiled once it is warm. Where the engine
proves at its start that rows of these programs do not depend on one another (`batch_invariance`;
on one device, not on a mesh), the same prompt, seed and weights give the same tokens and bitwise
the same logprobs, alone or in a full batch, in any sequence slot and lane. Other numbers of slots
or lanes, another instruction set or another size of XLA's thread pool are other programs, whose
last bits may differ.
"""

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import EngineConfig
from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.adapter_loads import AdapterLoads
from marin_rl.inference.attention import SHARE
from marin_rl.inference.batch import Chunk, Job, RunningBatch, RunningSequence
from marin_rl.inference.batch_invariance import Invariance
from marin_rl.inference.generation import Delta, GenerationRequest, GenerationResult
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.programs import Limits
from marin_rl.inference.runner import Policy, Runner
from marin_rl.inference.scheduler import JobQueue, RequestBounds, Schedule, schedule
from marin_rl.inference.stops import Decode

# An idle engine waits for more requests, which come close together, until none came for QUIET_S,
# GATHER_S at most: samples that start together share their prompts and their chunks.
QUIET_S = 0.005
GATHER_S = 0.05

# Seconds that an engine without work keeps its fused copy of the weights for the next request.
COPY_KEPT_S = 1.0

# While others decode, the prompts of a step may have as many tokens as this many chunks: a longer
# prefill would make the running sequences wait.
PREFILL_CHUNKS = 4

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Counts since the start; durations in seconds.

    `tokens` were sampled and kept, `slot_steps` are the steps of all sequence slots, empty ones
    too, and `busy_slot_steps` those that sampled. `failed` requests ended with an error. Of
    prompts, `prefilled_tokens` were computed and `cached_tokens` read from what earlier requests
    left, by `continued_prompts`; `evicted_prefixes` were left, and lost to other requests.
    """

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    chunks: int = 0
    slot_steps: int = 0
    busy_slot_steps: int = 0
    prefilled_prompts: int = 0
    copied_prompts: int = 0
    scored_prompts: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    continued_prompts: int = 0
    evicted_prefixes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    swaps: int = 0
    cancelled: int = 0
    failed: int = 0

    def snapshot(self) -> "EngineStats":
        """The counts as they are now; safe from any thread."""
        return replace(self)


class VersionInUse(InferenceError):
    """Requests are running whose tokens other weights of the same version have drawn."""

    transient = True


class Engine:
    """Continuous batching over `config.slots` sequences of at most `context_length` tokens.

    `stop_token_ids` end every completion (the tokenizer's end of sequence); `decode` turns ids into
    text, and is needed only for requests with stop strings. Raises InputError for a model that it
    cannot decode faithfully.
    """

    def __init__(
        self,
        model: LmHeadModel,
        config: EngineConfig,
        *,
        context_length: int,
        weight_version: int = 0,
        parameters_digest: str = "",
        stop_token_ids: Sequence[int] = (),
        decode: Decode | None = None,
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        self._runner = Runner(model, config, context_length, jnp.dtype(dtype))
        self.spec = self._runner.spec
        self.context_length = context_length
        self.stats = EngineStats()
        self._config = config
        self.stop_token_ids = tuple(stop_token_ids)
        self._bounds = RequestBounds(
            vocabulary=self.spec.vocabulary,
            context_length=context_length,
            stop_tokens=len(self.stop_token_ids),
            has_decode=decode is not None,
        )
        self._policy = self._runner.policy(model, weight_version, parameters_digest)
        runner = self._runner
        extras = ExtraRows(runner.lanes, runner.length, self.spec.vocabulary, runner.put)
        has_adapters = runner.bank is not None
        self._batch = RunningBatch(
            config.slots, self.spec.vocabulary, decode, extras, has_adapters=has_adapters
        )
        self._queue = JobQueue()
        # requests whose futures are not resolved yet, queued or running
        self._in_flight: dict[Job, None] = {}
        self._chunk_tokens = config.slots * config.chunk_steps
        self._some_cancelled = False
        self._changed = threading.Condition()
        self.adapters = AdapterLoads(runner.bank, runner.bank_sizes, self._changed, self._in_flight)
        self._closing = False
        self._paused = False
        self._in_step = False
        self._sleep_requested = False
        self._reset_prefixes = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> Policy:
        """Policy that new requests will be sampled with."""
        return self._policy

    @property
    def alive(self) -> bool:
        """True while requests are accepted."""
        return self._thread.is_alive() and not self._closing

    @property
    def queued(self) -> int:
        """Samples that wait for a sequence slot."""
        with self._changed:
            return self._queue.waiting

    @property
    def slots(self) -> int:
        """Sequences that are decoded side by side."""
        return self._config.slots

    @property
    def invariance(self) -> Invariance:
        """Equalities that are proven for this engine's programs on this machine."""
        return self._runner.invariance

    @property
    def sharing(self) -> bool:
        """True where sequences that began with one prompt read its cache once."""
        return self._runner.sharing

    @property
    def keeps_prefixes(self) -> bool:
        """True where dialogues go on from the cache that their last turn left."""
        return self._runner.keeps_prefixes

    @property
    def active(self) -> int:
        """Sequence slots in use."""
        return self._batch.active

    @property
    def paused(self) -> bool:
        """True if no chunk starts until `resume`."""
        return self._paused

    def submit(
        self,
        request: GenerationRequest,
        on_delta: Callable[[Delta], None] | None = None,
        on_scheduled: Callable[[Policy], None] | None = None,
    ) -> "Future[GenerationResult]":
        """Queue a request; safe from any thread. Cancelling the future frees its sequence slots.

        `on_delta` is called on the engine's thread with the tokens that each chunk added to each
        sample, in order, before the future resolves; it must be quick. An exception in it fails
        this request alone. Delivered tokens are never taken back. `on_scheduled` is called there
        too, each time that samples of the request are scheduled or its prompt is to be scored, with
        the policy that will draw their first tokens; an exception in it fails the request before
        that.

        Raises InputError for a request that could never be served, AdapterGone for one on an
        adapter that is not loaded, InferenceError once closed.
        """
        self._bounds.check(request)
        seed = request.sampling.seed
        job = Job(
            request=request,
            future=Future(),
            on_delta=on_delta,
            on_scheduled=on_scheduled,
            # sample i draws with seed + i: 48 bits leave room for it within a key's 64
            seed=secrets.randbits(48) if seed is None else seed,
            stop_tokens=self.stop_token_ids + request.stop_token_ids,
        )
        with self._changed:
            if self._closing:
                raise InferenceError("the engine is closed: it takes no requests any more")
            job.adapter = self.adapters.get(request.adapter)
            self._queue.append(job)
            self._in_flight[job] = None
            # the caches are wanted again: a sleep that was asked for before this request is void
            self._sleep_requested = False
            self.stats.requests += 1
            self.stats.prompt_tokens += len(request.prompt_ids)
            self._changed.notify_all()
        job.future.add_done_callback(self._note_cancelled)
        return job.future

    def _note_cancelled(self, future: "Future[GenerationResult]") -> None:
        # assigned and never or-ed: `|=` reads first, and could undo another thread's assignment
        if future.cancelled():
            with self._changed:
                self._some_cancelled = True
                self._changed.notify_all()

    def swap(self, model: LmHeadModel, weight_version: int, parameters_digest: str) -> None:
        """Sample with another model's arrays from the next chunk on: no copy, no wait.

        Requests that are queued or running go on. Raises, and keeps the old weights: InputError for
        a model of another shape, or where adapters are loaded on other weights; VersionInUse for
        other weights of the same version while requests run, which could not tell the tokens of one
        from those of the other.
        """
        policy = self._runner.policy(model, weight_version, parameters_digest)
        with self._changed:
            self._check_version(policy)
            self._check_adapters(policy)
            self._policy = policy
            self.stats.swaps += 1
            self._changed.notify_all()  # an idle engine may hold a copy of the old ones

    def _check_version(self, policy: Policy) -> None:
        old = self._policy
        ours, theirs = policy.parameters_digest, old.parameters_digest
        if policy.weight_version != old.weight_version or ours == theirs:
            return
        # a copy: the engine's thread removes those that end
        if any(job.started_at for job in list(self._in_flight)):
            raise VersionInUse(
                f"requests are running on other weights of version {old.weight_version} (expected "
                f"the digest {theirs[:16]}, found {ours[:16]}): wait for their end, or give "
                "another version"
            )

    def _check_adapters(self, policy: Policy) -> None:
        ours, theirs = policy.parameters_digest, self._policy.parameters_digest
        names = {one.name for one in (*self.adapters.loaded, *self.adapters.in_use)}
        if names and ours != theirs:
            raise InputError(
                f"adapters are loaded on the weights {theirs[:16]} ({', '.join(sorted(names))}): "
                f"unload them, and wait for their requests, before {ours[:16]} take their place"
            )

    def pause(self) -> None:
        """Start no chunk until `resume`; returns when none is running, or after a `resume`.

        Requests go on queueing, running ones wait, and `swap` works. Not for the engine's own
        thread, which could never return.
        """
        assert threading.current_thread() is not self._thread
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            while self._in_step and self._paused:
                self._changed.wait()

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def sleep(self) -> None:
        """Give back the memory of the caches, once idle, until the next request wants them.

        For a trainer in the same process, between two rounds of requests; returns at once.
        """
        with self._changed:
            self._sleep_requested = True
            self._changed.notify_all()

    def reset_prefix_cache(self) -> None:
        """Let every request from now on be prefilled from its start; changes no result."""
        with self._changed:
            self._reset_prefixes = True

    @property
    def programs(self) -> int:
        """Number of programs that `warm_up` compiles."""
        return self._runner.programs

    def warm_up(self) -> None:
        """Compile everything that requests can need, so that none of them waits for it.

        To be called before the first request: it uses the cache that the engine's thread owns.
        """
        with self._changed:
            assert not self._queue
            assert self._batch.active == 0
            # under the lock, so that the engine's thread begins no step on the same caches
            self._runner.warm_up(self._policy, self._batch.inputs, self._batch.extras)

    def close(self) -> None:
        """Stop after the chunk that is running. Requests that have not ended get InferenceError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
                with self._changed:
                    self._in_step = False
                    self._changed.notify_all()
        finally:
            self._runner.close()
            with self._changed:
                # closing before the requests fail: one that came later would wait for a thread that
                # is gone
                self._closing = True
                self._in_step = False
                self._changed.notify_all()
                self._fail(list(self._in_flight), "the engine was closed")
                self.adapters.close()

    def _wait_for_work(self) -> bool:
        """Wait for requests, and for the end of a pause; False once the engine closes."""
        with self._changed:
            while not self._closing:
                self._drop_cancelled()
                self.adapters.write()
                if self._paused or not (self._queue or self._batch.active):
                    self._idle()
                    continue
                if self._batch.active == 0:
                    self._wait_to_batch()
                # waiting released the lock, and a pause may have come meanwhile
                if not self._paused:
                    self._in_step = not self._closing
                    return not self._closing
            return False

    def _idle(self) -> None:
        """Wait for a change, and free memory: at once where `pause` or `sleep` asks for it.

        Else the fused weights stay for COPY_KEPT_S, so that requests which come one after another
        use the same copy; a copy of weights that were swapped out goes at once.
        """
        runner = self._runner
        if not (self._paused or self._sleep_requested) and runner.holds_copy_of(self._policy):
            if not self._changed.wait(COPY_KEPT_S):
                runner.release_memory()
            return
        caches = self._sleep_requested and self._batch.active == 0
        if caches:
            self._batch.forget_prefixes()
        runner.release_memory(caches=caches)
        self._sleep_requested &= self._batch.active > 0
        self._changed.wait()

    def _wait_to_batch(self) -> None:
        """Wait a moment for requests that arrive together with the first one."""
        deadline = time.monotonic() + GATHER_S
        seen, slots = 0, self._config.slots
        while not self._closing and seen < slots and time.monotonic() < deadline:
            waiting = self._queue.waiting
            if waiting == seen:
                return
            seen = waiting
            # woken by every arrival, so the wait is for QUIET_S without one
            while seen < slots and self._changed.wait(QUIET_S) and time.monotonic() < deadline:
                seen = self._queue.waiting

    def _step(self) -> None:
        """Take one step, as described at the head of this module."""
        # planned under the lock, computed outside of it: submissions never wait for the device
        with self._changed:
            policy = self._policy
            self._drop_cancelled()
            # before anything is planned: requests may wait for what is written here
            self.adapters.write()
            busy, tokens = self._batch.active > 0, PREFILL_CHUNKS * self._chunk_tokens
            budget = tokens if busy else math.inf
            lanes, bucket = self._runner.lanes, self._runner.bucket
            keeps = self._runner.keeps_prefixes
            if self._reset_prefixes:
                self._batch.forget_prefixes()
                self._reset_prefixes = False
            plan = schedule(
                self._queue,
                self._batch,
                lanes,
                policy.key,
                bucket,
                budget,
                keeps_prefixes=keeps,
            )
        self._notify_scheduled(plan, policy)
        try:
            self._score(policy, [job for job in plan.to_score if not job.ended])
            self._prefill(policy, plan)
            for job, error in self._batch.constrain():
                self._fail([job], "its constraint failed", error)
            if self._batch.active == 0:
                return
            chunk = self._decode(policy)
            self._refuse_nonfinite(chunk)
            added = self._batch.advance(chunk, policy.key if keeps else None)
            self._emit(added, policy)
        except jax.errors.JaxRuntimeError as error:
            _log.exception("a chunk failed on the device; its requests fail")
            with self._changed:
                started = [job for job in self._in_flight if job.started_at]
            self._fail(started, "the device failed", error)
            # the failed program was given the caches to overwrite, so they are lost
            self._batch.forget_prefixes()
            self._runner.start_over()

    def _notify_scheduled(self, plan: Schedule, policy: Policy) -> None:
        """Call `on_scheduled` of every request that the step begins work for."""
        for job in dict.fromkeys((*plan.to_score, *plan.jobs)):
            if job.on_scheduled is None or job.future.cancelled():
                continue
            try:
                job.on_scheduled(policy.with_adapter(job.adapter))
            except Exception as error:  # noqa: BLE001 - a callback of the caller
                self._fail([job], "it was refused when it got a slot", error)

    def _emit(self, added: list[tuple[Job, Delta]], policy: Policy) -> None:
        """Call the listeners with the new tokens, and resolve finished requests."""
        for job, delta in added:
            self.stats.tokens += len(delta.token_ids)
            if job.on_delta is None or job.ended or job.future.cancelled():
                continue
            try:
                job.on_delta(delta)
            except Exception as error:  # noqa: BLE001 - a callback of the caller
                _log.exception("a request's on_delta failed: the request fails")
                self._fail([job], "its listener failed", error)
        # after every listener: a future never resolves before its last delta was delivered
        for job in dict.fromkeys(job for job, delta in added if delta.finish_reason):
            if len(job.finished) == job.request.n and not job.ended:
                self._finish(job, policy)

    def _drop_cancelled(self) -> None:
        if not self._some_cancelled:
            return
        self._some_cancelled = False
        jobs = dict.fromkeys((*self._batch.jobs(), *self._queue))
        cancelled = [job for job in jobs if job.future.cancelled()]
        self._queue.discard(cancelled)
        for job in cancelled:
            self._batch.release(job)
            self._end(job)

    def _score(self, policy: Policy, jobs: list[Job]) -> None:
        """Score prompts, and finish the jobs that want nothing else."""
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
        self.stats.scored_prompts += 1

    def _prefill(self, policy: Policy, plan: Schedule) -> None:
        """Run each new prompt once in a lane, and copy its cache to where else it starts."""
        started = time.monotonic()
        if plan.prompts:
            self._runner.prefill(policy, plan.prompts, self._batch.inputs.adapter_S)
            prompts = [ids for own in plan.prompts.values() for ids, _ in own]
            self.stats.prefilled_prompts += len(prompts)
            self.stats.prefilled_tokens += sum(map(len, prompts))
        if plan.extensions:
            self._runner.extend(policy, plan.extensions, self._batch.inputs.adapter_S)
            self.stats.prefilled_prompts += len(plan.extensions)
            self.stats.prefilled_tokens += sum(len(one.token_ids) for one in plan.extensions)
        self.stats.cached_tokens += plan.cached_tokens
        self.stats.continued_prompts += plan.continued
        self.stats.evicted_prefixes = self._batch.evictions
        if plan.copies:
            self._runner.copy(plan.copies)
            self.stats.copied_prompts += len(plan.copies)
        if plan.jobs:
            # JAX only queues the work: without this the prefill would count as time of decoding
            self._runner.wait()
        now = time.monotonic()
        self.stats.prefill_s += now - started
        for job in plan.jobs:
            # samples may be scheduled in several steps: the first one's time counts
            job.prefilled_at = job.prefilled_at or now

    def _decode(self, policy: Policy) -> Chunk:
        started = time.monotonic()
        extras = self._batch.extras
        # a constraint's mask holds for one token
        steps = 1 if extras.constrained else self._config.chunk_steps
        waiting = min(self._queue.waiting, self._config.slots)
        shared = self._batch.shared_positions(SHARE) if self.sharing else 0
        limits = Limits(np.int32(steps), np.int32(waiting), np.int32(shared))
        chunk = self._runner.decode(policy, self._batch.inputs, extras, limits)
        self.stats.decode_s += time.monotonic() - started
        self.stats.chunks += 1
        self.stats.slot_steps += chunk.slot_steps
        self.stats.busy_slot_steps += int(chunk.counts_S.sum())
        return chunk

    def _refuse_nonfinite(self, chunk: Chunk) -> None:
        """Fail requests whose logits are not finite, and remove what they left in the cache."""
        bad = np.flatnonzero(~self._batch.finite(chunk))
        if len(bad) == 0:
            return
        # masked positions are multiplied by zero, and NaN times zero is NaN: the next sequence in
        # the slot would fail too
        _log.error("non-finite logits in %d sequence slots: their requests fail", len(bad))
        jobs = dict.fromkeys(map(self._batch.job_in, bad.tolist()))
        self._fail([job for job in jobs if job is not None], "the model's logits are not finite")
        self._batch.forget_prefixes()
        self._runner.forget_nonfinite()

    def _fail(self, jobs: list[Job], message: str, cause: Exception | None = None) -> None:
        """Fail requests. A library's error is the cause, not the message: it may name files."""
        with self._changed:
            self._queue.discard(jobs)
        for job in jobs:
            self._batch.release(job)
            if self._end(job):
                self.stats.failed += 1
                failure = InferenceError(message)
                failure.__cause__ = cause
                job.future.set_exception(failure)

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
        if self._end(job):
            job.future.set_result(result)

    def _end(self, job: Job) -> bool:
        """Mark a job as ended; True if its future is to be resolved: once, unless cancelled."""
        if job.ended:
            return False
        job.ended = True
        self._in_flight.pop(job, None)
        # from here on the future cannot be cancelled, so its result can be set without a race
        if job.future.set_running_or_notify_cancel():
            return True
        self.stats.cancelled += 1
        return False
