"""Messages between a parent and its workers: lines of a number and of parts in base64.

The parent draws each number by chance, and an answer repeats it with the item's index, so that a
line that other code wrote to the pipe is recognised.
"""

import base64
from collections.abc import Sequence

READY, UNFIT = b"ready", b"unfit"  # first answer of a worker
MEMORY_EXIT_STATUS = 86  # of a worker that exceeded its memory
PIPES_EXIT_STATUS = 87  # of a worker whose code closed or replaced its pipes
ANSWERED_KEPT = 10_000  # numbers of the last answers, by which a parent knows a second one


def encoded(number: str, parts: Sequence[bytes]) -> bytes:
    """Return a line, without its newline, of a number and parts of any bytes."""
    return b" ".join([number.encode(), *map(base64.b64encode, parts)])


def decoded(line: bytes) -> tuple[str, list[bytes]]:
    """Return the number and the parts of a line; an empty part is kept. Raises ValueError."""
    number, *parts = line.rstrip(b"\n").split(b" ")
    return number.decode("ascii"), [base64.b64decode(part, validate=True) for part in parts]


def answer_number(number: str, index: int) -> str:
    """Return the number of the answer to one item of a message."""
    return f"{number}.{index}"
