"""The body of a worker: set limits, begin the work that the parent names, answer its items.

The first message (`lines`) names a module, its settings and limits; the module's `begin(settings)`
returns the function `(common, item) -> answer`, or a handler of calls that interleave
(`interleaved`). Leaves out what modules do (`templates`, `grammars`, `environments.worker`).
"""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from marin_rl.errors import InputError
from marin_rl.isolated.interleaved import serve
from marin_rl.isolated.lines import (
    MEMORY_EXIT_STATUS,
    READY,
    UNFIT,
    answer_number,
    decoded,
    encoded,
)

_FILES_MAX = 32


def work(questions: BinaryIO, answers: BinaryIO) -> None:
    """Serve one parent until it closes its end.

    CPU time is limited for each item by an interval timer of the kernel, which ends the process
    even while a C function holds the interpreter lock.
    """

    def send(index: int, *parts: bytes) -> None:
        _write(answers, answer_number(number, index), parts)

    number, (first,) = decoded(questions.readline())
    hello = json.loads(first)
    module = importlib.import_module(hello["module"])
    _limit(hello)
    try:
        answer = module.begin(hello["settings"])
    except InputError as error:
        send(0, UNFIT, str(error).encode(errors="replace"))
        return
    send(0, READY)
    if hello.get("interleaved"):
        serve(
            answer,
            questions,
            lambda number, *parts: _write(answers, answer_number(number, 0), parts),
            limit_s=hello["wall_s"],
            answer_bytes=hello["answer_bytes"],
            answers=answers.fileno(),
        )
        return
    try:
        while line := questions.readline():
            number, (common, *items) = decoded(line)
            for index, item in enumerate(items):
                signal.setitimer(signal.ITIMER_PROF, hello["cpu_s"])  # SIGPROF ends the process
                data = answer(common, item)
                signal.setitimer(signal.ITIMER_PROF, 0)
                send(index, data)
    except MemoryError:
        os._exit(MEMORY_EXIT_STATUS)  # nothing that needs memory may run any more


def _write(answers: BinaryIO, number: str, parts: Sequence[bytes]) -> None:
    left = memoryview(encoded(number, parts) + b"\n")
    while left:
        left = left[answers.write(left) :]


def _limit(hello: Mapping[str, Any]) -> None:
    """Limit memory, and what a sealed worker may open and start; its children inherit it."""
    # Linux counts what a process can write to, not what libraries only reserve.
    memory = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    limits = {memory: _bytes_in_use() + hello["memory_bytes"]}
    if hello["sealed"]:
        limits |= {
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: _FILES_MAX,
            resource.RLIMIT_NPROC: 0,
        }
    for name, most in limits.items():
        with suppress(OSError, ValueError):  # a lower limit of the user's stays
            resource.setrlimit(name, (most, most))


def _bytes_in_use() -> int:
    """Return the bytes that this process can write to, 0 where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
