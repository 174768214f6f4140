"""The watch over one sandboxed program: its output within a bound, its time, and its memory.

Leaves out how a program is started and what its end means (`sandbox`).
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from marin_rl.isolated.sandbox_command import SandboxLimits
from marin_rl.isolated.scratch import bytes_under

Limit = Literal["time", "CPU time", "memory", "output", "disk"]

END_TIMEOUT_S = 10.0  # for the kernel to end what was killed; it takes milliseconds
_POLL_S = 0.05  # between two looks at memory
_DISK_POLL_S = 1.0  # and at a workspace, whose files are counted
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Output of a program, and the limit that ended it."""

    limit: Limit | None
    stdout: bytes
    stderr: bytes


def watch(
    process: subprocess.Popen[bytes],
    limits: SandboxLimits,
    wall_s: float,
    workspace: Path | None = None,
) -> Watched:
    """Read a program's output until it ends, and kill it at a limit; it is reaped afterwards."""
    assert process.stdout is not None
    assert process.stderr is not None
    output = {pipe.fileno(): bytearray() for pipe in (process.stdout, process.stderr)}
    for descriptor in output:
        os.set_blocking(descriptor, False)
    with process.stdout, process.stderr, _pidfd(process.pid) as ended:
        try:
            limit = _until_end(process.pid, ended, output, _Looks(limits, workspace), wall_s)
        finally:
            _kill(process)
            process.wait()
    stdout, stderr = (bytes(data[: limits.output_bytes]) for data in output.values())
    return Watched(limit=limit, stdout=stdout, stderr=stderr)


def _until_end(  # noqa: C901 - one loop with four ways out
    process_id: int,
    ended: int,
    output: dict[int, bytearray],
    looks: "_Looks",
    wall_s: float,
) -> Limit | None:
    """Gather output until the process has ended; return the limit that it exceeded before."""
    poll, limits = select.poll(), looks.limits
    for descriptor in (*output, ended):
        poll.register(descriptor, select.POLLIN)
    now = time.monotonic()
    deadline, next_look = now + wall_s, now + _POLL_S
    while True:
        wait_s = min(deadline, next_look) - time.monotonic()
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, wait_s) * 1000)}
        # What it printed before its end is in the pipes; a process that it left may hold them open.
        for descriptor in output if ended in ready else ready:
            if not _read(descriptor, output[descriptor], limits.output_bytes):
                with contextlib.suppress(KeyError):  # its end was read before
                    poll.unregister(descriptor)
        if any(len(data) > limits.output_bytes for data in output.values()):
            return "output"
        if ended in ready:
            return None
        if (now := time.monotonic()) >= deadline:
            return "time"
        if now >= next_look:
            if (limit := looks.exceeded(process_id)) is not None:
                return limit
            next_look = time.monotonic() + _POLL_S


class _Looks:
    """Looks at the memory of a program, and now and then at the size of its workspace."""

    def __init__(self, limits: SandboxLimits, workspace: Path | None) -> None:
        self.limits, self._workspace = limits, workspace
        self._next_count = time.monotonic() + _DISK_POLL_S

    def exceeded(self, process_id: int) -> Limit | None:
        """Return the limit that a program exceeds now."""
        if _memory_of(process_id) > self.limits.memory_bytes:
            return "memory"
        if self._workspace is not None and time.monotonic() >= self._next_count:
            if bytes_under(self._workspace) > self.limits.workspace_bytes:
                return "disk"
            self._next_count = time.monotonic() + _DISK_POLL_S
        return None


def _read(descriptor: int, data: bytearray, bytes_max: int) -> bool:
    """Append what is there, up to a byte more than the limit; return False at the end."""
    while len(data) <= bytes_max:
        try:
            chunk = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            break
        if not chunk:
            return False
        data += chunk
    return True


def _memory_of(root: int) -> int:
    """Return the bytes in use by a process and its descendants; shared pages count in parts."""
    total, waiting = 0, [root]
    while waiting:
        place = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            for task in (place / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (place / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


@contextlib.contextmanager
def discarded_on_error(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill and reap a process, and close its pipes, where what it waits for fails."""
    try:
        yield
    except BaseException:
        _kill(process)
        process.communicate()
        raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program's first process and its group; it is not reaped yet, so the number is its."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


@contextlib.contextmanager
def _pidfd(process_id: int) -> Iterator[int]:
    descriptor = os.pidfd_open(process_id)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def await_end(process_id: int) -> None:
    """Wait until a process is gone: the first of a namespace, which goes last."""
    with contextlib.suppress(ProcessLookupError), _pidfd(process_id) as ended:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll(END_TIMEOUT_S * 1000)


def end_marked(mark: str) -> None:
    """Kill the processes whose environment has a mark: what a program without walls left."""
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (place / "environ").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)
