"""Packs: objects of a stream that have several finished groups of a chunk (`commit_every_s`).

The packs of a chunk are a chain of objects, each created once. Pack n + 1 is written only by a
process that has read or written pack n, and has none of the groups of those before: a group is in
one pack, and what two workers sample twice is dropped by the second. A pack goes once all numbers
of its chunk are settled by sealed rounds, so a chain is whole as long as it matters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from marin_rl.storage.layout import pack_key
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import load_or_none
from marin_rl.storage.tables.pieces import commit_groups, table_sampled_as
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from marin_rl.storage.tables.streamed import WORKER, group_numbers, number_of
from marin_rl.types import RolloutGroup, ServedPolicy


@dataclass(slots=True, kw_only=True)
class PackChain:
    """The packs of the groups `numbers`, as this process knows them; `worker` goes into footers."""

    run: Run
    numbers: range
    policy: ServedPolicy
    fingerprint: str
    worker: str
    length: int = 0
    finished: set[int] = field(default_factory=set[int])  # numbers of groups that a pack has

    def read(self) -> list[RolloutGroup]:
        """Groups of the packs that follow those which are known.

        Names are known, and no listing is trusted: a chain ends at the first object that is absent.
        Raises CommitConflict, CorruptObject, NewerSchema, StoreUnavailable.
        """
        groups = list[RolloutGroup]()
        while (data := load_or_none(self.run.store, key := self._next_key)) is not None:
            pack = self._decoded(key, data)
            self._count(number_of(group.group_id) for group in pack)
            groups += pack
        return groups

    def append(self, groups: Sequence[RolloutGroup]) -> None:
        """Commit groups as the next pack, without those that others have committed meanwhile.

        Raises CommitConflict, CommitUnknown, StorageError.
        """
        # Again after each create: where another process was first, its pack may have some of the
        # groups.
        while left := [group for group in groups if number_of(group.group_id) not in self.finished]:
            self._count(self._commit(self._next_key, left))

    @property
    def _next_key(self) -> str:
        return pack_key(self.numbers, self.length)

    def _count(self, numbers: Iterable[int]) -> None:
        self.finished.update(numbers)
        self.length += 1

    def _decoded(self, key: str, data: pa.Buffer) -> Sequence[RolloutGroup]:
        return groups_of(table_sampled_as(self.fingerprint, data, self.run.store.url_of(key)))

    def _commit(self, key: str, groups: Sequence[RolloutGroup]) -> Iterable[int]:
        """Create a pack of these groups; the numbers of those that are committed there."""
        committed, ours = commit_groups(
            self.run,
            key,
            groups,
            round=self.policy.weight_version,
            shard=0,
            fingerprint=self.fingerprint,
            policy=self.policy,
            stamp={WORKER: self.worker},
        )
        # Otherwise what is committed is another's pack: its groups count, and ours are tried in the
        # next one.
        if ours:
            return [number_of(group.group_id) for group in groups]
        source = self.run.store.url_of(key)
        return group_numbers(decode_shard(committed, ["group_id"], source=source), key, source)
