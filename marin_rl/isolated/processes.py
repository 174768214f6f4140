"""The parent's end of a worker process: start it, send and receive lines, kill it.

What a worker prints is forwarded to standard error within a budget. Leaves out what the lines mean
(`worker`) and what happens in the child (`supervisor`). This is hygiene, not a sandbox: a worker
has the user's rights.
"""

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping

EXIT_TIMEOUT_S = 10.0  # for a supervisor to kill what there is; it takes milliseconds
POLL_S = 0.005
PRINTED_BYTES_MAX = 64 * 1024  # at once, and then
PRINTED_BYTES_PER_S = 256.0  # at most 22 MB a day for each worker
_READ_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20

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

    The process starts at once, with `environment` and nothing else of this process's. Raises
    OSError where no process can be started.
    """

    def __init__(self, environment: Mapping[str, str], printed: PrintedText) -> None:
        self._buffer = bytearray()
        self._printed = printed
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as theirs:
            self._answers, answers = os.pipe()
            on_failure.callback(os.close, self._answers)
            theirs.callback(os.close, answers)
            lifeline, self._lifeline = os.pipe()
            on_failure.callback(os.close, self._lifeline)
            theirs.callback(os.close, lifeline)
            numbers = (answers, lifeline, os.getpid())
            # `-c` rather than multiprocessing: spawn would import this program's main module, and
            # with it JAX; a fork would copy its threads' locks.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # or a types.py in the current folder would be taken for Python's
                    "-c",
                    "from marin_rl.isolated.supervisor import supervise; supervise()",
                    *map(str, numbers),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
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

    @property
    def pipes(self) -> tuple[int, int, int]:
        """Descriptors for event loops: requests to write, answers and printed text to read."""
        return self._questions.fileno(), self._answers, self._output.fileno()

    def write(self, data: memoryview) -> int:
        """Write what the pipe takes now, and return how much. Raises BrokenPipeError."""
        try:
            return os.write(self._questions.fileno(), data)
        except BlockingIOError:
            return 0

    def take_lines(self, bytes_max: int) -> list[bytes]:
        """Lines that one read of a readable pipe completes, without their newlines.

        Raises EOFError when the worker has ended, LineTooLong.
        """
        data = os.read(self._answers, _CHUNK_BYTES)
        if not data:
            raise EOFError
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n") if b"\n" in data else [b""]
        if b"\n" in data:
            self._buffer = bytearray(rest)
        if max(map(len, [*lines, self._buffer])) > bytes_max:
            raise LineTooLong(f"expected a line of at most {bytes_max:,} bytes, found a longer one")
        return lines

    def forward_output(self) -> bool:
        """Forward what is printed by now to standard error; return False at the pipe's end."""
        for _ in range(16):  # a flood must not keep the caller here
            try:
                data = os.read(self._output.fileno(), _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._printed.forward(data)
        return True

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
            self.forward_output()
            for pipe in (self._questions, self._output):
                with contextlib.suppress(OSError):
                    pipe.close()
            os.close(self._answers)
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def leave(self) -> None:
        """Close a fork's copies of the pipes. The process is its parent's, and runs on."""
        self._open = False
        for descriptor in (self._lifeline, self._answers):
            os.close(descriptor)
        for pipe in (self._questions, self._output):
            pipe.close()
        self._process.poll()  # no child of this process: counts as ended

    def _await_exit(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, options) is None:
            self.forward_output()
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
            if self._output.fileno() in ready and not self.forward_output():
                poll.unregister(self._output)
            if descriptor in ready:
                return
        raise TimeoutError
