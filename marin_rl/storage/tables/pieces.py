"""Pieces of a shard: groups that are finished while the shard is not, each created once.

A piece has the rows that its shard will have, and the shard's fingerprint. It holds one group, or
those of its members that have ended and did not fail; the others come in further pieces. The
names are private, so that readers see committed shards alone, and gc deletes the pieces of shards
that are committed.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from marin_rl.errors import CommitConflict, ObjectMissing
from marin_rl.storage.commits import new_attempt
from marin_rl.storage.layout import PARTIAL, piece_name, pieces_folder
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import commit_table, load
from marin_rl.storage.tables.rollouts import (
    decode_shard,
    encode_shard,
    groups_of,
    identify_shard,
)
from marin_rl.types import Rollout, RolloutGroup, ServedPolicy
from schemas.migrations import ROLLOUTS as LADDER


def commit_groups(
    run: Run,
    key: str,
    groups: Sequence[RolloutGroup],
    *,
    round: int,
    shard: int,
    fingerprint: str,
    policy: ServedPolicy,
    stamp: Mapping[str, str] | None = None,
) -> tuple[bytes, bool]:
    """Create groups at a key; the bytes that are committed there, and True if they are these.

    Raises CommitConflict, CommitUnknown, StorageError.
    """
    attempt = new_attempt()
    data = encode_shard(
        groups,
        run_id=run.run_id,
        round=round,
        shard=shard,
        attempt=attempt,
        # The process that makes the shard writes its own name there.
        replica="",
        fingerprint=fingerprint,
        policy=policy,
        stamp=stamp,
    )
    committed = commit_table(run.store, key, data, LADDER, attempt=attempt, fingerprint=fingerprint)
    return committed, committed == data


def table_sampled_as(fingerprint: str, data: bytes | pa.Buffer, source: str) -> pa.Table:
    """The rows of an object of groups. Raises CommitConflict where it was sampled otherwise."""
    _, theirs = identify_shard(data, source)
    if theirs != fingerprint:
        raise CommitConflict(
            f"{source}: it was sampled with other settings, code or tokenizer: expected "
            f"fingerprint {fingerprint}, found {theirs}. Remove the file"
        )
    return decode_shard(data, source=source)


class ShardPieces:
    """The pieces of one shard of a round, under one fingerprint."""

    takes_members = True

    def __init__(
        self, run: Run, round: int, shard: int, fingerprint: str, policy: ServedPolicy
    ) -> None:
        self._run, self._round, self._shard = run, round, shard
        self._fingerprint, self._policy = fingerprint, policy
        self._folder = pieces_folder(round, shard, fingerprint)
        self._counts: dict[str, int] = {}

    def read(self) -> dict[str, dict[int, Rollout]]:
        """Members that are finished, by group and index; the first piece that has one counts.

        Raises CorruptObject, NewerSchema, StoreUnavailable.
        """
        # A listing that is incomplete costs samples, and no more: a create finds what it lacks.
        members: dict[str, dict[int, Rollout]] = {}
        for key in self._run.store.list(self._folder):
            name = key.rpartition("/")[2]
            if name.startswith((".", PARTIAL)):  # a killed writer's; what is not finished
                continue
            try:
                groups = self._decoded(key, load(self._run.store, key))
            except ObjectMissing:  # gc took it since: the shard is committed
                continue
            for group in groups:
                self._counts[group.group_id] = self._counts.get(group.group_id, 0) + 1
                known = members.setdefault(group.group_id, {})
                for rollout in group.rollouts:
                    known.setdefault(rollout.index_in_group, rollout)
        return members

    def commit(self, group: RolloutGroup) -> dict[int, Rollout]:
        """Commit a group, or some of its members; those that are committed now, by index.

        They are another process's where that was first. Raises CommitUnknown, StorageError.
        """
        number = self._counts.get(group.group_id, 0)
        self._counts[group.group_id] = number + 1
        key = f"{self._folder}/{piece_name(group.group_id.rpartition('/')[2], number)}"
        committed, ours = commit_groups(
            self._run,
            key,
            [group],
            round=self._round,
            shard=self._shard,
            fingerprint=self._fingerprint,
            policy=self._policy,
        )
        # What is committed decides: members of another process stand for these.
        groups = [group] if ours else self._decoded(key, committed)
        return {r.index_in_group: r for each in groups for r in each.rollouts}

    def _decoded(self, key: str, data: bytes | pa.Buffer) -> Sequence[RolloutGroup]:
        return groups_of(decode_shard(data, source=self._run.store.url_of(key)))
