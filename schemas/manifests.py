"""The manifest: the record whose creation commits a slot, and its canonical JSON.

A manifest names everything that belongs to its slot, with digests, and carries a digest of itself:
equal records have equal bytes. Reading and writing objects belongs to storage.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from schemas import Malformed, NewerVersion
from schemas.records import Key, Moment, Name, Number, Sha256, Size, Text, validated
from schemas.strict_json import LIMITS, parse_json

FORMAT = "marin-rl/manifest"
VERSION = 1
RECORD_BYTES_MAX = LIMITS.bytes_max

Shape = TypeVar("Shape", bound=BaseModel)


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON, sorted, without spaces or NaN: equal values have equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def sha256_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sealed_json(record: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `record`, with the SHA-256 of the same as its `digest`."""
    return canonical_json({**record, "digest": sha256_of(canonical_json(record))})


def open_sealed_json(data: bytes, *, format: str, version: int) -> dict[str, Any]:
    """The record inside `sealed_json`, without its digest.

    Raises Malformed when this is not such a record, names another format, or does not match its
    digest; NewerVersion when its version is above `version`.
    """
    return _opened(data, format, version)[0]


def open_record(data: bytes, shape: type[Shape], *, format: str, version: int) -> dict[str, Any]:
    """As `open_sealed_json`, by a model of the fields. Raises Malformed naming the field."""
    record, unsealed = _opened(data, format, version)
    validated(lambda: shape.model_validate_json(unsealed))
    return record


def _opened(data: bytes, format: str, version: int) -> tuple[dict[str, Any], bytes]:
    """The record without its digest, and its canonical JSON."""
    if len(data) > RECORD_BYTES_MAX:
        raise Malformed(
            f"expected a record of {RECORD_BYTES_MAX} bytes at most, found {len(data)} bytes"
        )
    try:
        record = parse_json(data)
    except Malformed as error:
        raise Malformed(f"expected a JSON object of format {format}: {error}") from None
    if not isinstance(record, dict) or record.get("format") != format:
        other = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise Malformed(f"expected format {format!r}, found {_shown(other)}")
    stored = record.get("version")
    if not isinstance(stored, int) or isinstance(stored, bool) or stored < 1:
        raise Malformed(f"expected a version from 1 to {version}, found {_shown(stored)}")
    if stored > version:
        raise NewerVersion(
            f"{format} version {_shown(stored)} is newer than {version}, the newest this software "
            "reads: upgrade marin-rl"
        )
    digest = record.pop("digest", None)
    unsealed = canonical_json(record)
    if digest != sha256_of(unsealed):
        raise Malformed(
            f"the record does not match its own digest ({_shown(digest)}): it was altered"
        )
    return record, unsealed


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 100 else f"{text[:100]}…"


_STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An object of a slot, `name` relative to it; `rows`, `minima` and `maxima` are of tables."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Key
    bytes: Size
    sha256: Sha256
    rows: Size | None = None
    minima: Mapping[str, Number] = field(default_factory=dict)
    maxima: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parent:
    """A committed slot that this one was made from, by the SHA-256 of its commit object."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    slot: Key
    sha256: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Parts of a slot, its parents, and the attempt and code that wrote it.

    `fingerprint` is a digest of what decides the content, `attempt` names the writer; `created_at`
    is UTC in ISO 8601; `totals` are numbers for people and readers; `extra` is the slot's own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    slot: Key
    attempt: Name
    fingerprint: Text
    created_at: Moment
    code: Mapping[str, Text] = field(default_factory=dict)
    libraries: Mapping[str, Text] = field(default_factory=dict)
    parents: tuple[Parent, ...] = ()
    parts: tuple[Part, ...] = ()
    totals: Mapping[str, Number] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    @property
    def sha256(self) -> str:
        return sha256_of(self.to_json())

    def to_json(self) -> bytes:
        """The bytes that are stored. Raises ValueError on NaN or infinite numbers."""
        lists = {
            "parents": [_plain(parent) for parent in self.parents],
            "parts": [_plain(part) for part in self.parts],
        }
        return sealed_json(_plain(self) | lists)

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """The manifest that `data` is. Raises Malformed or NewerVersion."""
        record, unsealed = _opened(data, FORMAT, VERSION)
        known = {item.name for item in fields(cls)}
        if set(record) != known:
            raise Malformed(f"expected the fields {sorted(known)}, found {_shown(sorted(record))}")
        if canonical_json({**record, "digest": sha256_of(unsealed)}) != data:
            raise Malformed("the manifest is not canonical JSON: it was not written by marin-rl")
        manifest = validated(lambda: _MANIFEST.validate_json(unsealed))
        if len({part.name for part in manifest.parts}) < len(manifest.parts):
            raise Malformed("expected parts with names of their own, found one twice")
        return manifest


_MANIFEST = TypeAdapter(Manifest)


def _plain(record: Manifest | Parent | Part) -> dict[str, Any]:
    # None of them is copied, as `asdict` would.
    return {item.name: getattr(record, item.name) for item in fields(record)}
