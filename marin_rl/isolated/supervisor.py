"""The child's end of a worker process: a supervisor, and its fork that runs the code.

The supervisor runs no code of others. It adopts whatever descends from the worker (Linux), also
what began a session of its own, and kills all of it when the worker ends, when the parent lets go,
and when the parent dies, by `kill -9` too. The pipes are hidden from the worker's own children.
"""

import contextlib
import fcntl
import os
import random
import resource
import select
import signal
import sys

from marin_rl.isolated.descendants import (
    LINUX,
    adopt_orphans,
    end_with,
    exit_like,
    kill_descendants,
    reaped,
)
from marin_rl.isolated.worker import work

DESCRIPTORS_MAX = 4096
_READ_BYTES = 1 << 16


def supervise() -> None:
    """Run the worker of `sys.argv`, and end all its processes afterwards.

    Ends as the worker did; with 0 when the parent has let go or died.
    """
    answers, lifeline, parent = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(lifeline)
        end_with(supervisor)
        _work(answers)
        return
    os.close(answers)
    _silence(0, 1, 2)
    status = _watch(worker, lifeline, parent)
    kill_descendants(worker)
    if status is not None:
        exit_like(status)
    os._exit(0)


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
        for process, status in reaped():
            if process == worker:
                return status
        if any(descriptor != wake for descriptor, _ in poll.poll()):
            return None
        with contextlib.suppress(BlockingIOError):
            os.read(wake, _READ_BYTES)
