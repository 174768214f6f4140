"""Processes that work on untrusted input and are killed where they exceed a limit.

Owns a worker's life (start, deadline, kill, restart), the pipe to it, and a small pool of workers.
A worker is a fresh interpreter in a session of its own, with a clean environment: no secret of this
process is in it. CPU time and memory are limited by the kernel in the worker itself (`child`); the
wall clock is watched here. Leaves out what workers do (`templates`, `grammars`).
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from marin_rl.errors import InputError
from marin_rl.isolated.child import LENGTH, MEMORY_EXIT_STATUS, joined

STARTUP_TIMEOUT_S = 120.0
_PIECE_BYTES = 1 << 18
# Where the interpreter finds its libraries, and which time zone it is in; nothing else is passed.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_CTYPE")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of one item: CPU time, time by the wall clock, memory, and bytes of its answer.

    `wall_s` is far above `cpu_s`: a worker on a busy machine may wait for its turn.
    """

    cpu_s: float | int
    wall_s: float | int
    memory_bytes: int
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """An item that its worker did not survive, and the limit that it exceeded."""

    limit: Literal["cpu", "wall", "memory", "answer", "crash"]
    message: str


class WorkerPool:
    """Up to `size` workers that run one module. Thread safe.

    Workers are started when they are first needed, or by `start`, and kept. A killed one is
    replaced at once, without waiting until its successor is ready. A forked child process starts
    its own.
    """

    def __init__(self, module: str, limits: WorkerLimits, size: int) -> None:
        self._module, self._limits, self._size = module, limits, size
        self._lock = threading.Lock()
        self._reset()
        _pools.add(self)

    def start(self) -> None:
        """Start a first worker, without waiting for it."""
        with self._worker():
            pass

    def ask(self, common: bytes, items: Sequence[bytes]) -> list[bytes | WorkerFault]:
        """Return answers to the items in order, to all of them or up to the first fault.

        `common` is sent once for all of them. Waits where all workers are busy. Raises InputError
        where no worker can be started.
        """
        with self._worker() as worker:
            return worker.ask(common, items)

    def close(self) -> None:
        """End the workers that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    @contextmanager
    def _worker(self) -> Iterator["Worker"]:
        with self._lock:
            if self._owner != os.getpid():
                self._reset()
            places = self._places
        with places:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or Worker(self._module, self._limits)
            try:
                yield worker
            except BaseException:
                worker.close()
                raise
            with self._lock:
                self._idle.append(worker)

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._places = threading.Semaphore(self._size)
        self._idle: list[Worker] = []


class Worker:
    """One worker process and the pipes to it. One caller at a time.

    The process starts at once. It ends when this process does: an idle one reads the end of its
    input, a busy one reaches its limit of CPU time.
    """

    def __init__(self, module: str, limits: WorkerLimits) -> None:
        self._module, self._limits = module, limits
        self._start()

    @property
    def process_id(self) -> int:
        """Id of the process that works at the moment."""
        return self._process.pid

    def ask(self, common: bytes, items: Sequence[bytes]) -> list[bytes | WorkerFault]:
        """Return answers to the first items: to all of them, or up to the first fault.

        After a fault the worker is a fresh one.
        """
        if self._process.poll() is not None:  # something else ended it while it was idle
            self._restart()
        self._wait_until_ready()
        answers: list[bytes | WorkerFault] = []
        try:
            self._send(joined([common, *items]))
            while len(answers) < len(items):
                answers.append(self._receive(self._limits.wall_s))
        except TimeoutError:
            answers.append(WorkerFault("wall", f"over {self._limits.wall_s:g} seconds"))
            self._restart()
        except _AnswerTooLong as error:
            answers.append(WorkerFault("answer", str(error)))
            self._restart()
        except (EOFError, BrokenPipeError):
            answers.append(self._fault_of_exit())
            self._restart()
        return answers

    def close(self) -> None:
        """Kill the process and all of its session."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _start(self) -> None:
        self._ready = False
        self._buffer = bytearray()
        arguments = f"{self._module!r}, {self._limits.cpu_s!r}, {self._limits.memory_bytes!r}"
        # `-c` rather than multiprocessing: spawn would import this program's main module, and with
        # it JAX; a fork would copy its threads' locks.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from marin_rl.isolated.child import main; main({arguments})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._writing = self._process.stdin.fileno()
        self._reading = self._process.stdout.fileno()
        os.set_blocking(self._writing, False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._reading, select.POLLIN)
        self._writable.register(self._writing, select.POLLOUT)

    def _restart(self) -> None:
        self.close()
        self._start()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._receive(STARTUP_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            why = f"was not ready in {STARTUP_TIMEOUT_S:g} s" if late else "ended at its start"
            raise InputError(
                f"a process for {self._module} {why}: its standard error says more; expected that "
                f"{sys.executable} can be started here"
            ) from None
        self._ready = True

    def _send(self, message: bytes) -> None:
        """Write a message. Raises TimeoutError, BrokenPipeError."""
        rest = memoryview(LENGTH.pack(len(message)) + message)
        deadline = time.monotonic() + self._limits.wall_s
        while rest:
            if not self._writable.poll(_milliseconds_until(deadline)):
                raise TimeoutError
            rest = rest[os.write(self._writing, rest[:_PIECE_BYTES]) :]

    def _receive(self, timeout_s: float | int) -> bytes:
        """Read the next answer. Raises TimeoutError, EOFError, _AnswerTooLong."""
        deadline = time.monotonic() + timeout_s
        self._fill(LENGTH.size, deadline)
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self._limits.answer_bytes:
            raise _AnswerTooLong(f"an answer over {self._limits.answer_bytes} bytes")
        end = LENGTH.size + length
        self._fill(end, deadline)
        answer = bytes(memoryview(self._buffer)[LENGTH.size : end])
        del self._buffer[:end]
        return answer

    def _fill(self, length: int, deadline: float) -> None:
        """Read until the buffer has `length` bytes."""
        while len(self._buffer) < length:
            if not self._readable.poll(_milliseconds_until(deadline)):
                raise TimeoutError
            data = os.read(self._reading, _PIECE_BYTES)
            if not data:
                raise EOFError
            self._buffer += data

    def _fault_of_exit(self) -> WorkerFault:
        try:
            code = self._process.wait(self._limits.wall_s)
        except subprocess.TimeoutExpired:
            return WorkerFault("crash", "the process closed its output")
        if code == -signal.SIGPROF:
            return WorkerFault("cpu", f"over {self._limits.cpu_s:g} seconds of CPU time")
        if code == MEMORY_EXIT_STATUS:
            return WorkerFault("memory", f"over {self._limits.memory_bytes >> 20} MiB of memory")
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return WorkerFault("crash", f"the process ended with {how}")


class _AnswerTooLong(Exception):
    pass


def _milliseconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1000


def _environment() -> dict[str, str]:
    """Return the environment of a worker: how to find this package, and no secret."""
    here = str(Path(__file__).resolve().parents[2])
    # not the working directory: a module that lies there is not this program's
    paths = dict.fromkeys([here, *(path for path in sys.path if Path(path).is_absolute())])
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()
