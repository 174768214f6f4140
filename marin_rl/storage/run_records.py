"""run.json: the record that makes a folder a run, written once; its configuration and ancestors.

Leaves out the slots of a run and their references (runs.py).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from marin_rl.config import (
    Config,
    differences,
    fingerprint_fields,
    free_keys,
    outward_keys,
    parse_config,
    without,
)
from marin_rl.errors import ConfigError, CorruptObject, NewerSchema, ObjectMissing
from marin_rl.storage.commits import commit_object, fingerprint, new_attempt
from marin_rl.storage.provenance import code_version, library_versions
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.forked_store import Ancestor
from schemas import Malformed, NewerVersion
from schemas.manifests import canonical_json, open_record, sealed_json
from schemas.records import RunRecord

FORMAT = "marin-rl/run"
VERSION = 2  # 2 has `ancestors`; runs without any are written as 1, which older software reads
RUN_KEY = "run.json"
SEED_BITS = 48


def read_record(store: ObjectStore) -> dict[str, Any] | None:
    """Parsed run.json of a run's folder; None where there is none.

    Raises CorruptObject, NewerSchema.
    """
    try:
        data = store.read(RUN_KEY)
    except ObjectMissing:
        return None
    return parse_record(data, store.url_of(RUN_KEY))


def parse_record(data: bytes, source: str) -> dict[str, Any]:
    """The record in the bytes of a run.json. Raises CorruptObject, NewerSchema naming `source`."""
    try:
        return open_record(data, RunRecord, format=FORMAT, version=VERSION)
    except NewerVersion as error:
        raise NewerSchema(f"{source}: {error}") from None
    except Malformed as error:
        raise CorruptObject(f"{source}: {error}") from None


def ancestors_in(record: Mapping[str, Any]) -> tuple[Ancestor, ...]:
    """The runs that a fork's run.json names, ascending; none for other runs."""
    return tuple(Ancestor(**item) for item in record.get("ancestors", ()))


def create_record(
    store: ObjectStore, config: Config, ancestors: Sequence[Ancestor] = ()
) -> dict[str, Any]:
    """Commit run.json; returns the record of the process that was first.

    Raises CommitUnknown, StorageError.
    """
    attempt = new_attempt()
    forked = {"ancestors": [asdict(ancestor) for ancestor in ancestors]} if ancestors else {}
    record = {
        **forked,
        "format": FORMAT,
        "version": VERSION if ancestors else 1,
        "run_id": config.run_id,
        "config": config.model_dump(mode="json"),
        "content_digest": fingerprint("run", fingerprint_fields(config)),
        "seeds": {"run": config.seed},
        "code": code_version(),
        "libraries": library_versions(),
        "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "attempt": attempt,
    }
    source = store.url_of(RUN_KEY)

    def identify(data: bytes) -> tuple[str, str]:
        # The first record is adopted; differences are then reported key by key.
        return str(parse_record(data, source)["attempt"]), config.run_id

    data = commit_object(
        store,
        RUN_KEY,
        sealed_json(record),
        attempt=attempt,
        fingerprint=config.run_id,
        identify=identify,
    )
    return parse_record(data, source)


def stored_config(record: Mapping[str, Any], source: str) -> Config:
    """The configuration in a record, without what is its user's alone. Raises ConfigError."""
    tree = record["config"]
    return parse_config(
        without(tree, outward_keys()) if isinstance(tree, Mapping) else tree, source
    )


def check_content(record: Mapping[str, Any], config: Config, source: str) -> None:
    """Raise ConfigError naming the keys unless the record is of this configuration's content."""
    lines = differences(
        fingerprint_fields(stored_config(record, source)), fingerprint_fields(config)
    )
    if lines:
        raise ConfigError(
            f"run {config.run_id!r} exists with another content ({source}); these keys differ:\n  "
            + "\n  ".join(lines)
            + "\nUse another run_id, or the values the run was started with. These may differ "
            f"freely: {', '.join(free_keys())}"
        )


def seed_from(config: Config, *parts: str | int) -> int:
    """See `Run.seed_of`; for what is no run, and has no folder."""
    digest = hashlib.sha256(canonical_json([config.seed, config.run_id, *parts])).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
