"""Bounds on the JSON of a body, checked before anything is built from it.

A body of some megabytes can spell millions of values, and each costs a parser 30 to 300 times the
bytes that spell it. So values, names and containers are counted in the bytes, at the speed of
`bytes.count`, and a body beyond a bound is refused at that cost alone. Leaves out the number of
bytes (`auth`) and what the fields hold (`requests`).
"""

from collections.abc import Iterator

# Token ids of one request: 512 prompts of 1,024 tokens, or one prompt of half a million.
VALUES_MAX = 2**19
# Each is a field of a message, a tool call or a schema: 4,096 messages that call and answer in turn
# have 23,000.
NAMES_MAX = 2**15
CONTAINERS_MAX = 2**16
# Schemas of forms have at most 32 levels, inside of six levels of a request.
DEPTH_MAX = 64

# Small enough that a chunk's pieces stay in the processor's cache; 2 is the least, for an escape.
_CHUNK_BYTES = 2**17
_OTHERS = bytes(set(range(256)) - set(b'"[]{},:'))


class TooMuchJson(ValueError):
    """A body that spells more than a bound allows."""


def check_bounds(data: bytes) -> None:
    """Raise TooMuchJson for a body with too many values, names, containers, or levels.

    Bytes that are not JSON may pass: the parser stops at the first of them, and up to there the
    counts are those that it sees.
    """
    containers = data.count(b"[") + data.count(b"{")
    if (
        containers <= DEPTH_MAX
        and data.count(b",") < VALUES_MAX - containers
        and data.count(b":") <= NAMES_MAX
    ):
        return  # even if all of them stood outside of strings
    _count(data)


def _count(data: bytes) -> None:
    values = names = containers = depth = 0
    for marks in _marks_outside_strings(data):
        opened = marks.count(b"[") + marks.count(b"{")
        containers += opened
        names += marks.count(b":")
        values += marks.count(b",") + opened
        _refuse_beyond(containers, CONTAINERS_MAX, "objects and lists")
        _refuse_beyond(names, NAMES_MAX, "names")
        _refuse_beyond(values, VALUES_MAX, "values")
        for mark in marks.translate(None, b",:"):
            depth += 1 if mark in b"[{" else -1
            if depth > DEPTH_MAX:
                raise TooMuchJson(f"expected at most {DEPTH_MAX} levels of objects and lists")
            if depth < 0:
                return  # not JSON: the parser says where


def _refuse_beyond(count: int, most: int, noun: str) -> None:
    if count > most:
        raise TooMuchJson(f"expected at most {most} {noun} in a body")


def _marks_outside_strings(data: bytes) -> Iterator[bytes]:
    """The brackets, commas and colons that are no part of a string, chunk by chunk."""
    inside, start, quotes = False, 0, 0
    while start < len(data):
        chunk = data[start : start + _CHUNK_BYTES]
        backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        if backslashes % 2 and start + len(chunk) < len(data):
            chunk = chunk[:-1]  # the next chunk has it, with what it escapes
        start += len(chunk)
        unescaped = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = unescaped.translate(None, _OTHERS).split(b'"')
        quotes += len(pieces) - 1  # a string may begin in one chunk and end in another
        _refuse_beyond((quotes + 1) // 2, VALUES_MAX + NAMES_MAX, "strings")
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
