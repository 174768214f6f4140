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
from typing import TypeVar

import pyarrow as pa

from marin_rl.errors import CorruptObject, MarinRLError, NewerSchema, ObjectMissing
from marin_rl.storage.layout import code_key, metrics_round_of, shard_of, shard_of_piece
from marin_rl.storage.run_records import RUN_KEY, ancestors_in, read_record, stored_config
from marin_rl.storage.runs import check_run_id, with_ancestors
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from marin_rl.storage.stores.forked_store import Ancestor
from marin_rl.storage.tables.batches import schema_of
from marin_rl.storage.tables.metrics import check_metrics
from marin_rl.storage.tables.parquet import TableReader, digest_of, load
from marin_rl.storage.tables.tombstones import pruned_parts
from marin_rl.storage.upkeep.integrity import (
    Fault,
    Kind,
    MetricsLines,
    fork_faults,
    gap_faults,
    link_faults,
    read_lines,
    special_faults,
    unnamed_faults,
)
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
from schemas.manifests import Manifest, Part, canonical_json, sha256_of
from schemas.migrations import BATCHES, METRICS, REWARDS, ROLLOUTS, SCORES, Ladder
from schemas.migrations import DISPOSITIONS as DISPOSITIONS_LADDER
from schemas.migrations import PAIRS as PAIRS_LADDER
from schemas.rollouts import ROLLOUTS as ROLLOUTS_SCHEMA
from schemas.strict_json import parse_json
from schemas.tables import DISPOSITIONS, METRICS_IDENTITY
from schemas.tables import PAIRS as PAIRS_SCHEMA
from schemas.tables import REWARDS as REWARDS_SCHEMA
from schemas.tables import SCORES as SCORES_SCHEMA

# Requests mostly wait for the network, so their number does not follow the cores.
REMOTE_WORKERS = 16


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
        """True if there is no fault that matters."""
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
    name, ancestors, faults = _identity(top, own)
    store = with_ancestors(top, own, ancestors)
    inventory = take_inventory(store)
    lines = read_lines(store, inventory)
    jobs = [
        *_part_jobs(store, inventory),
        *_loose_jobs(store, inventory, partial(_player, name, ancestors), lines),
        *_code_jobs(own, inventory),
    ]
    local = store.local_path(RUN_KEY) is not None
    with ThreadPoolExecutor(workers or (os.cpu_count() or 1 if local else REMOTE_WORKERS)) as pool:
        # Every job to its end: one damaged file must not hide the next.
        outcomes = list(pool.map(_outcome, jobs))
    manifests = [slot for slot in inventory.slots if slot.manifest is not None]
    faults += [fault for _, fault in outcomes if fault is not None]
    faults += chain(
        _unreadable(store, inventory),
        link_faults(store, inventory),
        gap_faults(store, inventory),
        fork_faults(store, inventory, ancestors),
        unnamed_faults(store, inventory),
        lost_groups(store, inventory),
        lines.faults,
        lines.unclosed(store, inventory),
    )
    # A special file has failed its own check already where it is a part; it is reported once.
    seen = {fault.place for fault in faults}
    faults += (fault for fault in special_faults(store, inventory) if fault.place not in seen)
    return Checked(
        objects=1 + len(manifests) + len(jobs),  # 1 is run.json
        bytes=sum(size for size, _ in outcomes),
        seconds=time.monotonic() - began,
        pruned=sum(len(slot.gone) for slot in manifests),
        faults=tuple(sorted(faults, key=lambda fault: (fault.place, fault.kind))),
    )


def _identity(
    top: ObjectStore, own: ObjectStore
) -> tuple[str | None, tuple[Ancestor, ...], list[Fault]]:
    """Run id and ancestors by run.json, and the faults of that record."""
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
    return record["run_id"], ancestors, faults


def _player(name: str | None, ancestors: Sequence[Ancestor], round: int) -> str | None:
    """The run that played a round; None where run.json does not say."""
    return next((a.run_id for a in ancestors if round < a.through_round), name)


Result = TypeVar("Result")
Check = Callable[[], tuple[int, Fault | None]]
Job = tuple[str, Check]  # the place that is checked comes first


def _outcome(job: Job) -> tuple[int, Fault | None]:
    """Bytes read, and what is wrong; what could not even be read is a fault as well."""
    result = _explained(*job)
    return (0, result) if isinstance(result, Fault) else result


def _in_words(error: Exception) -> str:
    if isinstance(error, MarinRLError):
        return str(error)
    return f"cannot be read: {type(error).__name__}: {str(error)[:1000]}"


def _part_jobs(store: ObjectStore, inventory: Inventory) -> Iterator[Job]:
    for slot in inventory.slots:
        for part in slot.manifest.parts if slot.manifest else ():
            if part.name not in slot.gone:
                yield store.url_of(slot.key(part.name)), partial(_check_part, store, slot, part)


def _check_part(store: ObjectStore, slot: Slot, part: Part) -> tuple[int, Fault | None]:
    """Bytes hashed, and what is wrong with one part."""
    place = store.url_of(slot.key(part.name))
    try:
        data = load(store, slot.key(part.name))
    except ObjectMissing:
        if part.name in pruned_parts(store, slot.slot, slot.sha256):
            return 0, None  # retention took it since the listing
        return 0, Fault("missing", place, f"{store.url_of(slot.key(MANIFEST))} names it")
    detail = f"expected {part.bytes} bytes with SHA-256 {part.sha256}, found {data.size}"
    # Sizes first: they separate truncated files from altered ones without hashing.
    if data.size != part.bytes:
        return 0, Fault("truncated" if data.size < part.bytes else "altered", place, detail)
    sha256 = digest_of(data)
    if sha256 != part.sha256:
        return data.size, Fault("altered", place, f"{detail} with {sha256}")
    assert slot.manifest is not None, "only committed slots have parts"
    manifest = slot.manifest

    # Bytes that match the digest may still break the schema, if their writer erred.
    def look() -> None:
        shape = _shape_of(manifest, part, place)
        if shape is not None:
            TableReader(data, place, shape[0]).check(shape[1])

    return data.size, _explained(place, look)


def _shape_of(manifest: Manifest, part: Part, place: str) -> tuple[Ladder, pa.Schema] | None:
    """Schema that a part must have; None for opaque parts, such as arrays."""
    kind = manifest.slot.partition("/")[0]
    if not part.name.endswith(".parquet"):
        return None
    if kind in ("rollouts", "evals"):
        return ROLLOUTS, ROLLOUTS_SCHEMA
    if kind == PAIRS:
        return PAIRS_LADDER, PAIRS_SCHEMA
    if part.name.startswith("scores-"):
        return SCORES, SCORES_SCHEMA
    if part.name.startswith("dispositions-"):
        return DISPOSITIONS_LADDER, DISPOSITIONS
    if part.name.startswith("batches-"):
        return BATCHES, schema_of(manifest, place)
    return None


Player = Callable[[int], str | None]
Look = Callable[[TableReader], Fault | None]


def _loose_jobs(
    store: ObjectStore, inventory: Inventory, player: Player, lines: MetricsLines
) -> Iterator[Job]:
    """Checks of commits that no manifest names: only their own bytes can be checked."""
    sealed = {slot.slot: slot for slot in inventory.of_kind("rollouts")}
    for item in inventory.items:
        match item:
            case Item(role="shard" | "late shard" | "piece", slot=Slot() as slot, name=name):
                shard = shard_of(shard_of_piece(name) or name)
                expected = {"run_id": player(slot.number), "round": slot.number, "shard": shard}
                kind = ROLLOUTS, ROLLOUTS_SCHEMA, partial(_misplaced, expected=expected)
            case Item(role="group" | "partial group"):
                # A round after all forks: what waits in a stream is of this run alone.
                expected = {"run_id": player(2**31)}
                kind = ROLLOUTS, ROLLOUTS_SCHEMA, partial(_misplaced, expected=expected)
            case Item(role="metrics", key=key):
                round = metrics_round_of(key)
                expected = {"run_id": player(round or 0), "round": round}
                look = partial(_wrong_metrics, expected=expected, lines=lines)
                kind = METRICS, METRICS_IDENTITY, look
            case Item(role="rewards", key=key):
                # Against the rollouts that they scored: a table of another round would rank the
                # wrong answers.
                rollouts = sealed.get(scored_slot(key) or "")
                kind = REWARDS, REWARDS_SCHEMA, partial(_of_other_rollouts, rollouts=rollouts)
            case _:
                continue
        yield store.url_of(item.key), partial(_check_loose, store, item.key, *kind)


def _code_jobs(own: ObjectStore, inventory: Inventory) -> Iterator[Job]:
    """Checks of copies of code: those that run.json names, and those that are there."""
    try:
        record = read_record(own)
    except (CorruptObject, NewerSchema):  # a fault of its own
        record = None
    named = {code_key(digest) for digest in files_in(record["config"] if record else None)}
    there = {item.key for item in inventory.of_role("code")}
    for key in sorted(named | there):
        yield own.url_of(key), partial(_check_code, own, key)


def _check_code(own: ObjectStore, key: str) -> tuple[int, Fault | None]:
    """Bytes hashed, and what is wrong with a copy of code, whose name is its digest."""
    place = own.url_of(key)
    try:
        data = load(own, key)
    except ObjectMissing:
        return 0, Fault("missing", place, f"{own.url_of(RUN_KEY)} names it")
    if code_key(digest_of(data)) == key:
        return data.size, None
    detail = f"expected a file named by its SHA-256, found {digest_of(data)}"
    return data.size, Fault("altered", place, detail)


def _wrong_metrics(
    reader: TableReader, expected: Mapping[str, str | int | None], lines: MetricsLines
) -> Fault | None:
    """Fault of metrics of another round, or of other ones than metrics.jsonl repeats."""
    check_metrics(reader)
    fault = _misplaced(reader, expected)
    return lines.compared(reader, int(expected["round"] or 0)) if fault is None else fault


def _check_loose(
    store: ObjectStore, key: str, ladder: Ladder, schema: pa.Schema, look: Look
) -> tuple[int, Fault | None]:
    """Bytes read, and what is wrong with them, or else what `look` finds."""
    place = store.url_of(key)
    data = load(store, key)
    # Parquet ends with its magic number: a missing end is reported as truncation, before Arrow
    # fails on it with an error that names neither.
    if bytes(memoryview(data)[-4:]) != b"PAR1":
        return data.size, Fault("truncated", place, "the end of a Parquet file is missing")

    def read() -> Fault | None:
        reader = TableReader(data, place, ladder)
        reader.check(schema)
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
            detail = (
                f"expected rows of {name} {expected[name]!r}, found {foreign[0]!r}: it is another's"
            )
            return Fault("altered", reader.source, detail)
    return None


def _of_other_rollouts(reader: TableReader, rollouts: Slot | None) -> Fault | None:
    """Fault of a reward table about other rollouts than those that lie there."""
    scored = reader.stamp.get("rollouts_sha256")
    # Rollouts without a readable manifest have no digest to compare with.
    if rollouts is None or rollouts.sha256 in (None, scored):
        return None
    detail = f"is about rollouts with SHA-256 {scored}, {rollouts.slot} has {rollouts.sha256}"
    return Fault("wrong parent", reader.source, detail)


def _explained(
    place: str, look: Callable[[], Result], otherwise: Kind = "malformed"
) -> Result | Fault:
    """Return the result of `look`, or a fault for the error that it raised."""
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


def _unreadable(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    for slot in inventory.slots:
        if slot.fault is not None:
            yield _of_record(store, slot.key(slot.damaged), slot.fault)


def _of_record(store: ObjectStore, key: str, error: CorruptObject | NewerSchema) -> Fault:
    """Fault of a sealed record: altered if the seal is broken, whichever version it claims."""
    kind: Kind = "newer version" if isinstance(error, NewerSchema) else "altered"
    # A flipped bit in the version must not send the user off to upgrade.
    if kind == "newer version" and not _sealed(store.read(key)):
        kind = "altered"
    return Fault(kind, store.url_of(key), str(error))


def _sealed(data: bytes) -> bool:
    try:
        record = parse_json(data)
        digest = record.pop("digest")
        return digest == sha256_of(canonical_json(record))
    except (ValueError, KeyError, AttributeError, TypeError):
        # Any JSON is possible here: a list, or no digest.
        return False
