"""The parent's end of a worker process: start it, read what it prints, kill it.

What a worker prints is forwarded to standard error within a budget. Leaves out its calls (`pool`)
and what happens in the child (`supervisor`). This is hygiene, not a sandbox: a worker has the
user's rights.
"""

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

EXIT_TIMEOUT_S = 10.0  # for a supervisor to kill what there is; it takes milliseconds
PRINTED_BYTES_MAX = 64 * 1024  # at once, and then
PRINTED_BYTES_PER_S = 256.0  # at most 22 MB a day for each worker
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
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                sys.stderr.write(shown)
                sys.stderr.flush()


class WorkerProcess:
    """A worker process and the pipes to it, none of which blocks. Not thread safe.

    The process starts at once, with `environment` and nothing else of this process's; the worker is
    `interpreter`, by default this one. Raises OSError where no process can be started.
    """

    def __init__(
        self, environment: Mapping[str, str], printed: PrintedText, interpreter: str | None = None
    ) -> None:
        self._printed = printed
        self.answers, theirs = os.pipe()
        try:
            # `-c` rather than multiprocessing: spawn would import this program's main module, and
            # with it JAX; a fork would copy its threads' locks.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # or a types.py in the current folder would be taken for Python's
                    "-c",
                    "from marin_rl.isolated.supervisor import supervise; supervise()",
                    *map(str, (theirs, os.getpid())),
                    *([interpreter] if interpreter else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(theirs,),
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            os.close(self.answers)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self.requests, self.answers, self.output):
            os.set_blocking(descriptor, False)

    @property
    def process_id(self) -> int:
        """Process id of the supervisor, which is also the process group and session."""
        return self._process.pid

    def forward_output(self) -> bool:
        """Forward what is printed by now to standard error; return False at the pipe's end."""
        for _ in range(16):  # a flood must not keep the caller here
            try:
                data = os.read(self.output, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._printed.forward(data)
        return True

    def terminate(self) -> None:
        """Ask for the end of the worker and its descendants, without waiting for it."""
        self._process.terminate()

    def end(self) -> int:
        """End the worker and its descendants; return the exit code of the supervisor."""
        self.terminate()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.forward_output()
        self._close()
        return code

    def leave(self) -> None:
        """Close a fork's copies of the pipes. The process is its parent's, and runs on."""
        self._close()
        self._process.poll()  # no child of this process: counts as ended

    def _close(self) -> None:
        os.close(self.answers)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
