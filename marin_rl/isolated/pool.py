"""Pools of processes for code that may hang, crash, or fill memory; each call has limits.

A worker answers calls one after another, or many at once (`worker`). One that has to die, because a
call blocks it, fills its memory or ends it, fails that call; its others are lost by no fault of
theirs. Leaves out processes (`processes`), and what workers do (`templates`, `grammars`,
`environments.worker`).
"""

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from marin_rl.isolated.processes import PrintedText, Worker, WorkerFault, WorkerSpec, stop_loop

LOSSES_MAX = 3  # of a call's worker, each by the fault of another call


class Pool:
    """Up to `size` workers of one kind. Thread safe.

    Workers start when they are first needed, or by `start`, and are kept; one that has ended is
    replaced. A forked child process starts its own.
    """

    def __init__(self, spec: WorkerSpec, size: int) -> None:
        self._spec, self._size = spec, size
        self._printed = PrintedText(spec.title)  # one budget for all that it starts
        self._workers: list[Worker] = []
        self.forget()
        _pools.add(self)

    def start(self, workers: int = 1) -> None:
        """Start the first workers, without waiting for them. Raises OSError."""
        with self._lock:
            while len(self._workers) < workers:
                self._workers.append(Worker(self._spec, self._printed))

    def ready(self) -> Any:
        """Return the `ready` value of the work, once it has begun. Raises InputError."""
        worker = self.assign()
        try:
            return worker.ready.result()
        finally:
            self.release(worker)

    def assign(self) -> Worker:
        """The worker with the least load, which is one more now; see `release`. Raises OSError."""
        with self._lock:
            self._workers = [worker for worker in self._workers if worker.alive]
            least = min(self._workers, key=lambda worker: worker.load, default=None)
            if least is None or (least.load and len(self._workers) < self._size):
                least = Worker(self._spec, self._printed)
                self._workers.append(least)
            least.load += 1
            return least

    def release(self, worker: Worker) -> None:
        """Take back what `assign` gave. Replaces a worker that has ended, before it is needed."""
        with self._lock:
            worker.load -= 1
            if not worker.alive and worker in self._workers:
                self._workers.remove(worker)
                if not (worker.ready.done() and worker.ready.exception()):  # its work could begin
                    self._workers.append(Worker(self._spec, self._printed))

    def ask(
        self, requests: Sequence[bytes], limit_s: float | int | None = None
    ) -> "list[Any | WorkerFault]":
        """Return the answer to each request, by a worker that has no others. Waits for one.

        What is lost is asked for again. Raises InputError where the work cannot begin.
        """
        answers: list[Any | WorkerFault] = []
        losses = 0  # of the next answer
        with self._places:
            while len(answers) < len(requests):
                worker = self.assign()
                try:
                    for call in worker.call_all(requests[len(answers) :], limit_s):
                        try:
                            answers.append(call.result())
                        except WorkerFault as fault:
                            if fault.limit == "lost" and losses < LOSSES_MAX:
                                losses += 1
                                break
                            answers.append(fault)
                        losses = 0
                finally:
                    self.release(worker)
        return answers

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the supervisors of the workers that live."""
        with self._lock:
            return [worker.process_id for worker in self._workers if worker.alive]

    def close(self) -> None:
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    def forget(self) -> None:
        """Begin without workers, in a fork: they are its parent's."""
        _parents.extend(self._workers)
        self._lock = threading.Lock()
        self._places = threading.Semaphore(self._size)
        self._workers = []


_pools: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_parents: list[Worker] = []  # kept in a fork, so that no finaliser of it closes their wires
os.register_at_fork(after_in_child=lambda: [pool.forget() for pool in _pools])


@atexit.register
def close_pools() -> None:
    """End the workers of all pools, and the thread of their wires; both start again when used."""
    for pool in list(_pools):
        pool.close()
    stop_loop()
