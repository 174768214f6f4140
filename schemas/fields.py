"""The types of fields in JSON records: names, keys, digests and numbers that anyone may rely on.

A record comes from a folder that somebody else may have written. Its fields are checked by these
types before they become a path, a size or a line on a terminal. Only shapes are checked here.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from schemas import Malformed

NAME_BYTES_MAX = 255  # of one folder or file: what file systems take
KEY_BYTES_MAX = 1024  # of a whole key: what object stores take
TEXT_MAX = 1024
SHOWN_MAX = 80

Value = TypeVar("Value")


def is_name(text: str) -> bool:
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        return False
    return len(text.encode(errors="replace")) <= NAME_BYTES_MAX


def is_key(text: str) -> bool:
    """Return True for a normalised relative path of names: it leads below the folder it is of."""
    fits = len(text.encode(errors="replace")) <= KEY_BYTES_MAX
    return fits and all(is_name(part) for part in text.split("/"))


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("expected the name of one file or folder, without / and control signs")
    return text


def _key(text: str) -> str:
    if not is_key(text):
        raise ValueError("expected a relative path like a/b, without '.', '..' and control signs")
    return text


def _moment(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() is None:
        raise ValueError("expected a time with its offset from UTC, in ISO 8601")
    return text


Name = Annotated[str, AfterValidator(_name)]
Key = Annotated[str, AfterValidator(_key)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=TEXT_MAX)]
Moment = Annotated[str, Field(max_length=64), AfterValidator(_moment)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Round = Annotated[int, Field(ge=0, lt=2**31)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Number = Integer | float


def validated(validate: Callable[[], Value]) -> Value:
    """The result of a pydantic validation. Raises Malformed with the first field that is wrong."""
    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:SHOWN_MAX]
        shown = repr(first["input"])[:SHOWN_MAX]
        raise Malformed(
            f"field {place or '(all)'}: {first['msg']}, found {shown}; {error.error_count()} such "
            "fields: it was not written by marin-rl"
        ) from None
