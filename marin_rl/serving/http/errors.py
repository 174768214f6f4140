"""Parse request bodies: strict shapes, and errors that name the wrong field.

Owns the base of all bodies, the reading of JSON, and the refusal as OpenAI words it. An unknown
field is refused by name rather than ignored: an option that silently does nothing is worse than
none.

A body of some megabytes can spell millions of values, and each costs a parser 30 to 300 times the
bytes that spell it. So `check_bounds` first counts values, names and containers in the bytes, at
the speed of `bytes.count`, and a body beyond a bound is refused at that cost alone. Leaves out the
number of bytes (`auth`), what conversations hold (`messages`) and what may be asked for
(`requests`).
"""

import difflib
import random
import secrets
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from marin_rl.inference.client.protocol import error_body

Version = Annotated[int, Field(ge=0, lt=2**31)]
VersionText = Annotated[str, Field(pattern=r"^\d{1,9}$")]  # SGLang's type for the same field

# A larger body is not parsed a second time only to name the number in it.
FOUND_BYTES_MAX = 2**20

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


class ApiError(Exception):
    """A refusal or fault, as the client will see it; `retry_s` goes into a Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = (headers or {}) | ({"Retry-After": str(retry_s)} if retry_s else {})
        type = _TYPES.get(status, "invalid_request_error")
        self.body = error_body(message, type=type, code=code, param=param)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class Body(BaseModel):
    """Base of every body: no unknown fields, no NaN, no bool or string where a number is due."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    """Read a JSON body; ApiError 400 names the first wrong field and what was expected of it."""
    try:
        check_bounds(data)
        return kind.model_validate_json(data)
    except TooMuchJson as error:
        raise ApiError(400, str(error), code="limit_exceeded") from None
    except ValidationError as error:
        raise _refusal(kind, data, error) from None


def _refusal(kind: type[Body], data: bytes, error: ValidationError) -> ApiError:
    # with its input, each error would hold another copy of the object around it
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = _most_specific(errors)
    names = _names(kind, first)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return _unknown(kind, first, names)
    if first["type"] == "value_error":
        field, separator, remainder = message.partition(": ")
        if separator and field.isidentifier():
            names, message = [*names, field], remainder
        param = ".".join(names)
        return ApiError(400, f"{param}: {message}" if param else message, param=param)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message}")
    if not names:
        return ApiError(400, f"expected a JSON object: {message}")
    param = ".".join(names)
    return ApiError(400, f"{param}: {message}{_found_value(data, first)}", param=param)


def _names(kind: type[Body], error: ErrorDetails) -> list[str]:
    """Path of the error in the body: fields and list indices, without union branches."""
    known, names = _fields(kind), list[str]()
    for part in error["loc"]:
        if isinstance(part, int) or (part in known and part not in names[-1:]):
            names.append(str(part))
    return names


def _unknown(kind: type[Body], error: ErrorDetails, names: list[str]) -> ApiError:
    name = str(error["loc"][-1])[:200]
    if names[-1:] != [name]:
        names.append(name)
    close = []
    if len(names) == 1:
        close = difflib.get_close_matches(name, list(kind.model_fields), n=1, cutoff=0.6)
    param = ".".join(names)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return ApiError(400, f"unknown field {param!r}{meant}", code="unknown_field", param=param)


def _most_specific(errors: list[ErrorDetails]) -> ErrorDetails:
    """The error to report: an unknown field first; of a union's branches, one of the right type."""
    for error in errors:
        if error["type"] == "extra_forbidden":
            return error
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    of_type = [error for error in same if not error["type"].endswith("_type")]
    return (of_type or same)[0]


@lru_cache
def _fields(kind: type[Body]) -> frozenset[str]:
    """Field names of a body, at any depth.

    Error locations hold the names of a union's branches too; only these name fields.
    """
    names: set[str] = set()
    seen: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [kind]
    while waiting:
        model = waiting.pop()
        seen.add(model)
        for name, field in model.model_fields.items():
            names.add(field.alias or name)
            waiting += [inner for inner in _models_in(field.annotation) if inner not in seen]
    return frozenset(names)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _found_value(data: bytes, error: ErrorDetails) -> str:
    """End of an error message: the number or boolean that came instead."""
    if len(data) > FOUND_BYTES_MAX or error["type"] == "missing" or error["loc"][-1] == "[key]":
        return ""
    value: Any = from_json(data)
    for part in error["loc"]:  # some parts name a union's branch, not a place in the body
        if isinstance(value, dict):
            value = value.get(part, value)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
    return f", found {value!r}" if isinstance(value, bool | int | float) else ""


# Seeded by the system once: asking it for every id would release the interpreter lock each time.
_random = random.Random(secrets.randbits(256))


def new_id() -> str:
    """Return a unique id; not a secret."""
    return f"{_random.getrandbits(128):032x}"


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
