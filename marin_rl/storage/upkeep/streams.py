"""Upkeep of streams of groups: what a sealed round has collected, what waits, and what is lost.

Which objects may go is said here; `gc` decides when, `fsck` and `audit` report.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from marin_rl.config import Config
from marin_rl.errors import CorruptObject, NewerSchema
from marin_rl.storage import layout
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, rounds_in
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.tables.intakes import Intake, Settled, intake_in
from marin_rl.storage.tables.parquet import PARTS_MAX, iter_present
from marin_rl.storage.tables.rollouts import decode_shard
from marin_rl.storage.tables.stream import numbers_of, rows_by_group
from marin_rl.storage.upkeep.integrity import Fault
from marin_rl.storage.upkeep.inventory import Inventory


def collected_keys(config: Config, inventory: Inventory) -> Iterator[str]:
    """Keys of stream objects whose groups are all in sealed rounds, and of claims on them."""
    settled = Settled()
    for slot in inventory.of_kind("intakes"):
        if slot.manifest is not None and slot.number in inventory.sealed:
            # Those of earlier rounds too: each is sealed before the next one takes its groups.
            settled = intake_in(slot.manifest).settled
    return _settled_keys(config, inventory.keys, settled)


def taken_batches(inventory: Inventory) -> Iterator[str]:
    """Batches of a server of trajectories whose groups are all committed: those before the last."""
    numbers = {key: n for key in inventory.keys if (n := layout.popped_batch_of(key)) is not None}
    last = max(numbers.values(), default=0)
    return (key for key, number in numbers.items() if number < last)


def _settled_keys(config: Config, keys: Iterable[str], settled: Settled) -> Iterator[str]:
    for key in keys:
        if (claim := layout.claim_of(key)) is not None:
            numbers = numbers_of(config, claim[0])
        elif (partial := layout.partial_of(key)) is not None:
            numbers = range(partial, partial + 1)
        else:
            numbers = layout.numbers_in(key)
        # A pack stays until no one goes on with its chunk, for chains have no gaps.
        if numbers and all(n in settled for n in numbers):
            yield key


def collected_now(run: Run) -> list[str]:
    """As `collected_keys`, from a listing of the stream, for a run that is being played."""
    # The latest one may not be sealed yet.
    for round in reversed(rounds_in(run.folder, "intakes")[-2:]):
        # Both: until the round is sealed its groups are the only copy of them.
        intake = read_manifest(run.folder, layout.intake_slot(round))
        if intake is None or read_manifest(run.folder, layout.rollouts_slot(round)) is None:
            continue
        settled = intake_in(intake[0], run.folder.url_of).settled
        return list(_settled_keys(run.config, run.folder.list(layout.STREAM), settled))
    return []


def lost_groups(store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
    """Missing groups that the intake of an unsealed round names."""
    sealed, there = inventory.sealed, set(inventory.keys)
    for slot in inventory.of_kind("intakes"):
        if slot.manifest is None or slot.number in sealed:
            continue
        named = dict.fromkeys(e.key for e in intake_in(slot.manifest, store.url_of).groups)
        for key in named:
            if key not in there:
                detail = f"{store.url_of(slot.slot)} names it, and its round is not sealed"
                yield Fault("missing", store.url_of(key), detail)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Groups of a stream that are kept unfinished, and the tokens that were sampled of them.

    `begun_again` counts members whose recorded turns did not fit what the environment answered.
    """

    groups: int
    tokens: int
    begun_again: int = 0


def unfinished_groups(run: Run) -> Unfinished:
    """Partial groups of the stream: begun by one policy, to be continued by a later one."""
    keys = run.store.list(layout.STREAM)
    # A part that a crash left behind its finished group is not under way any longer.
    finished, intake = {number for number, _ in _finished(run, keys)}, _latest_intake(run)
    settled = intake.settled if intake else Settled()
    begun = [
        (number, key)
        for key in keys
        if (number := layout.partial_of(key)) is not None
        and number not in finished
        and number not in settled
    ]
    tokens = begun_again = 0
    present = iter_present(run.store, (key for _, key in begun))
    for (_, key), data in zip(begun, present, strict=True):
        if data is not None:
            columns = ["n_completion_tokens", "error"]
            rows = decode_shard(data, columns, source=run.store.url_of(key))
            tokens += sum(rows["n_completion_tokens"].to_pylist())
            # A part has an error only where its member was begun again.
            begun_again += len(rows) - rows["error"].null_count
    # A group may have several parts.
    numbers = {number for number, _ in begun}
    return Unfinished(groups=len(numbers), tokens=tokens, begun_again=begun_again)


def _latest_intake(run: Run) -> Intake | None:
    rounds = rounds_in(run.store, "intakes")
    latest = read_manifest(run.store, layout.intake_slot(rounds[-1])) if rounds else None
    return intake_in(latest[0], run.store.url_of) if latest else None


def waiting_rollouts(run: Run) -> int:
    """Rollouts that are finished and have no disposition yet.

    They are groups of the stream that no sealed round has, and rounds that are sealed and have no
    batches. Groups that cannot be read are left to `fsck`.
    """
    settled, unsealed = Settled(), set[int]()
    if (intake := _latest_intake(run)) is not None:
        settled = intake.settled
        # Earlier ones are: each round is sealed before the next one takes its groups.
        if read_manifest(run.store, layout.rollouts_slot(intake.round)) is None:
            unsealed = {entry.number for entry in intake.groups}
    # By number: two workers may have committed a group.
    streamed = dict(_finished(run, run.store.list(layout.STREAM), settled, unsealed))
    count, round = sum(streamed.values()), max(rounds_in(run.store, "batches"), default=-1)
    # A folder without a manifest is an attempt: that round has no batches yet.
    if round < 0 or read_manifest(run.store, layout.batches_slot(round)) is not None:
        round += 1
    while (sealed := read_manifest(run.store, layout.rollouts_slot(round))) is not None:
        count += int(sealed[0].totals.get("rows", 0))
        round += 1
    return count


def _finished(
    run: Run, keys: Iterable[str], settled: Container[int] = (), unsealed: Container[int] = ()
) -> Iterator[tuple[int, int]]:
    """Number and rollouts of finished groups, but for those that are `settled` and sealed."""

    def wanted(number: int) -> bool:
        return number not in settled or number in unsealed

    listed = [key for key in keys if any(map(wanted, layout.numbers_in(key)))]
    # An object may be as large as a part of a round.
    for key, data in zip(listed, iter_present(run.store, listed, PARTS_MAX), strict=True):
        source = run.store.url_of(key)
        try:
            rows = (
                ()
                if data is None
                else rows_by_group(decode_shard(data, ["group_id"], source=source), key, source)
            )
            yield from ((number, len(group)) for number, group in rows if wanted(number))
        except (CorruptObject, NewerSchema):
            continue  # left to fsck
