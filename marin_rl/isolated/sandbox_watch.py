"""The watch over one sandboxed program: its output within a bound, its time, memory and disk.

What counts is what the kernel holds for a program: page tables as memory, and files that have no
name any more as disk. Leaves out how a program is started and what its end means (`sandbox`).
"""

import contextlib
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from marin_rl.isolated.sandbox_command import SandboxLimits
from marin_rl.isolated.scratch import ENTRY_BYTES, bytes_under

Limit = Literal["time", "CPU time", "memory", "output", "disk", "files", "processes"]
Watched = tuple[Limit | None, bytes, bytes]  # the limit that ended it, its output and errors

END_TIMEOUT_S = 10.0  # for the kernel to end what was killed; it takes milliseconds
_POLL_S = 0.05  # between two looks at memory, which cost milliseconds of a core each
_LOOKS_MAX = 600  # of a program, about: those that run for minutes are looked at less often
_DISK_POLL_S = 1.0  # and at a workspace, whose files are counted
_READ_BYTES = 1 << 16
_PAGE_BYTES = 4096  # in which a file system in memory is measured
_OURS = 1  # of a program's processes: the first of its namespace


def watch(
    process: subprocess.Popen[bytes],
    limits: SandboxLimits,
    wall_s: float,
    workspace: Path | None = None,
    rooms: Sequence[str] = (),
    end_by: signal.Signals = signal.SIGKILL,
) -> Watched:
    """Read a program's output until it ends, and kill it at a limit; it is reaped afterwards.

    `rooms` are file systems in memory of its own, which limit bytes and not entries. A process that
    has others to end is asked first, by the signal `end_by`.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    output = {pipe.fileno(): bytearray() for pipe in (process.stdout, process.stderr)}
    for descriptor in output:
        os.set_blocking(descriptor, False)
    looks = _Looks(limits, workspace, rooms)
    with process.stdout, process.stderr, _pidfd(process.pid) as ended:
        try:
            limit = _until_end(process.pid, ended, output, looks, wall_s)
        finally:  # it is not reaped yet, so the number is its
            if end_by != signal.SIGKILL:
                os.kill(process.pid, end_by)
                _await(ended)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
    if limit is None and looks.workspace_is_full():
        limit = "disk"  # by a program too short to be looked at
    stdout, stderr = (bytes(data[: limits.output_bytes]) for data in output.values())
    return limit, stdout, stderr


def _until_end(  # noqa: C901 - one loop with four ways out
    process_id: int, ended: int, output: dict[int, bytearray], looks: "_Looks", wall_s: float
) -> Limit | None:
    """Gather output until the process has ended; return the limit that it exceeded before."""
    poll, limits = select.poll(), looks.limits
    for descriptor in (*output, ended):
        poll.register(descriptor, select.POLLIN)
    now = time.monotonic()
    pause_s = max(_POLL_S, wall_s / _LOOKS_MAX)
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
            next_look = time.monotonic() + pause_s


class _Looks:
    """Looks at a program: its memory, entries of its rooms, and the size of its workspace.

    A workspace is counted now and then, and at once where its file system has lost more room than
    the program may take. Others may have taken it; what has no name is counted as well then.
    """

    def __init__(self, limits: SandboxLimits, workspace: Path | None, rooms: Sequence[str]) -> None:
        self.limits, self._workspace, self._rooms = limits, workspace, rooms
        self._next_count = time.monotonic() + _DISK_POLL_S
        self._used = 0 if workspace is None else _used_bytes(workspace)

    def exceeded(self, process_id: int) -> Limit | None:
        """Return the limit that a program exceeds now."""
        processes = _processes_of(process_id)[1:]  # the first is ours
        if sum(map(_threads, processes)) > self.limits.processes + _OURS:
            return "processes"  # the kernel has no such limit for root
        if sum(map(_memory_of, processes)) > self.limits.memory_bytes:
            return "memory"
        if processes and any(
            _is_full_of_entries(room, processes[0], self.limits.disk_bytes) for room in self._rooms
        ):
            return "files"
        return "disk" if self.workspace_is_full(processes) else None

    def workspace_is_full(self, processes: Sequence[int] = ()) -> bool:
        """Return True where a workspace, with files that `processes` hold, is over its limit.

        It is always counted once no process is left.
        """
        if self._workspace is None:
            return False
        used = _used_bytes(self._workspace)
        grown = used - self._used > self.limits.workspace_bytes
        if processes and not grown and time.monotonic() < self._next_count:
            return False
        held = _held_bytes(processes, self._workspace.stat().st_dev, strict=grown)
        count = held + bytes_under(self._workspace, strict=grown)
        self._next_count = time.monotonic() + _DISK_POLL_S
        if grown:
            self._used = used
        return count > self.limits.workspace_bytes


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


def _processes_of(root: int) -> list[int]:
    processes, waiting = [], [root]
    while waiting:
        processes.append(process_id := waiting.pop())
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{process_id}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return processes


def _threads(process_id: int) -> int:
    try:
        return Path(f"/proc/{process_id}/task").stat().st_nlink - 2
    except OSError:
        return 0


def _memory_of(process_id: int) -> int:
    """Return the bytes of a process, with swap and page tables; shared pages count in parts."""
    total = 0
    for name, columns in (("status", ("VmPTE:",)), ("smaps_rollup", ("Pss:", "SwapPss:"))):
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{process_id}", name).read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(columns))
    return total


def _used_bytes(place: Path) -> int:
    disk = os.statvfs(place)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _is_full_of_entries(room: str, process_id: int, bytes_max: int) -> bool:
    """Return True for a file system in memory with more entries than its bytes allow.

    False where it is gone, or not made yet: then the host's, which is larger, is in its place.
    """
    try:
        disk = os.statvfs(f"/proc/{process_id}/root{room}")
    except OSError:
        return False
    made = disk.f_blocks * disk.f_frsize < bytes_max + _PAGE_BYTES
    return made and (disk.f_files - disk.f_ffree) * ENTRY_BYTES > bytes_max


def _held_bytes(processes: Sequence[int], device: int, *, strict: bool) -> int:
    """Return the bytes of files of a device that have no name and that processes have open.

    With `strict` also of those that are only mapped, and the largest number where files are out of
    sight: on their way through a socket, or of a process that shows nothing.
    """
    held: dict[int, int] = {}
    try:
        for process_id in processes:
            for place in _descriptors(process_id):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    status = place.stat()  # of what is open, not of a path
                    if stat.S_ISSOCK(status.st_mode) and strict and _sends_files(place):
                        return sys.maxsize
                    if status.st_dev == device and not status.st_nlink:
                        held[status.st_ino] = status.st_blocks * 512
            if strict:
                held = _mapped(process_id) | held
    except OSError:
        return sys.maxsize if strict else sum(held.values())
    return sum(held.values())


def _descriptors(process_id: int) -> Iterator[Path]:
    """Open files of a process, by thread: threads need not share their descriptor table."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            yield from (task / "fd").iterdir()


def _sends_files(socket: Path) -> bool:
    """Return True for a socket with descriptors that were sent and not received."""
    information = (socket.parents[1] / "fdinfo" / socket.name).read_text()
    return any(
        line.startswith("scm_fds:") and line.split()[1] != "0" for line in information.splitlines()
    )


def _mapped(process_id: int) -> dict[int, int]:
    """Return the bytes that a process has mapped of each file without a name, by inode."""
    mapped: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process_id}/maps").read_text(errors="replace").splitlines():
            span, _, _, _, inode, *name = line.split(maxsplit=5)
            # memory that processes share has such a name too, and is counted as memory
            if name and name[0].endswith("(deleted)") and not name[0].startswith("/dev/zero"):
                first, last = (int(address, 16) for address in span.split("-"))
                mapped[int(inode)] = mapped.get(int(inode), 0) + last - first
    return mapped


@contextlib.contextmanager
def _pidfd(process_id: int) -> Iterator[int]:
    descriptor = os.pidfd_open(process_id)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _await(ended: int) -> bool:
    """Wait for the end of a process by its descriptor; False where it takes too long."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    return bool(poll.poll(END_TIMEOUT_S * 1000))


def end_namespace(first: int) -> None:
    """End a namespace by its first process, and wait until that is gone; it goes last.

    It may be left where bubblewrap was killed while it made the namespace. It is reaped where it is
    a child of this process by now, as orphans of a container are children of its first process.
    """
    with contextlib.suppress(ProcessLookupError), _pidfd(first) as ended:
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        if _await(ended):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(first, os.WNOHANG)
