"""JSON from elsewhere, read in one way: bounded in size and depth, each name of an object once.

A document may come from anybody. Some megabytes can spell millions of values, each of which costs a
parser 30 to 300 times the bytes that spell it; so `check_bounds` first counts values, names and
containers in the bytes. Leaves out files (`marin_rl.plain_files`) and what the values mean.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from schemas import Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """Most bytes, values, names and containers of a document, and levels within each other."""

    bytes_max: int = 64 * 2**20
    values_max: int = 4_000_000
    names_max: int = 4_000_000
    containers_max: int = 4_000_000
    depth_max: int = 200  # orjson writes 254, and a value stands inside of others of ours


LIMITS = JsonLimits()

# Small enough that a chunk's pieces stay in the processor's cache; 2 is the least, for an escape.
_CHUNK_BYTES = 2**17
_OTHERS = bytes(set(range(256)) - set(b'"[]{},:'))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class TooMuchJson(Malformed):
    """A document that spells more than a bound allows."""


def parse_json(data: bytes, limits: JsonLimits = LIMITS) -> Any:
    """Return the value of a JSON document in UTF-8, integers of any size exactly.

    Raises Malformed for what is no JSON (NaN, infinities and lone surrogates included), for numbers
    beyond float64, for a name twice in one object, and beyond the limits.
    """
    if len(data) > limits.bytes_max:
        raise TooMuchJson(f"expected at most {limits.bytes_max} bytes, found {len(data)}")
    check_bounds(data, limits)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        # Without the byte: messages go to those who may not read the file.
        raise Malformed(f"can't decode byte {error.start} and what follows as UTF-8") from None
    if text.startswith("\ufeff"):
        raise Malformed("expected UTF-8 without a byte order mark, found one: save it without")
    try:
        value = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError, OverflowError) as error:
        raise Malformed(str(error)) from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"expected each name of an object once, found {twice!r:.80} twice")
    return result


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"expected a finite number, found {text}")


def _finite(text: str) -> float:
    number = float(text)
    return number if abs(number) < float("inf") else _no_number(text[:40])


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite
)


def check_bounds(data: bytes, limits: JsonLimits) -> None:
    """Raise TooMuchJson for a document with too many values, names, containers, or levels.

    Bytes that are not JSON may pass, for the parser stops at the first of them.
    """
    containers = data.count(b"[") + data.count(b"{")
    if (
        containers <= limits.depth_max
        and data.count(b",") < limits.values_max - containers
        and data.count(b":") <= limits.names_max
    ):
        return  # even if all of them stood outside of strings
    values = names = containers = depth = 0
    for marks in _marks_outside_strings(data, limits):
        opened = marks.count(b"[") + marks.count(b"{")
        containers += opened
        names += marks.count(b":")
        values += marks.count(b",") + opened
        _refuse_beyond(containers, limits.containers_max, "objects and lists")
        _refuse_beyond(names, limits.names_max, "names")
        _refuse_beyond(values, limits.values_max, "values")
        for mark in marks.translate(None, b",:"):
            depth += 1 if mark in b"[{" else -1
            if depth > limits.depth_max:
                raise TooMuchJson(
                    f"expected at most {limits.depth_max} levels of objects and lists"
                )
            if depth < 0:
                return  # not JSON: the parser says where


def _refuse_beyond(count: int, most: int, noun: str) -> None:
    if count > most:
        raise TooMuchJson(f"expected at most {most} {noun} in all, found more")


def _marks_outside_strings(data: bytes, limits: JsonLimits) -> Iterator[bytes]:
    """Brackets, commas and colons outside of strings, chunk by chunk."""
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
        _refuse_beyond((quotes + 1) // 2, limits.values_max + limits.names_max, "strings")
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
