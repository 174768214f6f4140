"""The loop of an isolated worker: read a message, answer each of its items, under limits.

Run by `process.WorkerProcess`. The first message names the module of the work, which has a function
`answer(common, item)`, and its limits. Memory, files and processes are limited once; CPU time is
limited for each item by an interval timer of the kernel, which ends the process even while a C
function holds the interpreter lock. Leaves out the work itself.
"""

import base64
import contextlib
import importlib
import json
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from marin_rl.process import Channel

MEMORY_EXIT_STATUS = 86
_FILES_MAX = 32


def main(channel: Channel) -> None:
    """Answer messages until the parent closes its end."""
    lines = channel.lines()
    hello = json.loads(next(lines))
    answer = importlib.import_module(hello["module"]).answer
    _limit(hello["memory_bytes"])
    channel.send(b"ready")
    try:
        for line in lines:
            common, *items = decoded(line)
            for item in items:
                signal.setitimer(signal.ITIMER_PROF, hello["cpu_s"])  # SIGPROF ends the process
                data = answer(common, item)
                signal.setitimer(signal.ITIMER_PROF, 0)
                channel.send(encoded([data]))
    except MemoryError:
        os._exit(MEMORY_EXIT_STATUS)  # nothing that needs memory may run any more


def encoded(parts: Sequence[bytes]) -> bytes:
    """Return one line of several parts of any bytes."""
    return b" ".join(base64.b64encode(part) for part in parts)


def decoded(line: bytes) -> list[bytes]:
    """Return the parts of a line; an empty part is kept."""
    return [base64.b64decode(part) for part in line.rstrip(b"\n").split(b" ")]


def _limit(memory_bytes: int) -> None:
    limits = [
        (resource.RLIMIT_AS, _address_space_bytes() + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _FILES_MAX),
        (resource.RLIMIT_NPROC, 0),
    ]
    for name, most in limits:
        with contextlib.suppress(OSError, ValueError):  # a lower limit of the user's stays
            resource.setrlimit(name, (most, most))


def _address_space_bytes() -> int:
    """Return the address space in use, 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
