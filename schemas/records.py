"""JSON records other than manifests, and the types of fields in all of them.

Each is sealed by its own digest. The models check shapes strictly, because a record may come from a
folder that somebody else has written; fields that they do not know are ignored.
"""

from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

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


ANCESTORS_MAX = 1000  # of a fork of a fork …: each is a folder that every listing looks into
CODE_NAMES_MAX = 1000  # keys of a configuration that name code


class Record(BaseModel):
    """Base of the records: strict, without NaN, open to fields of other versions."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class RowsRecord(Record):
    """Digest of the rows that a run reads by one key of its configuration."""

    attempt: Name
    path: Text
    rows_digest: Text


class AncestorRecord(Record):
    """A run that a fork begins with, see `marin_rl.storage.stores.store.Ancestor`."""

    model_config = ConfigDict(extra="forbid")

    run_id: Name
    through_round: Round
    sha256: Sha256


class Seeds(Record):
    run: Integer


class RunRecord(Record):
    """run.json."""

    run_id: Name
    config: dict[str, Any]
    content_digest: Sha256
    seeds: Seeds
    code: dict[str, Text]
    libraries: dict[str, Text]
    created_at: Moment
    attempt: Name
    user_code: Annotated[list[dict[str, Text]], Field(max_length=CODE_NAMES_MAX)] = []
    ancestors: Annotated[list[AncestorRecord], Field(max_length=ANCESTORS_MAX)] = []

    @model_validator(mode="after")
    def _ascend(self) -> "RunRecord":
        rounds = [ancestor.through_round for ancestor in self.ancestors]
        if any(later <= earlier for earlier, later in pairwise(rounds)):
            raise ValueError(f"expected ancestors by ascending through_round, found {rounds[:9]}")
        return self


class TombstoneRecord(Record):
    """pruned.json."""

    slot: Key
    manifest: Sha256
    parts: list[Key]
    rule: dict[str, Any]
    created_at: Moment
    attempt: Name


class ContentsRecord(Record):
    """contents.json."""

    run_id: Name
    everything: bool
    root_hash: Sha256
    lineage: dict[Key, dict[Key, Sha256]]
    entries: list[tuple[Key, Size, Sha256]]
