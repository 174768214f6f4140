"""The manifest: the one record whose creation commits a slot, and its canonical JSON.

A manifest names everything that belongs to its slot, with digests, and carries a digest of itself.
It is written once and never changed, so equal records have equal bytes. This module only shapes and
checks; reading and writing objects belongs to storage.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from schemas import Malformed, NewerVersion

FORMAT = "marin-rl/manifest"
VERSION = 1


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces: equal values have equal bytes.

    Raises ValueError on NaN and infinities, TypeError on what JSON cannot say.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def sha256_of(data: bytes) -> str:
    """SHA-256 of `data`, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sealed_json(record: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `record` with `digest`, the SHA-256 of the same without it, added."""
    return canonical_json({**record, "digest": sha256_of(canonical_json(record))})


def open_sealed_json(data: bytes, *, format: str, version: int) -> dict[str, Any]:
    """The record inside `sealed_json`, without its digest.

    Raises Malformed when this is not such a record, names another format, or does not match its
    digest; NewerVersion when its version is above `version`.
    """
    try:
        record = json.loads(data)
    except ValueError as error:
        raise Malformed(f"expected a JSON object of format {format}: {error}") from None
    if not isinstance(record, dict) or record.get("format") != format:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise Malformed(f"expected format {format!r}, found {found!r}")
    found = record.get("version")
    if not isinstance(found, int) or found < 1:
        raise Malformed(f"expected a version from 1 to {version}, found {found!r}")
    if found > version:
        raise NewerVersion(
            f"{format} version {found} is newer than {version}, the newest this software reads: "
            "upgrade marin-rl"
        )
    digest = record.pop("digest", None)
    if digest != sha256_of(canonical_json(record)):
        raise Malformed(f"the record does not match its own digest ({digest!r}): it was altered")
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One object of a slot: `name` is relative to the slot, `bytes` its size.

    `rows`, `minima` and `maxima` summarise tables, and are empty for other parts.
    """

    name: str
    bytes: int
    sha256: str
    rows: int | None = None
    minima: Mapping[str, int | float] = field(default_factory=dict)
    maxima: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parent:
    """A committed slot that this one was made from, by the SHA-256 of its commit object."""

    slot: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a slot consists of, what it was made from, and by which attempt of which code.

    `fingerprint` says what the content is decided by, `attempt` who wrote it; `created_at` is UTC
    in ISO 8601; `totals` are numbers for people and readers; `extra` is the slot's own.
    """

    slot: str
    attempt: str
    fingerprint: str
    created_at: str
    code: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    parents: tuple[Parent, ...] = ()
    parts: tuple[Part, ...] = ()
    totals: Mapping[str, int | float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    @property
    def sha256(self) -> str:
        """SHA-256 of this manifest's bytes: what a child names its parent by."""
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
        record = open_sealed_json(data, format=FORMAT, version=VERSION)
        known = {item.name for item in fields(cls)}
        if set(record) != known:
            raise Malformed(f"expected the fields {sorted(known)}, found {sorted(record)}")
        try:
            record["parents"] = tuple(Parent(**parent) for parent in record["parents"])
            record["parts"] = tuple(Part(**part) for part in record["parts"])
            manifest = cls(**record)
        except TypeError as error:
            raise Malformed(f"a parent or part has the wrong fields: {error}") from None
        if manifest.to_json() != data:
            raise Malformed("the manifest is not canonical JSON: it was not written by marin-rl")
        return manifest


def _plain(record: Manifest | Parent | Part) -> dict[str, Any]:
    """The fields of a record by name, none of them copied as `asdict` would."""
    return {item.name: getattr(record, item.name) for item in fields(record)}
