"""The child's end of a worker process: a supervisor, and its fork that runs the code.

The supervisor runs no code of others. It adopts whatever descends from the worker (Linux), also
what began a session of its own, and kills all of it when the worker ends, when the parent lets go,
and when the parent dies, by `kill -9` too. The pipes are hidden from the worker's own children.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from marin_rl.isolated.worker import work

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

KILL_TIMEOUT_S = 5.0  # for processes that the kernel does not let die at once
POLL_S = 0.001
DESCRIPTORS_MAX = 4096
_READ_BYTES = 1 << 16


def supervise() -> None:
    """Run the worker of `sys.argv`, and end all its processes afterwards.

    Ends as the worker did; with 0 when the parent has let go or died.
    """
    answers, lifeline, parent = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(lifeline)
        _end_with(supervisor)
        _work(answers)
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


def _work(answers: int) -> None:
    """Run the worker on the pipes, which its children do not inherit; its input is empty."""
    questions, replies = os.fdopen(_hidden(0), "rb"), os.fdopen(_hidden(answers), "wb", buffering=0)
    _silence(0)
    os.close(answers)
    work(questions, replies)


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
