"""Faults of a run: their kinds, and the faults that manifests and names show.

Links of the lineage that lead nowhere or elsewhere, commits that later ones prove, objects that
nothing commits; and lines that contradict metrics. Bytes of commits are fsck.py's.
"""

import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.storage import layout
from marin_rl.storage.commits import attempt_in
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.local import not_regular
from marin_rl.storage.stores.store import KINDS, Ancestor
from marin_rl.storage.tables.metrics import JSONL_KEY, json_line
from marin_rl.storage.tables.parquet import TableReader, load
from marin_rl.storage.upkeep.inventory import MANIFEST, PARENT, Inventory, Slot

TOP_FILES = frozenset(
    ("run.json", ".lock", JSONL_KEY, layout.LEARNING_CURVE, layout.REPORT, *KINDS)
)

_BEGUN = re.compile(rb'\{"round": (\d{1,9}), ')
_TORN = re.compile(rb'\{"round": \d{0,9},?')  # before it is known which round it was to be of

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
            detail = f"cannot be made from {', '.join(names) or 'nothing'}"
            yield Fault("wrong parent", place, detail)
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
    number = slot.number
    match slot.kind:
        case "batches":
            # And those of the rounds just before it, whose groups it may use again.
            first = number - len(parents) + 1
            earlier = [layout.batches_slot(n) for n in range(first, number)] if first >= 0 else []
            return list(parents) == [layout.rollouts_slot(number), *earlier]
        case "evals":
            return list(parents) == [layout.checkpoint_slot(number)]
        case "intakes":
            return list(parents) == ([layout.intake_slot(number - 1)] if number else [])
        case "rollouts":
            if list(parents) == [layout.intake_slot(number)]:
                return True
            # Any earlier checkpoint: sampling may run ahead of training.
            earlier = [layout.checkpoint_slot(n) for n in range(number + 1)]
            return len(parents) == 1 and parents[0] in earlier
        case "checkpoints" if number:
            made_of = layout.checkpoint_slot(number - 1), layout.batches_slot(number - 1)
            return tuple(parents) == made_of
        case "checkpoints" | "sft" | "base":
            # A base is no parent of its own: a manifest cannot name itself.
            return {parent.partition("/")[0] for parent in parents} <= {"sft", layout.base_slot()}
        case _:  # pairs, and what learns from them
            kinds = ("pairs", slot.kind, "sft", layout.base_slot())
            return all(parent.partition("/")[0] in kinds for parent in parents)


def gap_faults(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    """Missing commits that later commits imply; for parents, see `link_faults`."""
    for place, proof in inventory.lost.items():
        if proof is not PARENT:
            key = place if layout.metrics_round_of(place) is not None else f"{place}/{MANIFEST}"
            yield Fault("missing", store.url_of(key), proof)


def fork_faults(
    store: ObjectStore, inventory: Inventory, ancestors: Sequence[Ancestor]
) -> Iterator[Fault]:
    """A fork that has played nothing, and whose parent gave up what it would begin with."""
    if not ancestors:
        return
    parent = ancestors[-1]
    slots = inventory.of_kind("checkpoints")
    # One that has gone on from that checkpoint needs its arrays no more.
    if any(slot.number > parent.through_round and slot.manifest is not None for slot in slots):
        return
    for slot in slots:
        if slot.number == parent.through_round and slot.gone:
            yield Fault(
                "missing",
                store.url_of(slot.slot),
                f"run {parent.run_id!r} gave up its arrays before it could see the fork, which "
                f"cannot be played and keeps other checkpoints from being pruned: delete "
                f"{store.url}, and fork from a checkpoint that has arrays",
            )


def unnamed_faults(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    for item in inventory.items:
        place = store.url_of(item.key)
        if item.role == "stray":
            yield Fault("orphan", place, "lies among the slots, but in none")
        if item.slot is None or item.slot.fault is not None:
            continue
        attempt = attempt_in(item.name)
        if item.role == "loose" and attempt is None:
            yield Fault("orphan", place, "no manifest names it, and no attempt wrote it")
        elif item.role == "loose":
            # Another attempt that was first, or a process that is still writing: no damage.
            late = item.slot.manifest is not None
            state = "which came too late" if late else "which did not commit, or not yet"
            yield Fault("leftover", place, f"of attempt {attempt}, {state}")
        elif item.role == "collected piece":
            yield Fault("leftover", place, "a group that its shard has collected")
        elif item.role == "late shard":
            yield Fault("orphan", place, "a shard that the manifest of its round does not name")


def special_faults(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    """Links, pipes, devices and the like where marin-rl has files; in local runs alone."""
    for key in inventory.keys:
        ours = key in TOP_FILES or key.partition("/")[0] in (*KINDS, "code", "data")
        if ours and (path := store.local_path(key)) is not None:
            with suppress(FileNotFoundError):  # gone since the listing
                if not stat.S_ISREG(path.lstat().st_mode):  # no listing has what lies behind links
                    yield Fault("malformed", str(path), str(not_regular(path)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLines:
    """The lines of a run's metrics.jsonl, by the round that each says it is of.

    The file is no commit, and a killed process leaves a torn line in it, or none. But a line that
    contradicts the metrics of its round was altered, and a line of a round without metrics proves
    that there were some. `faults` are about lines of no round, or about the file.
    """

    place: str = ""
    by_round: dict[int, list[bytes]] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    def compared(self, reader: TableReader, round: int) -> Fault | None:
        """Faults of the lines of a round, compared with its metrics."""
        if lines := self.by_round.get(round):
            expected = json_line(reader.table(reader.schema).to_pylist()[0])
            if not all(map(expected.startswith, lines)):  # a torn line is its beginning
                detail = f"its line of round {round} is not what {layout.metrics_key(round)} says"
                return Fault("altered", self.place, detail)
        return None

    def unclosed(self, store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
        """Rounds with a whole line, whose metrics are gone."""
        for round in sorted(self.by_round.keys() - inventory.closed):
            if any(line.endswith(b"}") for line in self.by_round[round]):
                detail = f"{JSONL_KEY} has a line of that round"
                yield Fault("missing", store.url_of(layout.metrics_key(round)), detail)


def read_lines(store: ObjectStore, inventory: Inventory) -> MetricsLines:
    """The lines of metrics.jsonl, as they are; none where the run has no such file."""
    if JSONL_KEY not in inventory.keys:
        return MetricsLines()
    place = store.url_of(JSONL_KEY)
    try:
        data = load(store, JSONL_KEY).to_pybytes()
    except ObjectMissing:
        return MetricsLines()
    except CorruptObject as error:
        return MetricsLines(place=place, faults=(Fault("malformed", place, str(error)),))
    by_round: dict[int, list[bytes]] = {}
    faults: list[Fault] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        match = _BEGUN.match(line)
        if match is not None:
            by_round.setdefault(int(match[1]), []).append(line)
        # A killed process may have written any beginning of a line.
        elif line and _TORN.fullmatch(line) is None and not b'{"round": '.startswith(line):
            detail = f"line {number} is no metrics of a round: {line[:40]!r}"
            faults.append(Fault("altered", place, detail))
    # A file of another kind would fill pages: a few lines show that.
    return MetricsLines(place=place, by_round=by_round, faults=tuple(faults[:20]))
