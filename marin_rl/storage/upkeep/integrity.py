"""Faults of a run: their kinds, and those that manifests and names alone show.

Links of the lineage that lead nowhere or elsewhere, commits that later ones prove there have been,
objects that nothing commits. Bytes are fsck.py's. Nothing is read here but the inventory.
"""

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from marin_rl.storage.commits import attempt_in
from marin_rl.storage.layout import (
    LEARNING_CURVE,
    REPORT,
    base_slot,
    batches_slot,
    checkpoint_slot,
    evals_slot,
    intake_slot,
    metrics_key,
    rollouts_slot,
)
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.forked_store import KINDS, Ancestor
from marin_rl.storage.stores.local import not_regular
from marin_rl.storage.upkeep.inventory import (
    MANIFEST,
    Inventory,
    Slot,
    made_by,
    scored_slot,
)

TOP_FILES = frozenset(("run.json", ".lock", "metrics.jsonl", LEARNING_CURVE, REPORT, *KINDS))

Kind = Literal[
    "missing", "truncated", "altered", "malformed", "newer version", "wrong parent", "orphan",
    "leftover",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of damage, and the object that has it.

    missing: named but not there; truncated: shorter than committed; altered: other bytes than
    committed; malformed: not what its format promises; newer version: written by newer software;
    wrong parent: a link of the lineage leads elsewhere; orphan: visible, but nothing commits it;
    leftover: an attempt's file that nothing names, which is harmless and which gc deletes.
    """

    kind: Kind
    place: str
    detail: str

    @property
    def harmless(self) -> bool:
        """True if the run is complete in spite of this fault."""
        return self.kind == "leftover"


def link_faults(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    """Parents that are not there, are others, or could not be parents of this slot."""
    slots = {slot.slot: slot for slot in inventory.slots}
    for slot in inventory.slots:
        if slot.manifest is None:
            continue
        place = store.url_of(slot.key(MANIFEST))
        names = [parent.slot for parent in slot.manifest.parents]
        if not _possible(slot, names):
            yield Fault(
                "wrong parent", place, f"cannot be made from {', '.join(names) or 'nothing'}"
            )
        for parent in slot.manifest.parents:
            origin = slots.get(parent.slot)
            # A parent that cannot be read has a fault of its own, and is there.
            if origin is None or (origin.manifest is None and origin.fault is None):
                where = store.url_of(f"{parent.slot}/{MANIFEST}")
                yield Fault("missing", where, f"{place} was made from it")
            elif origin.manifest is not None and origin.sha256 != parent.sha256:
                detail = f"names {parent.slot} with SHA-256 {parent.sha256}, found {origin.sha256}"
                yield Fault("wrong parent", place, detail)


def _possible(slot: Slot, parents: Sequence[str]) -> bool:
    """True if a slot may be made from these parents."""
    number = slot.number
    match slot.kind:
        case "batches":
            # And those of the rounds just before it, whose groups it may use again.
            first = number - len(parents) + 1
            earlier = [batches_slot(n) for n in range(first, number)] if first >= 0 else []
            return list(parents) == [rollouts_slot(number), *earlier]
        case "evals":
            return list(parents) == [checkpoint_slot(number)]
        case "intakes":
            return list(parents) == ([intake_slot(number - 1)] if number else [])
        case "rollouts":
            if list(parents) == [intake_slot(number)]:
                return True
            # Any earlier checkpoint: sampling may run ahead of training.
            return len(parents) == 1 and parents[0] in map(checkpoint_slot, range(number + 1))
        case "checkpoints" if number:
            return list(parents) == [checkpoint_slot(number - 1), batches_slot(number - 1)]
        case "checkpoints" | "sft" | "base":
            # A base is no parent of its own: a manifest cannot name itself.
            return {parent.partition("/")[0] for parent in parents} <= {"sft", base_slot()}
        case _:  # a reward model and its pairs
            kinds = ("pairs", "reward_model", "sft", base_slot())
            return all(parent.partition("/")[0] in kinds for parent in parents)


def gap_faults(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    """Commits that later ones prove there have been, but for parents: see `link_faults`."""
    named = {
        parent.slot for slot in inventory.slots if slot.manifest for parent in slot.manifest.parents
    }
    # Missing parents are reported once, by `link_faults`.
    lost = inventory.lost - named
    for slot, reason in _implied_by_tables(inventory).items():
        if slot in lost:
            yield Fault("missing", store.url_of(f"{slot}/{MANIFEST}"), reason)
    for round, detail in sorted(_closed_before(inventory).items()):
        if round not in inventory.closed:
            yield Fault("missing", store.url_of(metrics_key(round)), detail)


def _closed_before(inventory: Inventory) -> dict[int, str]:
    """Rounds that were closed before something else was committed, and what that was."""
    batches = {s.number: s.slot for s in inventory.of_kind("batches") if s.manifest and s.number}
    checkpoints = {s.number for s in inventory.of_kind("checkpoints") if s.manifest or s.fault}
    proofs = {n - 1: f"{slot} was made after that round was closed" for n, slot in batches.items()}
    return proofs | {
        number - 1: f"{checkpoint_slot(number + 1)} was trained after that round was closed"
        for number in checkpoints
        if number >= 1 and number + 1 in checkpoints
    }


def _implied_by_tables(inventory: Inventory) -> dict[str, str]:
    """Slots that tables outside any manifest prove to have been committed, with the proof."""
    reasons: dict[str, str] = {}
    for round in sorted(inventory.closed):
        why = f"{metrics_key(round)} says that the round was trained"
        reasons |= dict.fromkeys(made_by(round), why)
    for round in sorted(inventory.evaluated):
        reasons[evals_slot(round)] = f"{metrics_key(round)} has what the evaluation measured"
    for key in inventory.keys:
        if (slot := scored_slot(key)) is not None:
            reasons.setdefault(slot, f"{key} was made from it")
    return reasons


def fork_faults(
    store: ObjectStore, inventory: Inventory, ancestors: Sequence[Ancestor]
) -> Iterator[Fault]:
    """A fork that has played nothing, and whose parent gave up what it would begin with."""
    if not ancestors:
        return
    parent = ancestors[-1]
    for slot in inventory.of_kind("checkpoints"):
        # It has gone on from that checkpoint, and needs its arrays no more.
        if slot.number > parent.through_round and slot.manifest is not None:
            return
    for slot in inventory.of_kind("checkpoints"):
        if slot.number == parent.through_round and slot.gone:
            yield Fault(
                "missing",
                store.url_of(slot.slot),
                f"run {parent.run_id!r} gave up its arrays before it could see the fork, which "
                f"cannot be played and keeps other checkpoints from being pruned: delete "
                f"{store.url}, and fork from a checkpoint that has arrays",
            )


def unnamed_faults(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    """Objects among the slots that nothing commits."""
    for item in inventory.items:
        place = store.url_of(item.key)
        if item.role == "stray":
            yield Fault("orphan", place, "lies among the slots, but in none")
        if item.slot is None or item.slot.fault is not None:
            continue
        if item.role == "loose":
            yield _loose_end(item.slot, item.name, place)
        elif item.role == "collected piece":
            yield Fault("leftover", place, "a group that its shard has collected")
        elif item.role == "late shard":
            yield Fault("orphan", place, "a shard that the manifest of its round does not name")


def special_faults(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    """Links, pipes, devices and the like where marin-rl has files; in local runs alone."""
    for key in inventory.keys:
        if key in TOP_FILES or key.partition("/")[0] in (*KINDS, "code", "data"):
            path = store.local_path(key)
            if path is None:
                return
            try:
                if not stat.S_ISREG(path.lstat().st_mode):  # no listing has what lies behind links
                    yield Fault("malformed", str(path), str(not_regular(path)))
            except FileNotFoundError:
                continue  # gone since the listing


def _loose_end(slot: Slot, name: str, place: str) -> Fault:
    attempt = attempt_in(name)
    if attempt is None:
        return Fault("orphan", place, "no manifest names it, and no attempt wrote it")
    # Another attempt that was first, or a process that is still writing: neither is damage.
    state = "which did not commit, or not yet" if slot.manifest is None else "which came too late"
    return Fault("leftover", place, f"of attempt {attempt}, {state}")
