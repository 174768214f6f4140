"""Simpler commit protocols, each wrong in its own way: what the laws must catch."""

from typing import Any

from marin_rl.config import RetentionConfig
from marin_rl.errors import CommitConflict
from marin_rl.storage.commits import commit_manifest, manifest_key, parse_manifest
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome
from marin_rl.storage.upkeep.gc import Collection
from marin_rl.storage.upkeep.inventory import take_inventory
from schemas.manifests import Manifest

COLLECTED = Collection(garbage=(), live=False, skipped=(), deleted=True)


def exists_then_put(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: looks, and then writes over any object that came in between."""
    key = manifest_key(manifest.slot)
    if key.rpartition("/")[2] in store.children(manifest.slot):
        return parse_manifest(store.read(key), key)
    store.put_part(key, manifest.to_json())
    return manifest


def delete_on_conflict(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: makes room for itself."""
    key = manifest_key(manifest.slot)
    while store.put_if_absent(key, manifest.to_json()) is not PutOutcome.CREATED:
        store.delete(key)
    return manifest


def trusts_exists(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: takes EXISTS for another's, though it may be our own write."""
    if store.put_if_absent(manifest_key(manifest.slot), manifest.to_json()) is PutOutcome.EXISTS:
        raise CommitConflict("it exists")
    return manifest


def trusts_silence(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: takes UNKNOWN for success, and never reads back."""
    store.put_if_absent(manifest_key(manifest.slot), manifest.to_json())
    return manifest


def fixed_names(_attempt: str, name: str) -> str:
    """Wrong: two attempts write the same files."""
    return name


def one_try(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Right, for what it says is true: the deadline is over at once."""
    return commit_manifest(store, manifest, deadline_s=0, sleep=lambda _: None)


def gc_at_once(run: Run, _rule: RetentionConfig, **_: Any) -> Collection:
    """Wrong: deletes what nothing names yet, also of processes that are about to name it."""
    for slot in take_inventory(run.folder).slots:
        for name in slot.unnamed():
            run.folder.delete(slot.key(name))
    return COLLECTED


def gc_without_a_word(run: Run, _rule: RetentionConfig, **_: Any) -> Collection:
    """Wrong: gives arrays up, and leaves no tombstone that says so."""
    for slot in take_inventory(run.folder).of_kind("checkpoints")[:-2]:
        for part in slot.manifest.parts if slot.manifest else ():
            run.folder.delete(slot.key(part.name))
    return COLLECTED
