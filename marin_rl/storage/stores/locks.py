"""The lock of a run: one process of a machine holds it, and its file says which.

The kernel's lock decides, and goes when its process goes. The text in the file is for people and
for readers, who cannot lock: a process id means something on its own machine alone.
"""

import fcntl
import os
import platform
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from marin_rl.errors import ObjectMissing, RunLocked
from marin_rl.storage.stores.local import explained, open_regular

SIGNATURE_BYTES_MAX = 1024
# As many digits as always fit in the C int that os.kill takes.
_PID = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Holder:
    """Process that signed a lock. `host` is None where older software, which wrote none, signed."""

    pid: int
    host: str | None = None

    @property
    def here(self) -> bool:
        return self.host in (None, platform.node())

    @property
    def alive(self) -> bool:
        """True if it runs; also for a process of another machine, which cannot be known."""
        if not self.here:
            return True
        try:
            # Signal 0 sends nothing: the kernel only says whether there is such a process.
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def __str__(self) -> str:
        return f"process {self.pid}" if self.here else f"process {self.pid} on {self.host}"


def holder_in(path: Path) -> Holder | None:
    """Process that signed a lock file; None where the file is unsigned or missing."""
    with suppress(ObjectMissing), explained(path):
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            text = file.read(SIGNATURE_BYTES_MAX).decode(errors="replace")
        match text.split():
            case [pid, *host] if _PID.fullmatch(pid):
                return Holder(int(pid), " ".join(host) or None)
    return None


def is_free(path: Path) -> bool:
    """True if no process has the lock file locked now. Writes nothing, and releases it at once."""
    with suppress(ObjectMissing), explained(path), os.fdopen(open_regular(path), "rb") as file:
        try:
            # Shared, so that two processes that only look do not report each other.
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def refuse_locked(path: Path) -> None:
    """Raise RunLocked, with the process that holds the lock file, if one does. Writes nothing."""
    if not is_free(path):
        raise _locked(path)


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Hold the lock file while the block runs.

    Raises RunLocked, with the process that holds it; CorruptObject for any but a regular file: it
    would be emptied.
    """
    with explained(path, 0):
        # Not truncated: until the lock is ours the text is that of the process which holds it.
        descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        file = os.fdopen(descriptor, "a+", encoding="utf-8")
    with file:
        # Signed only once it is locked: another's name would send people to the wrong process.
        try:
            # Without waiting: a second process is mostly a mistake, which an error explains.
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(path) from None
        _sign(file, f"{os.getpid()} {platform.node()}\n")
        try:
            yield
        finally:
            _sign(file, "")


def _sign(file: TextIO, text: str) -> None:
    """Write this process into the lock file, for the error of the next process that wants it."""
    with suppress(OSError):  # a full disk must not keep the run from being locked, or let go
        file.truncate(0)
        file.write(text)
        file.flush()


def _locked(path: Path) -> RunLocked:
    # "a+" leaves the holder's text in place; it may be empty for an instant.
    holder = holder_in(path)
    by = "another process" if holder is None else str(holder)
    where = " on this machine" if holder is None or holder.here else ""
    command = ["marin-rl", "status", path.parent.name, "--root", str(path.parents[1])]
    return RunLocked(
        f"{path.parent} is being worked on by {by}{where}: wait for it, or end it. To follow it:\n"
        f"  {shlex.join(command)}"
    )
