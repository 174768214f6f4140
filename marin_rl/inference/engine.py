"""The embedded engine: many requests, one batch of fixed shape, a thread of its own.

Owns the order of things: requests join free slots between chunks, a chunk of decode steps runs on
the device without returning to Python, finished ones leave, and new weights take the old ones'
place between two chunks by a change of reference. Leaves out what is computed (`decoder`,
`sampling`), what a sequence is (`slots`), and HTTP (`server`).

The shapes of the compiled programs follow from the engine's configuration and from the length of a
request's own prompt, never from the load. So the same prompt, seed and weights give the same tokens
and bitwise the same logprobs, alone or in a full batch, and nothing is compiled once it is warm.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float32, Int32
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import EngineConfig
from marin_rl.errors import InferenceError, InputError
from marin_rl.inference import decoder
from marin_rl.inference.decoder import Cache
from marin_rl.inference.programs import decode_chunk, prefill_slots
from marin_rl.inference.slots import (
    STOP_TOKENS_MAX,
    Decode,
    GenerationRequest,
    GenerationResult,
    Job,
    SlotTable,
)
from marin_rl.inference.weights import Weights, on_device, read_model, rotary_table

# An idle engine waits for a round's other requests until none came for QUIET_S, GATHER_S at most.
QUIET_S = 0.005
GATHER_S = 0.05
BUCKET_MIN = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is loaded: references to the model's arrays, and their identity."""

    weights: Weights
    weight_version: int
    parameters_digest: str


@dataclass(slots=True)
class EngineStats:
    """Counts since the start; durations in seconds, `slot_steps` counts empty slots too."""

    requests: int = 0
    tokens: int = 0
    chunks: int = 0
    slot_steps: int = 0
    prefilled_prompts: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    swaps: int = 0


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
        self.spec, weights = read_model(model)
        self.context_length = context_length
        self.stats = EngineStats()
        self._config = config
        self._dtype = jnp.dtype(dtype)
        self._stop_token_ids = tuple(stop_token_ids)
        self._has_decode = decode is not None
        self._place = SingleDeviceSharding(jax.devices()[0])
        weights = on_device(weights, self._place)
        self._policy = Policy(weights, weight_version, parameters_digest)
        self._table = SlotTable(config.slots, decode)
        self._cache = self._empty_cache()
        rotary = rotary_table(model, decoder.cache_length(self._cache))
        self._rotary = on_device(rotary, self._place)
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> Policy:
        """What requests that come now will be sampled with."""
        return self._policy

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def queued(self) -> int:
        """Samples that wait for a slot."""
        with self._changed:
            return sum(job.waiting for job in self._queue)

    def submit(self, request: GenerationRequest) -> "Future[GenerationResult]":
        """Queue a request; safe from any thread. Cancelling the future frees its slots.

        Raises InputError for a request that could never be served, InferenceError once closed.
        """
        self._check(request)
        seed = request.sampling.seed
        job = Job(
            request=request,
            future=Future(),
            seed=secrets.randbits(48) if seed is None else seed,
            stop_tokens=self._stop_token_ids + request.stop_token_ids,
        )
        with self._changed:
            if self._closing:
                raise InferenceError("the engine is closed: it takes no requests any more")
            self._queue.append(job)
            self.stats.requests += 1
            self._changed.notify_all()
        return job.future

    def _check(self, request: GenerationRequest) -> None:
        prompt, sampling = request.prompt_ids, request.sampling
        if request.n < 1 or sampling.max_tokens < 1:
            raise InputError(
                f"expected n and max_tokens of at least 1, found {request.n} and "
                f"{sampling.max_tokens}"
            )
        if len(prompt) == 0:
            raise InputError("expected a prompt of at least one token, found none")
        if prompt.min() < 0 or prompt.max() >= self.spec.vocabulary:
            raise InputError(
                f"expected token ids from 0 to {self.spec.vocabulary - 1}, found "
                f"{prompt.min()} to {prompt.max()}"
            )
        if len(prompt) + sampling.max_tokens > self.context_length:
            raise InputError(
                f"expected prompt and max_tokens within the context of {self.context_length} "
                f"tokens, found {len(prompt)} + {sampling.max_tokens}"
            )
        stops = len(self._stop_token_ids) + len(request.stop_token_ids)
        if stops > STOP_TOKENS_MAX:
            raise InputError(f"expected at most {STOP_TOKENS_MAX} stop tokens, found {stops}")
        if sampling.stop and not self._has_decode:
            raise InputError("stop strings need an engine with a tokenizer")

    def swap(self, model: LmHeadModel, weight_version: int, parameters_digest: str) -> None:
        """Sample with another model's arrays from the next chunk on: no copy, no wait.

        Requests that are queued or running go on. Raises InputError, and keeps the old weights,
        for a model of another shape.
        """
        spec, weights = read_model(model)
        if spec != self.spec:
            raise InputError(f"expected a model like the one loaded, {self.spec}, found {spec}")
        policy = Policy(on_device(weights, self._place), weight_version, parameters_digest)
        with self._changed:
            self._policy = policy
            self.stats.swaps += 1

    def warm_up(self) -> None:
        """Compile everything that requests can need, so that none of them waits for it.

        To be called before the first request: it uses the cache that the engine's thread owns.
        """
        with self._changed:
            assert not self._queue
            assert self._table.active == 0
            idle = np.full(self._config.slots, self._config.prefill_rows, np.int32)
            for bucket in self.buckets():
                tokens = np.zeros((self._config.prefill_rows, bucket), np.int32)
                self._prefill(self._policy, tokens, 0, idle)
            self._decode_chunk(self._policy)

    def buckets(self) -> tuple[int, ...]:
        """Padded prompt lengths: powers of two, the last one cut to the cache's length."""
        longest = decoder.cache_length(self._cache)
        sizes = [BUCKET_MIN]
        while sizes[-1] < longest:
            sizes.append(min(2 * sizes[-1], longest))
        return tuple(sizes)

    def close(self) -> None:
        """Stop after the chunk that is running. Requests that have not ended get InferenceError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._gather():
                self._round()
        finally:
            with self._changed:
                self._closing = True
                self._fail([*self._table.jobs(), *self._queue], "the engine was closed")
                self._queue.clear()

    def _gather(self) -> bool:
        """Wait for work; False when the engine is to end."""
        with self._changed:
            while not self._closing and not self._queue and self._table.active == 0:
                self._changed.wait()
            if self._table.active == 0:
                self._let_others_join()
            return not self._closing

    def _let_others_join(self) -> None:
        deadline = time.monotonic() + GATHER_S
        seen = 0
        while not self._closing and seen < self._config.slots and time.monotonic() < deadline:
            waiting = sum(job.waiting for job in self._queue)
            if waiting == seen:
                return
            seen = waiting
            # woken by every arrival, so the wait is for QUIET_S without one
            while self._changed.wait(QUIET_S) and time.monotonic() < deadline:
                seen = sum(job.waiting for job in self._queue)

    def _round(self) -> None:
        """Seat whoever waits, decode one chunk, hand out what has ended."""
        with self._changed:
            policy = self._policy
            self._drop_cancelled()
            seated = self._seat()
        try:
            self._prefill_seated(policy, seated)
            tokens, logprobs, counts = self._decode_chunk(policy)
        except jax.errors.JaxRuntimeError as error:
            _log.exception("a chunk failed on the device; its requests are given up")
            self._fail(self._table.jobs(), f"the device failed: {str(error)[:200]}")
            self._cache = self._empty_cache()
            return
        self._refuse_nonfinite(logprobs, counts)
        self.stats.tokens += int(counts.sum())
        for job in self._table.advance(tokens, logprobs, counts, policy.weight_version):
            self._finish(job, policy)

    def _drop_cancelled(self) -> None:
        for job in self._table.jobs():
            if job.future.cancelled():
                self._table.release(job)
        cancelled = [job for job in self._queue if job.future.cancelled()]
        for job in cancelled:
            self._queue.remove(job)

    def _seat(self) -> list[tuple[int, Job]]:
        """Give free slots to waiting samples, first come first served."""
        seated: list[tuple[int, Job]] = []
        for slot in self._table.free():
            if not self._queue:
                break
            job = self._queue[0]
            job.started_at = job.started_at or time.monotonic()
            self._table.assign(slot, job)
            seated.append((slot, job))
            if job.waiting == 0:
                self._queue.popleft()
        return seated

    def _prefill_seated(self, policy: Policy, seated: list[tuple[int, Job]]) -> None:
        """Run each seated job's prompt once and copy its cache to the job's new slots."""
        by_bucket: dict[int, dict[int, tuple[Job, list[int]]]] = {}
        for slot, job in seated:
            # the last prompt token goes through the first decode step, which gives its logits
            length = len(job.request.prompt_ids) - 1
            if length:
                bucket = next(size for size in self.buckets() if size >= length)
                by_bucket.setdefault(bucket, {}).setdefault(id(job), (job, []))[1].append(slot)
        rows = self._config.prefill_rows
        for bucket, jobs in sorted(by_bucket.items()):
            waiting = list(jobs.values())
            for start in range(0, len(waiting), rows):
                self._prefill_jobs(policy, bucket, waiting[start : start + rows])
        now = time.monotonic()
        for _, job in seated:
            job.prefilled_at = job.prefilled_at or now

    def _prefill_jobs(self, policy: Policy, bucket: int, jobs: list[tuple[Job, list[int]]]) -> None:
        rows = self._config.prefill_rows
        tokens = np.zeros((rows, bucket), np.int32)
        source = np.full(self._config.slots, rows, np.int32)
        for row, (job, slots) in enumerate(jobs):
            prompt = job.request.prompt_ids[:-1]
            tokens[row, : len(prompt)] = prompt
            source[slots] = row
        started = time.monotonic()
        self._prefill(policy, tokens, len(jobs), source)
        jax.block_until_ready(self._cache)
        self.stats.prefill_s += time.monotonic() - started
        self.stats.prefilled_prompts += len(jobs)

    def _prefill(
        self,
        policy: Policy,
        tokens_RP: Int32[np.ndarray, "R P"],
        rows: int,
        source_S: Int32[np.ndarray, " S"],
    ) -> None:
        self._cache = prefill_slots(
            policy.weights,
            self._rotary,
            self._cache,
            tokens_RP,
            np.int32(rows),
            source_S,
            spec=self.spec,
            dtype=self._dtype,
        )

    def _decode_chunk(
        self, policy: Policy
    ) -> tuple[Int32[np.ndarray, "S C"], Float32[np.ndarray, "S C"], Int32[np.ndarray, " S"]]:
        started = time.monotonic()
        self._cache, tokens, logprobs, counts = decode_chunk(
            policy.weights,
            self._rotary,
            self._cache,
            self._table.inputs,
            spec=self.spec,
            steps=self._config.chunk_steps,
            dtype=self._dtype,
        )
        counts_S = np.asarray(counts)
        self.stats.decode_s += time.monotonic() - started
        self.stats.chunks += 1
        self.stats.slot_steps += int(counts_S.max()) * self._config.slots
        return np.asarray(tokens).T, np.asarray(logprobs).T, counts_S

    def _refuse_nonfinite(self, logprobs_SC: np.ndarray, counts_S: np.ndarray) -> None:
        """Give up requests whose logits are not finite, and forget what they left in the cache."""
        bad = np.flatnonzero(~self._table.finite(logprobs_SC, counts_S))
        if len(bad) == 0:
            return
        # a NaN in a masked position would still spoil whoever takes the slot next
        _log.error("non-finite logits in %d slots: their requests are given up", len(bad))
        jobs = {id(job): job for job in map(self._table.job_in, bad.tolist()) if job is not None}
        self._fail(list(jobs.values()), "the model's logits are not finite")
        self._cache = jax.tree.map(jnp.nan_to_num, self._cache)

    def _fail(self, jobs: list[Job], message: str) -> None:
        for job in jobs:
            self._table.release(job)
            if job in self._queue:
                self._queue.remove(job)
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(InferenceError(message))

    def _finish(self, job: Job, policy: Policy) -> None:
        now = time.monotonic()
        version = policy.weight_version
        result = GenerationResult(
            samples=tuple(running.sample(version) for _, running in sorted(job.finished.items())),
            weight_version=version,
            parameters_digest=policy.parameters_digest,
            queue_s=job.started_at - job.submitted_at,
            prefill_s=job.prefilled_at - job.started_at,
            decode_s=now - job.prefilled_at,
        )
        if job.future.set_running_or_notify_cancel():
            job.future.set_result(result)

    def _empty_cache(self) -> Cache:
        slots, length = self._config.slots, self.context_length
        cache = decoder.empty_cache(self.spec, slots, length, self._dtype)
        return on_device(cache, self._place)
