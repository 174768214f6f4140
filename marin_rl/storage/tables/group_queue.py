"""Groups that environments push: a durable queue, in the order in which they were accepted.

The queue has no file of its own. The group with number n is the piece of group `n %
groups_per_round` of round `n // groups_per_round`, under a fingerprint that no policy decides; so
what a round trains on follows from committed names alone, and gc and fsck treat pushed groups as
any other piece of a shard. A group is created before the next number is tried: no number is left
out. The footer has a digest of what was pushed, by which a repeated request finds its first commit.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from marin_rl.config import Config, fingerprint_fields
from marin_rl.storage import layout
from marin_rl.storage.commits import fingerprint
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import TableReader, load_or_none, load_readable
from marin_rl.storage.tables.rollouts import commit_groups, decode_shard
from marin_rl.types import RolloutGroup, ServedPolicy
from schemas.migrations import ROLLOUTS as LADDER
from schemas.strict_json import parse_json
from schemas.tables import CONTENT_VERSION

# Groups among which a repeated request looks for its first commit: a client tries again within
# minutes. An opening server reads the footers of as many.
RECENT_MAX = 1024

# In the footer of a group, and under ORIGIN in the metadata of its example.
DIGEST, ENVIRONMENT = "pushed_digest", "pushed_by"
ORIGIN = "pushed"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """Place of a group: its number in the queue, its round, shard, and number in the round."""

    number: int
    round: int
    shard: int
    group: int

    @property
    def group_id(self) -> str:
        return f"{layout.round_name(self.round)}/group-{self.group:05d}"


def place_of(config: Config, number: int) -> QueuePlace:
    groups, shards = config.rollouts.groups_per_round, config.rollouts.shards_per_round
    round, group = divmod(number, groups)
    # The shard whose edges, groups * shard // shards, the group lies between.
    shard = ((group + 1) * shards - 1) // groups
    return QueuePlace(number=number, round=round, shard=shard, group=group)


class GroupQueue:
    """The groups pushed to a run. Methods are called one at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        content = {"rollouts": fingerprint_fields(run.config.rollouts)}
        self._fingerprint = fingerprint("pushed", content, (), CONTENT_VERSION)
        self._recent: OrderedDict[tuple[int, str], None] = OrderedDict()
        self._waiting: deque[tuple[int, int]] = deque()  # number and environment
        self.accepted = 0  # the number of the next group

    def open(self) -> None:
        """Read what is committed. Raises StoreUnavailable, CorruptObject, NewerSchema."""
        # From what is committed: there is no counter that a crash could leave behind or ahead.
        listed = set(self._run.store.list("rollouts"))
        self.accepted = max(self._ends(listed), default=0)
        first = max(0, self.accepted - RECENT_MAX)
        places = [place_of(self._run.config, n) for n in range(first, self.accepted)]
        # Gc takes those that shards have collected.
        there = {key: place for place in places if (key := self._key(place)) in listed}
        present = load_readable(self._run.store, there)
        for place, data in zip(there.values(), present, strict=True):
            if data is not None:
                self._remember(place, self._stamp(place, data))

    def append(
        self,
        environment: int,
        digest: str,
        policy: ServedPolicy,
        group_at: Callable[[str], RolloutGroup],
    ) -> bool:
        """Commit the group that `group_at` makes for an id, at the next number that is free.

        False where an earlier request had committed it, by `digest`. `policy` sampled it. Raises
        CommitUnknown, StorageError, and what `group_at` raises.
        """
        while True:
            # A client that got no reply sends again: that must not become a second group.
            if (environment, digest) in self._recent:
                return False
            place = place_of(self._run.config, self.accepted)
            group = group_at(place.group_id)
            stamp = {DIGEST: digest, ENVIRONMENT: str(environment)}
            committed, _ = commit_groups(
                self._run,
                self._key(place),
                [group],
                round=place.round,
                shard=place.shard,
                fingerprint=self._fingerprint,
                policy=policy,
                stamp=stamp,
            )
            # Taken by this group or another one: the number is not tried again.
            self.accepted = place.number + 1
            # Another server may have filled this place, and gc may have taken it since: what is
            # created below a shard that is committed is read by no one.
            kept = self._collected(place) or self._stamp(place, committed)
            self._remember(place, kept)
            if kept == stamp:
                return True

    def queued(self, taken: int) -> Counter[int]:
        """Number of groups by environment, without the first `taken` ones of all."""
        while self._waiting and self._waiting[0][0] < taken:
            self._waiting.popleft()
        return Counter(environment for _, environment in self._waiting)

    def places(self, round: int, shard: int) -> list[QueuePlace]:
        groups = self._run.config.rollouts.groups_per_round
        numbers = range(round * groups, (round + 1) * groups)
        places = (place_of(self._run.config, number) for number in numbers)
        return [place for place in places if place.shard == shard]

    def rows(self, place: QueuePlace) -> pa.Table | None:
        """The rows of a group as its shard will have them; None while it is not committed."""
        key = self._key(place)
        data = load_or_none(self._run.store, key)
        return None if data is None else decode_shard(data, source=self._run.store.url_of(key))

    def _collected(self, place: QueuePlace) -> dict[str, str] | None:
        """Stamp of the group that the committed shard has at a place; None without a shard."""
        key = layout.shard_key(place.round, place.shard)
        data = load_or_none(self._run.store, key)
        if data is None:
            return None
        source = self._run.store.url_of(key)
        rows = decode_shard(data, ["group_id", "metadata"], source=source).to_pylist()
        # Of any row: all rows of a group have the metadata of its example.
        texts = [row["metadata"] for row in rows if row["group_id"] == place.group_id]
        return {name: str(value) for name, value in parse_json(texts[0].encode())[ORIGIN].items()}

    def _remember(self, place: QueuePlace, stamp: dict[str, str]) -> None:
        environment = int(stamp[ENVIRONMENT])
        self._recent[environment, stamp[DIGEST]] = None
        self._waiting.append((place.number, environment))
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    def _stamp(self, place: QueuePlace, data: pa.Buffer | bytes) -> dict[str, str]:
        stamp = TableReader(data, self._run.store.url_of(self._key(place)), LADDER).stamp
        return {name: stamp[name] for name in (DIGEST, ENVIRONMENT)}

    def _key(self, place: QueuePlace) -> str:
        folder = layout.pieces_folder(place.round, place.shard, self._fingerprint)
        return f"{folder}/{layout.piece_name(place.group_id.rpartition('/')[2], 0)}"

    def _ends(self, keys: Iterable[str]) -> Iterator[int]:
        """Yield the number after each group that is committed, as a piece or in a shard."""
        rollouts = self._run.config.rollouts
        for key in keys:
            _, name, *path = key.split("/")
            round, inner = layout.round_of(name), "/".join(path)
            if round is None:
                continue
            first = round * rollouts.groups_per_round
            shard, group = layout.shard_of(inner), layout.group_of_piece(inner)
            if shard is not None:
                # A shard stands for all of its groups, whose pieces gc may have taken.
                yield first + rollouts.groups_per_round * (shard + 1) // rollouts.shards_per_round
            elif group is not None:
                yield first + group + 1
