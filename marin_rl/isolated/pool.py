"""Pools of processes for code that may hang, crash, or fill memory; each call has limits.

A worker answers calls one after another, or many at once (`worker`). One that has to die, because a
call blocks it, fills its memory or ends it, fails that call; its others are lost by no fault of
theirs. All pipes of this process are served by one thread with an event loop of its own, so that a
worker that hangs, floods or dies holds up no caller but those that wait for it. Leaves out what
workers do (`templates`, `grammars`, `environments.worker`).
"""

import asyncio
import atexit
import itertools
import json
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import orjson

from marin_rl.errors import InputError
from marin_rl.isolated.processes import (
    EXIT_TIMEOUT_S,
    PrintedText,
    WorkerProcess,
    sealed_environment,
)
from marin_rl.isolated.supervisor import STARTUP_TIMEOUT_S
from marin_rl.isolated.worker import MEMORY_EXIT_STATUS

LOSSES_MAX = 3  # of a call's worker, each by the fault of another call
_READ_BYTES = 1 << 20
_ENVELOPE_BYTES_MAX = 256  # of a line, in addition to the answer

Limit = Literal["cpu", "wall", "memory", "answer", "crash", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of one call: CPU time, time by the wall clock, memory, and bytes of its answer.

    `wall_s` is far above `cpu_s`: a worker on a busy machine may wait for its turn. CPU time is
    limited in workers that answer one call after another. Memory is in addition to what the worker
    has when its work begins. A `sealed` worker may write no file and start no process. None is no
    limit.
    """

    cpu_s: float | int | None = None
    wall_s: float | int | None
    memory_bytes: int | None
    answer_bytes: int
    sealed: bool = True


class WorkerFault(Exception):
    """A call that was not answered: the limit that it exceeded, or the end of its process.

    The limit is `lost` for a call whose process ended by the fault of another call, or of none.
    """

    def __init__(self, limit: Limit, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Work of a process: a module with a function `begin`, which gets `settings`, and limits.

    `environment` is the process's; the default has no secrets, and modules from absolute places
    alone. `interpreter` is another Python, for which `module` is a file; `name` is for people.
    """

    module: str
    limits: WorkerLimits
    settings: Mapping[str, Any] | None = None
    environment: Mapping[str, str] | None = None
    interpreter: str | None = None
    name: str | None = None

    @property
    def title(self) -> str:
        return self.name or self.module


@dataclass(frozen=True, slots=True)
class _Pending:
    answer: "Future[Any]"
    limit_s: float | int | None


class Worker:
    """A worker process and the calls that it has not answered. It is not started again.

    Starts at once; `ready` is set once its work has begun, with what the work says of itself.
    Raises OSError where no process can be started.
    """

    def __init__(self, spec: WorkerSpec, printed: PrintedText) -> None:
        self._spec, self._limits = spec, spec.limits
        self.load = 0  # what a pool balances
        self.alive = True
        self.ready: Future[Any] = Future()
        self._pending = {0: _Pending(self.ready, STARTUP_TIMEOUT_S)}
        self._numbers = itertools.count(1)
        self._incoming, self._outgoing = bytearray(), bytearray()
        environment = sealed_environment() if spec.environment is None else spec.environment
        self._process = WorkerProcess(environment, printed, spec.interpreter)
        self._loop = _pipes_loop()
        self._loop.call_soon_threadsafe(self._begin)

    @property
    def process_id(self) -> int:
        return self._process.process_id

    @property
    def is_fit(self) -> bool:
        """False once the work could not begin."""
        return not (self.ready.done() and self.ready.exception())

    def call(self, request: bytes, limit_s: float | int | None = None) -> "Future[Any]":
        """Ask for the answer to a request in JSON; `limit_s` replaces the limit of the worker.

        The future raises WorkerFault, and InputError where the work could not begin.
        """
        return self.call_all([request], limit_s)[0]

    def call_all(
        self, requests: Sequence[bytes], limit_s: float | int | None = None
    ) -> "list[Future[Any]]":
        answers: list[Future[Any]] = [Future() for _ in requests]
        self._loop.call_soon_threadsafe(self._ask, requests, limit_s, answers)
        return answers

    def close(self) -> None:
        """Kill the process with all that descends from it."""
        if not self.alive:
            return
        ended = threading.Event()
        self._loop.call_soon_threadsafe(self._lose, None, ended.set)
        ended.wait(EXIT_TIMEOUT_S * 2)

    def leave(self) -> None:
        """Leave the process to the parent of this fork."""
        if self.alive:
            self._process.leave()

    # what follows runs in the thread of the pipes

    def _begin(self) -> None:
        self._loop.add_reader(self._process.answers, self._take)
        self._loop.add_reader(self._process.output, self._forward)
        about = {"module": self._spec.module, "settings": self._spec.settings}
        self._write([json.dumps(about | asdict(self._limits)).encode()])

    def _ask(
        self,
        requests: Sequence[bytes],
        limit_s: float | int | None,
        answers: "Sequence[Future[Any]]",
    ) -> None:
        if not self.alive:
            for answer in answers:
                _fail(answer, self._refusal("before the call"))
            return
        limit, lines = b"null" if limit_s is None else b"%f" % limit_s, list[bytes]()
        for request, answer in zip(requests, answers, strict=True):
            number = next(self._numbers)
            self._pending[number] = _Pending(answer, limit_s or self._limits.wall_s)
            lines.append(b'{"id":%d,"limit_s":%b,"request":%b}' % (number, limit, request))
        self._write(lines)

    def _refusal(self, how: object) -> BaseException:
        unfit = self.ready.exception() if self.ready.done() else None
        return unfit or WorkerFault("lost", f"its process ended ({how})")

    def _write(self, lines: Sequence[bytes]) -> None:
        assert not any(b"\n" in line for line in lines), "a message is one line"
        idle = not self._outgoing
        self._outgoing += b"\n".join([*lines, b""])
        if idle:
            self._flush()

    def _flush(self) -> None:
        """Write what the pipe takes, and go on when it takes more."""
        requests, outgoing = self._process.requests, self._outgoing
        with suppress(BrokenPipeError):  # its end is noticed at the other pipe
            with suppress(BlockingIOError), memoryview(outgoing) as data:
                taken = os.write(requests, data)
                data.release()
                del outgoing[:taken]
            if outgoing:
                self._loop.add_writer(requests, self._flush)
                return
        self._loop.remove_writer(requests)

    def _forward(self) -> None:
        if not self._process.forward_output():
            self._loop.remove_reader(self._process.output)

    def _take(self) -> None:
        data = os.read(self._process.answers, _READ_BYTES)
        if not data:
            self._lose(None)
            return
        self._incoming += data
        if b"\n" in data:
            *lines, rest = bytes(self._incoming).split(b"\n")
            self._incoming = bytearray(rest)
            for line in filter(None, lines):
                try:
                    self._receive(orjson.loads(line))
                except (ValueError, LookupError, TypeError):  # its code wrote to the pipe
                    self._process.terminate()
        if len(self._incoming) > self._limits.answer_bytes + _ENVELOPE_BYTES_MAX:
            self._incoming.clear()
            self._process.terminate()

    def _receive(self, record: Mapping[str, Any]) -> None:
        if "ended" in record:
            self._lose(record)
        elif pending := self._pending.pop(record["id"], None):
            if "answer" in record:
                _set(pending.answer, record["answer"])
            elif "unfit" in record:
                _fail(pending.answer, InputError(record["unfit"]))
            elif record["limit"] == "wall":
                _fail(pending.answer, WorkerFault("wall", f"over {pending.limit_s:g} seconds"))
            else:
                most = f"an answer over {self._limits.answer_bytes} bytes"
                _fail(pending.answer, WorkerFault("answer", most))

    def _lose(
        self, record: Mapping[str, Any] | None, then: Callable[[], None] | None = None
    ) -> None:
        """End the process; `record` is the supervisor's, None where it had no time for one."""
        if not self.alive:
            if then is not None:
                then()
            return
        self.alive = False
        self._loop.remove_reader(self._process.answers)
        self._loop.remove_reader(self._process.output)
        self._loop.remove_writer(self._process.requests)
        # The kernel may take its time to end a process: never in the thread of the pipes.
        threading.Thread(
            target=self._end, args=(record, then), name="isolated-end", daemon=True
        ).start()

    def _end(self, record: Mapping[str, Any] | None, then: Callable[[], None] | None) -> None:
        code = self._process.end()
        record = record or {"ended": -1, "code": code, "late": False}
        with suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._fail_pending, record)
        if then is not None:
            then()

    def _fail_pending(self, record: Mapping[str, Any]) -> None:
        """Fail all calls: the one that ended the process with its cause, the others as lost."""
        pending, self._pending = self._pending, {}
        how = self._cause(record, pending.get(record["ended"]))
        if pending.pop(0, None) is not None:
            late = f"was not ready in {STARTUP_TIMEOUT_S:g} s"
            why = late if how.limit == "wall" else f"ended at its start ({how})"
            _fail(
                self.ready,
                InputError(
                    f"the process for {self._spec.title} {why}: its standard error says more; "
                    "expected that Python processes can be started here"
                ),
            )
        lost = self._refusal(how)
        for number, call in pending.items():
            _fail(call.answer, how if number == record["ended"] else lost)

    def _cause(self, record: Mapping[str, Any], call: _Pending | None) -> WorkerFault:
        code: int = record["code"]
        if record["late"]:
            limit_s = self._limits.wall_s if call is None else call.limit_s
            return WorkerFault("wall", f"over {limit_s or 0:g} seconds")
        if code == -signal.SIGPROF:
            return WorkerFault("cpu", f"over {self._limits.cpu_s or 0:g} seconds of CPU time")
        if code == MEMORY_EXIT_STATUS:
            mebibytes = (self._limits.memory_bytes or 0) >> 20
            return WorkerFault("memory", f"over {mebibytes} MiB of memory")
        return WorkerFault("crash", f"signal {-code}" if code < 0 else f"exit status {code}")


class Pool:
    """Up to `size` workers of one kind. Thread safe.

    Workers start when they are first needed, or by `start`, and are kept; one that has ended is
    replaced. A forked child process starts its own.
    """

    def __init__(self, spec: WorkerSpec, size: int) -> None:
        self._spec, self._size = spec, size
        self._printed = PrintedText(spec.title)  # one budget for all that it starts
        self._lock = threading.Lock()
        self._reset()
        _pools.add(self)

    def start(self, workers: int = 1) -> None:
        """Start the first workers, without waiting for them. Raises OSError."""
        with self._lock:
            self._leave_parents()
            while len(self._workers) < workers:
                self._workers.append(self._new())

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
            self._leave_parents()
            self._workers = [worker for worker in self._workers if worker.alive]
            least = min(self._workers, key=lambda worker: worker.load, default=None)
            if least is None or (least.load and len(self._workers) < self._size):
                least = self._new()
                self._workers.append(least)
            least.load += 1
            return least

    def release(self, worker: Worker) -> None:
        """Take back what `assign` gave. Replaces a worker that has ended, before it is needed."""
        with self._lock:
            worker.load -= 1
            if not worker.alive and worker in self._workers:
                self._workers.remove(worker)
                if worker.is_fit:
                    self._workers.append(self._new())

    def ask(
        self, requests: Sequence[bytes], limit_s: float | int | None = None
    ) -> "list[Any | WorkerFault]":
        """Return the answer to each request, by a worker that has no others. Waits for one.

        What is lost is asked for again. Raises InputError where the work cannot begin.
        """
        answers: list[Any | WorkerFault] = []
        losses = 0  # one after another
        with self._lock:
            self._leave_parents()
            places = self._places
        with places:
            while len(answers) < len(requests):
                before = len(answers)
                last_try = losses == LOSSES_MAX
                answers += self._answers(requests[before:], limit_s, last_try=last_try)
                losses = losses + 1 if len(answers) == before else 0
        return answers

    def _answers(
        self, requests: Sequence[bytes], limit_s: float | int | None, *, last_try: bool
    ) -> "Iterator[Any | WorkerFault]":
        """Answers of one worker, up to the first that is lost."""
        worker = self.assign()
        try:
            for call in worker.call_all(requests, limit_s):
                try:
                    yield call.result()
                except WorkerFault as fault:
                    if fault.limit != "lost" or last_try:
                        yield fault
                    if fault.limit == "lost":
                        return
        finally:
            self.release(worker)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the supervisors of the workers that live."""
        with self._lock:
            return [worker.process_id for worker in self._workers if worker.alive]

    def close(self) -> None:
        """End all workers, in a fork none: they are its parent's."""
        with self._lock:
            self._leave_parents()
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    def _new(self) -> Worker:
        return Worker(self._spec, self._printed)

    def _leave_parents(self) -> None:
        """Leave workers that a parent of this fork has started to it."""
        if self._owner != os.getpid():
            for worker in self._workers:
                worker.leave()
            self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._places = threading.Semaphore(self._size)
        self._workers: list[Worker] = []


def _set(future: "Future[Any]", value: Any) -> None:
    with suppress(Exception):  # its caller may have been cancelled
        future.set_result(value)


def _fail(future: "Future[Any]", error: BaseException) -> None:
    with suppress(Exception):  # as above
        future.set_exception(error)


_pools: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_lock = threading.Lock()
# By process: a fork has no thread of its parent.
_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}


def _pipes_loop() -> asyncio.AbstractEventLoop:
    """The event loop that serves the pipes of this process, started at its first use."""
    with _lock:
        if os.getpid() not in _loops:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="isolated-pipes", daemon=True)
            thread.start()
            _loops[os.getpid()] = loop, thread
        return _loops[os.getpid()][0]


@atexit.register
def close_pools() -> None:
    """End the workers of all pools, and the thread of their pipes; both start again when used."""
    for pool in list(_pools):
        pool.close()
    with _lock:
        loop, thread = _loops.pop(os.getpid(), (None, None))
    if loop is not None and thread is not None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
