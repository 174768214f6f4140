"""Process of a world (simulator.py): a run, by the real code of commits.py.

The same slots in the same order as the real stages, with a few bytes in each.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from support.simulated_bucket import rollouts_of

from marin_rl.errors import ObjectMissing, StorageError
from marin_rl.storage.commits import (
    commit_object,
    find_commit,
    fingerprint,
    manifest_of,
    new_manifest,
    parent_of,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import checkpoint_slot
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.types import SlotRef
from schemas.manifests import Part, sha256_of

if TYPE_CHECKING:
    from support.simulator import Process, World


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
            identify=_identify,
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


def _identify(data: bytes) -> tuple[str, str]:
    record = json.loads(data)
    return record["attempt"], record["fingerprint"]
