"""Groups that are committed before the round that trains on them: chains of objects.

    chain of                                objects
    ended members of a group                …/.groups/SHARD/group-00003-00.parquet
    pieces of its unfinished completions    …/.groups/SHARD/partial-group-00003-00.parquet
    ended groups of a chunk of the stream   …/.stream/groups-00000000-00000003-00.parquet
    pieces of a group of the stream         …/.stream/partial-group-00000003-00.parquet

Each object is created once, and has the rows that its shard will have. Object n + 1 is written only
by a process that has read or written object n, so a chain has one course, whichever processes write
it. Names are private: readers of rounds see committed shards alone. Chains of a shard go once it is
committed, those of a stream once sealed rounds have all their groups.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from marin_rl.errors import CommitConflict
from marin_rl.storage.layout import pack_key, partial_key, partial_name, piece_name, pieces_folder
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import iter_present
from marin_rl.storage.tables.rollouts import commit_groups, decode_shard, groups_of, identify_shard
from marin_rl.types import RolloutGroup, ServedPolicy

WORKER = "worker"  # in the footer of an object of a stream: who sampled its groups


@dataclass(slots=True, kw_only=True)
class GroupLog:
    """Chains of groups under one fingerprint, as far as this process has read and written them.

    `key` names an object by its chain and number. `round`, `shard` and `stamp` go into the objects.
    """

    run: Run
    policy: ServedPolicy
    fingerprint: str
    key: Callable[[str, int], str]
    round: int
    shard: int = 0
    stamp: Mapping[str, str] = field(default_factory=dict[str, str])
    lengths: Counter[str] = field(default_factory=Counter[str])
    group_ids: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # by chain
    left: set[str] = field(default_factory=set[str])  # chains that other processes go on with

    def read(self, chains: Iterable[str]) -> dict[str, list[RolloutGroup]]:
        """Groups of each chain in order, from where it is known; without chains that have none.

        Names are known, and no listing is trusted: a chain ends at the first object that is absent.
        """
        groups: dict[str, list[RolloutGroup]] = {}
        waiting = list(chains)
        # One wave for all chains: a bucket answers many reads in the time of one.
        while waiting:
            keys = [self._next_key(chain) for chain in waiting]
            present = zip(waiting, keys, self._load(keys), strict=True)
            waiting = []
            for chain, key, data in present:
                if data is not None:
                    part = self._decoded(key, data)
                    groups.setdefault(chain, []).extend(part)
                    self._count(chain, part)
                    waiting.append(chain)
        return groups

    def append(
        self, chain: str, groups: Sequence[RolloutGroup]
    ) -> tuple[Sequence[RolloutGroup], bool]:
        """Commit groups as the next object; those that are committed there, and True if ours."""
        committed, ours = self._commit(self._next_key(chain), groups)
        self._count(chain, committed)
        return committed, ours

    def complete(self, chain: str, groups: Sequence[RolloutGroup]) -> None:
        """Append groups, without those that others have committed to the chain meanwhile."""
        # Again after each create: the object of another process may have some of the groups.
        while left := [g for g in groups if g.group_id not in self.group_ids.get(chain, ())]:
            self.append(chain, left)

    def go_on(self, chain: str, group: RolloutGroup) -> bool:
        """Append what a piece added to a group; False where another process goes on with it."""
        if chain in self.left:
            return False
        _, ours = self.append(chain, [group])
        # Another process goes on from here: two continuations of one text must not mix.
        if not ours:
            self.left.add(chain)
        return ours

    def _next_key(self, chain: str) -> str:
        return self.key(chain, self.lengths[chain])

    def _count(self, chain: str, groups: Iterable[RolloutGroup]) -> None:
        self.lengths[chain] += 1
        self.group_ids.setdefault(chain, set()).update(group.group_id for group in groups)

    def _decoded(self, key: str, data: bytes | pa.Buffer) -> Sequence[RolloutGroup]:
        source = self.run.store.url_of(key)
        _, theirs = identify_shard(data, source)
        if theirs != self.fingerprint:
            raise CommitConflict(
                f"{source}: it was sampled with other settings, code or tokenizer: expected "
                f"fingerprint {self.fingerprint}, found {theirs}. Remove the file"
            )
        table = decode_shard(data, source=source)
        # Each row by its own digest: later pieces of a group may be of later policies.
        digests = iter(table["policy_digest"].to_pylist())
        return [
            replace(
                group,
                rollouts=tuple(replace(r, policy_digest=next(digests)) for r in group.rollouts),
            )
            for group in groups_of(table)
        ]

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return iter_present(self.run.store, keys)

    def _commit(
        self, key: str, groups: Sequence[RolloutGroup]
    ) -> tuple[Sequence[RolloutGroup], bool]:
        data, ours = commit_groups(
            self.run,
            key,
            groups,
            round=self.round,
            shard=self.shard,
            fingerprint=self.fingerprint,
            policy=self.policy,
            stamp=self.stamp,
        )
        return (groups if ours else self._decoded(key, data)), ours


def _of_shard(
    name_of: Callable[[str, int], str],
    run: Run,
    round: int,
    shard: int,
    fingerprint: str,
    policy: ServedPolicy,
) -> GroupLog:
    """Chains below the private folder of a shard, by the ids of their groups."""
    folder = pieces_folder(round, shard, fingerprint)
    return GroupLog(
        run=run,
        policy=policy,
        fingerprint=fingerprint,
        key=lambda group_id, n: f"{folder}/{name_of(group_id.rpartition('/')[2], n)}",
        round=round,
        shard=shard,
    )


members_of_shard = partial(_of_shard, piece_name)  # members that have ended
partials_of_shard = partial(_of_shard, partial_name)  # pieces of unfinished groups


def _of_stream(
    key: Callable[[str, int], str], run: Run, fingerprint: str, policy: ServedPolicy, worker: str
) -> GroupLog:
    """Chains of a stream; `worker` goes into the footers."""
    return GroupLog(
        run=run,
        policy=policy,
        fingerprint=fingerprint,
        key=key,
        # Which round takes them is open: `commit_tables` writes that into the shard.
        round=policy.weight_version,
        stamp={WORKER: worker},
    )


def groups_of_chunk(
    run: Run, numbers: range, fingerprint: str, policy: ServedPolicy, worker: str
) -> GroupLog:
    return _of_stream(lambda _, n: pack_key(numbers, n), run, fingerprint, policy, worker)


# Chains of pieces of a stream's unfinished groups, by the ids of the groups.
partials_of_stream = partial(
    _of_stream, lambda group_id, n: partial_key(int(group_id.rpartition("-")[2]), n)
)
