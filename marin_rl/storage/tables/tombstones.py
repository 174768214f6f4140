"""The tombstone of a slot: which parts retention has removed, and by which rule.

A pruned checkpoint keeps its manifest, so its digests, totals and place in the lineage stay; its
arrays are gone. `pruned.json` next to the manifest says so. It is created before the first file is
deleted, and like everything visible it never changes: what it names may be absent, nothing else.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.storage.commits import commit_object, new_attempt, record_errors
from marin_rl.storage.stores.filesystem import ObjectStore
from schemas.manifests import Manifest, Part, open_record, sealed_json
from schemas.records import TombstoneRecord

FORMAT = "marin-rl/pruned"
VERSION = 1
PRUNED = "pruned.json"


def array_parts(manifest: Manifest) -> list[Part]:
    """Parts of a checkpoint that hold its arrays: the files below the attempt's folder."""
    folder = f"{manifest.attempt}/"
    # By the folder of the attempt: scores, and other parts of the slot, lie outside of it.
    return [part for part in manifest.parts if part.name.startswith(folder)]


def commit_tombstone(
    store: ObjectStore, manifest: Manifest, rule: Mapping[str, Any]
) -> frozenset[str]:
    """Record that the arrays of a checkpoint may be deleted; names of the recorded parts."""
    attempt = new_attempt()
    record = {
        "format": FORMAT,
        "version": VERSION,
        "slot": manifest.slot,
        "manifest": manifest.sha256,
        "parts": [part.name for part in array_parts(manifest)],
        "rule": dict(rule),
        "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "attempt": attempt,
    }
    key = f"{manifest.slot}/{PRUNED}"
    source = store.url_of(key)
    # Two processes may prune at once: the first tombstone is the one that both follow.
    data = commit_object(
        store,
        key,
        sealed_json(record),
        attempt=attempt,
        fingerprint=manifest.sha256,
        identify=lambda other: itemgetter("attempt", "manifest")(_parsed(other, source)),
    )
    return frozenset(_parsed(data, source)["parts"])


def pruned_parts(store: ObjectStore, slot: str, sha256: str | None = None) -> frozenset[str]:
    """Names of the parts that a tombstone says are gone; none without a tombstone.

    `sha256` is that of the slot's manifest. Raises CorruptObject, also for a tombstone of another
    manifest; NewerSchema.
    """
    key = f"{slot}/{PRUNED}"
    try:
        data = store.read(key)
    except ObjectMissing:
        return frozenset()
    tombstone = _parsed(data, store.url_of(key))
    # A tombstone of another manifest would make gc delete arrays that are still wanted.
    if sha256 is not None and tombstone["manifest"] != sha256:
        raise CorruptObject(
            f"{store.url_of(key)}: expected the tombstone of the manifest {sha256}, found that of "
            f"{tombstone['manifest']}"
        )
    return frozenset(tombstone["parts"])


def _parsed(data: bytes, source: str) -> dict[str, Any]:
    with record_errors(source):
        return open_record(data, TombstoneRecord, format=FORMAT, version=VERSION)
