"""Heartbeats of the servers of a run, and the checkpoint that a trainer has them serve.

Both are private objects below `.fleet/`, written again and again by one writer each. They commit
nothing: without them a run is what it is, gc may delete them at any time, and a server that is
alive writes its own again. Whether a server is alive is never read off a clock: who wants to know
asks the server. Where a run has an API token, records are signed with it, so that who can write
into a root, and knows no token, can neither collect prompts nor send servers elsewhere. A heartbeat
ages by the trainer's rounds: it repeats the session and version of the target that its server read
last, so that a copy of an old one, put back, leads no request to who has the address now.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from marin_rl.config import Config, fingerprint_fields
from marin_rl.errors import CorruptObject, ObjectMissing, StorageError
from marin_rl.storage.commits import record_errors
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.stores.filesystem import ObjectStore
from schemas.fleet import HeartbeatEnvelope, HeartbeatRecord, TargetEnvelope, TargetRecord
from schemas.manifests import canonical_json, open_record, sealed_json, sha256_of
from schemas.records import Record
from schemas.strict_json import parse_json

FLEET = ".fleet"
TARGET_KEY = f"{FLEET}/target.json"
VERSION = 1
READERS = 16  # a listing names the heartbeats, and each is a request of its own in a bucket

Item = TypeVar("Item")

_SUFFIX = ".heartbeat.json"
_SETTINGS = ("policy.compute_dtype", "policy.context_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Self-description of a server: see `schemas.fleet.HeartbeatRecord`."""

    server: str
    url: str
    run_sha256: str
    model: str
    weight_version: int
    parameters_digest: str
    labels: Mapping[str, str]
    code: str
    tokenizer: str
    chat_template: str
    settings: Mapping[str, Any]
    beat: int
    slots: int
    busy: int
    queued: int
    tokens_per_second: float
    started_at: float
    beat_at: float
    idle: float | None = None
    base_digest: str | None = None
    adapters: Sequence[str] | None = None
    session: str | None = None
    target_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The checkpoint that servers are to serve: see `schemas.fleet.TargetRecord`."""

    run_sha256: str
    version: int
    through: int
    parameters_digest: str
    session: str | None = None

    def aged(self, heartbeat: Heartbeat, version: int) -> str:
        """Why a heartbeat is too old for those who sample by `version`; empty where it is not.

        Its server must have read a target of this session, of that version or a later one.
        """
        # The target may be an old one that was put back, too.
        if self.version < version:
            return f"the target of the run is version {self.version}, expected {version} or later"
        if not self.session or heartbeat.session != self.session:
            return "its heartbeat is older than this start of the trainer"
        if heartbeat.target_version is None or heartbeat.target_version < version:
            return f"its heartbeat is older than the target of version {version}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Facts that a server and its trainer must have in common, by digest; `settings` by key."""

    run_sha256: str
    code: str
    tokenizer: str
    chat_template: str
    settings: Mapping[str, Any]

    def refusal(self, heartbeat: Heartbeat) -> str:
        """Why a server may not sample for this run; empty where it may."""
        # Digests first: settings of another run or code need no comparison.
        for what, expected, actual in (
            ("another run of this name", self.run_sha256, heartbeat.run_sha256),
            ("other code", self.code, heartbeat.code),
            ("another tokenizer", self.tokenizer, heartbeat.tokenizer),
            ("another chat template", self.chat_template, heartbeat.chat_template),
        ):
            if actual != expected:
                return f"{what}: expected digest {expected[:12]}, found {actual[:12]}"
        keys = sorted(set(self.settings) | set(heartbeat.settings))
        for key in keys:
            expected, actual = self.settings.get(key), heartbeat.settings.get(key)
            if expected != actual:
                return (
                    f"another configuration: {key} is {actual!r}, expected {expected!r} (digests "
                    f"{_digest(heartbeat.settings)[:12]} and {_digest(self.settings)[:12]})"
                )
        return ""


def _digest(settings: Mapping[str, Any]) -> str:
    return sha256_of(canonical_json(dict(settings)))


def served_settings(config: Config) -> dict[str, Any]:
    """Settings, by dotted key, that decide how a server of a run samples."""
    flat = _flat(fingerprint_fields(config.inference), "inference.")
    tree = _flat(config.policy.model_dump(mode="json"), "policy.")
    return flat | {key: tree[key] for key in _SETTINGS}


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result


def run_sha256(folder: ObjectStore) -> str:
    """SHA-256 of a run's record: another run under the same name has another."""
    return sha256_of(folder.read(RUN_KEY))


class SignedRecords:
    """Records below `.fleet/` in a run's own folder, read and written with one API token."""

    def __init__(self, folder: ObjectStore, api_key: str | None) -> None:
        self.folder, self._key = folder, api_key

    @property
    def api_key(self) -> str | None:
        """The token that records are signed with; None where there is none."""
        return self._key

    def signed(self, kind: str, record: Mapping[str, Any]) -> bytes:
        """The bytes of a record."""
        full = {kind: dict(record), "format": f"marin-rl/{kind}", "version": VERSION}
        return sealed_json({**full, "signature": self._signature(full)})

    def opened(self, kind: str, shape: type[Record], key: str) -> dict[str, Any]:
        """The record of an object. Raises ObjectMissing, CorruptObject, NewerSchema."""
        data, source = self.folder.read(key), self.folder.url_of(key)
        with record_errors(source):
            record = open_record(data, shape, format=f"marin-rl/{kind}", version=VERSION)
        signature = record.pop("signature", "")
        # In constant time, and before any field is used: to write into the folder is not yet to be
        # trusted.
        if not hmac.compare_digest(str(signature), self._signature(record)):
            raise CorruptObject(
                f"{source}: expected a record signed with this process's API token, found "
                f"{'another signature' if signature else 'none'}: set the same token on the "
                "trainer, on every server and on every worker (inference.api_key_variable)"
            )
        return record[kind]

    def each(self, suffix: str, read: Callable[[str], Item | None]) -> list[Item]:
        """Results of `read`, by the name of each record with a suffix; None is left out.

        Raises StoreUnavailable.
        """
        names = [name for name in self.folder.children(FLEET) if name.endswith(suffix)]
        # At once: in a bucket each record is a request, and a fleet has many.
        with ThreadPoolExecutor(min(READERS, len(names) or 1)) as pool:
            return [item for item in pool.map(read, names) if item is not None]

    def _signature(self, record: Mapping[str, Any]) -> str:
        """Code of a record under the API token; empty where there is no token."""
        if self._key is None:
            return ""
        # Over the canonical bytes: another order of keys is the same record.
        return hmac.digest(self._key.encode(), canonical_json(dict(record)), "sha256").hex()


class FleetBoard(SignedRecords):
    """The records of the servers of a run, and of what they are to serve."""

    def announce(self, heartbeat: Heartbeat) -> None:
        """Write a server's heartbeat in the place of its last one. Raises StorageError."""
        self.folder.replace(_key(heartbeat.server), self.signed("heartbeat", asdict(heartbeat)))

    def withdraw(self, server: str) -> None:
        """Remove a server's heartbeat. Raises StorageError."""
        self.folder.delete(_key(server))

    def heartbeats(self) -> "list[Heartbeat | Unreadable]":
        """Every heartbeat, the last one of each address; what cannot be read says why.

        Raises StoreUnavailable.
        """
        read = self.each(_SUFFIX, self._heartbeat)
        # A server that was killed and started again at its address has two; its clock is one.
        latest: dict[str, Heartbeat] = {}
        for item in read:
            if isinstance(item, Heartbeat):
                before = latest.setdefault(item.url, item)
                latest[item.url] = max(before, item, key=lambda each: each.started_at)
        return [*latest.values(), *(item for item in read if isinstance(item, Unreadable))]

    def aim(self, target: Target) -> None:
        """Write which checkpoint servers are to serve. Raises StorageError."""
        said = {name: value for name, value in asdict(target).items() if value is not None}
        self.folder.replace(TARGET_KEY, self.signed("target", said))

    def release(self) -> None:
        """Let servers go on to the newest checkpoint. Raises StorageError."""
        self.folder.delete(TARGET_KEY)

    def target(self) -> Target | None:
        """The checkpoint that servers are to serve, None for the newest.

        Raises CorruptObject for a record of another run or token, StoreUnavailable.
        """
        try:
            record = self.opened("target", TargetEnvelope, TARGET_KEY)
        except ObjectMissing:
            return None
        fields: dict[str, Any] = {name: record.get(name) for name in TargetRecord.model_fields}
        return Target(**fields)

    def _heartbeat(self, name: str) -> "Heartbeat | Unreadable | None":
        try:
            record = self.opened("heartbeat", HeartbeatEnvelope, f"{FLEET}/{name}")
        except ObjectMissing:
            return None  # withdrawn since the listing
        except StorageError as error:
            if error.transient:
                raise
            return Unreadable(name=name, error=str(error))
        fields: dict[str, Any] = {name: record.get(name) for name in HeartbeatRecord.model_fields}
        return Heartbeat(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A heartbeat that cannot be taken, and why."""

    name: str
    error: str


def heartbeat_age_s(key: str, data: bytes, now: float) -> float | None:
    """Seconds since a heartbeat was written, by its writer's clock; None for other objects."""
    if not (key.endswith(_SUFFIX) and key.startswith(f"{FLEET}/")):
        return None
    try:
        return now - float(parse_json(data)["heartbeat"]["beat_at"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _key(server: str) -> str:
    return f"{FLEET}/{server}{_SUFFIX}"
