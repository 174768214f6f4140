"""Pools of workers that each answer many calls at once; the parent's end of `interleaved`.

All pipes of a process are served by one thread with an event loop of its own, so that a worker that
hangs, floods or dies holds up no caller but those that wait for it. A worker that is silent for
longer than a call may take is killed; the call that blocked it fails in another way than those that
were only in its process. Leaves out what is called (`environments.episode_pool`).
"""

import asyncio
import atexit
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from marin_rl.errors import InputError
from marin_rl.isolated.interleaved import ANSWER, BEGUN, LATE, PAUSED, TOO_LARGE
from marin_rl.isolated.lines import (
    ANSWERED_KEPT,
    MEMORY_EXIT_STATUS,
    PIPES_EXIT_STATUS,
    READY,
    answer_number,
    decoded,
    encoded,
)
from marin_rl.isolated.pool import EXIT_PATIENCE_S, STARTUP_TIMEOUT_S, WorkerLimits
from marin_rl.isolated.processes import LineTooLong, PrintedText, WorkerProcess

GRACE_S = 1.0  # for a worker to report a call that is late, before it counts as blocked
_NUMBER_BYTES_MAX = 128  # of a line, in addition to the answer

Limit = Literal["wall", "memory", "answer", "crash"]


class CallFault(Exception):
    """A call that was not answered: the limit that it exceeded, or the end of its worker.

    `guilty` is False for a call whose worker ended because of another, or without a known cause.
    """

    def __init__(self, limit: Limit, message: str, *, guilty: bool) -> None:
        super().__init__(message)
        self.limit, self.guilty = limit, guilty


@dataclass(slots=True)
class _Pending:
    answer: "Future[bytes]"
    sent_at: float


@dataclass(slots=True)
class _State:
    """Calls of a worker that are not answered; touched by the thread of the pipes alone."""

    pending: dict[str, _Pending] = field(default_factory=dict)
    running: str | None = None  # the call whose slice runs
    answered: deque[str] = field(default_factory=lambda: deque(maxlen=ANSWERED_KEPT))
    heard_at: float = 0.0
    outgoing: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)  # for the worker to be ready
    timer: asyncio.TimerHandle | None = None


class CallWorker:
    """A worker process for many calls. It is not started again: a pool takes another."""

    def __init__(
        self,
        hello: bytes,
        limits: WorkerLimits,
        environment: Mapping[str, str],
        name: str,
        printed: PrintedText,
    ) -> None:
        self._limits, self._name = limits, name
        self._loop = _pipes_loop()
        self._state = _State()
        self._first = secrets.token_hex(8)
        self.assigned = 0  # what a pool balances
        self.alive = True
        self._ready: Future[None] = Future()
        self._process = WorkerProcess(environment, printed)
        self._loop.call_soon_threadsafe(self._begin, hello)

    @property
    def process_id(self) -> int:
        """Process id of the supervisor of the process that works."""
        return self._process.process_id

    def call(self, request: bytes) -> "Future[bytes]":
        """Ask for an answer; the future raises CallFault, and InputError for an unfit worker."""
        answer: Future[bytes] = Future()
        self._loop.call_soon_threadsafe(self._ask, request, answer)
        return answer

    def close(self) -> None:
        """Kill the process with all that descends from it."""
        ended = threading.Event()
        self._loop.call_soon_threadsafe(self._lose, None, ended.set)
        ended.wait(EXIT_PATIENCE_S * 2)

    # what follows runs in the thread of the pipes

    def _begin(self, hello: bytes) -> None:
        _, answers, output = self._process.pipes
        self._loop.add_reader(answers, self._take)
        self._loop.add_reader(output, self._forward, output)
        self._state.heard_at = time.monotonic()
        self._state.outgoing += encoded(self._first, [hello]) + b"\n"
        self._flush()
        self._watch()

    def _ask(self, request: bytes, answer: "Future[bytes]") -> None:
        if not self.alive:
            answer.set_exception(CallFault("crash", "its worker has ended", guilty=False))
            return
        number, now = secrets.token_hex(8), time.monotonic()
        if not self._state.pending and self._ready.done():
            self._state.heard_at = now  # an idle worker owed nothing
        self._state.pending[number] = _Pending(answer, now)
        self._write(encoded(number, [request]))
        self._watch()

    def _write(self, line: bytes) -> None:
        if not self._ready.done():  # until then the worker reads its first message alone
            self._state.waiting += line + b"\n"
            return
        empty = not self._state.outgoing
        self._state.outgoing += line + b"\n"
        if empty:
            self._flush()

    def _flush(self) -> None:
        """Write what the pipe takes, and go on when it takes more."""
        outgoing, (questions, *_) = self._state.outgoing, self._process.pipes
        with suppress(BrokenPipeError):  # its end is noticed at the other pipe
            with memoryview(outgoing) as data:
                taken = self._process.write(data)
            del outgoing[:taken]
            if outgoing:
                self._loop.add_writer(questions, self._flush)
            else:
                self._loop.remove_writer(questions)

    def _forward(self, output: int) -> None:
        if not self._process.forward_output():
            self._loop.remove_reader(output)

    def _take(self) -> None:
        bytes_max = -(-self._limits.answer_bytes // 3) * 4  # base64 writes 4 bytes for 3
        try:
            for line in self._process.take_lines(bytes_max + _NUMBER_BYTES_MAX):
                self._state.heard_at = time.monotonic()
                self._receive(line)
        except EOFError:
            self._lose(None)
        except (LineTooLong, ValueError) as error:
            self._lose(("answer", f"wrote to its process's own pipe: {error}"))

    def _receive(self, line: bytes) -> None:
        """Take in a line. Raises ValueError for one that is none of the worker's."""
        found, (kind, *parts) = decoded(line)
        number = found.removesuffix(answer_number("", 0))
        if number == self._first and not self._ready.done():
            if kind == READY:
                self._ready.set_result(None)
                self._state.outgoing += self._state.waiting
                self._flush()
                if self._state.timer is not None:  # it was set for the time that a start may take
                    self._state.timer.cancel()
                    self._state.timer = None
                self._watch()
            else:
                self._ready.set_exception(InputError(parts[0].decode()))
                self._lose(None)
            return
        pending = self._state.pending.get(number)
        if kind in (BEGUN, PAUSED):
            self._state.running = number if kind == BEGUN else None
        elif pending is not None and kind in (ANSWER, LATE, TOO_LARGE):
            del self._state.pending[number]
            self._state.answered.append(number)
            self._resolve(pending, kind, parts)
        else:
            if number in self._state.answered:
                # a child that this call left behind: the one that runs now has no part in it
                self._state.running = number
            raise ValueError(f"found {line[:40]!r}")

    def _resolve(self, pending: _Pending, kind: bytes, parts: list[bytes]) -> None:
        if kind == ANSWER:
            _set(pending.answer, parts[0])
        elif kind == LATE:
            _fail(pending.answer, CallFault("wall", self._over_time(), guilty=True))
        else:
            most = f"over {self._limits.answer_bytes} bytes"
            _fail(pending.answer, CallFault("answer", most, guilty=True))

    def _over_time(self) -> str:
        return f"over {self._limits.wall_s:g} seconds"

    def _watch(self) -> None:
        """See to it that a silent worker is noticed, while anything is asked of it."""
        state = self._state
        if state.timer is None and self.alive and (state.pending or not self._ready.done()):
            left_s = state.heard_at + self._silence_max_s() - time.monotonic()
            state.timer = self._loop.call_later(max(0.01, left_s), self._check_silence)

    def _silence_max_s(self) -> float:
        return self._limits.wall_s + GRACE_S if self._ready.done() else STARTUP_TIMEOUT_S

    def _check_silence(self) -> None:
        state, (_, answers, _) = self._state, self._process.pipes
        state.timer = None
        silent = time.monotonic() - state.heard_at > self._silence_max_s()
        # with something to read, this thread was late and not the worker
        readable = select.poll()  # `select` takes no descriptor above 1023
        readable.register(answers, select.POLLIN)
        unread = bool(readable.poll(0))
        if silent and not unread and (state.pending or not self._ready.done()):
            self._lose(("wall", self._over_time()))
        else:
            self._watch()

    def _lose(
        self, cause: tuple[Limit, str] | None, then: Callable[[], None] | None = None
    ) -> None:
        """End the process; `cause` is None where it ended by itself, or is no longer wanted."""
        if not self.alive:
            if then is not None:
                then()
            return
        self.alive = False
        questions, answers, output = self._process.pipes
        self._loop.remove_reader(answers)
        self._loop.remove_reader(output)
        self._loop.remove_writer(questions)
        if self._state.timer is not None:
            self._state.timer.cancel()
        # The kernel may take its time to end a process: never in the thread of the pipes.
        patience_s = EXIT_PATIENCE_S if cause is None and then is None else 0.0
        threading.Thread(
            target=self._end, args=(cause, then, patience_s), name="isolated-end", daemon=True
        ).start()

    def _end(
        self,
        cause: tuple[Limit, str] | None,
        then: Callable[[], None] | None,
        patience_s: float,
    ) -> None:
        how = self._process.end(patience_s)
        self._loop.call_soon_threadsafe(self._fail_pending, cause or self._exit(how))
        if then is not None:
            then()

    def _exit(self, how: str) -> tuple[Limit, str]:
        if self._process.exit_code == MEMORY_EXIT_STATUS:
            return "memory", f"over {self._limits.memory_bytes >> 20} MiB of memory"
        if self._process.exit_code == PIPES_EXIT_STATUS:
            return "crash", "closed or replaced descriptors that its process needs"
        return "crash", f"ended its process ({how})"

    def _fail_pending(self, cause: tuple[Limit, str]) -> None:
        """Fail all calls: those that ended the worker with its cause, the others without guilt."""
        state, (limit, message) = self._state, cause
        pending, state.pending = state.pending, {}
        if not self._ready.done():
            self._ready.set_exception(InputError(f"the process for {self._name} {message}"))
        unfit = self._ready.exception()
        guilty = _guilty(state.running, pending, limit, self._limits.wall_s)
        for number, call in pending.items():
            if unfit is not None:
                _fail(call.answer, unfit)
            elif number in guilty:
                _fail(call.answer, CallFault(limit, message, guilty=True))
            else:
                _fail(call.answer, CallFault("crash", f"its worker {message}", guilty=False))


def _guilty(
    running: str | None, pending: Mapping[str, _Pending], limit: Limit, wall_s: float | int
) -> set[str]:
    """Calls that ended their worker: the one that ran; of a silent worker, else those overdue."""
    if running is not None:
        return {running}
    now = time.monotonic()
    return {n for n, call in pending.items() if limit == "wall" and now - call.sent_at > wall_s}


class CallPool:
    """Up to `size` workers that run one module, for calls that stay with their worker. Thread safe.

    Workers start when they are first needed; one that has ended is replaced at the next need. A
    forked child process starts its own.
    """

    def __init__(
        self,
        module: str,
        limits: WorkerLimits,
        size: int,
        *,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        name: str,
    ) -> None:
        self._hello = limits.hello(module, settings, interleaved=True)
        self._limits, self._size = limits, size
        self._environment, self._name = environment, name
        self._printed = PrintedText(name)  # one budget for all that it starts
        self._lock = threading.Lock()
        self._owner, self._workers = os.getpid(), list[CallWorker]()

    def assign(self) -> CallWorker:
        """The worker with the least assigned to it, which is one more now; see `release`.

        Raises OSError where no process can be started.
        """
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._workers = os.getpid(), []
            self._workers = [worker for worker in self._workers if worker.alive]
            least = min(self._workers, key=lambda worker: worker.assigned, default=None)
            if least is None or (least.assigned and len(self._workers) < self._size):
                least = CallWorker(
                    self._hello, self._limits, self._environment, self._name, self._printed
                )
                self._workers.append(least)
            least.assigned += 1
            return least

    def release(self, worker: CallWorker) -> None:
        """Take back what `assign` gave."""
        with self._lock:
            worker.assigned -= 1

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the supervisors of the workers that live."""
        with self._lock:
            return [worker.process_id for worker in self._workers if worker.alive]

    def close(self) -> None:
        """Kill all workers."""
        with self._lock:
            workers, self._workers = self._workers, []
        if self._owner == os.getpid():
            for worker in workers:
                worker.close()


def _set(future: "Future[bytes]", value: bytes) -> None:
    with suppress(Exception):  # its caller may have been cancelled
        future.set_result(value)


def _fail(future: "Future[bytes]", error: BaseException) -> None:
    with suppress(Exception):  # as above
        future.set_exception(error)


_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has no thread of its parent


def _pipes_loop() -> asyncio.AbstractEventLoop:
    """The event loop that serves the pipes of this process, started at its first use."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="isolated-pipes", daemon=True).start()
        return loop


@atexit.register
def _stop() -> None:
    loop = _loops.get(os.getpid())
    if loop is not None:
        loop.call_soon_threadsafe(loop.stop)
