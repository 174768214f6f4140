"""The supervisor of a worker process: a parent between them that runs no code of others.

It adopts whatever descends from the worker (Linux), also what began a session of its own, and kills
all of it when the worker ends or blocks, when the parent asks for it or lets go, and when the
parent dies, by `kill -9` too. Its last line on the worker's pipe says which call's code ran then.
"""

import contextlib
import os
import resource
import select
import signal
import sys
import tempfile
import time

from marin_rl.isolated import worker
from marin_rl.isolated.descendants import (
    LINUX,
    adopt_orphans,
    end_with,
    kill_descendants,
    reaped,
)

STARTUP_TIMEOUT_S = 120.0
_POLL_S_MAX = 3600.0
_STARTING_POLL_S = 0.25  # while the limit of the worker's calls is not known
_READ_BYTES = 1 << 16


def supervise() -> None:
    """Run the worker of `sys.argv`, and end all its processes afterwards.

    Its requests are standard input. The arguments are the descriptor of its answers, the parent's
    process id and, if it is another, the interpreter.
    """
    answers, parent, *interpreter = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    shared = _shared_memory()
    state = worker.SharedState(shared)
    state.write(0, time.monotonic() + STARTUP_TIMEOUT_S, _STARTING_POLL_S)
    supervisor, wake = os.getpid(), _wake_by_signals()
    process = os.fork()
    if process == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        end_with(supervisor)
        requests = os.dup(0)
        _silence(0)
        _work(requests, answers, shared, interpreter)
        return
    _silence(1, 2)
    code, late = _watch(process, state, parent, wake)
    kill_descendants(process)
    number, *_ = state.read()
    if late and number < 0:
        number = ~number
    with contextlib.suppress(OSError):  # the parent may be gone
        late_or_not = "true" if late else "false"
        os.write(answers, b'\n{"ended":%d,"code":%d,"late":%b}\n'
                 % (number, code, late_or_not.encode()))  # fmt: skip
    os._exit(0)


def _work(requests: int, answers: int, shared: int, interpreter: list[str]) -> None:
    """Be the worker, here or in another interpreter, which need not have this package."""
    if not interpreter:
        worker.main(requests, answers, shared)
        return
    descriptors = (requests, answers, shared)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    os.environ.pop("PYTHONPATH")  # the packages of this interpreter are not for that one
    os.execv(interpreter[0], [*interpreter, "-I", worker.__file__, *map(str, descriptors)])


def _shared_memory() -> int:
    if LINUX:
        shared = os.memfd_create("worker")
    else:
        with tempfile.TemporaryFile() as file:
            shared = os.dup(file.fileno())
    os.truncate(shared, worker.SharedState.FORM.size)
    return shared


def _silence(*descriptors: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _wake_by_signals() -> int:
    """A pipe that becomes readable when a child ends, or the parent asks for the end."""
    wake, waking = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return wake


def _watch(process: int, state: worker.SharedState, parent: int, wake: int) -> tuple[int, bool]:
    """Return the worker's exit code, and True if it blocks; 0 if the parent lets go or dies."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(0, 0)  # tells the end of the pipe alone: requests are the worker's to read
    if LINUX:
        # A fork of the parent may hold the pipe too; this is about the parent alone.
        with contextlib.suppress(OSError):
            poll.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() != parent:
            return 0, False
    while (status := dict(reaped()).get(process)) is None:
        _, deadline, limit_s = state.read()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return -signal.SIGKILL, True
        # No call that begins meanwhile is late before its limit.
        ready = {
            descriptor for descriptor, _ in poll.poll(min(left_s, limit_s, _POLL_S_MAX) * 1000)
        }
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = os.read(wake, _READ_BYTES)
        if ready - {wake} or signal.SIGTERM in signals:
            return 0, False
    return os.waitstatus_to_exitcode(status), False
