"""Run a command under a supervisor: a process that ends everything the command has started.

The supervisor runs no code of others. It adopts all descendants of the command (Linux), also those
in sessions of their own, and kills them when the command ends or is late, and when its own parent
sends SIGTERM, closes the socket that is standard input, or dies, by `kill -9` too. It then ends as
the command did, or by SIGALRM where that was late.

    supervisor.py PARENT LEASE COMMAND…

LEASE is a descriptor of shared memory (`worker.Lease`), or -1 for a command without a deadline.
Imports nothing of this package: it runs as a file, also under an empty environment.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

KILL_TIMEOUT_S = 5.0  # for processes that the kernel does not let die at once
KILL_POLL_S = 0.001
_POLL_S_MAX = 3600.0
_SIGNALS_READ_BYTES = 1 << 16


def supervised(command: Sequence[str], lease: int = -1) -> list[str]:
    """Return the command line of a supervisor of `command`, for this process to start."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(lease), *command]


def main(parent: int, lease: int, command: list[str]) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, waking = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    supervisor = os.getpid()
    if (child := os.fork()) == 0:
        end_with(supervisor)
        os.execvp(command[0], command)
    status = _watch(child, lease, parent, wake)
    _kill_descendants(child)
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            signal.signal(ended_by, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended_by})
        os.kill(supervisor, ended_by)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    if not LINUX:
        os.setpgid(0, 0)  # so that the parent can kill this group and live
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(child: int, lease: int, parent: int, wake: int) -> int:
    """Return the child's status; SIGALRM once it is late, SIGKILL if the parent ends it or dies."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(0, 0)  # reports the end of the socket alone: what it carries is the child's
    if LINUX:
        # A fork of the parent may hold the socket too; this is about the parent alone.
        with contextlib.suppress(OSError):
            poll.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() != parent:
            return signal.SIGKILL
    state = None if lease < 0 else memoryview(mmap.mmap(lease, 0)).cast("d")
    while (status := dict(_reaped()).get(child)) is None:
        wait_s = _POLL_S_MAX
        if state is not None:
            _, deadline, limit_s = state
            if (left_s := deadline - time.monotonic()) <= 0:
                return signal.SIGALRM
            wait_s = min(left_s, limit_s, wait_s)  # a call that begins now is late after its limit
        ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = os.read(wake, _SIGNALS_READ_BYTES)
        if ready - {wake} or signal.SIGTERM in signals:
            return signal.SIGKILL
    return status


def _reaped() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _kill_descendants(child: int) -> None:
    """Kill everything that descends from this process, and what that starts meanwhile.

    On other systems than Linux, the process group of the child.
    """
    if not LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        return
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (alive := _descendants(os.getpid())) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        list(_reaped())
        time.sleep(KILL_POLL_S)


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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
