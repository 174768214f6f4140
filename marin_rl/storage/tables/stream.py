"""Groups that wait in a stream for the round that takes them (`asynchrony.sampler: windowed`).

A group has a number, and one private object that is created once, by whichever worker ends it
first; with `commit_every_s` several groups share one (`packs`). Who samples which numbers is agreed
on by claims, which spare work and decide nothing: where two workers sample one group, the first
object stays. Leaves out what rounds take (`intakes`).
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa

from marin_rl.config import Config, fingerprint_fields
from marin_rl.errors import CorruptObject
from marin_rl.storage.commits import commit_object, fingerprint, new_attempt
from marin_rl.storage.layout import (
    STREAM,
    claim_key,
    claim_of,
    pack_of,
    stream_group_of,
    stream_key,
)
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.tables.parquet import (
    PARTS_MAX,
    in_order,
    iter_present,
    load_or_none,
)
from marin_rl.storage.tables.pieces import commit_groups
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from marin_rl.storage.tables.streamed import WORKER, Sampled, StreamedGroup, streamed_groups
from marin_rl.types import RolloutGroup, ServedPolicy
from schemas import Malformed, NewerVersion
from schemas.manifests import open_sealed_json, sealed_json
from schemas.rollouts import CONTENT_VERSION

CLAIM_FORMAT, CLAIM_VERSION = "marin-rl/claim", 1

Packs = dict[str, tuple[StreamedGroup, ...]]  # groups by the key of their pack

# By the store of the run, and the fingerprint that they were checked by: each is read once.
_packs: "WeakKeyDictionary[ObjectStore, dict[str | None, Packs]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A worker's claim on a chunk of groups; `policy_version` is the policy it samples them by."""

    chunk: int
    number: int
    worker: str
    policy_version: int
    claimed_at: datetime

    def is_live(self, now: datetime, seconds: float) -> bool:
        """True while others leave the chunk to the worker, by clocks that may differ."""
        # Either way: a clock that runs ahead must not make a claim live for ever.
        return abs((now - self.claimed_at).total_seconds()) <= seconds


def chunk_size(config: Config) -> int:
    """Number of groups that are claimed together: those of a shard, rounded up."""
    groups, shards = config.rollouts.groups_per_round, config.rollouts.shards_per_round
    return -(-groups // shards)


def numbers_of(config: Config, chunk: int) -> range:
    """Numbers of the groups of a chunk."""
    size = chunk_size(config)
    return range(chunk * size, (chunk + 1) * size)


def stream_fingerprint(
    config: Config, environment_version: str, tokenizer: str, chat_template: str
) -> str:
    """Digest of what decides the groups of a stream, whatever the policy that samples them.

    `tokenizer` and `chat_template` are digests. A worker with other settings has another one.
    """
    # What decides the text of a group and nothing that decides only when it is sampled: workers may
    # differ in the rest.
    content = {
        "seed": config.seed,
        "environment": fingerprint_fields(config.environment),
        "environment_version": environment_version,
        "sampling": fingerprint_fields(config.sampling),
        "group_size": config.rollouts.group_size,
        "greedy_baseline": bool(config.rollouts.greedy_baseline),
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        **({} if config.piece_tokens is None else {"piece_tokens": config.piece_tokens}),
        **({"recompute_kv_cache": config.recompute_kv_cache} if config.in_flight_updates else {}),
    }
    return fingerprint("stream", content, (), CONTENT_VERSION)


@dataclass(slots=True)
class GroupStream:
    """The stream of a run, as this process knows it. Methods are called one at a time.

    A listing may lack what was committed lately: that costs freshness, for what a round takes is
    what was seen.
    """

    run: Run
    numbers: frozenset[int] = frozenset()  # of groups that were listed as objects of their own
    groups: dict[int, StreamedGroup] = field(default_factory=dict[int, StreamedGroup])
    claims: dict[int, Claim] = field(default_factory=dict[int, Claim])
    fingerprint: str | None = None
    patience: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of commits, for tests
    packs: Packs = field(default_factory=Packs)  # that were listed and read
    packed: dict[int, StreamedGroup] = field(default_factory=dict[int, StreamedGroup])

    def look(self) -> None:
        """List the stream: which groups are finished, and claims. Raises as `read`."""
        keys = self.run.store.list(STREAM)
        listed = (stream_group_of(key) for key in keys)
        self.numbers = frozenset(number for number in listed if number is not None)
        self._read_packs([key for key in keys if pack_of(key) is not None])
        self._read_claims(keys)

    def has(self, numbers: set[int]) -> bool:
        """Return True if these groups are finished, as far as was listed."""
        # First, since most groups of a packed stream are there: the loop below is for mixed ones.
        if numbers <= self.packed.keys():
            return True
        return all(number in self.numbers or number in self.packed for number in numbers)

    def read(self, settled: Container[int]) -> None:
        """Read what was listed and is new; forget groups that are `settled`.

        Raises CommitConflict for groups of a worker with other settings, CorruptObject,
        NewerSchema, StoreUnavailable.
        """
        # A group may be gone because gc took it after a round had sealed it, so it must not be
        # taken again.
        for number in [*self.groups]:
            if number in settled or not (number in self.numbers or number in self.packed):
                del self.groups[number]
        packed = (item for item in self.packed.items() if item[0] not in settled)
        self.groups |= {number: group for number, group in packed if number not in self.groups}
        new = [n for n in sorted(self.numbers) if n not in settled and n not in self.groups]
        keys = [stream_key(number) for number in new]
        for key, item in zip(keys, self._load(keys), strict=True):
            if item is not None:
                self.groups |= {group.number: group for group in self._decoded(key, item)}

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return iter_present(self.run.store, keys)

    def _read_packs(self, keys: Sequence[str]) -> None:
        """Read the packs that were not read before, a few at a time; forget those that are gone."""
        listed = {*keys}
        known = _packs.setdefault(self.run.store, {}).setdefault(self.fingerprint, {})
        for key in [key for key in self.packs if key not in listed]:
            for group in self.packs.pop(key):
                self.packed.pop(group.number, None)
            known.pop(key, None)
        new = [key for key in keys if key not in self.packs]
        unread = [key for key in new if key not in known]
        known |= zip(unread, self._each(unread), strict=True)
        self.packs |= {key: known[key] for key in new}
        self.packed |= {group.number: group for key in new for group in known[key]}

    def _each(self, keys: Sequence[str]) -> Iterator[tuple[StreamedGroup, ...]]:
        """Groups of each object, none where it is gone."""

        def groups_of_object(key: str) -> tuple[StreamedGroup, ...]:
            data = load_or_none(self.run.store, key)
            return () if data is None else self._decoded(key, data)

        return in_order(self.run.store, groups_of_object, keys, PARTS_MAX)

    def _decoded(self, key: str, data: pa.Buffer) -> tuple[StreamedGroup, ...]:
        sampled = Sampled(self.run.run_id, self.fingerprint)
        return streamed_groups(key, data, self.run.store.url_of(key), sampled)

    def _read_claims(self, keys: Iterable[str]) -> None:
        """Read the latest claim of each chunk."""
        latest: dict[int, tuple[int, str]] = {}
        for key in keys:
            if (claim := claim_of(key)) is not None:
                # The highest number: a later claim stands in the place of those that ran out.
                latest[claim[0]] = max(latest.get(claim[0], (-1, "")), (claim[1], key))
        known = {c: self.claims[c] for c, (n, _) in latest.items() if self._knows(c, n)}
        new = [(c, key) for c, (_, key) in sorted(latest.items()) if c not in known]
        data = self._load([key for _, key in new])
        for (chunk, key), item in zip(new, data, strict=True):
            if item is not None:
                known[chunk] = claim_in(item.to_pybytes(), self.run.store.url_of(key))
        self.claims = known

    def _knows(self, chunk: int, number: int) -> bool:
        return chunk in self.claims and self.claims[chunk].number == number

    def commit(self, number: int, group: RolloutGroup, policy: ServedPolicy, worker: str) -> bool:
        """Create a group; False where another worker was first. Raises StorageError."""
        assert self.fingerprint is not None, "a worker knows its settings"
        _, ours = commit_groups(
            self.run,
            stream_key(number),
            [group],
            # Which round takes it is open: `commit_tables` writes that into the shard.
            round=policy.weight_version,
            shard=0,
            fingerprint=self.fingerprint,
            policy=policy,
            stamp={WORKER: worker},
        )
        return ours

    def claim(self, chunk: int, worker: str, policy_version: int, now: datetime) -> bool:
        """Claim a chunk; False where another worker was first. Raises StorageError."""
        known = self.claims.get(chunk)
        # One above the last that was seen: a worker that saw fewer finds the place taken, and
        # leaves the chunk.
        number = 0 if known is None else known.number + 1
        ours = Claim(
            chunk=chunk,
            number=number,
            worker=worker,
            policy_version=policy_version,
            claimed_at=now,
        )
        key, attempt = claim_key(chunk, number), new_attempt()
        data = _claim_bytes(ours, attempt)
        source = self.run.store.url_of(key)
        committed = commit_object(
            self.run.store,
            key,
            data,
            attempt=attempt,
            # One for all claims: a place that is taken is no conflict, the first claim stays.
            fingerprint="claim",
            identify=lambda other: (str(_record(other, source)["attempt"]), "claim"),
            **self.patience,
        )
        # What is committed, which may be another worker's claim: the next look needs no further
        # read.
        self.claims[chunk] = claim_in(committed, source)
        return committed == data


def _claim_bytes(claim: Claim, attempt: str) -> bytes:
    return sealed_json(
        {
            "format": CLAIM_FORMAT,
            "version": CLAIM_VERSION,
            "attempt": attempt,
            "chunk": claim.chunk,
            "number": claim.number,
            "worker": claim.worker,
            "policy_version": claim.policy_version,
            "claimed_at": claim.claimed_at.isoformat(),
        }
    )


def claim_in(data: bytes, source: str) -> Claim:
    """The claim that an object is. Raises CorruptObject naming `source`."""
    record = _record(data, source)
    try:
        return Claim(
            chunk=int(record["chunk"]),
            number=int(record["number"]),
            worker=str(record["worker"]),
            policy_version=int(record["policy_version"]),
            claimed_at=datetime.fromisoformat(record["claimed_at"]).astimezone(UTC),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObject(f"{source}: expected a claim on groups: {error!r}") from None


def _record(data: bytes, source: str) -> dict[str, Any]:
    try:
        return open_sealed_json(data, format=CLAIM_FORMAT, version=CLAIM_VERSION)
    except (Malformed, NewerVersion) as error:
        raise CorruptObject(f"{source}: {error}") from None


def groups_in(run: Run, numbers: Sequence[int]) -> Iterator[RolloutGroup]:
    """Yield the committed groups of the stream by number, those that are there."""
    keys = [stream_key(number) for number in numbers]
    for key, data in zip(keys, iter_present(run.store, keys), strict=True):
        if data is not None:
            yield from groups_of(decode_shard(data, source=run.store.url_of(key)))
