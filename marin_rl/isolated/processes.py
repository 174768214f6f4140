"""Workers for untrusted input that are killed where they exceed a limit, and small pools of them.

`KeptWorker` is a `process.WorkerProcess` that is started again after a fault; rewards are scored by
one too (`environments.scoring`). A `Worker`'s limits hold for each item: CPU time and memory are
limited by the kernel in the worker itself (`main`), the wall clock and the size of an answer here.
Leaves out what workers do (`templates`, `grammars`).
"""

import atexit
import base64
import importlib
import json
import os
import resource
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from marin_rl.errors import InputError
from marin_rl.worker_process import (
    Channel,
    LineTooLong,
    PrintedText,
    WorkerProcess,
    clean_environment,
)

STARTUP_TIMEOUT_S = 120.0
EXIT_PATIENCE_S = 5.0  # between the end of a worker's pipe and its exit status
MEMORY_EXIT_STATUS = 86
_FILES_MAX = 32


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


class KeptWorker:
    """A worker process that is started again whenever it had to be ended. One caller at a time.

    `target` and the options are those of `WorkerProcess`, `name` is for people. The process starts
    at once; its first message is `hello()`, and its first line says that it is ready.
    """

    def __init__(
        self,
        target: str,
        name: str,
        *,
        environment: Mapping[str, str],
        memory_bytes_max: int | None = None,
    ) -> None:
        self._name = name
        self._new_process = partial(
            WorkerProcess,
            target,
            environment=environment,
            memory_bytes_max=memory_bytes_max,
            printed=PrintedText(name),
        )
        self._start()

    @property
    def process_id(self) -> int:
        """Process id of the supervisor of the process that works at the moment."""
        return self._process.process_id

    def hello(self) -> bytes:
        """Return the first message of a new process."""
        raise NotImplementedError

    def close(self) -> None:
        """Kill the process with all that descends from it."""
        self._process.end()

    def restart(self) -> None:
        """Kill the process, and start another without waiting for it."""
        self._process.end()
        self._start()

    def _start(self) -> None:
        self._ready = False
        self._process = self._new_process()
        # A process that has ended already is reported once something waits until it is ready.
        with suppress(BrokenPipeError):
            self._process.send(self.hello(), STARTUP_TIMEOUT_S)

    def first_line(self, bytes_max: int) -> bytes | None:
        """Wait for a new process's first line; None if it was read before. Raises InputError."""
        if self._ready:
            return None
        try:
            line = self._process.receive(STARTUP_TIMEOUT_S, bytes_max)
        except TimeoutError:
            why = f"was not ready in {STARTUP_TIMEOUT_S:g} s"
        except EOFError:
            why = f"ended at its start ({self._process.end(patience_s=EXIT_PATIENCE_S)})"
            self._start()  # so that a later call does not read a closed pipe
        else:
            self._ready = True
            return line
        raise InputError(
            f"the process for {self._name} {why}: its standard error says more; expected that "
            "Python processes can be started here"
        )


class Worker(KeptWorker):
    """Worker process of a pool."""

    def __init__(self, module: str, limits: WorkerLimits) -> None:
        self._module, self._limits = module, limits
        super().__init__("marin_rl.isolated.processes:main", module, environment=_environment())

    def hello(self) -> bytes:
        """Name the module of the work, and the limits that the process sets itself."""
        limits = {"cpu_s": self._limits.cpu_s, "memory_bytes": self._limits.memory_bytes}
        return json.dumps({"module": self._module, **limits}).encode()

    def ask(self, common: bytes, items: Sequence[bytes]) -> list[bytes | WorkerFault]:
        """Return answers to the first items: to all of them, or up to the first fault.

        After a fault the worker is a new one.
        """
        if not self._process.is_running:  # something else ended it while it was idle
            self.restart()
        self.first_line(self._limits.answer_bytes)
        answers: list[bytes | WorkerFault] = []
        try:
            self._process.send(_encoded([common, *items]), self._limits.wall_s)
            while len(answers) < len(items):
                answers.append(self._receive())
        except TimeoutError:
            answers.append(WorkerFault("wall", f"over {self._limits.wall_s:g} seconds"))
        except LineTooLong:
            message = f"an answer over {self._limits.answer_bytes} bytes"
            answers.append(WorkerFault("answer", message))
        except (EOFError, BrokenPipeError):
            answers.append(self._fault_of_exit())
        else:
            return answers
        self.restart()
        return answers

    def _receive(self) -> bytes:
        """Return the next answer. Raises TimeoutError, EOFError, LineTooLong."""
        bytes_max = -(-self._limits.answer_bytes // 3) * 4  # base64 writes 4 bytes for 3
        (answer,) = _decoded(self._process.receive(self._limits.wall_s, bytes_max))
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


def main(channel: Channel) -> None:
    """Answer messages until the parent closes its end; runs in the worker.

    The first message names the module of the work, which has a function `answer(common, item)`,
    and its limits. Memory, files and processes are limited once; CPU time is limited for each item
    by an interval timer of the kernel, which ends the process even while a C function holds the
    interpreter lock.
    """
    lines = channel.lines()
    hello = json.loads(next(lines))
    answer = importlib.import_module(hello["module"]).answer
    _limit(hello["memory_bytes"])
    channel.send(b"ready")
    try:
        for line in lines:
            common, *items = _decoded(line)
            for item in items:
                signal.setitimer(signal.ITIMER_PROF, hello["cpu_s"])  # SIGPROF ends the process
                data = answer(common, item)
                signal.setitimer(signal.ITIMER_PROF, 0)
                channel.send(_encoded([data]))
    except MemoryError:
        os._exit(MEMORY_EXIT_STATUS)  # nothing that needs memory may run any more


def _encoded(parts: Sequence[bytes]) -> bytes:
    """Return one line of several parts of any bytes."""
    return b" ".join(base64.b64encode(part) for part in parts)


def _decoded(line: bytes) -> list[bytes]:
    """Return the parts of a line; an empty part is kept."""
    return [base64.b64decode(part) for part in line.rstrip(b"\n").split(b" ")]


def _limit(memory_bytes: int) -> None:
    limits = [
        (resource.RLIMIT_AS, _address_space_bytes() + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _FILES_MAX),
        (resource.RLIMIT_NPROC, 0),
    ]
    for name, most in limits:
        with suppress(OSError, ValueError):  # a lower limit of the user's stays
            resource.setrlimit(name, (most, most))


def _address_space_bytes() -> int:
    """Return the address space in use, 0 where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
