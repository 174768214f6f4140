"""The embedded engine: many requests, one batch of fixed shape, and a thread for both.

`Engine.submit` queues a request from any thread; the engine's thread waits for work and takes steps
(`engine_step`). New weights (`swap`) take the old ones' place between two steps, by a change of
reference, and adapters are written into their bank there. Leaves out the computation (`runner`) and
HTTP.

The shapes of the compiled programs follow from the engine's configuration and from the length of a
request's own prompt, never from the load. Where rows of them are proven not to depend on one
another (`batch_invariance`; on one device, not on a mesh), the same prompt, seed and weights give
bitwise the same tokens and logprobs under any load, in any sequence slot and lane. Other numbers of
slots or lanes, another instruction set or thread pool are other programs, whose last bits may
differ.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import jax.numpy as jnp

from marin_rl.compilation import nbytes
from marin_rl.config import EngineConfig
from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.adapters import AdapterLoads
from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.engine_step import EngineStats, EngineStep, PendingRequests
from marin_rl.inference.execution_plan import ExecutionPlan
from marin_rl.inference.generation import (
    Delta,
    GenerationRequest,
    GenerationResult,
    Job,
    Policy,
    RequestBounds,
)
from marin_rl.inference.growing_runner import GrowingRunner
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.runner import Runner
from marin_rl.inference.stops import Decode
from marin_rl.inference.warm_up import programs_of, warm_up
from marin_rl.machine import ENGINE_KEYS, give_back_freed_memory, memory_errors
from marin_rl.models.module import LanguageModel
from marin_rl.progress import phase

# An idle engine waits for more requests, which come close together, until none came for QUIET_S,
# GATHER_S at most: samples that start together share their prompts and their chunks.
QUIET_S = 0.005
GATHER_S = 0.05

# Seconds that an engine without work keeps its fused copy of the weights for the next request.
COPY_KEPT_S = 1.0


class VersionInUse(InferenceError):
    """Requests are running whose tokens other weights of the same version have drawn."""

    transient = True


class Engine:
    """Continuous batching over `config.slots` sequences of at most `context_length` tokens.

    `stop_token_ids` end every completion (the tokenizer's end of sequence); `decode` turns ids into
    text, and is needed only for requests with stop strings. With the programs of `GrowingRunner`
    they and the cache follow the load: on one device, without prefix cache and adapters.
    Raises InputError for a model that it cannot decode faithfully.
    """

    def __init__(  # noqa: PLR0913 - a policy, its tokenizer, and how it is decoded
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        context_length: int,
        weight_version: int = 0,
        parameters_digest: str = "",
        stop_token_ids: Sequence[int] = (),
        decode: Decode | None = None,
        dtype: jnp.dtype | type = jnp.float32,
        programs: type[Runner] = Runner,
    ) -> None:
        runner = self._runner = programs(model, config, context_length, jnp.dtype(dtype))
        self.spec = runner.spec
        self.context_length = context_length
        self.stats = EngineStats()
        self.stop_token_ids = tuple(stop_token_ids)
        self._bounds = RequestBounds(
            vocabulary=self.spec.vocabulary,
            context_length=context_length,
            stop_tokens=len(self.stop_token_ids),
            has_decode=decode is not None,
        )
        self.policy = runner.policy(model, weight_version, parameters_digest)
        extras = ExtraRows(runner.lanes, runner.length, self.spec.vocabulary, runner.put)
        self._batch = RunningBatch(
            config.slots, self.spec.vocabulary, decode, extras, has_adapters=runner.bank is not None
        )
        self._changed = threading.Condition()
        self._pending = PendingRequests(self._batch, self._changed, self.stats)
        self._steps = EngineStep(runner, self._batch, self._pending, self.stats)
        self.adapters = AdapterLoads(
            runner.bank, runner.plan.bank_sizes, self._changed, self._pending.adapters
        )
        self.paused = False
        self._closing = self._in_step = self._sleep_requested = self._reset_prefixes = False
        # last, for it reads all of the above; a daemon, for a process may end without `close`
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def queued(self) -> int:
        with self._changed:
            return self._pending.queue.waiting

    @property
    def slots(self) -> int:
        return self._runner.lanes.slots

    @property
    def plan(self) -> ExecutionPlan:
        return self._runner.plan

    @property
    def active(self) -> int:
        return self._batch.active

    def submit(
        self,
        request: GenerationRequest,
        on_delta: Callable[[Delta], None] | None = None,
        on_scheduled: Callable[[Policy], None] | None = None,
        *,
        streams: bool = False,
    ) -> "Future[GenerationResult]":
        """Queue a request; safe from any thread. Cancelling the future frees its sequence slots.

        `on_delta` is called on the engine's thread with the tokens that each chunk added to each
        sample, in order, before the future resolves; it must be quick. `on_scheduled` is called
        there too, each time that samples of the request are scheduled or its prompt is to be
        scored, with the policy that will draw their first tokens. An exception in either fails this
        request alone. `streams`: few requests that someone reads along are decoded by token.

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
            streams=streams,
            # sample i draws with seed + i: 48 bits leave room for it within a key's 64
            seed=secrets.randbits(48) if seed is None else seed,
            stop_tokens=self.stop_token_ids + request.stop_token_ids,
        )
        with self._changed:
            if self._closing:
                raise InferenceError("the engine is closed: it takes no requests any more")
            job.adapter = self.adapters.get(request.adapter)
            self._pending.add(job)
            # the caches are wanted again: a sleep that was asked for before this request is void
            self._sleep_requested = False
            self._changed.notify_all()
        # last, and outside of the lock: a future that is cancelled already calls back at once
        job.future.add_done_callback(self._pending.note_cancelled)
        return job.future

    def swap(
        self,
        model: LanguageModel,
        weight_version: int,
        parameters_digest: str,
        *,
        recompute_kv_cache: bool = False,
    ) -> None:
        """Sample with another model's arrays from the next chunk on: no copy, no wait.

        Requests that are queued or running go on. Running sequences keep the keys and values of
        their earlier positions; with `recompute_kv_cache` a prefill computes them again before the
        next chunk, as if all tokens so far were a prompt. Raises, and keeps the old weights:
        InputError for a model of another shape, or where adapters are loaded on other weights;
        VersionInUse for other weights of the same version while requests run, which could not tell
        the tokens of one from those of the other.
        """
        policy = replace(
            self._runner.policy(model, weight_version, parameters_digest),
            recompute_kv_cache=recompute_kv_cache,
        )
        with self._changed:
            old, new = self.policy, parameters_digest
            # queued requests have no tokens yet: all of theirs will be of the new weights
            mixed = weight_version == old.weight_version and self._pending.started
            if mixed and new != old.parameters_digest:
                raise VersionInUse(
                    f"requests are running on other weights of version {weight_version} (expected "
                    f"the digest {old.parameters_digest[:16]}, found {new[:16]}): wait for their "
                    "end, or give another version"
                )
            names = {one.name for one in (*self.adapters.loaded, *self.adapters.in_use())}
            if names and new != old.parameters_digest:
                raise InputError(
                    f"adapters are loaded on the weights {old.parameters_digest[:16]} "
                    f"({', '.join(sorted(names))}): unload them, and wait for their requests, "
                    f"before {new[:16]} take their place"
                )
            self.policy = policy
            self.stats.swaps += 1
            self._changed.notify_all()  # an idle engine may hold a copy of the old ones

    def pause(self) -> None:
        """Start no chunk until `resume`; returns when none is running, or after a `resume`.

        Running requests wait, and `swap` works. Not for the engine's own thread, which could never
        return.
        """
        assert threading.current_thread() is not self._thread
        with self._changed:
            self.paused = True
            self._changed.notify_all()
            # the step that is running ends first: after this no program writes the caches
            while self._in_step and self.paused:
                self._changed.wait()

    def resume(self) -> None:
        with self._changed:
            self.paused = False
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
            # no notification: the next step does it before it plans, and none is read sooner
            self._reset_prefixes = True

    @property
    def growing(self) -> GrowingRunner | None:
        return self._runner if isinstance(self._runner, GrowingRunner) else None

    @property
    def programs(self) -> int:
        """Number of programs that `warm_up` compiles; of a growing cache, that are compiled."""
        return len(self.growing.programs) if self.growing else programs_of(self._runner)

    @memory_errors("the engine", ENGINE_KEYS)
    @phase("compiling the engine's programs")
    def warm_up(self, announce: Callable[[str], None] = lambda line: None) -> None:
        """Compile everything that requests can need, so that none of them waits for it.

        `announce` gets a line for each program. To be called before the first request: it uses the
        cache that the engine's thread owns.
        """
        with self._changed:
            assert not self._pending.queue
            assert self._batch.active == 0
            # under the lock, so that the engine's thread begins no step on the same caches
            warm_up(self._runner, self.policy, self._batch.inputs, self._batch.extras, announce)

    def close(self) -> None:
        """Stop after the chunk that is running. Requests that have not ended get InferenceError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # outside of the lock, which the engine's thread takes once more at its end
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
                with self._changed:
                    # `pause` waits for this: no chunk is on its way any more
                    self._in_step = self._steps.in_flight
                    self._changed.notify_all()
            self._steps.settle()
        finally:
            self._runner.close()
            with self._changed:
                # closing before the requests fail: one that came later would wait for a thread that
                # is gone
                self._closing = True
                self._in_step = False
                self._changed.notify_all()
                self._pending.fail(list(self._pending.jobs), "the engine was closed")
                self.adapters.close()

    def _wait_for_work(self) -> bool:
        """Wait for requests, and for the end of a pause; False once the engine closes."""
        with self._changed:
            while not self._closing:
                self._pending.drop_cancelled()
                # here too: a load waits for it while the engine is idle or paused
                self.adapters.write()
                if self._rests:
                    if self._steps.in_flight:  # it is read before anything waits
                        return True
                    self._idle()
                    continue
                if self._batch.active == 0:
                    self._wait_to_batch()
                # waiting released the lock, and a pause may have come meanwhile
                if not self.paused:
                    self._in_step = not self._closing
                    return not self._closing
            return False

    @property
    def _rests(self) -> bool:
        return self.paused or not (self._pending.queue or self._batch.active)

    def _idle(self) -> None:
        """Wait for a change, and free memory: at once where `pause` or `sleep` asks for it.

        Else the fused weights stay for COPY_KEPT_S, so that requests which come one after another
        use the same copy; a copy of weights that were swapped out goes at once.
        """
        memory = self._runner.memory
        if not (self.paused or self._sleep_requested) and memory.holds_copy_of(self.policy):
            if not self._changed.wait(COPY_KEPT_S):
                memory.release()
            return
        caches = self._sleep_requested and self._batch.active == 0
        if caches:
            self._batch.kept.drop_all()
            freed = nbytes((memory.caches, memory.fused))
            memory.release(caches=True)
            # freed in pieces between others' memory, it would not hold what a trainer needs at once
            give_back_freed_memory(freed)
        else:
            memory.release()
        # while sequences are paused the caches are theirs: the request stays
        self._sleep_requested &= self._batch.active > 0
        self._changed.wait()

    def _wait_to_batch(self) -> None:
        """Wait a moment for requests that arrive together with the first one."""
        deadline = time.monotonic() + GATHER_S
        seen, slots = 0, self.slots
        while not self._closing and seen < slots and time.monotonic() < deadline:
            waiting = self._pending.queue.waiting
            if waiting == seen:
                return
            seen = waiting
            # woken by every arrival, so the wait is for QUIET_S without one
            while seen < slots and self._changed.wait(QUIET_S) and time.monotonic() < deadline:
                seen = self._pending.queue.waiting

    def _step(self) -> None:
        """Take one step, as described at the head of this module."""
        # planned under the lock, computed outside of it: submissions never wait for the device
        with self._changed:
            # one for the whole step: a swap that comes meanwhile is for the next
            policy = self.policy
            self._pending.drop_cancelled()
            # before planning: requests may wait for an adapter that is written here
            self.adapters.write()
            if self._reset_prefixes:
                self._batch.kept.drop_all()
                self._reset_prefixes = False
            plan = None if self._rests else self._steps.plan(policy)
        if plan is None:
            self._steps.settle()
        else:
            self._steps.run(plan, policy)
