"""Inventory of a run's folder, sorted by slot: the basis of gc and fsck. Changes nothing.

A slot is a folder of a known kind and number. The inventory records the parts that its manifest
names, pruned parts, and attempts' other files. What to do about them is up to gc and fsck.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from marin_rl.errors import CorruptObject, NewerSchema, ObjectMissing
from marin_rl.storage import layout
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.fleet import FLEET
from marin_rl.storage.run_progress import optimizer_round
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.store import is_private
from marin_rl.storage.tables.parquet import TableReader, load_readable
from marin_rl.storage.tables.tombstones import PRUNED, pruned_parts
from schemas.manifests import Manifest, Part
from schemas.migrations import METRICS

MANIFEST = "manifest.json"
KINDS: Mapping[str, str] = {
    "rollouts": "round", "batches": "round", "checkpoints": "round", "evals": "round",
    "intakes": "round", "sft": "step", "reward_model": "step", "preference": "step",
}  # fmt: skip
PAIRS = "pairs"  # what is learned from: one slot, without a number
BASE = "base"  # what an adapter is of: likewise
PARENT = "a slot was made from it"

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|\.probe-[0-9a-f]{16}")
_NUMBERED = re.compile(r"(round|step)-\d{5,}")

Role = Literal[
    "record", "part", "shard", "late shard", "piece", "collected piece", "loose", "stray",
    "group", "partial group", "metrics", "rewards", "code", "heartbeat", "temporary", "other",
]  # fmt: skip
# Of what lies in these folders, and in no slot; in those of slots it is a stray.
_IN_FOLDERS: Mapping[str, Role] = {"rewards": "rewards", "code": "code", "metrics": "stray"}


@dataclass(frozen=True, slots=True)
class Item:
    """An object of a run and its role; `slot` and `name` where it lies in a slot.

    record: a manifest or a tombstone; part: its manifest names it; shard: of a round that is not
    sealed; late shard: not named by the manifest of its round; piece: groups of a shard, collected
    where the shard is committed; loose: anything else in a slot; stray: among the slots, in none;
    group, partial group: of a stream; temporary: what a killed writer or probe leaves behind.
    """

    key: str
    role: Role
    slot: "Slot | None" = None
    name: str = ""


def is_temporary(key: str) -> bool:
    return _TEMPORARY.fullmatch(key.rpartition("/")[2]) is not None


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A slot: `names` of its objects relative to it, its manifest if it is committed.

    `fault` says why the record that `damaged` names cannot be read: the slot is neither committed
    nor uncommitted then. `pruned` are parts that retention has removed, or is about to.
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
        return self.slot.partition("/")[0]

    @property
    def number(self) -> int:
        """Its round or step; 0 for slots that have neither."""
        return 0 if self.slot in (PAIRS, BASE) else int(self.slot.rpartition("-")[2])

    @property
    def whole(self) -> int:
        """The checkpoint that has the optimizer's state which this one leaves out; else itself."""
        earlier = None if self.manifest is None else optimizer_round(self.manifest)
        return self.number if earlier is None else earlier

    @property
    def seen(self) -> bool:
        # Committed, also by a manifest that cannot be read.
        return self.manifest is not None or self.fault is not None

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        return {} if self.manifest is None else {part.name: part for part in self.manifest.parts}

    @cached_property
    def gone(self) -> frozenset[str]:
        """Missing parts that its tombstone names."""
        return self.pruned - set(self.names)

    def key(self, name: str) -> str:
        return f"{self.slot}/{name}"

    def items(self) -> Iterator[Item]:
        """Its objects with their roles; also parts that are missing, but for pruned ones."""
        missing = [name for name in self.parts if name not in self.gone.union(self.names)]
        return (
            Item(self.key(name), self._role(name), self, name) for name in (*self.names, *missing)
        )

    def _role(self, name: str) -> Role:
        if name in (MANIFEST, PRUNED):
            return "record"
        if is_temporary(name):
            return "temporary"
        if name in self.parts:
            return "part"
        if self.kind == "rollouts" and layout.shard_of(name) is not None:
            return "shard" if self.manifest is None else "late shard"
        if self.kind == "rollouts" and (shard := layout.shard_of_piece(name)) is not None:
            # A sealed round has all its groups in shards: none of its pieces is needed.
            collected = self.manifest is not None or shard in self.names
            return "collected piece" if collected else "piece"
        return "loose"


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Keys of a run, fresh when it was taken; `slots` by name, ascending.

    `lost` are slots, and metrics by their keys, that are not committed though others prove that
    they were; each with the proof.
    """

    keys: tuple[str, ...]
    slots: Sequence[Slot]
    lost: Mapping[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def items(self) -> tuple[Item, ...]:
        outside = (Item(key, _role_outside(key)) for key in self.keys if _slot_of(key) is None)
        return (*(item for slot in self.slots for item in slot.items()), *outside)

    @cached_property
    def closed(self) -> frozenset[int]:
        return _closed_rounds(self.keys)

    @cached_property
    def sealed(self) -> frozenset[int]:
        return frozenset(s.number for s in self.of_kind("rollouts") if s.manifest is not None)

    def of_kind(self, kind: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.kind == kind]


def _role_outside(key: str) -> Role:
    top = key.partition("/")[0]
    if is_temporary(key):
        return "temporary"
    if layout.numbers_in(key):
        return "group"
    if layout.partial_of(key) is not None:
        return "partial group"
    if layout.metrics_round_of(key) is not None:
        return "metrics"
    if top == FLEET:
        return "heartbeat"
    if is_private(key) or "/" not in key:
        return "other"
    return "stray" if top in KINDS else _IN_FOLDERS.get(top, "other")


def take_inventory(store: ObjectStore) -> Inventory:
    """List a run once and read every manifest. Raises StoreUnavailable, StorageError.

    A listing is no instant: a round that is played meanwhile may be in it by its later commits
    alone. What those prove to be committed is looked for again before it counts as lost.
    """
    # One listing: each further one may see a later state of a run that is being played.
    keys = set(store.list())
    names_by_slot: dict[str, list[str]] = {}
    for key in keys:
        slot = _slot_of(key)
        if slot is not None:
            names_by_slot.setdefault(slot, []).append(key.removeprefix(f"{slot}/"))
    # After the listing: a manifest that came in between only shows more, and never less.
    slots = {slot: read_slot(store, slot, sorted(names)) for slot, names in names_by_slot.items()}
    looked: set[str] = set()
    # Until nothing new is proven: a checkpoint that is read names parents of its own.
    while late := _unseen(_proofs(slots, keys), slots, keys).keys() - looked:
        looked |= late
        for place in late:
            _look_again(store, place, keys, slots)
    evaluations = _evaluations(store, keys, slots)
    for place in evaluations:
        _look_again(store, place, keys, slots)
    return Inventory(
        keys=tuple(sorted(keys)),
        slots=sorted(slots.values(), key=lambda slot: (slot.kind, slot.number)),
        lost=_unseen({**_proofs(slots, keys), **evaluations}, slots, keys),
    )


def _look_again(store: ObjectStore, place: str, keys: set[str], slots: dict[str, Slot]) -> None:
    """List a slot again, or look for metrics again, and add what is there."""
    if layout.metrics_round_of(place) is not None:
        with suppress(ObjectMissing, CorruptObject):  # a link in the folder's place: fsck names it
            store.size(place)
            keys.add(place)
        return
    try:
        there = store.list(place)
    except CorruptObject as fault:  # a link in the place of the slot's folder
        # A fault of one slot, so that the others are still looked at.
        slots[place] = Slot(slot=place, names=(), fault=fault, damaged=MANIFEST)
        return
    keys.update(there)
    if there:
        slots[place] = read_slot(store, place, [key.removeprefix(f"{place}/") for key in there])


def _proofs(slots: Mapping[str, Slot], keys: Iterable[str]) -> dict[str, str]:
    """Slots, and metrics by key, that must be committed, each with what proves it.

    For evaluations, see `_evaluations`.
    """
    proofs = dict[str, str]()
    for key in keys:
        if (slot := scored_slot(key)) is not None:
            proofs[slot] = f"{key} was made from it"
    # Metrics are committed after the slots of their round, and before the next round is trained.
    for round in _closed_rounds(keys):
        why = f"{layout.metrics_key(round)} says that the round was trained"
        slots_of = layout.rollouts_slot(round), layout.batches_slot(round)
        proofs |= dict.fromkeys((*slots_of, layout.checkpoint_slot(round + 1)), why)
    batches = [s for s in slots.values() if s.kind == "batches" and s.manifest and s.number]
    why = "{} was made after that round was closed"
    proofs |= {layout.metrics_key(slot.number - 1): why.format(slot.slot) for slot in batches}
    trained = {slot.number for slot in slots.values() if slot.kind == "checkpoints" and slot.seen}
    why = "{} was trained after that round was closed"
    proofs |= {
        layout.metrics_key(number - 1): why.format(layout.checkpoint_slot(number + 1))
        for number in trained
        if number and number + 1 in trained
    }
    manifests = [slot.manifest for slot in slots.values() if slot.manifest is not None]
    return proofs | {parent.slot: PARENT for made in manifests for parent in made.parents}


def _unseen(
    proofs: Mapping[str, str], slots: Mapping[str, Slot], keys: Collection[str]
) -> dict[str, str]:
    seen = {slot.slot for slot in slots.values() if slot.seen}
    return {place: why for place, why in proofs.items() if place not in seen and place not in keys}


def scored_slot(key: str) -> str | None:
    """The slot of the rollouts that a reward table is about; None for other keys."""
    top, _, path = key.partition("/")
    round = layout.round_of(path.partition("/")[0])
    if top != "rewards" or round is None or is_private(key) or not key.endswith(".parquet"):
        return None
    return layout.rollouts_slot(round)


def _evaluations(
    store: ObjectStore, keys: Iterable[str], slots: Mapping[str, Slot]
) -> dict[str, str]:
    """Evaluations that metrics prove and that were not seen committed, with the proof."""
    rounds = sorted(_closed_rounds(keys))
    unseen = [r for r in rounds if (s := slots.get(layout.evals_slot(r))) is None or not s.seen]
    buffers = load_readable(store, [layout.metrics_key(round) for round in unseen])
    evaluations = dict[str, str]()
    for round, data in zip(unseen, buffers, strict=True):
        key = layout.metrics_key(round)
        with suppress(CorruptObject, NewerSchema):  # faults of those metrics
            reader = None if data is None else TableReader(data, store.url_of(key), METRICS)
            if reader and any(name.startswith("eval/") for name in reader.schema.names):
                evaluations[layout.evals_slot(round)] = f"{key} has what the evaluation measured"
    return evaluations


def _closed_rounds(keys: Iterable[str]) -> frozenset[int]:
    rounds = map(layout.metrics_round_of, keys)
    return frozenset(round for round in rounds if round is not None)


def read_slot(store: ObjectStore, slot: str, names: Sequence[str]) -> Slot:
    """A slot with the objects `names`, its manifest read if one is among them."""
    listed = tuple(names)
    # No read without a name in the listing: on a bucket each would be a request.
    if MANIFEST not in listed:
        return Slot(slot=slot, names=listed)
    looked_at = MANIFEST
    try:
        read = read_manifest(store, slot)
        if read is None:
            return Slot(slot=slot, names=listed)
        looked_at = PRUNED
        # The tombstone holds for this manifest only, by its digest.
        gone = pruned_parts(store, slot, read[1]) if PRUNED in listed else frozenset()
    except (CorruptObject, NewerSchema) as fault:
        return Slot(slot=slot, names=listed, fault=fault, damaged=looked_at)
    return Slot(slot=slot, names=listed, manifest=read[0], sha256=read[1], pruned=gone)


def _slot_of(key: str) -> str | None:
    parts = key.split("/")
    if (parts[0] == PAIRS and len(parts) == 2) or (parts[0] == BASE and len(parts) > 1):
        return parts[0]
    match = _NUMBERED.fullmatch(parts[1]) if len(parts) > 2 else None
    if match is None or match[1] != KINDS.get(parts[0]):
        return None
    return f"{parts[0]}/{parts[1]}"
