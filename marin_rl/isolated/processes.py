"""A worker process as its parent has it: its environment, its calls, what it prints, its end.

All pipes of this process are served by one thread with an event loop of its own, so that a worker
that hangs, floods or dies holds up no caller but those that wait for it. What a worker prints is
forwarded to standard error within a budget. Leaves out the choice of a worker (`pool`) and what
happens in the child (`supervisor`). This is hygiene, not a sandbox: a worker has the user's rights.
"""

import asyncio
import codecs
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from marin_rl.errors import InputError
from marin_rl.isolated.supervisor import STARTUP_TIMEOUT_S
from marin_rl.isolated.worker import MEMORY_EXIT_STATUS

EXIT_TIMEOUT_S = 10.0  # for a supervisor to kill what there is; it takes milliseconds
PRINTED_BYTES_MAX = 64 * 1024  # at once, and then
PRINTED_BYTES_PER_S = 256.0  # at most 22 MB a day for each worker
_PRINTED_READ_BYTES = 1 << 16
_READ_BYTES = 1 << 20
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
    """Forward what workers print to standard error, within a budget; count what is dropped.

    The budget refills with time, so that a worker that is started again has no new one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._budget, self._refilled_at = float(PRINTED_BYTES_MAX), time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._muted = False
        self.dropped_bytes = 0

    def forward(self, data: bytes) -> None:
        """Write the part of `data` that the budget allows, without control characters."""
        now = time.monotonic()
        refill = (now - self._refilled_at) * PRINTED_BYTES_PER_S
        self._budget = min(self._budget + refill, PRINTED_BYTES_MAX)
        self._refilled_at = now
        allowed = data[: int(self._budget)]
        self._budget -= len(allowed)
        self.dropped_bytes += len(data) - len(allowed)
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
        self.alive = True
        self.ready: Future[Any] = Future()
        self._pending = {0: _Pending(self.ready, STARTUP_TIMEOUT_S)}
        self._numbers = itertools.count(1)
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._answers, theirs = os.pipe()
        try:
            self._process = _started(spec, theirs)
        except OSError:
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._requests, self._answers, self._output):
            os.set_blocking(descriptor, False)
        self._loop = _pipes_loop()
        self._loop.call_soon_threadsafe(self._begin)

    @property
    def process_id(self) -> int:
        """Process id of the supervisor, which is also the process group and session."""
        return self._process.pid

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
        """Close a fork's copies of the pipes. The process is its parent's, and runs on."""
        if self.alive:
            self._close_pipes()
            self._process.poll()  # no child of this process: counts as ended

    def _close_pipes(self) -> None:
        os.close(self._answers)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    # what follows runs in the thread of the pipes

    def _begin(self) -> None:
        self._loop.add_reader(self._answers, self._take)
        self._loop.add_reader(self._output, self._forward)
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
        requests, outgoing = self._requests, self._outgoing
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
        """Forward what is printed by now to standard error."""
        for _ in range(16):  # a flood must not keep the caller here
            try:
                data = os.read(self._output, _PRINTED_READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                return
            self._printed.forward(data)

    def _take(self) -> None:
        data = os.read(self._answers, _READ_BYTES)
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
        self._loop.remove_reader(self._answers)
        self._loop.remove_reader(self._output)
        self._loop.remove_writer(self._requests)
        # The kernel may take its time to end a process: never in the thread of the pipes.
        threading.Thread(
            target=self._end, args=(record, then), name="isolated-end", daemon=True
        ).start()

    def _end(self, record: Mapping[str, Any] | None, then: Callable[[], None] | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._forward()
        self._close_pipes()
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


def _started(spec: WorkerSpec, answers: int) -> subprocess.Popen[bytes]:
    """Start a supervisor, which starts the worker; `answers` is its end of that pipe."""
    environment = sealed_environment() if spec.environment is None else spec.environment
    # `-c` rather than multiprocessing: spawn would import this program's main module, and with it
    # JAX; a fork would copy its threads' locks. -P: or a types.py in the current folder would be
    # taken for Python's.
    supervise = "from marin_rl.isolated.supervisor import supervise; supervise()"
    arguments = [str(answers), str(os.getpid()), *([spec.interpreter] if spec.interpreter else [])]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", supervise, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        pass_fds=(answers,),
        start_new_session=True,
        bufsize=0,
    )


def _set(future: "Future[Any]", value: Any) -> None:
    with suppress(Exception):  # its caller may have been cancelled
        future.set_result(value)


def _fail(future: "Future[Any]", error: BaseException) -> None:
    with suppress(Exception):  # as above
        future.set_exception(error)


_loops_lock = threading.Lock()
# By process: a fork has no thread of its parent.
_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}


def _pipes_loop() -> asyncio.AbstractEventLoop:
    """The event loop that serves the pipes of this process, started at its first use."""
    with _loops_lock:
        if os.getpid() not in _loops:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="isolated-pipes", daemon=True)
            thread.start()
            _loops[os.getpid()] = loop, thread
        return _loops[os.getpid()][0]


def stop_loop() -> None:
    """End the thread of the pipes; it starts again when it is used."""
    with _loops_lock:
        loop, thread = _loops.pop(os.getpid(), (None, None))
    if loop is not None and thread is not None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
