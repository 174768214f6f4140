"""Processes that descend from this one: adopted where they are orphaned, and killed.

Imports nothing of this package: run as a file, it runs one command and ends all that the command
has started, also in sessions of its own and under an empty environment.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

KILL_TIMEOUT_S = 5.0  # for processes that the kernel does not let die at once
POLL_S = 0.001


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents end (Linux)."""
    if LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    if not LINUX:
        os.setpgid(0, 0)  # so that the parent can kill this group and live
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def reaped() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def kill_descendants(child: int) -> None:
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
        list(reaped())
        time.sleep(POLL_S)


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


def exit_like(status: int) -> NoReturn:
    """End this process as one with a status of `waitpid` has ended."""
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            signal.signal(ended_by, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended_by})
        os.kill(os.getpid(), ended_by)
    os._exit(os.waitstatus_to_exitcode(status))


def _run(command: list[str]) -> NoReturn:
    """Run a command until it ends or SIGTERM comes, and end all that it has started."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    waited_for = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    parent, status = os.getpid(), None
    if (child := os.fork()) == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)
        end_with(parent)
        os.execvp(command[0], command)
    while status is None and signal.sigwait(waited_for) != signal.SIGTERM:
        status = dict(reaped()).get(child)
    kill_descendants(child)
    exit_like(signal.SIGKILL if status is None else status)


if __name__ == "__main__":
    _run(sys.argv[1:])
