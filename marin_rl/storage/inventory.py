"""What lies in a run's folder, sorted by slot: the common ground of gc and fsck. Changes nothing.

A slot is a folder of a known kind and number. What its manifest names, what was pruned from it, and
which attempt wrote the rest, is told here; what is to be done about it is not.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from marin_rl.errors import CorruptObject, NewerSchema
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.filesystem import ObjectStore
from marin_rl.storage.objects import is_private
from marin_rl.storage.pruning import PRUNED, pruned_parts
from marin_rl.storage.slots import checkpoint_slot, metrics_key, round_of
from schemas.manifests import Manifest

MANIFEST = "manifest.json"
KINDS: Mapping[str, str] = {
    "rollouts": "round", "batches": "round", "checkpoints": "round", "evals": "round",
    "sft": "step", "reward_model": "step",
}  # fmt: skip
PAIRS = "pairs"  # what a reward model learns from: one slot, without a number

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|\.probe-[0-9a-f]{16}")
_SHARD = re.compile(r"shard-\d{4,}\.parquet")
_NUMBERED = re.compile(r"(round|step)-\d{5,}")


def is_temporary(key: str) -> bool:
    """Whether this is what a killed writer or probe leaves behind."""
    return _TEMPORARY.fullmatch(key.rpartition("/")[2]) is not None


def is_shard(name: str) -> bool:
    """Whether this is a rollout shard, which is a commit of its own."""
    return _SHARD.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot: `names` of its objects relative to it, its manifest if it is committed.

    `fault` says why the manifest or the tombstone, which `damaged` names, cannot be read; such a
    slot is neither committed nor uncommitted.
    `pruned` are the parts that retention has removed, or is about to.
    """

    slot: str
    names: tuple[str, ...]
    manifest: Manifest | None = None
    sha256: str | None = None
    fault: CorruptObject | NewerSchema | None = None
    damaged: str = ""
    pruned: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """The folder it lies in: rollouts, batches, checkpoints, evals, …"""
        return self.slot.partition("/")[0]

    @property
    def number(self) -> int:
        """Its round, or its step; 0 for what has neither."""
        return _number(self.slot)

    def key(self, name: str) -> str:
        """The key of one of its objects."""
        return f"{self.slot}/{name}"

    def unnamed(self) -> list[str]:
        """Objects that are neither commits, nor parts, nor temporary."""
        named = {MANIFEST, PRUNED}
        if self.manifest is not None:
            named |= {part.name for part in self.manifest.parts}
        return [
            name
            for name in self.names
            if name not in named
            and not is_temporary(name)
            and not (self.kind == "rollouts" and is_shard(name))
        ]


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All keys of a run, fresh when it was taken; `slots` by name, ascending."""

    keys: tuple[str, ...]
    slots: Sequence[Slot]

    @cached_property
    def temporary(self) -> list[str]:
        """Files of killed writers and probes, wherever they lie."""
        return [key for key in self.keys if is_temporary(key)]

    @cached_property
    def strays(self) -> list[str]:
        """Objects below a folder of slots that lie in no slot."""
        tops = {*KINDS, "metrics"}
        return [
            key
            for key in self.keys
            if key.partition("/")[0] in tops and "/" in key and _slot_of(key) is None
            if not is_private(key) and not _is_metrics(key)
        ]

    def of_kind(self, kind: str) -> list[Slot]:
        """The slots of one kind, ascending."""
        return [slot for slot in self.slots if slot.kind == kind]


def take_inventory(store: ObjectStore) -> Inventory:
    """List a run once and read every manifest. Raises StoreUnavailable, StorageError.

    A listing is no instant: a round that is played meanwhile may be in it by its later commits
    alone. What those prove to be committed is looked for again before it counts as absent.
    """
    keys = set(store.list())
    found: dict[str, list[str]] = {}
    for key in keys:
        slot = _slot_of(key)
        if slot is not None:
            found.setdefault(slot, []).append(key.removeprefix(f"{slot}/"))
    slots = {slot: read_slot(store, slot, sorted(names)) for slot, names in found.items()}
    looked: set[str] = set()
    while late := _proven(slots, keys) - looked:
        looked |= late
        for slot in late:
            there = store.list(slot)
            keys.update(there)
            if there:
                names = [key.removeprefix(f"{slot}/") for key in there]
                slots[slot] = read_slot(store, slot, names)
    if closed := _closed(slots) - keys:
        keys |= closed & set(store.list("metrics"))
    ordered = [slots[slot] for slot in sorted(slots, key=_order)]
    return Inventory(keys=tuple(sorted(keys)), slots=ordered)


def _proven(slots: Mapping[str, Slot], keys: Iterable[str]) -> set[str]:
    """Slots that must be committed and were not seen so: parents, and what a closed round made."""
    seen = {name for name, slot in slots.items() if slot.manifest or slot.fault}
    named = {
        parent.slot
        for slot in slots.values()
        if slot.manifest is not None
        for parent in slot.manifest.parents
    }
    rounds = (round_of(key.rpartition("/")[2]) for key in keys if _is_metrics(key))
    trained = {checkpoint_slot(round + 1) for round in rounds if round is not None}
    return (named | trained) - seen


def _closed(slots: Mapping[str, Slot]) -> set[str]:
    """Metrics of the rounds after which another one was trained."""
    rounds = {slot.number for slot in slots.values() if slot.kind == "checkpoints" and slot.sha256}
    return {metrics_key(round - 1) for round in rounds if round and round + 1 in rounds}


def read_slot(store: ObjectStore, slot: str, names: Sequence[str]) -> Slot:
    """A slot with the objects `names`, its manifest read if one is among them."""
    listed = tuple(names)
    if MANIFEST not in listed:
        return Slot(slot=slot, names=listed)
    looked_at = MANIFEST
    try:
        read = read_manifest(store, slot)
        if read is None:
            return Slot(slot=slot, names=listed)
        looked_at = PRUNED
        gone = pruned_parts(store, slot, read[1]) if PRUNED in listed else frozenset()
    except (CorruptObject, NewerSchema) as fault:
        return Slot(slot=slot, names=listed, fault=fault, damaged=looked_at)
    return Slot(slot=slot, names=listed, manifest=read[0], sha256=read[1], pruned=gone)


def _slot_of(key: str) -> str | None:
    parts = key.split("/")
    if parts[0] == PAIRS and len(parts) == 2:
        return PAIRS
    if len(parts) < 3 or parts[0] not in KINDS:
        return None
    match = _NUMBERED.fullmatch(parts[1])
    if match is None or match[1] != KINDS[parts[0]]:
        return None
    return f"{parts[0]}/{parts[1]}"


def _order(slot: str) -> tuple[str, int]:
    return slot.partition("/")[0], _number(slot)


def _number(slot: str) -> int:
    return 0 if slot == PAIRS else int(slot.rpartition("-")[2])


def _is_metrics(key: str) -> bool:
    top, _, name = key.partition("/")
    return top == "metrics" and re.fullmatch(r"round-\d{5,}\.parquet", name) is not None
