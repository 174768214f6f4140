"""The bucket of a world (simulator.py): its objects, and the laws of the commit protocol.

Every write and every delete is checked; an AssertionError names the law that was broken.
"""

import json

from marin_rl.storage.commits import manifest_key
from marin_rl.storage.runs import checkpoint_slot, round_of
from marin_rl.storage.stores.filesystem import PutOutcome
from marin_rl.storage.tables.tombstones import PRUNED
from schemas.manifests import Manifest, sha256_of


def is_commit(key: str) -> bool:
    """True if the key commits something: these never change."""
    return key.endswith(("/manifest.json", PRUNED)) or "/shard-" in key


def rollouts_of(shard: bytes) -> list[str]:
    """The names of the rollouts in a shard of this world."""
    record = json.loads(shard)
    return [f"{record['key']}/{record['attempt']}/{index}" for index in range(2)]


class Bucket:
    """The objects, and the laws they keep: an AssertionError names the law that was broken."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.referenced: dict[str, str] = {}
        self.consumed: dict[str, str] = {}
        self.writes = 0

    def create(self, key: str, data: bytes) -> PutOutcome:
        """Create atomically, as an honest store does."""
        if key in self.objects:
            return PutOutcome.EXISTS
        self.write(key, data)
        return PutOutcome.CREATED

    def write(self, key: str, data: bytes) -> None:
        """Write, replacing any object there."""
        before = self.objects.get(key)
        if before is not None and before != data:
            assert not is_commit(key), f"a visible key changed: {key}"
            assert key not in self.referenced, f"a part of a visible manifest changed: {key}"
        self.writes += 1
        self.objects[key] = data
        if key.endswith("/manifest.json") and before is None:
            self._note(key, data)

    def delete(self, key: str) -> None:
        """Remove what is there; of a visible manifest only what a tombstone gave up."""
        assert not (key in self.objects and is_commit(key)), f"a visible key vanished: {key}"
        if (owner := self.referenced.get(key)) is not None:
            assert self.pruned(key), f"a part of a visible manifest vanished: {key}"
            number = round_of(owner.split("/")[1])
            assert number is not None
            needed = manifest_key(checkpoint_slot(number + 2))
            assert needed in self.objects, f"one of the last two checkpoints lost its arrays: {key}"
        self.objects.pop(key, None)

    def pruned(self, key: str) -> bool:
        """True if a tombstone says that this part may be gone."""
        slot = "/".join(key.split("/")[:2])
        tombstone = self.objects.get(f"{slot}/{PRUNED}")
        return (
            tombstone is not None and key.removeprefix(f"{slot}/") in json.loads(tombstone)["parts"]
        )

    def _note(self, key: str, data: bytes) -> None:
        manifest = Manifest.from_json(data)
        assert manifest_key(manifest.slot) == key, f"{key} is the manifest of {manifest.slot}"
        for parent in manifest.parents:
            above = self.objects.get(manifest_key(parent.slot))
            assert above is not None, f"{key} has a parent that is not committed"
            assert sha256_of(above) == parent.sha256, f"{key} has a parent that lost"
        for part in manifest.parts:
            name = f"{manifest.slot}/{part.name}"
            found = self.objects.get(name)
            assert found is not None, f"{key} names {name}, which does not exist"
            assert sha256_of(found) == part.sha256, f"{key} names other bytes in {name}"
            self.referenced[name] = key
            if manifest.slot.startswith("batches/"):
                self._consume(key, json.loads(found)["rollouts"])

    def _consume(self, key: str, names: list[str]) -> None:
        for name in names:
            assert name not in self.consumed, f"{name} is consumed twice"
            self.consumed[name] = key
