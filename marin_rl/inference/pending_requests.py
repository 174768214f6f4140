"""Requests of an engine whose futures are not resolved yet, queued or running.

Owns how a request ends: with its result, with an error, or cancelled by its caller; once, whichever
comes first. Leaves out what it computes (`engine_step`) and its sequence slots (`batch`).
"""

import threading
from concurrent.futures import Future

from marin_rl.errors import InferenceError, OutOfMemory
from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.engine_stats import EngineStats
from marin_rl.inference.generation import GenerationResult
from marin_rl.inference.jobs import Job
from marin_rl.inference.scheduler import JobQueue


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
        """Queue a request. Under the lock."""
        self.queue.append(job)
        self.jobs[job] = None
        self._stats.requests += 1
        self._stats.prompt_tokens += len(job.request.prompt_ids)

    @property
    def started(self) -> list[Job]:
        """Requests that have had a sequence slot, or their prompt scored."""
        # a copy: the engine's thread removes those that end
        return [job for job in list(self.jobs) if job.started_at]

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
        # the queue is shared with submitters; slots are used by the engine's thread alone
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
        """Give a request its result, unless it was cancelled."""
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
