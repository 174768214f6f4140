"""fsck: check that everything a run committed is still there, unchanged and consistent.

Every manifest is opened, every part hashed and its schema checked, every parent link followed, in
threads, for hashing lets go of the interpreter. Commits that no manifest names (shards of an open
round, metrics) are read whole and written again in memory, which must give the same bytes, and must
hold what their names say. Nothing is changed, and only a failing store can end the search:
everything else that is wrong becomes a Fault.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa

from marin_rl.errors import CorruptObject, MarinRLError, NewerSchema, ObjectMissing
from marin_rl.storage import layout
from marin_rl.storage.run_records import RUN_KEY, ancestors_in, read_record, stored_config
from marin_rl.storage.runs import check_run_id, with_ancestors
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from marin_rl.storage.stores.store import Ancestor
from marin_rl.storage.tables.batches import schema_of
from marin_rl.storage.tables.metrics import check_metrics
from marin_rl.storage.tables.parquet import TableReader, digest_of, load
from marin_rl.storage.tables.tombstones import pruned_parts
from marin_rl.storage.upkeep import integrity
from marin_rl.storage.upkeep.integrity import Fault, Kind
from marin_rl.storage.upkeep.inventory import (
    MANIFEST,
    PAIRS,
    Inventory,
    Item,
    Slot,
    scored_slot,
    take_inventory,
)
from marin_rl.storage.upkeep.streams import lost_groups
from marin_rl.user_code import files_in
from schemas.manifests import canonical_json, sha256_of
from schemas.migrations import BATCHES, DISPOSITIONS, METRICS, REWARDS, ROLLOUTS, SCORES, Ladder
from schemas.migrations import PAIRS as PAIRS_LADDER
from schemas.strict_json import parse_json
from schemas.tables import METRICS_IDENTITY

Result = TypeVar("Result")
Record = Mapping[str, Any]
Outcome = tuple[int, Fault | None]  # bytes that were read, and what is wrong
Job = tuple[str, Callable[[], Outcome]]  # the place that is checked comes first
Look = Callable[[TableReader], Fault | None]

# Formats of parts, by the kind of their slot or the beginning of their name.
_OF_KINDS = {"rollouts": ROLLOUTS, "evals": ROLLOUTS, PAIRS: PAIRS_LADDER}
_PARTS = {
    layout.SCORES_PREFIX: SCORES,
    layout.DISPOSITIONS_PREFIX: DISPOSITIONS,
    layout.BATCHES_PREFIX: BATCHES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of fsck: objects, bytes that were hashed, wall seconds, and the faults.

    `pruned` counts parts that retention removed, as their tombstones say.
    """

    objects: int
    bytes: int
    seconds: float
    pruned: int
    faults: tuple[Fault, ...]

    @property
    def whole(self) -> bool:
        return all(fault.harmless for fault in self.faults)


def check_run(root: str, run_id: str, *, workers: int | None = None) -> Checked:
    """Check a run, what it shares with its ancestors included. Opens it even if run.json is broken.

    Raises ObjectMissing when there is no such folder, ConfigError for what can be no run's name,
    StoreUnavailable, StorageError.
    """
    began = time.monotonic()
    check_run_id(run_id)
    top = open_store(root)
    own = top.at(run_id)
    if not own.children():
        raise ObjectMissing(f"nothing lies in {own.url}: expected a run; see `marin-rl status`")
    # A broken run.json is one fault among others: the slots can be checked without it.
    record, ancestors, faults = _identity(top, own)
    store = with_ancestors(top, own, ancestors)
    inventory = take_inventory(store)
    lines = integrity.read_lines(store, inventory)
    checks = _Checks(store, inventory, record, ancestors, lines)
    jobs = list(checks.jobs())
    # Requests mostly wait for the network, so their number does not follow the cores.
    usual = 16 if store.local_path(RUN_KEY) is None else os.cpu_count()
    with ThreadPoolExecutor(workers or usual) as pool:
        # Every job to its end: one damaged file must not hide the next.
        results = [
            (0, result) if isinstance(result, Fault) else result
            for result in pool.map(lambda job: _explained(*job), jobs)
        ]
    manifests = [slot for slot in inventory.slots if slot.manifest is not None]
    faults += [fault for _, fault in results if fault is not None]
    faults += chain(
        (_of_record(store, s.key(s.damaged), s.fault) for s in inventory.slots if s.fault),
        integrity.link_faults(store, inventory),
        integrity.gap_faults(store, inventory),
        integrity.fork_faults(store, inventory, ancestors),
        integrity.unnamed_faults(store, inventory),
        lost_groups(store, inventory),
        lines.faults,
        lines.unclosed(store, inventory),
    )
    # A special file has failed its own check already where it is a part; it is reported once.
    seen = {fault.place for fault in faults}
    faults += (
        fault for fault in integrity.special_faults(store, inventory) if fault.place not in seen
    )
    return Checked(
        objects=1 + len(manifests) + len(jobs),  # 1 is run.json
        bytes=sum(size for size, _ in results),
        seconds=time.monotonic() - began,
        pruned=sum(len(slot.gone) for slot in manifests),
        faults=tuple(sorted(faults, key=lambda fault: (fault.place, fault.kind))),
    )


def _identity(
    top: ObjectStore, own: ObjectStore
) -> tuple[Record | None, tuple[Ancestor, ...], list[Fault]]:
    """Run.json, the ancestors that it names, and the faults of these records."""
    place = own.url_of(RUN_KEY)
    try:
        record = read_record(own)
    except (CorruptObject, NewerSchema) as error:
        return None, (), [_of_record(own, RUN_KEY, error)]
    if record is None:
        return None, (), [Fault("missing", place, "the record that makes this folder a run")]
    ancestors, faults = ancestors_in(record), list[Fault]()
    try:
        stored_config(record, place)
    except Exception as error:  # noqa: BLE001 - a validator meets values of any kind here
        faults.append(Fault("malformed", place, _in_words(error)))
    for ancestor in ancestors:
        key = f"{ancestor.run_id}/{RUN_KEY}"
        try:
            sha256 = sha256_of(top.at(ancestor.run_id).read(RUN_KEY))
        except ObjectMissing:
            faults.append(Fault("missing", top.url_of(key), f"named as ancestor by {place}"))
            continue
        except CorruptObject as error:
            faults.append(Fault("malformed", top.url_of(key), str(error)))
            continue
        if sha256 != ancestor.sha256:
            detail = f"names {key} with SHA-256 {ancestor.sha256}, found {sha256}"
            faults.append(Fault("wrong parent", place, detail))
    return record, ancestors, faults


@dataclass(frozen=True, slots=True)
class _Checks:
    store: ObjectStore
    inventory: Inventory
    record: Record | None
    ancestors: Sequence[Ancestor]
    lines: integrity.MetricsLines

    def jobs(self) -> Iterator[Job]:
        """A check of each part, of each object that is its own commit, and of each copy of code."""
        url = self.store.url_of
        for item in self.inventory.items:
            if item.role == "part" and item.slot is not None:
                yield url(item.key), partial(self._part, item.slot, item.name)
            elif (table := self._table(item)) is not None:
                yield url(item.key), partial(_check_table, self.store, item.key, *table)
        named = files_in(self.record["config"] if self.record else None)
        copies = {item.key for item in self.inventory.items if item.role == "code"}
        for key in sorted(copies.union(map(layout.code_key, named))):
            yield url(key), partial(self._code, key)

    def _part(self, slot: Slot, name: str) -> Outcome:
        part, place = slot.parts[name], self.store.url_of(slot.key(name))
        try:
            data = load(self.store, slot.key(name))
        except ObjectMissing:
            if name in pruned_parts(self.store, slot.slot, slot.sha256):
                return 0, None  # retention took it since the listing
            return 0, Fault("missing", place, f"{self.store.url_of(slot.key(MANIFEST))} names it")
        detail = f"expected {part.bytes} bytes with SHA-256 {part.sha256}, found {data.size}"
        # Sizes first: they separate truncated files from altered ones without hashing.
        if data.size != part.bytes:
            return 0, Fault("truncated" if data.size < part.bytes else "altered", place, detail)
        sha256 = digest_of(data)
        if sha256 != part.sha256:
            return data.size, Fault("altered", place, f"{detail} with {sha256}")
        if not name.endswith(".parquet"):
            return data.size, None  # opaque, such as arrays
        ladder = _OF_KINDS.get(slot.kind)
        ladder = ladder or next((own for p, own in _PARTS.items() if name.startswith(p)), None)
        if ladder is None:
            return data.size, None

        def look() -> None:
            assert slot.manifest is not None, "only committed slots have parts"
            schema = schema_of(slot.manifest, place) if ladder is BATCHES else None
            TableReader(data, place, ladder).check(schema)

        # Bytes that match the digest may still break the schema, if their writer erred.
        return data.size, _explained(place, look)

    def _table(self, item: Item) -> tuple[Ladder, Look] | None:
        """Format of a table that no manifest names, and a check that its rows are in their place.

        Only its own bytes can be checked.
        """
        match item:
            case Item(role="shard" | "late shard" | "piece", slot=Slot(number=round), name=name):
                shard = layout.shard_of(layout.shard_of_piece(name) or name)
                expected = {"run_id": self._player(round), "round": round, "shard": shard}
                return ROLLOUTS, partial(_misplaced, expected=expected)
            case Item(role="group" | "partial group"):
                # A round after all forks: what waits in a stream is of this run alone.
                return ROLLOUTS, partial(_misplaced, expected={"run_id": self._player(2**31)})
            case Item(role="metrics"):
                round = layout.metrics_round_of(item.key) or 0
                expected = {"run_id": self._player(round), "round": round}

                def look(reader: TableReader) -> Fault | None:
                    check_metrics(reader)
                    # Of another round, or other ones than metrics.jsonl repeats.
                    return _misplaced(reader, expected) or self.lines.compared(reader, round)

                return METRICS, look
            case Item(role="rewards"):
                # A table of another round would rank the wrong answers.
                return REWARDS, partial(self._of_other_rollouts, scored_slot(item.key))
        return None

    def _player(self, round: int) -> str | None:
        """The run that played a round; None where run.json does not say."""
        own = None if self.record is None else self.record["run_id"]
        return next((a.run_id for a in self.ancestors if round < a.through_round), own)

    def _of_other_rollouts(self, slot: str | None, reader: TableReader) -> Fault | None:
        """Fault of a reward table that was made from other rollouts than the round's."""
        scored = reader.stamp.get("rollouts_sha256")
        rollouts = {item.slot: item.sha256 for item in self.inventory.of_kind("rollouts")}
        actual = rollouts.get(slot or "")
        # Rollouts without a readable manifest have no digest to compare with.
        if actual in (None, scored):
            return None
        detail = f"is about rollouts with SHA-256 {scored}, {slot} has {actual}"
        return Fault("wrong parent", reader.source, detail)

    def _code(self, key: str) -> Outcome:
        place = self.store.url_of(key)
        try:
            data = load(self.store, key)
        except ObjectMissing:
            return 0, Fault("missing", place, f"{self.store.url_of(RUN_KEY)} names it")
        if layout.code_key(digest_of(data)) == key:
            return data.size, None
        detail = f"expected a file named by its SHA-256, found {digest_of(data)}"
        return data.size, Fault("altered", place, detail)


def _check_table(store: ObjectStore, key: str, ladder: Ladder, look: Look) -> Outcome:
    place = store.url_of(key)
    data = load(store, key)
    # Before Arrow fails on a missing end with an error that does not name it.
    if bytes(memoryview(data)[-4:]) != b"PAR1":
        return data.size, Fault("truncated", place, "the end of a Parquet file is missing")

    def read() -> Fault | None:
        reader = TableReader(data, place, ladder)
        reader.check(METRICS_IDENTITY if ladder is METRICS else None)
        # No digest of these files is stored. Their writer is deterministic: rewriting checks them.
        again = reader.rewritten()
        if again is not None and again != data.to_pybytes():
            raise CorruptObject(f"{place}: its rows, written again, give other bytes")
        return look(reader)

    return data.size, _explained(place, read, "altered")


def _misplaced(reader: TableReader, expected: Mapping[str, str | int | None]) -> Fault | None:
    """Fault of a file whose rows are not of the run, round or shard that its name says."""
    names = [name for name, value in expected.items() if value is not None]
    table = reader.table(pa.schema([reader.schema.field(name) for name in names]))
    for name in names:
        foreign = sorted(set(table[name].to_pylist()) - {expected[name]}, key=str)
        if foreign:
            detail = f"expected rows of {name} {expected[name]!r}, found {foreign[0]!r}"
            return Fault("altered", reader.source, f"{detail}: it is another's")
    return None


def _in_words(error: Exception) -> str:
    if isinstance(error, MarinRLError):
        return str(error)
    return f"cannot be read: {type(error).__name__}: {str(error)[:1000]}"


def _explained(
    place: str, look: Callable[[], Result], otherwise: Kind = "malformed"
) -> Result | Fault:
    try:
        return look()
    except NewerSchema as error:
        return Fault("newer version", place, str(error))
    except CorruptObject as error:
        return Fault(otherwise, place, str(error))
    except MarinRLError:
        raise  # of storage itself
    except Exception as error:  # noqa: BLE001 - a crafted file fails anywhere inside of Arrow
        return Fault(otherwise, place, _in_words(error))


def _of_record(store: ObjectStore, key: str, error: CorruptObject | NewerSchema) -> Fault:
    """Fault of a sealed record: altered if the seal is broken, whichever version it claims."""
    kind: Kind = "newer version" if isinstance(error, NewerSchema) else "altered"
    # A flipped bit in the version must not send the user off to upgrade.
    if kind == "newer version":
        try:
            record = parse_json(store.read(key))
            sealed = record.pop("digest") == sha256_of(canonical_json(record))
        except (ValueError, KeyError, AttributeError, TypeError):  # a list, or no digest
            sealed = False
        kind = kind if sealed else "altered"
    return Fault(kind, store.url_of(key), str(error))
