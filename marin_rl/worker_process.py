"""Child processes for code that may hang, crash, flood its output or leave processes behind.

A worker is two processes: a supervisor, and its fork that runs the code. The supervisor runs no
code of others. It adopts whatever descends from the worker (Linux), also what began a session of
its own, and kills all of it when the worker ends, when the parent lets go, and when the parent
dies, by `kill -9` too. Messages are lines on two pipes that the worker's own children do not
inherit; what the worker prints is forwarded to standard error within a budget.

Leaves out what the lines mean. This is hygiene, not a sandbox: a worker has the user's rights.
"""

import codecs
import contextlib
import ctypes
import fcntl
import importlib
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

EXIT_TIMEOUT_S = 10.0  # for a supervisor to kill what there is; it takes milliseconds
KILL_TIMEOUT_S = 5.0  # for processes that the kernel does not let die at once
POLL_S = 0.005
PRINTED_BYTES_MAX = 64 * 1024  # at once, and then
PRINTED_BYTES_PER_S = 256.0  # at most 22 MB a day for each worker
DESCRIPTORS_MAX = 4096
_READ_BYTES = 1 << 16

# What a worker inherits of the environment: nothing that is likely to be a secret.
INHERITED = frozenset(
    {
        "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONDONTWRITEBYTECODE",
        "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TEMP",
        "TERM", "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME",
    }
)  # fmt: skip
INHERITED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "GOMP_", "KMP_")


class LineTooLong(ValueError):
    """A worker sent more bytes than a message may have."""


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
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                sys.stderr.write(shown)
                sys.stderr.flush()


class WorkerProcess:
    """A worker process and the pipes to it. Not thread safe: one caller at a time.

    `target` is "module:function", called in the worker with its `Channel`. The process starts at
    once, with `environment` (`clean_environment()` where that is None) and, where
    `memory_bytes_max` is given, that much memory for each of its processes. Raises OSError where
    no process can be started.
    """

    def __init__(
        self,
        target: str,
        *,
        environment: Mapping[str, str] | None = None,
        memory_bytes_max: int | None = None,
        printed: PrintedText | None = None,
    ) -> None:
        self._buffer = bytearray()
        self._printed = printed or PrintedText(target)
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as theirs:
            self._answers, answers = os.pipe()
            on_failure.callback(os.close, self._answers)
            theirs.callback(os.close, answers)
            lifeline, self._lifeline = os.pipe()
            on_failure.callback(os.close, self._lifeline)
            theirs.callback(os.close, lifeline)
            numbers = (answers, lifeline, os.getpid(), memory_bytes_max or 0)
            # `-c` rather than multiprocessing: spawn would import this program's main module, and
            # with it JAX; a fork would copy its threads' locks.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from marin_rl.worker_process import supervise; supervise()",
                    target,
                    *map(str, numbers),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=clean_environment() if environment is None else dict(environment),
                pass_fds=(answers, lifeline),
                start_new_session=True,
                bufsize=0,
            )
            on_failure.pop_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._questions.fileno(), False)
        os.set_blocking(self._output.fileno(), False)
        self._open = True

    @property
    def process_id(self) -> int:
        """Process id of the supervisor, which is also the process group and session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True while the supervisor runs, so the worker may still answer."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return self._open and os.waitid(os.P_PID, self._process.pid, options) is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the worker, minus the signal that ended it; None before `end`."""
        return self._process.returncode

    def send(self, line: bytes, timeout_s: float | int) -> None:
        """Send one line, without its newline. Raises TimeoutError, BrokenPipeError."""
        assert b"\n" not in line, "a message is one line"
        left = memoryview(line + b"\n")
        deadline = time.monotonic() + timeout_s
        descriptor = self._questions.fileno()
        while left:
            self._wait_for(descriptor, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(descriptor, left) :]

    def receive(self, timeout_s: float | int, bytes_max: int) -> bytes:
        """Return the next line, without its newline.

        Raises TimeoutError, EOFError when the worker has ended, LineTooLong.
        """
        deadline = time.monotonic() + timeout_s
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > bytes_max:
                break
            self._wait_for(self._answers, select.POLLIN, deadline)
            data = os.read(self._answers, _READ_BYTES)
            if not data:
                raise EOFError
            self._buffer += data
        if end < 0 or end > bytes_max:
            raise LineTooLong(f"expected a line of at most {bytes_max:,} bytes, found a longer one")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def end(self, patience_s: float = 0.0) -> str:
        """End the worker and its descendants; return how it ended.

        A worker has `patience_s` to end by itself, for one that has closed its end already.
        """
        if self._open:
            self._open = False
            self._await_exit(patience_s)
            os.close(self._lifeline)
            self._await_exit(EXIT_TIMEOUT_S)
            # The supervisor is not reaped yet, so its number is still the group's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._forward_output()
            for pipe in (self._questions, self._output):
                with contextlib.suppress(OSError):
                    pipe.close()
            os.close(self._answers)
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _await_exit(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, options) is None:
            self._forward_output()
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_S)

    def _wait_for(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until a pipe is ready, and forward what is printed meanwhile. Raises TimeoutError.

        The deadline holds for a pipe that is always ready, too.
        """
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(self._output, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(poll.poll(left_s * 1000))
            if self._output.fileno() in ready and not self._forward_output():
                poll.unregister(self._output)
            if descriptor in ready:
                return
        raise TimeoutError

    def _forward_output(self) -> bool:
        """Forward what is in the pipe now; return False at its end."""
        for _ in range(16):  # a flood must not keep the caller here
            try:
                data = os.read(self._output.fileno(), _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._printed.forward(data)
        return True


@dataclass(frozen=True, slots=True)
class Channel:
    """A worker's end of the conversation with its parent: lines in, lines out."""

    incoming: BinaryIO
    outgoing: BinaryIO

    def lines(self) -> Iterator[bytes]:
        """Yield lines until the parent closes its end."""
        while line := self.incoming.readline():
            yield line

    def send(self, line: bytes) -> None:
        """Send one line, without its newline."""
        left = memoryview(line + b"\n")
        while left:
            left = left[self.outgoing.write(left) :]


def supervise() -> None:
    """Run the worker of `sys.argv`, and end all its processes afterwards.

    Ends as the worker did; with 0 when the parent has let go or died.
    """
    target, *numbers = sys.argv[1:]
    answers, lifeline, parent, memory_bytes_max = map(int, numbers)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(lifeline)
        _end_with(supervisor)
        _work(target, answers, memory_bytes_max)
        return
    os.close(answers)
    _silence(0, 1, 2)
    status = _watch(worker, lifeline, parent)
    _kill_descendants(worker)
    if status is not None and os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(supervisor, ended_by)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status))


def _end_with(supervisor: int) -> None:
    """Have the kernel kill this process when its supervisor dies."""
    if not LINUX:
        os.setpgid(0, 0)  # so that the supervisor can kill this group and live
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _work(target: str, answers: int, memory_bytes_max: int) -> None:
    channel = Channel(os.fdopen(_hidden(0), "rb"), os.fdopen(_hidden(answers), "wb", buffering=0))
    _silence(0)
    os.close(answers)
    if memory_bytes_max:
        # Linux counts what a process can write to, not what libraries only reserve.
        kind = resource.RLIMIT_DATA if LINUX else resource.RLIMIT_AS
        hard = resource.getrlimit(kind)[1]
        limit = memory_bytes_max if hard < 0 else min(memory_bytes_max, hard)
        resource.setrlimit(kind, (limit, limit))
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(channel)


def _hidden(descriptor: int) -> int:
    """A copy of a descriptor that children do not inherit, with a number not easily hit upon."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    top = DESCRIPTORS_MAX if soft < 0 else min(soft, DESCRIPTORS_MAX)
    lowest = random.SystemRandom().randrange(top // 2, max(top - 8, top // 2 + 1))
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)


def _silence(*descriptors: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _watch(worker: int, lifeline: int, parent: int) -> int | None:
    """Return the worker's status when it ends, None when the parent lets go or dies."""
    wake, waking = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    if LINUX:
        # A fork of the parent may hold the lifeline too; this is about the parent alone.
        with contextlib.suppress(OSError):
            poll.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() != parent:
            return None
    while True:
        for process, status in _reaped():
            if process == worker:
                return status
        if any(descriptor != wake for descriptor, _ in poll.poll()):
            return None
        with contextlib.suppress(BlockingIOError):
            os.read(wake, _READ_BYTES)


def _reaped() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _kill_descendants(worker: int) -> None:
    """Kill everything that descends from this process, and what that starts meanwhile."""
    if not LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        return
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (alive := _descendants(os.getpid())) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        list(_reaped())
        time.sleep(POLL_S / 5)


def _descendants(ancestor: int) -> list[int]:
    """Process ids of what descends from a process and still runs, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            # "pid (name) state parent …", and a name may hold anything
            fields = (path / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(path.name))
    descendants: list[int] = []
    waiting = [ancestor]
    while waiting:
        born = children.get(waiting.pop(), [])
        descendants += born
        waiting += born
    return descendants
