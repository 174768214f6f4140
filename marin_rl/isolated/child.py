"""The loop of an isolated process: read a message, answer each of its items, under limits.

Started by `processes`. Limits of memory, files and processes are set once, before the first
message; CPU time is limited for each item by an interval timer of the kernel, which ends the
process even while a C function holds the interpreter lock. Leaves out the work itself: a module
with a function `answer(common, item)`.
"""

import contextlib
import importlib
import os
import resource
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

MEMORY_EXIT_STATUS = 86
LENGTH = struct.Struct(">Q")
_FILES_MAX = 32
_PIECE_BYTES = 2**20


def main(module: str, cpu_s: float | int, memory_bytes: int) -> None:
    """Answer messages from standard input on standard output until the input closes."""
    reading, writing = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    answer = importlib.import_module(module).answer
    _limit(memory_bytes)
    _send(writing, b"ready")
    try:
        while (message := _receive(reading)) is not None:
            common, *items = split(message)
            for item in items:
                signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
                data = answer(common, item)
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(writing, data)
    except MemoryError:
        os._exit(MEMORY_EXIT_STATUS)  # nothing that needs memory may run any more
    except BrokenPipeError:
        return


def joined(parts: list[bytes]) -> bytes:
    """Return one message of several parts, each after its length."""
    pieces = [piece for part in parts for piece in (LENGTH.pack(len(part)), part)]
    return b"".join(pieces)


def split(message: bytes) -> Iterator[bytes]:
    """Yield the parts of a message."""
    at = 0
    while at < len(message):
        (length,) = LENGTH.unpack_from(message, at)
        at += LENGTH.size
        yield message[at : at + length]
        at += length


def _limit(memory_bytes: int) -> None:
    limits = [
        (resource.RLIMIT_AS, _address_space_bytes() + memory_bytes),
        (resource.RLIMIT_CORE, 0),
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


def _send(descriptor: int, data: bytes) -> None:
    rest = memoryview(LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _receive(descriptor: int) -> bytes | None:
    """Read one message; None at the end of the input."""
    head = _read(descriptor, LENGTH.size)
    return None if head is None else _read(descriptor, LENGTH.unpack(head)[0])


def _read(descriptor: int, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        piece = os.read(descriptor, min(length - len(data), _PIECE_BYTES))
        if not piece:
            return None
        data += piece
    return bytes(data)
