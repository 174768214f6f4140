"""Finished groups of a stream, read from the objects that have them, without their tokens.

An object has one group, or several of a chunk that ended at about the same time (`packs`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa

from marin_rl.errors import CommitConflict, CorruptObject
from marin_rl.storage.layout import STREAM, pack_of, stream_group_of, stream_key
from marin_rl.storage.tables.parquet import TableReader, digest_of, select
from schemas.migrations import ROLLOUTS as LADDER
from schemas.rollouts import ROLLOUTS

WORKER = "worker"  # in the footer of an object: who sampled its groups
SCALARS = ("run_id", "group_id", "reward", "status", "policy_version_min", "policy_version_max")
VALID = ("complete", "truncated")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedGroup:
    """A finished group of the stream: its number, oldest and newest policy, and rollouts.

    `sha256` is the digest of its object, and `pack` that object's name where it has several groups.
    `differs` says that the rewards of its valid members are not all equal.
    """

    number: int
    sha256: str
    version: int
    version_max: int
    rollouts: int
    differs: bool
    pack: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The run whose groups these are, and the settings of its workers where they are known."""

    run_id: str
    fingerprint: str | None

    def check(self, source: str, stamp: Mapping[str, str], run_ids: Sequence[str]) -> None:
        """Refuse what a worker of another run, or with other settings, put into the stream.

        Raises CommitConflict.
        """
        worker, theirs = stamp.get(WORKER, "unknown"), stamp.get("fingerprint", "")
        if set(run_ids) != {self.run_id}:
            raise CommitConflict(
                f"{source}: worker {worker} sampled it for run {run_ids[0]!r}, expected "
                f"{self.run_id!r}: stop that worker, and remove the file"
            )
        if self.fingerprint is not None and theirs != self.fingerprint:
            raise CommitConflict(
                f"{source}: worker {worker} sampled it with other settings, code or tokenizer: "
                f"expected fingerprint {self.fingerprint}, found {theirs}. Stop that worker, start "
                "it with this run's configuration, and remove the file"
            )


def number_of(group_id: str) -> int:
    """The number of a group of the stream, by its id. Raises ValueError."""
    return int(group_id.rpartition("-")[2])


def object_key(number: int, pack: str) -> str:
    """The object that has a group: the pack of this name, or its own."""
    return f"{STREAM}/{pack}" if pack else stream_key(number)


def streamed_groups(
    key: str, data: pa.Buffer, source: str, sampled: Sampled
) -> tuple[StreamedGroup, ...]:
    """The groups of an object. Raises CommitConflict, CorruptObject, NewerSchema."""
    reader = TableReader(data, source, LADDER)
    columns = reader.table(select(ROLLOUTS, SCALARS)).to_pydict()  # its footer is read once
    sampled.check(source, reader.stamp, columns["run_id"])
    rows = zip(*(columns[name] for name in SCALARS[1:]), strict=True)
    own, sha256 = stream_group_of(key), digest_of(data)
    pack = "" if own is not None else key.rpartition("/")[2]
    groups = list[StreamedGroup]()
    # Rows of a group lie together: a pack is written group by group.
    for group_id, members in groupby(rows, key=lambda row: row[0]):
        _, rewards, statuses, oldest, newest = zip(*members, strict=True)
        valid = {
            reward
            for reward, status in zip(rewards, statuses, strict=True)
            if reward is not None and status in VALID
        }
        groups.append(
            StreamedGroup(
                number=number_in(key, group_id, source) if own is None else own,
                sha256=sha256,
                version=min(oldest),
                version_max=max(newest),
                rollouts=len(statuses),
                # Equal rewards give no advantage: dynamic sampling counts the groups that differ.
                differs=len(valid) > 1,
                pack=pack,
            )
        )
    return tuple(groups)


def number_in(key: str, group_id: str, source: str) -> int:
    """The number of a group of a pack. Raises CorruptObject where it is not among the pack's."""
    numbers = pack_of(key)
    assert numbers is not None, f"{key} is a pack"
    try:
        number = number_of(group_id)
    except ValueError:
        number = -1
    # The name is a promise that readers rely on before they open the object: it says which groups
    # may be inside.
    if number not in numbers:
        raise CorruptObject(
            f"{source}: expected groups {numbers[0]} to {numbers[-1]}, found {group_id!r}"
        )
    return number


def group_numbers(table: pa.Table, key: str, source: str) -> list[int]:
    """Numbers of the groups of an object, in order. Raises CorruptObject."""
    return [number for number, _ in rows_by_group(table, key, source)]


def rows_by_group(table: pa.Table, key: str, source: str) -> Iterator[tuple[int, pa.Table]]:
    """Number and rows of each group of an object. Raises CorruptObject."""
    own, first = stream_group_of(key), 0
    for group_id, rows in groupby(table["group_id"].to_pylist()):
        count = sum(1 for _ in rows)
        number = number_in(key, group_id, source) if own is None else own
        yield number, table.slice(first, count)
        first += count
