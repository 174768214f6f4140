"""gc: delete what no committed slot of a run can reach, and what a rule of retention prunes.

Five reasons, each safe for its own:

- `unreferenced`: lies in a committed slot and its manifest does not name it, or is a piece of a
  shard that is committed. Safe at any time: an attempt that is late finds the slot committed and
  adopts it.
- `uncommitted`: an attempt's files in a slot without a manifest. Safe once that attempt can commit
  no more: its process is gone, which the run's lock proves on one machine, or it is older than
  ATTEMPT_LIFETIME_S, after which `commit_manifest` refuses it. A slot that others were made from,
  that a round's metrics mention, or that another run reads, was committed, and lost its manifest:
  what is left of it stays, for the manifest may reappear.
  Groups of a shard that was never committed are `uncommitted` at that age alone, on one machine
  too: until then a retry goes on from them.
- `temporary`: what a killed writer left under a private name, on local roots, by lock and age.
- `heartbeat`: of a server that has not written it for as long as attempts live. One that is alive
  writes it again.
- `retention`: arrays of old checkpoints. A tombstone says so first; see tombstones.py. What a fork
  of this run reaches stays: a fork names its parents in run.json before it looks for tombstones,
  and here a tombstone stands before every neighbour is read, so one of the two always sees the
  other. Results of an earlier look in this process only spare tombstones.

Everything that is visible to a glob (shards, manifests, metrics) is a commit, and stays.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from marin_rl.config import RetentionConfig, parse_config
from marin_rl.errors import CorruptObject, NewerSchema, ObjectMissing, RunLocked, StorageError
from marin_rl.storage import layout, runs
from marin_rl.storage.commits import ATTEMPT_LIFETIME_S, attempt_age_s, attempt_in, manifest_of
from marin_rl.storage.fleet import heartbeat_age_s
from marin_rl.storage.run_progress import RETENTION, best_checkpoints, evaluated
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.locks import is_free
from marin_rl.storage.tables.parquet import in_order, load
from marin_rl.storage.tables.rollouts import identify_shard
from marin_rl.storage.tables.tombstones import array_parts, commit_tombstone
from marin_rl.storage.upkeep.forks import Reach, borrowed_from, reference_checkpoints
from marin_rl.storage.upkeep.inventory import Inventory, Item, Role, Slot, read_slot, take_inventory
from marin_rl.storage.upkeep.streams import collected_keys, collected_now, taken_batches

Reason = Literal["unreferenced", "uncommitted", "temporary", "heartbeat", "retention"]

Result = TypeVar("Result")

CLOCKS_APART_S = 24 * 3600.0  # by how much the clocks of writers and of gc may differ
LATE_S = ATTEMPT_LIFETIME_S + CLOCKS_APART_S  # an attempt of this age commits no more

_known: dict[str, Mapping[str, Reach]] = {}  # by run: objects that other runs read


@dataclass(frozen=True, slots=True)
class Garbage:
    key: str
    bytes: int
    reason: Reason

    @property
    def slot(self) -> str:
        return "/".join(self.key.split("/")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Garbage that gc collected, and `deleted`, False in a dry run.

    `live` says that another process works on the run, whose files were let alone; `skipped` are
    slots that were committed, and whose manifests are gone or cannot be read: nothing is deleted
    there. `unread` is the neighbour that cannot be read: with a possible fork no checkpoint is
    pruned.
    """

    garbage: tuple[Garbage, ...]
    live: bool
    skipped: tuple[str, ...]
    deleted: bool
    unread: str = ""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.garbage)


def collect(
    run: Run,
    rule: RetentionConfig | None = None,
    *,
    dry_run: bool = False,
    now: datetime | None = None,
) -> Collection:
    """Delete the garbage of a run, or only name it. Forks are looked up among the runs of its root.

    `rule` is by default that of `rule_of`; the last two checkpoints always stay, for a round that
    was interrupted is played again from the one before the last. Where a neighbour cannot be read,
    no checkpoint is given up. `now` is UTC.
    """
    # One moment for all ages: a long collection must not find files older as it goes on.
    rule, moment = rule or rule_of(run), now or datetime.now(UTC)
    with _alone(run, dry_run=dry_run) as alone:
        # Listed under the lock, so no process of this machine starts an attempt after the listing.
        inventory = take_inventory(run.folder)
        found = list(_garbage(run, inventory, rule, moment, alone=alone))
        open_slots = {item.slot for item in found if item.reason == "uncommitted"}
        # If a neighbour cannot be read, every open slot counts as read by it, and stays.
        read_by_others, unread = _or_none(lambda: _proven(run, open_slots), open_slots)
        retired, unread_too = _or_none(lambda: _retired(run, inventory, rule), [])
        garbage = [i for i in found if i.reason != "uncommitted" or i.slot not in read_by_others]
        garbage += retired
        if not dry_run:
            garbage = _delete(run, inventory, rule, garbage)
    return Collection(
        garbage=tuple(sorted(garbage, key=lambda item: item.key)),
        live=not alone,
        skipped=tuple(sorted(_damaged(inventory) | read_by_others)),
        deleted=not dry_run,
        unread=unread or unread_too,
    )


def _or_none(look: Callable[[], Result], none: Result) -> tuple[Result, str]:
    """Return the result of `look`; `none` and the reason where a neighbour cannot be read."""
    try:
        return look(), ""
    except StorageError as error:
        if error.transient:
            raise
        return none, str(error)


def retire(run: Run) -> None:
    """Prune checkpoints as the configuration asks; nothing where it asks to keep all.

    Groups of a stream that a sealed round has are deleted too, so that listings stay short. Called
    after every round: it looks from the latest checkpoint down to one that was pruned before, never
    at the whole run.
    """
    if run.config.windowed:
        # Own folder alone: what a fork shares with its parent is the parent's to delete.
        # `list`: an error is raised only where its result is taken.
        list(in_order(run.folder, run.folder.delete, collected_now(run)))
    rule = run.config.retention
    if rule.checkpoints_last is None:
        return
    slots: list[Slot] = []
    last = 0
    before = _best(run, rule)[-2:-1]  # kept until another was better
    for number in reversed(runs.rounds_in(run.folder, "checkpoints")):
        if number < last and number not in before:
            continue
        slot = layout.checkpoint_slot(number)
        names = [key.removeprefix(f"{slot}/") for key in run.folder.list(slot)]
        slots.append(read_slot(run.folder, slot, names))
        # Older checkpoints were judged when this one was pruned, so each round looks at few. One
        # that had what this one leaves out may have been kept for a later one, which is gone now.
        if slots[-1].pruned and slots[-1].pruned.isdisjoint(names):
            last = max(last, slots[-1].whole)
    inventory = Inventory(keys=(), slots=slots[::-1])
    _delete(run, inventory, rule, _retired(run, inventory, rule))


def rule_of(run: Run, last: int | None = None, every: int | None = None) -> RetentionConfig:
    """The present rule of retention, with `last` and `every` in its place. Raises ConfigError.

    The latest checkpoint records it, else run.json. Where that checkpoint is damaged all is kept,
    unless something is asked for: then raises CorruptObject.
    """
    requested = {"checkpoints_last": last, "checkpoints_every": every}
    overrides = {name: value for name, value in requested.items() if value is not None}
    try:
        own = _recorded_rule(run) or run.config.retention.model_dump(mode="json")
    except CorruptObject:
        if overrides:
            raise
        return RetentionConfig(age_s=run.config.retention.age_s)
    return parse_config({"retention": {**own, **overrides}}, "retention").retention


def _recorded_rule(run: Run) -> dict[str, Any] | None:
    """Rule in the run's own latest checkpoint, or in its warm start's; never an ancestor's."""
    latest = runs.latest_checkpoint(run) or runs.latest_preference(run) or runs.latest_sft(run)
    if latest is None or run.owner_of(latest.slot) != run.run_id:
        return None
    rule = manifest_of(run.store, latest).extra.get(RETENTION)
    if not isinstance(rule, dict | None):
        raise CorruptObject(
            f"{run.store.url_of(latest.slot)}: expected a mapping as {RETENTION}, found "
            f"{str(rule)[:100]!r}"
        )
    return rule


@contextmanager
def _alone(run: Run, *, dry_run: bool) -> Iterator[bool]:
    """Hold the run; False where another process of this machine does. A dry run only looks."""
    if dry_run:
        path = run.folder.local_path(runs.LOCK_KEY)
        yield path is None or is_free(path)
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(run.lock())
            alone = True
        except RunLocked:
            alone = False
        yield alone


def _garbage(
    run: Run, inventory: Inventory, rule: RetentionConfig, now: datetime, *, alone: bool
) -> Iterator[Garbage]:
    """Garbage but for arrays of checkpoints; what vanished meanwhile is left out."""
    # The lock proves that no writer of this machine is left. Without it only age proves that.
    locked = alone and run.folder.local_path(runs.LOCK_KEY) is not None
    oldest_s: dict[Role, tuple[Reason, float]] = {
        "loose": ("uncommitted", rule.age_s if locked else LATE_S),
        "piece": ("uncommitted", LATE_S),
        "heartbeat": ("heartbeat", LATE_S),
    }
    if alone:  # a process at work is still writing its temporary files
        oldest_s["temporary"] = "temporary", rule.age_s
    if run.config.rollouts.source:
        # Groups that were pushed cannot be sampled again: they wait for their round, however long.
        del oldest_s["piece"]
    unneeded = {*collected_keys(run.config, inventory), *taken_batches(inventory)}
    damaged = _damaged(inventory)
    for item in inventory.items:
        reason, limit_s = oldest_s.get(item.role, (None, 0.0))
        proven = reason == "uncommitted" and item.slot is not None and item.slot.slot in damaged
        # An attempt that is late finds the commit, and adopts it. Without an attempt in its name a
        # file is a commit, or the user's own: it stays.
        committed = item.slot is not None and item.slot.manifest is not None
        late = item.role == "loose" and committed and attempt_in(item.name) is not None
        if item.key in unneeded or late or item.role == "collected piece":
            reason = "unreferenced"
        elif reason is None or proven or _age_s(run.folder, item, now) <= limit_s:
            continue
        with suppress(ObjectMissing):
            yield Garbage(item.key, run.folder.size(item.key), reason)


def _age_s(store: ObjectStore, item: Item, now: datetime) -> float:
    """Seconds since an object was written, by its own word or its file's; 0 where none tells."""
    # What is not understood is not deleted: fsck names it.
    with suppress(CorruptObject, NewerSchema, ObjectMissing, ValueError, FileNotFoundError):
        match item.role:
            case "loose" if attempt := attempt_in(item.name):
                return attempt_age_s(attempt, now)
            case "piece":
                attempt, _ = identify_shard(load(store, item.key), store.url_of(item.key))
                return attempt_age_s(attempt, now)
            case "heartbeat":
                return heartbeat_age_s(item.key, store.read(item.key), now.timestamp()) or 0.0
            # Object stores have no temporary names, but for a probe's few bytes.
            case "temporary" if path := store.local_path(item.key):
                return now.timestamp() - path.lstat().st_mtime
    return 0.0


def _damaged(inventory: Inventory) -> set[str]:
    """Slots whose manifests cannot be read, or are gone although the run's files prove them."""
    return {s.slot for s in inventory.slots if s.fault is not None or s.slot in inventory.lost}


def _proven(run: Run, slots: set[str]) -> set[str]:
    """Those of these slots that another run was made from: they were committed once."""
    forkable = {slot for slot in slots if slot.partition("/")[0] in layout.POLICY_SLOTS}
    if not forkable:  # spares reading the run.json of every neighbour
        return forkable
    return set(filter(borrowed_from(run).proves, forkable))


def _retired(run: Run, inventory: Inventory, rule: RetentionConfig) -> list[Garbage]:
    """Arrays that the rule prunes, and those that an earlier gc left half deleted."""
    garbage: list[Garbage] = []
    best = _best(run, rule)[-1:]
    for slot in _checkpoints(inventory):
        if slot.manifest is not None and (slot.pruned or not _kept(slot, inventory, rule, best)):
            # What the tombstone names, where there is one: no other part may go missing.
            arrays = (part.name for part in array_parts(slot.manifest))
            names = sorted(set(slot.pruned or arrays).intersection(slot.names))
            garbage += [Garbage(slot.key(n), slot.parts[n].bytes, "retention") for n in names]
    return _unpinned(run, inventory, garbage, known=_known.get(run.folder.url, {}))


def _best(run: Run, rule: RetentionConfig) -> list[int]:
    """Checkpoints that were the best by the rule when they were evaluated, the best one last."""
    return [] if rule.best is None else best_checkpoints(evaluated(run, rule.best))


def _kept(slot: Slot, inventory: Inventory, rule: RetentionConfig, best: list[int]) -> bool:
    """True if the rule keeps a checkpoint; of the warm start, only the last ones are kept."""
    last, every = rule.checkpoints_last, rule.checkpoints_every
    if last is None:
        return True
    # An unfinished attempt does not count, or it would push out a checkpoint that is complete.
    committed = [s.number for s in inventory.of_kind(slot.kind) if s.manifest is not None]
    if slot.number in sorted(committed)[-last:]:
        return True
    spread = every is not None and slot.number % every == 0
    return slot.kind == "checkpoints" and (spread or slot.number in best)


def _checkpoints(inventory: Inventory) -> list[Slot]:
    return [slot for kind in layout.POLICY_SLOTS for slot in inventory.of_kind(kind)]


def _unpinned(
    run: Run, inventory: Inventory, garbage: list[Garbage], *, known: Mapping[str, Reach]
) -> list[Garbage]:
    """Garbage without arrays that the run's objective or a fork still reads (`borrowed_from`)."""
    if not any(item.reason == "retention" for item in garbage):
        return garbage
    # Looked up only where arrays would go: other garbage is read by no one.
    borrowed = borrowed_from(run, known)
    _known[run.folder.url] = borrowed.reaches
    pinned = {slot.slot for slot in _checkpoints(inventory) if borrowed.has(slot.slot)}
    latest = max((slot.number for slot in inventory.of_kind("checkpoints")), default=0)
    played = {max(latest - 1, 0), latest}  # the last one may be played again
    retired = {item.slot for item in garbage if item.reason == "retention"} - pinned
    for slot in inventory.of_kind("checkpoints"):
        # One that stays needs what it leaves out: the rounds since the whole one are played again.
        if slot.slot not in retired and not slot.pruned and slot.whole < slot.number:
            pinned.add(layout.checkpoint_slot(slot.whole))
            played.update(range(slot.whole, slot.number))
    for round in played:
        pinned.update(map(layout.checkpoint_slot, reference_checkpoints(run.config, round)))
    return [i for i in garbage if i.reason != "retention" or i.slot not in pinned]


def _delete(
    run: Run, inventory: Inventory, rule: RetentionConfig, garbage: list[Garbage]
) -> list[Garbage]:
    """Delete garbage, tombstones first; returns what was really deleted."""
    slots = {slot.slot: slot for slot in inventory.slots}
    retired = {item.slot for item in garbage if item.reason == "retention"}
    # Tombstones first: a crash in between leaves arrays for the next gc to delete. In the other
    # order it would leave a checkpoint that looks damaged.
    for name in sorted(retired):
        slot = slots[name]
        if not slot.pruned and slot.manifest is not None:
            commit_tombstone(run.folder, slot.manifest, rule.model_dump(mode="json"))
    # All neighbours are read again now that the tombstones exist: a fork made meanwhile either saw
    # a tombstone and failed, or is seen here.
    gone = _unpinned(run, inventory, garbage, known={})
    lock = run.folder.local_path(runs.LOCK_KEY)
    top = lock and lock.parent
    for item in gone:
        # File by file, after the tombstone: a crash anywhere here leaves garbage and no damage.
        run.folder.delete(item.key)
        path = run.folder.local_path(item.key)
        with suppress(OSError):  # the first folder that is not empty, or is removed already
            for folder in path.parents if path and top else ():
                if folder == top:
                    break
                folder.rmdir()
    return gone
