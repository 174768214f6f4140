"""Unfinished groups: what was sampled of their members, piece by piece (`partial_rollout`).

A group has a chain of private objects, each created once. Object n + 1 is written only by a process
that has read or written object n, so a chain has one course, and what it holds is gone on with by
one process: another finds the next object there, and appends no more. A row has the tokens that a
piece added to a member; one with a prompt begins the member again, whatever came before. Chains of
a stream go when a sealed round has their group, those of a shard once the shard is committed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from marin_rl.storage.layout import partial_key, partial_name, pieces_folder
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import iter_present
from marin_rl.storage.tables.pieces import commit_groups, table_sampled_as
from marin_rl.storage.tables.rollouts import groups_of
from marin_rl.storage.tables.streamed import WORKER
from marin_rl.types import RolloutGroup, ServedPolicy


@dataclass(slots=True, kw_only=True)
class PartialGroups:
    """Chains of the unfinished groups of a shard, or of a stream.

    `key` names an object by its group and number. `fingerprint` is that of the finished groups.
    """

    run: Run
    policy: ServedPolicy
    fingerprint: str
    key: Callable[[str, int], str]
    round: int
    shard: int = 0
    stamp: Mapping[str, str] = field(default_factory=dict[str, str])
    lengths: dict[str, int] = field(default_factory=dict[str, int])
    left: set[str] = field(default_factory=set[str])  # to other processes

    def read(self, group_ids: Sequence[str]) -> dict[str, list[RolloutGroup]]:
        """Parts of each group, in order. Raises CorruptObject, CommitConflict.

        Names are known, and no listing is trusted: a chain ends at the first object that is absent.
        """
        chains: dict[str, list[RolloutGroup]] = {}
        waiting, number = list(group_ids), 0
        # One wave for the n-th objects of all chains: a bucket answers many reads in the time of
        # one.
        while waiting:
            keys = [self.key(group_id, number) for group_id in waiting]
            there = list[str]()
            for group_id, key, data in zip(waiting, keys, self._load(keys), strict=True):
                if data is not None:
                    chains.setdefault(group_id, []).append(self._decoded(key, data))
                    there.append(group_id)
            waiting, number = there, number + 1
        self.lengths = {group_id: len(chain) for group_id, chain in chains.items()}
        return chains

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return iter_present(self.run.store, keys)

    def _decoded(self, key: str, data: pa.Buffer) -> RolloutGroup:
        table = table_sampled_as(self.fingerprint, data, self.run.store.url_of(key))
        (group,) = groups_of(table)
        # Each by its own digest: later parts of a group may be of later policies.
        rows = zip(group.rollouts, table["policy_digest"].to_pylist(), strict=True)
        rollouts = (replace(rollout, policy_digest=digest) for rollout, digest in rows)
        return replace(group, rollouts=tuple(rollouts))

    def append(self, group: RolloutGroup) -> bool:
        """Commit what a piece added to a group; False where another process goes on with it.

        Raises CommitUnknown, StorageError.
        """
        if group.group_id in self.left:
            return False
        number = self.lengths.get(group.group_id, 0)
        ours = self._commit(self.key(group.group_id, number), group)
        self.lengths[group.group_id] = number + 1
        # Another process goes on with this group from here: two continuations of one text must not
        # mix.
        if not ours:
            self.left.add(group.group_id)
        return ours

    def _commit(self, key: str, group: RolloutGroup) -> bool:
        _, ours = commit_groups(
            self.run,
            key,
            [group],
            round=self.round,
            shard=self.shard,
            fingerprint=self.fingerprint,
            policy=self.policy,
            stamp=self.stamp,
        )
        return ours


def partials_of_shard(
    run: Run, round: int, shard: int, fingerprint: str, policy: ServedPolicy
) -> PartialGroups:
    """Chains of the unfinished groups of a shard of a round."""
    folder = pieces_folder(round, shard, fingerprint)

    def key(group_id: str, number: int) -> str:
        return f"{folder}/{partial_name(group_id.rpartition('/')[2], number)}"

    return PartialGroups(
        run=run, policy=policy, fingerprint=fingerprint, key=key, round=round, shard=shard
    )


def partials_of_stream(
    run: Run, fingerprint: str, policy: ServedPolicy, worker: str
) -> PartialGroups:
    """Chains of the unfinished groups of a stream; `worker` goes into the footers."""

    def key(group_id: str, number: int) -> str:
        return partial_key(int(group_id.rpartition("-")[2]), number)

    return PartialGroups(
        run=run, policy=policy, fingerprint=fingerprint, key=key, round=policy.weight_version,
        stamp={WORKER: worker},
    )  # fmt: skip
