"""Pools of workers for code that may hang, crash, forge, or fill memory; each item has limits.

CPU time and memory are limited by the kernel in the worker itself (`worker`), the wall clock and
the size of an answer here. Leaves out what workers do (`templates`, `grammars`,
`environments.worker`).
"""

import atexit
import json
import os
import secrets
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from marin_rl.errors import InputError
from marin_rl.isolated.lines import (
    ANSWERED_KEPT,
    MEMORY_EXIT_STATUS,
    UNFIT,
    answer_number,
    decoded,
    encoded,
)
from marin_rl.isolated.processes import LineTooLong, PrintedText, WorkerProcess, clean_environment

STARTUP_TIMEOUT_S = 120.0
SEND_TIMEOUT_S = 60.0  # for a worker to take in a message, which it does at once
EXIT_PATIENCE_S = 5.0  # between the end of a worker's pipe and its exit status
_NUMBER_BYTES_MAX = 64  # of a line, in addition to the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of one item: CPU time, time by the wall clock, memory, and bytes of its answer.

    `wall_s` is far above `cpu_s`: a worker on a busy machine may wait for its turn. Memory is in
    addition to what the worker has when its work begins. A `sealed` worker may write no file and
    start no process.
    """

    cpu_s: float | int | None = None
    wall_s: float | int
    memory_bytes: int
    answer_bytes: int
    sealed: bool = True

    def hello(self, module: str, settings: Mapping[str, Any] | None, **more: Any) -> bytes:
        """First message of a worker that runs a module within these limits."""
        limits = asdict(self) | {"cpu_s": self.cpu_s or 0}  # 0 sets no timer
        return json.dumps({"module": module, "settings": settings, **limits, **more}).encode()


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """An item that its worker did not survive, and the limit that it exceeded."""

    limit: Literal["cpu", "wall", "memory", "answer", "crash"]
    message: str


class _SecondAnswer(Exception):
    """A line of an item that is answered already: a child that it left behind goes on."""


class Worker:
    """A worker process that is started again whenever it had to be ended. One caller at a time.

    The process starts at once, without waiting until it is ready. `hello` is its first message.
    """

    def __init__(
        self, hello: bytes, limits: WorkerLimits, environment: Mapping[str, str], name: str
    ) -> None:
        self._hello, self._limits, self._environment = hello, limits, environment
        self._name, self._printed = name, PrintedText(name)
        self._start()

    @property
    def process_id(self) -> int:
        """Process id of the supervisor of the process that works at the moment."""
        return self._process.process_id

    @property
    def is_ready(self) -> bool:
        """True once the process has begun its work."""
        return self._ready

    def ask(
        self, common: bytes, items: Sequence[bytes], wall_s: float | None = None
    ) -> list[bytes | WorkerFault]:
        """Return answers to the first items: to all of them, or up to the first fault.

        `wall_s` is for these items in place of the limit. After a fault the worker is a new one.
        Raises InputError where none can be started, or the work cannot begin.
        """
        if not self._process.is_running:  # something else ended it while it was idle
            self._restart()
        self._wait_until_ready()
        answers: list[bytes | WorkerFault] = []
        limit_s = self._limits.wall_s if wall_s is None else wall_s
        number = secrets.token_hex(16)
        try:
            self._process.send(encoded(number, [common, *items]), SEND_TIMEOUT_S)
            while len(answers) < len(items):
                (answer,) = self._receive(number, len(answers), limit_s)
                self._answered.append(answer_number(number, len(answers)))
                answers.append(answer)
        except TimeoutError:
            answers.append(WorkerFault("wall", f"over {limit_s:g} seconds"))
        except (EOFError, BrokenPipeError):
            answers.append(self._fault_of_exit())
        except ValueError as error:
            answers.append(WorkerFault("answer", str(error)))
        except _SecondAnswer:
            # The item that is asked for has no part in it. A new process has answered nothing yet,
            # so it answers at least one of the rest.
            self._restart()
            return [*answers, *self.ask(common, items[len(answers) :], wall_s)]
        else:
            return answers
        self._restart()
        return answers

    def close(self) -> None:
        """Kill the process with all that descends from it."""
        self._process.end()

    def leave(self) -> None:
        """Leave the process to the parent of this fork."""
        self._process.leave()

    def _start(self) -> None:
        self._ready = False
        self._answered: deque[str] = deque(maxlen=ANSWERED_KEPT)
        self._process = WorkerProcess(self._environment, self._printed)
        self._first = secrets.token_hex(16)
        # A process that has ended already is reported once something waits until it is ready.
        with suppress(BrokenPipeError):
            self._process.send(encoded(self._first, [self._hello]), STARTUP_TIMEOUT_S)

    def _restart(self) -> None:
        self._process.end()
        self._start()

    def _wait_until_ready(self) -> None:
        """Wait until a new process has begun its work. Raises InputError: close the worker then."""
        if self._ready:
            return
        try:
            verdict, *message = self._receive(self._first, 0, STARTUP_TIMEOUT_S)
        except TimeoutError:
            why = f"was not ready in {STARTUP_TIMEOUT_S:g} s"
        except EOFError:
            why = f"ended at its start ({self._process.end(patience_s=EXIT_PATIENCE_S)})"
        except ValueError as error:
            raise InputError(
                f"the process for {self._name} wrote to its own pipe at its start: expected that "
                f"it is ready, found {error}"
            ) from None
        else:
            if verdict == UNFIT:
                raise InputError(message[0].decode())
            self._ready = True
            return
        raise InputError(
            f"the process for {self._name} {why}: its standard error says more; expected that "
            "Python processes can be started here"
        )

    def _receive(self, number: str, index: int, timeout_s: float | int) -> list[bytes]:
        """Return the parts of the next answer.

        Raises TimeoutError, EOFError, _SecondAnswer, ValueError.
        """
        bytes_max = -(-self._limits.answer_bytes // 3) * 4  # base64 writes 4 bytes for 3
        try:
            line = self._process.receive(timeout_s, bytes_max + _NUMBER_BYTES_MAX)
        except LineTooLong:
            raise ValueError(f"an answer over {self._limits.answer_bytes} bytes") from None
        with suppress(ValueError):
            found, parts = decoded(line)
            if found == answer_number(number, index):
                return parts
            if found in self._answered:
                raise _SecondAnswer
        raise ValueError(f"a line without this message's number, {line[:40]!r}")

    def _fault_of_exit(self) -> WorkerFault:
        how = self._process.end(patience_s=EXIT_PATIENCE_S)
        code = self._process.exit_code
        if code == -signal.SIGPROF:
            return WorkerFault("cpu", f"over {self._limits.cpu_s:g} seconds of CPU time")
        if code == MEMORY_EXIT_STATUS:
            return WorkerFault("memory", f"over {self._limits.memory_bytes >> 20} MiB of memory")
        return WorkerFault("crash", how)


class WorkerPool:
    """Up to `size` workers that run one module. Thread safe.

    The module's `begin` gets `settings`; `environment` is a worker's, by default one without
    secrets and with modules from absolute places alone; `name` is for people. Workers are started
    when they are first needed, or by `start`, and kept. A killed one is replaced at once, without
    waiting until its successor is ready. A forked child process starts its own.
    """

    def __init__(
        self,
        module: str,
        limits: WorkerLimits,
        size: int,
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        self._hello, self._limits, self._size = limits.hello(module, settings), limits, size
        self._environment = environment
        self._name = name or module
        self._lock = threading.Lock()
        self._reset()
        _pools.add(self)

    def start(self, workers: int = 1) -> None:
        """Start the first workers, without waiting for them."""
        with ExitStack() as stack:
            for _ in range(workers):
                stack.enter_context(self._worker())

    def ask(
        self, common: bytes, items: Sequence[bytes], wall_s: float | None = None
    ) -> list[bytes | WorkerFault]:
        """Return answers to the items in order, to all of them or up to the first fault.

        `common` is sent once for all of them, and `wall_s` replaces the limit of each. Waits where
        all workers are busy. Raises InputError where no worker can be started.
        """
        with self._worker() as worker:
            return worker.ask(common, items, wall_s)

    def close(self) -> None:
        """End the workers that are idle, in a fork none: they are its parent's."""
        with self._lock:
            self._leave_parents()
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        with self._lock:
            self._leave_parents()
            places = self._places
        with places:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or self._new_worker()
            usable = False
            try:
                yield worker
                usable = True
            finally:
                if usable:
                    with self._lock:
                        # One that was just started again is taken last.
                        self._idle.insert(len(self._idle) if worker.is_ready else 0, worker)
                else:
                    worker.close()

    def _new_worker(self) -> Worker:
        environment = _sealed_environment() if self._environment is None else self._environment
        return Worker(self._hello, self._limits, environment, self._name)

    def _leave_parents(self) -> None:
        """Leave workers that a parent of this fork has started to it."""
        if self._owner != os.getpid():
            for worker in self._idle:
                worker.leave()
            self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._places = threading.Semaphore(self._size)
        self._idle: list[Worker] = []


def _sealed_environment() -> dict[str, str]:
    """Environment of a worker: no secret, and modules from absolute places alone.

    A module in the working directory is not this program's.
    """
    clean = clean_environment()
    here = str(Path(__file__).resolve().parents[2])
    paths = [path for path in clean["PYTHONPATH"].split(os.pathsep) if Path(path).is_absolute()]
    search = os.pathsep.join(dict.fromkeys([here, *paths]))
    return clean | {"PYTHONPATH": search, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


@atexit.register
def close_pools() -> None:
    """End the idle workers of all pools; a pool that is used again starts others."""
    for pool in list(_pools):
        pool.close()
