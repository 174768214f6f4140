"""Bucket and processes of a simulated world (simulator.py).

The bucket checks the laws of the commit protocol at every write and delete; an AssertionError names
the law that was broken. A process runs the real code of commits.py: the same slots in the same
order as the real stages, with a few bytes in each.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from marin_rl.errors import ObjectMissing, StorageError
from marin_rl.storage.commits import (
    commit_object,
    find_commit,
    fingerprint,
    manifest_key,
    manifest_of,
    new_manifest,
    parent_of,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import checkpoint_slot, round_of
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome
from marin_rl.storage.tables.tombstones import PRUNED
from marin_rl.types import SlotRef
from schemas.manifests import Manifest, Part, sha256_of


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


if TYPE_CHECKING:
    from storage.simulation.simulator import Process, World


class Pruned(StorageError):
    """A part that a process wanted to read was pruned, as a tombstone says."""


class Player:
    """A process's way through a run: the same order of commits as the real stages."""

    def __init__(self, world: "World", process: "Process", store: ObjectStore) -> None:
        self.world, self.process, self.store = world, process, store
        self._commits = 0

    def play(self) -> SlotRef:
        """All rounds; the last checkpoint."""
        checkpoint = self.slot("checkpoints/round-00000", (), {"arrays": {}})
        for round in range(self.world.shape.rounds):
            checkpoint = self.round(round, checkpoint)
        return checkpoint

    def round(self, round: int, checkpoint: SlotRef) -> SlotRef:
        """One round; its checkpoint."""
        name = f"round-{round:05d}"
        shards = [
            self.shard(f"rollouts/{name}/shard-{index:04d}.parquet", checkpoint)
            for index in range(self.world.shape.shards)
        ]
        sealed = self.sealed(f"rollouts/{name}", shards, checkpoint)
        batches = self.batches(f"batches/{name}", sealed)
        parts = {"arrays": {"round": round}, "more/scores": {}}
        above = (checkpoint, batches)
        return self.slot(checkpoint_slot(round + 1), above, parts, reads=checkpoint)

    def shard(self, key: str, checkpoint: SlotRef) -> SlotRef:
        """Commit a shard, which is its own commit."""
        decided = fingerprint("shard", {"key": key}, (parent_of(checkpoint),))
        attempt = self._attempt()
        record = {"key": key, "attempt": attempt, "fingerprint": decided}
        found = commit_object(
            self.store,
            key,
            json.dumps(record).encode(),
            attempt=attempt,
            fingerprint=decided,
            identify=identify,
            deadline_s=self.process.deadline_s,
            sleep=lambda _: None,
        )
        ref = SlotRef(slot=key, sha256=sha256_of(found), reused=False, summary={})
        self.world.acknowledge(ref)
        return ref

    def sealed(self, slot: str, shards: Sequence[SlotRef], checkpoint: SlotRef) -> SlotRef:
        """Commit the manifest of a round's shards, each of which is read again."""
        parts = [part_of(ref.slot.rpartition("/")[2], self.store.read(ref.slot)) for ref in shards]
        return self._commit(slot, (checkpoint,), parts, self._attempt())

    def batches(self, slot: str, sealed: SlotRef) -> SlotRef:
        """Commit what is consumed of a sealed round."""
        manifest = manifest_of(self.store, sealed)
        shards = (self.store.read(f"{sealed.slot}/{part.name}") for part in manifest.parts)
        names = [name for shard in shards for name in rollouts_of(shard)]
        return self.slot(slot, (sealed,), {"batches": {"rollouts": names}})

    def slot(
        self,
        slot: str,
        parents: Sequence[SlotRef],
        data: dict[str, Any],
        reads: SlotRef | None = None,
    ) -> SlotRef:
        """Commit a slot with parts of its own, under names unique to the attempt.

        No two attempts write the same bytes, as where files hold times.
        """
        decided = fingerprint("slot", {"slot": slot}, [parent_of(ref) for ref in parents])
        if (found := find_commit(self.store, slot, decided)) is not None:
            self.world.acknowledge(found)
            return found
        if reads is not None:
            self._read(reads)
        attempt = self._attempt()
        parts = []
        for name, record in data.items():
            value = json.dumps(record | {"attempt": attempt}).encode()
            unique = self.world.naming(attempt, name)
            self.store.put_part(f"{slot}/{unique}", value)
            parts.append(part_of(unique, value))
        return self._commit(slot, parents, parts, attempt, decided)

    def _read(self, ref: SlotRef) -> None:
        """Read the parts of a checkpoint. A late process may meet a pruned one: see Pruned."""
        for part in manifest_of(self.store, ref).parts:
            key = f"{ref.slot}/{part.name}"
            try:
                data = self.store.read(key)
            except ObjectMissing:
                assert self.world.bucket.pruned(key), f"a part is not there: {key}"
                raise Pruned(key) from None
            assert sha256_of(data) == part.sha256, f"a part has other bytes: {key}"

    def _commit(
        self,
        slot: str,
        parents: Sequence[SlotRef],
        parts: Sequence[Part],
        attempt: str,
        decided: str | None = None,
    ) -> SlotRef:
        above = [parent_of(ref) for ref in parents]
        shards = [[part.name, part.sha256] for part in parts]
        manifest = new_manifest(
            slot,
            attempt=attempt,
            fingerprint=decided or fingerprint("rollouts", {"shards": shards}, above),
            parents=above,
            parts=parts,
        )
        manifest = replace(manifest, libraries={}, code={})  # they cost time, and no law is theirs
        self.process.committing = True
        winner = self.world.commit(
            self.store, manifest, deadline_s=self.process.deadline_s, sleep=lambda _: None
        )
        self.process.committing = False
        ref = ref_of(winner, reused=winner.attempt != attempt)
        self.world.acknowledge(ref)
        return ref

    def _attempt(self) -> str:
        self._commits += 1
        number = int(self.process.name.rpartition("-")[2]) * 1000 + self._commits
        return f"{self.world.clock:%Y%m%dT%H%M%S}-{number:016x}"


def identify(data: bytes) -> tuple[str, str]:
    """(attempt, fingerprint) of an object of a simulation, which is JSON."""
    record = json.loads(data)
    return record["attempt"], record["fingerprint"]
