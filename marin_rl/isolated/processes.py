"""A worker process as its parent has it: its environment, its calls, what it prints, its end.

A thread with an event loop serves the wires (sockets) of all workers, so that one that hangs,
floods or dies holds up only callers that wait for it. What a worker prints is forwarded to standard
error within a budget. Leaves out the choice of a worker (`pool`) and what happens in the child
(`supervisor`, `worker`). This is hygiene, not a sandbox: a worker has the user's rights.
"""

import asyncio
import codecs
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from marin_rl.errors import InputError
from marin_rl.isolated.supervisor import LINUX, supervised
from marin_rl.isolated.worker import MEMORY_EXIT_STATUS, Lease
from marin_rl.isolated.worker import __file__ as worker_file

STARTUP_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 10.0  # for a supervisor to kill what there is; it takes milliseconds
PRINTED_BYTES_MAX = 64 * 1024  # at once, and then
PRINTED_BYTES_PER_S = 256.0  # at most 22 MB a day for each worker
_PRINTED_READ_BYTES = 1 << 16
_LAST_PRINTS_S = 1.0  # for text of a process that has ended; one it left may hold the pipe open
_STARTING_POLL_S = 0.25  # while the limit of the worker's calls is not known
_ENVELOPE_BYTES_MAX = 256  # of a line, in addition to the answer

# What a worker inherits of the environment: nothing that is likely to be a secret.
INHERITED = frozenset(
    {
        "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONDONTWRITEBYTECODE",
        "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TEMP",
        "TERM", "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME",
    }
)  # fmt: skip
INHERITED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "GOMP_", "KMP_")


def clean_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Environment variables for a worker: an allow-list, plus those in `names`.

    Accelerators are hidden, and modules are searched where this process searches them.
    """
    wanted = INHERITED | set(names)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in wanted or name.startswith(INHERITED_PREFIXES)
    }
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        **inherited,
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
    }


def sealed_environment() -> dict[str, str]:
    """Environment of a worker: no secret, and modules from absolute places alone.

    A module in the working directory is not this program's.
    """
    clean = clean_environment()
    here = str(Path(__file__).resolve().parents[2])
    paths = [path for path in clean["PYTHONPATH"].split(os.pathsep) if Path(path).is_absolute()]
    search = os.pathsep.join(dict.fromkeys([here, *paths]))
    return clean | {"PYTHONPATH": search, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class PrintedText:
    """Forward what workers print to standard error, within a budget.

    The budget refills with time, so that a worker that is started again has no new one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._budget, self._refilled_at = float(PRINTED_BYTES_MAX), time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._muted = False

    def forward(self, data: bytes) -> None:
        """Write the part of `data` that the budget allows, without control characters."""
        now = time.monotonic()
        refill = (now - self._refilled_at) * PRINTED_BYTES_PER_S
        self._budget = min(self._budget + refill, PRINTED_BYTES_MAX)
        self._refilled_at = now
        allowed = data[: int(self._budget)]
        self._budget -= len(allowed)
        text = self._decoder.decode(allowed)
        shown = "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
        if len(allowed) < len(data) and not self._muted:
            shown += (
                f"\n[{self._name} prints more than {PRINTED_BYTES_MAX // 1024} KiB at once or "
                f"{PRINTED_BYTES_PER_S:g} bytes/s: the rest is dropped]\n"
            )
        self._muted = len(allowed) < len(data)
        if shown:
            with suppress(OSError, ValueError):  # standard error may be closed
                sys.stderr.write(shown)
                sys.stderr.flush()


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
        self._spec, self._limits, self._printed = spec, spec.limits, printed
        self.load = 0  # what a pool balances
        self.alive, self._closed = True, False
        self.ready: Future[Any] = Future()
        self._pending = {0: _Pending(self.ready, STARTUP_TIMEOUT_S)}
        self._numbers = itertools.count(1)
        if LINUX:
            shared = os.memfd_create("lease")
        else:
            with tempfile.TemporaryFile() as file:
                shared = os.dup(file.fileno())
        os.truncate(shared, Lease.BYTES)
        wire, theirs = socket.socketpair()
        try:
            self._lease = Lease(shared)
            self._lease.write(0, time.monotonic() + STARTUP_TIMEOUT_S, _STARTING_POLL_S)
            self._process = _started(spec, theirs, shared)
        except OSError:
            wire.close()
            raise
        finally:
            theirs.close()
            os.close(shared)
        self._loop = _wires_loop()
        self._reader, self._writer = _in_loop(self._greeted(wire), self._loop).result()
        self._served = _in_loop(self._serve(), self._loop)

    @property
    def process_id(self) -> int:
        """Process id of the supervisor, which is also the process group and session."""
        return self._process.pid

    def call(self, request: bytes) -> "Future[Any]":
        """Ask for the answer to a request in JSON.

        The future raises WorkerFault, and InputError where the work could not begin.
        """
        return self.call_all([request])[0]

    def call_all(
        self, requests: Sequence[bytes], limit_s: float | int | None = None
    ) -> "list[Future[Any]]":
        """Ask many; `limit_s` replaces the limit of the worker for each."""
        answers: list[Future[Any]] = [Future() for _ in requests]
        self._loop.call_soon_threadsafe(self._ask, requests, limit_s, answers)
        return answers

    def close(self) -> None:
        """Kill the process with all that descends from it."""
        self._closed = True
        self._process.terminate()
        wait([self._served], EXIT_TIMEOUT_S * 2)

    # what follows runs in the thread of the wires

    def _ask(
        self,
        requests: Sequence[bytes],
        limit_s: float | int | None,
        answers: "Sequence[Future[Any]]",
    ) -> None:
        if not self.alive:
            for answer in answers:
                _settle(answer, self._refusal("before the call"))
            return
        limit = b"null" if limit_s is None else b"%f" % limit_s
        for request, answer in zip(requests, answers, strict=True):
            assert b"\n" not in request, "a message is one line"
            number = next(self._numbers)
            self._pending[number] = _Pending(answer, limit_s or self._limits.wall_s)
            line = b'{"id":%d,"limit_s":%b,"request":%b}\n' % (number, limit, request)
            self._writer.write(line)

    def _refusal(self, how: object) -> BaseException:
        unfit = self.ready.exception() if self.ready.done() else None
        return unfit or WorkerFault("lost", f"its process ended ({how})")

    async def _greeted(
        self, wire: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the ends of a wire on which the first line is written."""
        limit = self._limits.answer_bytes + _ENVELOPE_BYTES_MAX
        reader, writer = await asyncio.open_connection(sock=wire, limit=limit)
        about = {"module": self._spec.module, "settings": self._spec.settings}
        writer.write(json.dumps(about | asdict(self._limits)).encode() + b"\n")
        return reader, writer

    async def _serve(self) -> None:
        """Read answers until all processes have ended, or the worker writes what is none."""
        printing = self._loop.create_task(self._forward_prints())
        with suppress(ValueError, LookupError, TypeError, ConnectionError):
            async for line in self._reader:
                self._receive(orjson.loads(line))
        self.alive = False
        # The kernel may take its time to end a process: never in the thread of the wires.
        code = await asyncio.to_thread(self._end)
        await asyncio.wait([printing], timeout=_LAST_PRINTS_S)
        printing.cancel()
        self._writer.close()
        self._fail_pending(code)

    async def _forward_prints(self) -> None:
        """Forward what the process prints to standard error."""
        reader = asyncio.StreamReader()
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            while data := await reader.read(_PRINTED_READ_BYTES):
                self._printed.forward(data)
        finally:
            transport.close()

    def _receive(self, record: Mapping[str, Any]) -> None:
        pending = self._pending.pop(record["id"], None)
        if pending is None:
            return
        if "answer" in record:
            result = record["answer"]
        elif "unfit" in record:
            result = InputError(record["unfit"])
        elif record["limit"] == "wall":
            result = WorkerFault("wall", f"over {pending.limit_s:g} seconds")
        else:
            most = f"an answer over {self._limits.answer_bytes} bytes"
            result = WorkerFault("answer", most)
        _settle(pending.answer, result)

    def _end(self) -> int:
        """Wait for the supervisor, which ends as the worker did; return its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def _fail_pending(self, code: int) -> None:
        """Fail all calls: the one that ended the process with its cause, the others as lost."""
        pending, self._pending = self._pending, {}
        number = self._lease.number
        if code == -signal.SIGALRM and number < 0:
            number = ~number  # its code blocked the event loop
        guilty = None if self._closed else pending.get(number)
        how = self._cause(code, guilty)
        if pending.pop(0, None) is not None:
            late = f"was not ready in {STARTUP_TIMEOUT_S:g} s"
            why = late if how.limit == "wall" else f"ended at its start ({how})"
            _settle(
                self.ready,
                InputError(
                    f"the process for {self._spec.title} {why}: its standard error says more; "
                    "expected that Python processes can be started here"
                ),
            )
        lost = self._refusal(how)
        for call in pending.values():
            _settle(call.answer, how if call is guilty else lost)

    def _cause(self, code: int, call: _Pending | None) -> WorkerFault:
        if code == -signal.SIGALRM:  # of the supervisor
            limit_s = self._limits.wall_s if call is None else call.limit_s
            return WorkerFault("wall", f"over {limit_s or 0:g} seconds")
        if code == -signal.SIGPROF:
            return WorkerFault("cpu", f"over {self._limits.cpu_s or 0:g} seconds of CPU time")
        if code == MEMORY_EXIT_STATUS:
            mebibytes = (self._limits.memory_bytes or 0) >> 20
            return WorkerFault("memory", f"over {mebibytes} MiB of memory")
        return WorkerFault("crash", f"signal {-code}" if code < 0 else f"exit status {code}")


def _started(spec: WorkerSpec, wire: socket.socket, lease: int) -> subprocess.Popen[bytes]:
    """Start a supervisor, which starts the worker at the other end of the wire."""
    environment = sealed_environment() if spec.environment is None else dict(spec.environment)
    if spec.interpreter is None:
        # Not multiprocessing: spawn would import this program's main module, and with it JAX; a
        # fork would copy its threads' locks. -P: or a types.py in the current folder would be taken
        # for Python's.
        work = "from marin_rl.isolated.worker import main; main()"
        command = [sys.executable, "-P", "-c", work, str(lease)]
    else:
        environment.pop("PYTHONPATH", None)  # our packages are not for that interpreter
        command = [spec.interpreter, "-I", worker_file, str(lease)]
    return subprocess.Popen(
        supervised(command, lease),
        stdin=wire.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(lease,),
        start_new_session=True,
        bufsize=0,
    )


def _settle(future: "Future[Any]", result: Any) -> None:
    """Set the result of a future, or its exception."""
    with suppress(InvalidStateError):  # its caller may have been cancelled
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


_in_loop = asyncio.run_coroutine_threadsafe
_loops_lock = threading.Lock()
# By process: a fork has no thread of its parent.
_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}


def _wires_loop() -> asyncio.AbstractEventLoop:
    """The event loop that serves the wires of this process, started at its first use."""
    with _loops_lock:
        if os.getpid() not in _loops:
            # epoll's registrations would be shared with forks
            loop = asyncio.SelectorEventLoop(selectors.PollSelector())
            thread = threading.Thread(target=loop.run_forever, name="isolated-wires", daemon=True)
            thread.start()
            _loops[os.getpid()] = loop, thread
        return _loops[os.getpid()][0]


def stop_loop() -> None:
    """End the thread of the wires; it starts again when it is used."""
    with _loops_lock:
        loop, thread = _loops.pop(os.getpid(), (None, None))
    if loop is not None and thread is not None:
        _in_loop(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
