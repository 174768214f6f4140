"""Workers for untrusted input that are killed where they exceed a limit, and small pools of them.

A worker is a `process.WorkerProcess` whose limits hold for each item: CPU time and memory are
limited by the kernel in the worker itself (`child`), the wall clock and the size of an answer here.
Leaves out what workers do (`templates`, `grammars`).
"""

import atexit
import json
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from marin_rl.errors import InputError
from marin_rl.isolated.child import MEMORY_EXIT_STATUS, decoded, encoded
from marin_rl.process import LineTooLong, PrintedText, WorkerProcess, clean_environment

STARTUP_TIMEOUT_S = 120.0
EXIT_PATIENCE_S = 1.0


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
            usable = False
            try:
                yield worker
                usable = True
            finally:
                if usable:
                    with self._lock:
                        self._idle.append(worker)
                else:
                    worker.close()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._places = threading.Semaphore(self._size)
        self._idle: list[Worker] = []


class Worker:
    """One worker process, started again whenever it had to be ended. One caller at a time."""

    def __init__(self, module: str, limits: WorkerLimits) -> None:
        self._module, self._limits = module, limits
        self._printed = PrintedText(module)
        self._start()

    @property
    def process_id(self) -> int:
        """Process id of the supervisor of the process that works at the moment."""
        return self._process.process_id

    def ask(self, common: bytes, items: Sequence[bytes]) -> list[bytes | WorkerFault]:
        """Return answers to the first items: to all of them, or up to the first fault.

        After a fault the worker is a new one.
        """
        if not self._process.is_running:  # something else ended it while it was idle
            self._restart()
        self._wait_until_ready()
        answers: list[bytes | WorkerFault] = []
        try:
            self._process.send(encoded([common, *items]), self._limits.wall_s)
            while len(answers) < len(items):
                answers.append(self._receive())
        except TimeoutError:
            answers.append(WorkerFault("wall", f"over {self._limits.wall_s:g} seconds"))
            self._restart()
        except LineTooLong:
            message = f"an answer over {self._limits.answer_bytes} bytes"
            answers.append(WorkerFault("answer", message))
            self._restart()
        except (EOFError, BrokenPipeError):
            answers.append(self._fault_of_exit())
            self._restart()
        return answers

    def close(self) -> None:
        """Kill the process with all that descends from it."""
        self._process.end()

    def _start(self) -> None:
        self._ready = False
        self._process = WorkerProcess(
            "marin_rl.isolated.child:main", environment=_environment(), printed=self._printed
        )
        limits = {"cpu_s": self._limits.cpu_s, "memory_bytes": self._limits.memory_bytes}
        hello = json.dumps({"module": self._module, **limits}).encode()
        # A process that has ended already is reported once something waits until it is ready.
        with suppress(BrokenPipeError):
            self._process.send(hello, STARTUP_TIMEOUT_S)

    def _restart(self) -> None:
        self._process.end()
        self._start()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._process.receive(STARTUP_TIMEOUT_S, self._limits.answer_bytes)
        except (TimeoutError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            why = f"was not ready in {STARTUP_TIMEOUT_S:g} s" if late else "ended at its start"
            raise InputError(
                f"a process for {self._module} {why}: its standard error says more; expected that "
                "Python processes can be started here"
            ) from None
        self._ready = True

    def _receive(self) -> bytes:
        """Return the next answer. Raises TimeoutError, EOFError, LineTooLong."""
        bytes_max = -(-self._limits.answer_bytes // 3) * 4  # base64 writes 4 bytes for 3
        (answer,) = decoded(self._process.receive(self._limits.wall_s, bytes_max))
        return answer

    def _fault_of_exit(self) -> WorkerFault:
        how = self._process.end(patience_s=EXIT_PATIENCE_S)
        code = self._process.exit_code
        if code == -signal.SIGPROF:
            return WorkerFault("cpu", f"over {self._limits.cpu_s:g} seconds of CPU time")
        if code == MEMORY_EXIT_STATUS:
            return WorkerFault("memory", f"over {self._limits.memory_bytes >> 20} MiB of memory")
        return WorkerFault("crash", f"the process ended with {how}")


def _environment() -> dict[str, str]:
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
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()
