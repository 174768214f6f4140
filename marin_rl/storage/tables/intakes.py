"""The intake of a round: which groups of the stream it takes and drops, in order, and why.

One record, created once. It is decided from what a process saw of the stream at one moment, which
clocks and listings decide; everything after it (shards, batches, update, audit, replay) is a
function of the record and of the groups that it names by digest. Groups are in the order of their
oldest policy and their number, never of arrival.
"""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pyarrow as pa

from marin_rl.config import Config
from marin_rl.errors import CorruptObject
from marin_rl.storage import commits
from marin_rl.storage.layout import STREAM, intake_slot, numbers_in, stream_group_of, stream_key
from marin_rl.storage.runs import Run, committed
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.tables.parquet import iter_present, verified
from marin_rl.storage.tables.rollouts import commit_tables, decode_shard, shard_ref
from marin_rl.storage.tables.stream import StreamedGroup, rows_by_group
from marin_rl.types import SlotRef
from schemas.manifests import Manifest, Parent
from schemas.tables import CONTENT_VERSION

STALE = "policy_age"
VERSION, RANGES_VERSION = 1, 2  # of `extra`; the first has groups one by one

KEPT_MAX = 2  # intakes in memory: a round's own, and that of the round before


class Entry(NamedTuple):
    """A group that a round takes, or drops for a reason; `version` is its oldest policy.

    `sha256` is the digest of its object, `pack` the object's name where it has several groups.
    """

    number: int
    sha256: str
    version: int
    reason: str = ""  # "" where it is taken
    pack: str = ""

    @property
    def key(self) -> str:
        return f"{STREAM}/{self.pack}" if self.pack else stream_key(self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Numbers of groups that intakes have taken or dropped: all below `floor`, and `above`."""

    floor: int = 0
    above: frozenset[int] = frozenset()

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and (number < self.floor or number in self.above)

    def left(self, numbers: range) -> set[int]:
        """Those of `numbers` that no intake has taken or dropped."""
        return {*range(max(numbers.start, self.floor), numbers.stop)} - self.above

    def with_numbers(self, numbers: Iterable[int]) -> "Settled":
        above, floor = {*self.above, *(n for n in numbers if n >= self.floor)}, self.floor
        # Kept small: nearly all numbers are below the floor, and a record lists only those above.
        while floor in above:
            above.remove(floor)
            floor += 1
        return Settled(floor=floor, above=frozenset(above))


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A round's intake: groups in order, those that are dropped with a reason; and what is settled.

    `waiting` is the number of finished groups that were seen and left for later rounds.
    """

    round: int
    groups: tuple[Entry, ...]
    settled: Settled
    waiting: int = 0

    @property
    def taken(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.groups if not entry.reason)

    @property
    def dropped(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.groups if entry.reason)


_kept: "WeakKeyDictionary[ObjectStore, dict[int, Intake]]" = WeakKeyDictionary()  # by run
_reading = Lock()  # threads that need an intake wait for its one reader


def decide(
    round: int,
    groups: Collection[StreamedGroup],
    settled: Settled,
    config: Config,
    *,
    under_way: Collection[int] = (),
    ended: bool = False,
) -> Intake | None:
    """The intake of a round by the finished groups that were seen; None where it is to wait.

    `under_way` are the policies of groups that are being sampled. With `ended`, sampling has
    ended: nothing under way is waited for.
    """
    oldest = round - config.staleness_rounds_max
    waits = config.ahead.sampler == "windowed_wait"
    # Before anything is taken: a group under way that would be too old next time is worth the wait.
    if waits and not ended and any(version <= oldest for version in under_way):
        return None
    # Oldest policy first, so that little becomes stale; then by number, not by arrival.
    waiting = [group for group in groups if group.number not in settled]
    waiting.sort(key=lambda group: (group.version, group.number))
    fresh = [group for group in waiting if group.version >= oldest]
    # Dropped by name in the record: each group that was sampled is accounted for once.
    stale = [group for group in waiting if group.version < oldest]
    taken = _first(fresh, config)
    if taken is None:
        return None
    entries = [
        *(Entry(g.number, g.sha256, g.version, "", g.pack) for g in taken),
        *(Entry(g.number, g.sha256, g.version, STALE, g.pack) for g in stale),
    ]
    return Intake(
        round=round,
        groups=tuple(entries),
        settled=settled.with_numbers(entry.number for entry in entries),
        waiting=len(fresh) - len(taken),
    )


def _first(fresh: Sequence[StreamedGroup], config: Config) -> Sequence[StreamedGroup] | None:
    """The oldest groups until the round has its number of them; None where there are too few.

    With dynamic sampling only those whose rewards differ count, up to `dynamic_sampling` batches.
    """
    wanted, most = config.rollouts.groups_per_round, len(fresh)
    if not config.samples_on:
        return fresh[:wanted] if len(fresh) >= wanted else None
    counted, most = 0, wanted * config.sample_batches_max
    for place, group in enumerate(fresh[:most], start=1):
        counted += group.differs
        if counted == wanted:
            return fresh[:place]
    return fresh[:most] if len(fresh) >= most else None


def intake_ref(run: Run, round: int) -> SlotRef | None:
    return committed(run, intake_slot(round))


def settled_before(run: Run, round: int) -> Settled:
    """Numbers of groups that the intakes of earlier rounds have settled. Raises ObjectMissing."""
    return _intake_of(run, round - 1).settled if round else Settled()


def _intake_of(run: Run, round: int) -> Intake:
    """A committed intake, which this process may have read before. Raises as `read_intake`.

    It is asked for at every look at the stream and for every shard, never changes, and a record of
    100,000 groups takes half a second to read.
    """
    with _reading:
        kept = _kept.setdefault(run.store, {})
        if (intake := kept.get(round)) is None:
            intake = kept[round] = read_intake(run, round)
            for old in sorted(kept)[:-KEPT_MAX]:
                del kept[old]
    return intake


def commit_intake(run: Run, intake: Intake) -> SlotRef:
    manifest = intake_manifest(run, intake)
    winner = commits.commit_manifest(run.store, manifest)
    return commits.ref_of(winner, reused=winner.attempt != manifest.attempt)


def intake_manifest(run: Run, intake: Intake) -> Manifest:
    parents: tuple[Parent, ...] = ()
    if intake.round:
        # Part of the fingerprint: intakes form one chain, and no group is taken by two.
        before = commits.read_manifest(run.store, intake_slot(intake.round - 1))
        assert before is not None, "rounds take their groups in turn"
        parents = (commits.parent_of(commits.ref_of(before[0])),)
    # Of the settings alone: what was seen is this record's to say, and the first one's.
    content = {
        "round": intake.round,
        "groups": run.config.rollouts.groups_per_round,
        "staleness": run.config.staleness_rounds_max,
    }
    return commits.new_manifest(
        intake_slot(intake.round),
        attempt=commits.new_attempt(),
        fingerprint=commits.fingerprint("intake", content, parents),
        parents=parents,
        totals={
            "groups": float(len(intake.taken)),
            "dropped": float(len(intake.dropped)),
            "waiting": float(intake.waiting),
        },
        extra={
            **_recorded(intake.groups),
            "settled": intake.settled.floor,
            "settled_above": sorted(intake.settled.above),
        },
    )


def _recorded(groups: Sequence[Entry]) -> dict[str, Any]:
    """The groups as a record has them, by ranges of numbers.

    A range is `[object, first number, count, policy, reason]`; `object` counts in `objects`, each
    with its name and digest.
    """
    objects = dict.fromkeys((entry.key.rpartition("/")[2], entry.sha256) for entry in groups)
    places = {name: place for place, (name, _) in enumerate(objects)}
    ranges = list[list[Any]]()
    for entry in groups:
        same = places[entry.key.rpartition("/")[2]], entry.version, entry.reason
        if ranges and (last := ranges[-1])[1] + last[2] == entry.number and same == (
            last[0], *last[3:]
        ):  # fmt: skip
            last[2] += 1
        else:
            ranges.append([same[0], entry.number, 1, *same[1:]])
    return {"intake": RANGES_VERSION, "objects": [list(each) for each in objects], "groups": ranges}


def _recorded_groups(extra: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The groups of a record. Raises KeyError, TypeError, ValueError."""
    version, groups = extra["intake"], extra["groups"]
    if version == VERSION:
        return tuple(Entry(int(n), str(sha), int(v), str(why)) for n, sha, v, why in groups)
    if version != RANGES_VERSION:
        raise ValueError(f"expected version {VERSION} or {RANGES_VERSION}, found {version!r}")
    objects = dict(enumerate(extra["objects"]))
    return tuple(entry for each in groups for entry in _entries(objects, *each))


def _entries(
    objects: Mapping[int, Any], place: int, first: int, count: int, version: int, reason: str
) -> Iterator[Entry]:
    """Yield the groups of a range. Raises KeyError, TypeError, ValueError."""
    name, sha256 = map(str, objects[place])
    key = f"{STREAM}/{name}"
    numbers, alone = numbers_in(key), stream_group_of(key) is not None
    # Before the loop: a forged count must not make entries without end.
    if first not in numbers or not 0 < count <= numbers.stop - first:
        raise ValueError(f"{name} cannot have {count} groups from number {first} on")
    pack = "" if alone else name
    for number in range(first, first + count):
        yield Entry(number, sha256, int(version), str(reason), pack)


def read_intake(run: Run, round: int) -> Intake:
    """A committed intake. Raises ObjectMissing, CorruptObject, NewerSchema."""
    return intake_in(commits.committed_manifest(run.store, intake_slot(round)), run.store.url_of)


def intake_in(manifest: Manifest, url_of: Any = str) -> Intake:
    """The intake that a manifest records. Raises CorruptObject."""
    extra, source = manifest.extra, url_of(manifest.slot)
    try:
        groups = _recorded_groups(extra)
        above = frozenset(map(int, extra["settled_above"]))
        settled = Settled(floor=int(extra["settled"]), above=above)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObject(f"{source}: expected an intake of groups: {error!r}") from None
    # Else a later round would take them once more.
    if any(entry.number not in settled for entry in groups):
        raise CorruptObject(f"{source}: expected its own groups among those that are settled")
    return Intake(
        round=int(manifest.slot.rpartition("-")[2]),
        groups=groups,
        settled=settled,
        waiting=int(manifest.totals.get("waiting", 0)),
    )


def intake_metrics(run: Run, round: int) -> dict[str, float]:
    """`staleness/groups_*` of a round's intake. Raises as `read_intake`."""
    intake = read_intake(run, round)
    return {
        "staleness/groups_dropped": float(len(intake.dropped)),
        "staleness/groups_waiting": float(intake.waiting),
    }


def collect_shard(run: Run, round: int, shard: int, intake: SlotRef) -> SlotRef:
    """Commit a shard of a round out of the groups that its intake names, taken or dropped."""
    content = {"round": round, "shard": shard}
    decided = commits.fingerprint(
        "collected", content, (commits.parent_of(intake),), CONTENT_VERSION
    )
    existing = shard_ref(run, round, shard, decided)
    if existing is not None:
        return existing
    entries, shards = _intake_of(run, round).groups, run.config.rollouts.shards_per_round
    # Edges by the totals alone: every process cuts the same shards out of the intake.
    start, stop = (len(entries) * edge // shards for edge in (shard, shard + 1))
    try:
        tables = _tables(run, entries[start:stop])
    except CorruptObject:
        # Another process may have sealed the round since the first look, and gc taken the groups.
        existing = shard_ref(run, round, shard, decided)
        if existing is None:
            raise
        return existing
    return commit_tables(run, round, shard, tables, decided)


def _tables(run: Run, entries: Sequence[Entry]) -> list[pa.Table]:
    # By object: a pack is fetched and hashed once for all its groups.
    digests = {entry.key: entry.sha256 for entry in entries}
    tables = dict[tuple[str, int], pa.Table]()
    present = iter_present(run.store, digests)
    for (key, sha256), data in zip(digests.items(), present, strict=True):
        source = run.store.url_of(key)
        if data is None:
            lost = ", ".join(str(entry.number) for entry in entries if entry.key == key)
            raise CorruptObject(
                f"{source}: group {lost} is gone, and an intake of run {run.run_id!r} names it: "
                "restore the file from a copy; nothing else of the run is lost, and the same "
                "command goes on from there"
            )
        # By the recorded digest: what trains is what was seen when the round decided.
        table = decode_shard(verified(data, sha256, source), source=source)
        rows = rows_by_group(table, key, source)
        tables |= {(key, number): rows_of for number, rows_of in rows}
    missing = [entry for entry in entries if (entry.key, entry.number) not in tables]
    if missing:
        raise CorruptObject(
            f"{run.store.url_of(missing[0].key)}: expected group {missing[0].number}, which an "
            f"intake of run {run.run_id!r} names there; found none"
        )
    return [tables[entry.key, entry.number] for entry in entries]
