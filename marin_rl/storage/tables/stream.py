"""Finished groups that wait in a stream for the round that takes them, and claims on chunks.

A group has a number, and is in one private object: with the groups of its chunk that ended at about
the same time (`group_log`), or by itself in runs of older versions. Who samples which numbers is
agreed on by claims, which spare work and decide nothing. Leaves out what rounds take (`intakes`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import pyarrow as pa

from marin_rl.config import Config, fingerprint_fields
from marin_rl.errors import CommitConflict, CorruptObject
from marin_rl.storage import layout
from marin_rl.storage.commits import commit_object, fingerprint, new_attempt
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.group_log import WORKER
from marin_rl.storage.tables.parquet import PARTS_MAX, TableReader, digest_of, iter_present, select
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from marin_rl.types import RolloutGroup
from schemas import Malformed, NewerVersion
from schemas.manifests import open_sealed_json, sealed_json
from schemas.migrations import ROLLOUTS as LADDER
from schemas.tables import CONTENT_VERSION, ROLLOUTS

CLAIM_FORMAT, CLAIM_VERSION = "marin-rl/claim", 1
SCALARS = ("run_id", "group_id", "reward", "status", "policy_version_min")
VALID = ("complete", "truncated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A worker's claim on a chunk of groups; `policy_version` is the policy it samples them by."""

    chunk: int
    number: int
    worker: str
    policy_version: int
    claimed_at: datetime

    def is_live(self, now: datetime, seconds: float) -> bool:
        """True until the claim is `seconds` old, by clocks that may differ."""
        # Either way: a clock that runs ahead must not make a claim live for ever.
        return abs((now - self.claimed_at).total_seconds()) <= seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedGroup:
    """A finished group of the stream: its number, oldest policy, and number of rollouts.

    `sha256` is the digest of its object, and `pack` that object's name where it may have several
    groups. `differs` says that the rewards of its valid members are not all equal.
    """

    number: int
    sha256: str
    version: int
    rollouts: int
    differs: bool
    pack: str = ""


def chunk_size(config: Config) -> int:
    """Number of groups that are claimed together: those of a shard, rounded up."""
    groups, shards = config.rollouts.groups_per_round, config.rollouts.shards_per_round
    return -(-groups // shards)


def numbers_of(config: Config, chunk: int) -> range:
    size = chunk_size(config)
    return range(chunk * size, (chunk + 1) * size)


def stream_fingerprint(
    config: Config, environment_version: str, tokenizer: str, chat_template: str
) -> str:
    """Digest of what decides the groups of a stream, whatever the policy that samples them.

    `tokenizer` and `chat_template` are digests. A worker with other settings has another one.
    """
    # Nothing that decides only when a group is sampled: workers may differ in that.
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
    what was seen. `fingerprint` is that of the run's workers, where it is known.
    """

    run: Run
    fingerprint: str | None = None
    patience: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of commits, for tests
    objects: dict[str, tuple[StreamedGroup, ...]] = field(
        default_factory=dict[str, tuple[StreamedGroup, ...]]
    )
    # Finished groups by number; settled ones are among them until gc takes their objects.
    groups: dict[int, StreamedGroup] = field(default_factory=dict[int, StreamedGroup])
    claims: dict[int, Claim] = field(default_factory=dict[int, Claim])

    def look(self) -> None:
        """List the stream, and read what is new: finished groups, and claims.

        Raises CommitConflict for groups of a worker with other settings, CorruptObject,
        NewerSchema, StoreUnavailable.
        """
        keys = self.run.store.list(layout.STREAM)
        listed = [key for key in keys if layout.numbers_in(key)]
        # Gc takes objects whose groups a round has sealed: those must not be taken again.
        known = {key: self.objects[key] for key in listed if key in self.objects}
        new = [key for key in listed if key not in known]
        if new or len(known) < len(self.objects):
            for key, data in zip(new, self._load(new), strict=True):
                if data is not None:
                    known[key] = self._decoded(key, data)
            self.objects = known
            self.groups = {group.number: group for groups in known.values() for group in groups}
        self._read_claims(keys)

    def has(self, numbers: set[int]) -> bool:
        """Return True if these groups are finished, as far as was listed."""
        return numbers <= self.groups.keys()

    def claim(self, chunk: int, worker: str, policy_version: int, now: datetime) -> bool:
        """Claim a chunk; False where another worker was first. Raises StorageError."""
        known = self.claims.get(chunk)
        # One above the last seen: a worker that saw fewer finds it taken, and leaves the chunk.
        number = 0 if known is None else known.number + 1
        key, attempt = layout.claim_key(chunk, number), new_attempt()
        ours = {
            "format": CLAIM_FORMAT,
            "version": CLAIM_VERSION,
            "attempt": attempt,
            "chunk": chunk,
            "number": number,
            "worker": worker,
            "policy_version": policy_version,
            "claimed_at": now.isoformat(),
        }
        source = self.run.store.url_of(key)
        committed = commit_object(
            self.run.store,
            key,
            sealed_json(ours),
            attempt=attempt,
            # One for all claims: a place that is taken is no conflict, the first claim stays.
            fingerprint="claim",
            identify=lambda other: (str(_record(other, source)["attempt"]), "claim"),
            **self.patience,
        )
        # The committed one, maybe another's: the next look needs no further read.
        self.claims[chunk] = claim_in(committed, source)
        return committed == sealed_json(ours)

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return iter_present(self.run.store, keys, PARTS_MAX)  # a pack may be as large as a part

    def _decoded(self, key: str, data: pa.Buffer) -> tuple[StreamedGroup, ...]:
        """The groups of an object. Raises CommitConflict, CorruptObject, NewerSchema."""
        source = self.run.store.url_of(key)
        reader = TableReader(data, source, LADDER)
        columns = reader.table(select(ROLLOUTS, SCALARS)).to_pydict()  # its footer is read once
        run_ids = columns["run_id"]
        worker, theirs = reader.stamp.get(WORKER, "unknown"), reader.stamp.get("fingerprint", "")
        if set(run_ids) != {self.run.run_id}:
            raise CommitConflict(
                f"{source}: worker {worker} sampled it for run {run_ids[0]!r}, expected "
                f"{self.run.run_id!r}: stop that worker, and remove the file"
            )
        if self.fingerprint is not None and theirs != self.fingerprint:
            raise CommitConflict(
                f"{source}: worker {worker} sampled it with other settings, code or tokenizer: "
                f"expected fingerprint {self.fingerprint}, found {theirs}. Stop that worker, start "
                "it with this run's configuration, and remove the file"
            )
        sha256 = digest_of(data)
        pack = "" if layout.stream_group_of(key) is not None else key.rpartition("/")[2]
        rows, groups = zip(*(columns[name] for name in SCALARS[1:]), strict=True), []
        # Rows of a group lie together: an object is written group by group.
        for group_id, members in groupby(rows, key=lambda row: row[0]):
            _, rewards, statuses, oldest = zip(*members, strict=True)
            both = zip(rewards, statuses, strict=True)
            valid = {reward for reward, status in both if status in VALID} - {None}
            groups.append(
                StreamedGroup(
                    number=number_in(key, group_id, source),
                    sha256=sha256,
                    version=min(oldest),
                    rollouts=len(statuses),
                    # Equal rewards give no advantage: dynamic sampling counts groups that differ.
                    differs=len(valid) > 1,
                    pack=pack,
                )
            )
        return tuple(groups)

    def _read_claims(self, keys: Iterable[str]) -> None:
        latest: dict[int, tuple[int, str]] = {}
        for key in keys:
            if (claim := layout.claim_of(key)) is not None:
                # The highest number: a later claim stands in the place of those that ran out.
                latest[claim[0]] = max(latest.get(claim[0], (-1, "")), (claim[1], key))
        known = {
            c: self.claims[c]
            for c, (number, _) in latest.items()
            if c in self.claims and self.claims[c].number == number
        }
        new = [(c, key) for c, (_, key) in sorted(latest.items()) if c not in known]
        data = self._load([key for _, key in new])
        for (chunk, key), item in zip(new, data, strict=True):
            if item is not None:
                known[chunk] = claim_in(item.to_pybytes(), self.run.store.url_of(key))
        self.claims = known


def number_in(key: str, group_id: str, source: str) -> int:
    """The number of a group of an object. Raises CorruptObject where it is not among its own."""
    if (own := layout.stream_group_of(key)) is not None:
        return own
    numbers = layout.pack_of(key)
    assert numbers is not None, f"{key} is a pack"
    text = group_id.rpartition("-")[2]
    # Readers rely on the name before they open the object.
    if not text.isdecimal() or int(text) not in numbers:
        raise CorruptObject(
            f"{source}: expected groups {numbers[0]} to {numbers[-1]}, found {group_id!r}"
        )
    return int(text)


def rows_by_group(table: pa.Table, key: str, source: str) -> Iterator[tuple[int, pa.Table]]:
    """Number and rows of each group of an object. Raises CorruptObject."""
    first = 0
    for group_id, rows in groupby(table["group_id"].to_pylist()):
        count = sum(1 for _ in rows)
        yield number_in(key, group_id, source), table.slice(first, count)
        first += count


def groups_alone(run: Run, numbers: Sequence[int]) -> Iterator[RolloutGroup]:
    """Yield groups that an older version committed each by itself, those that are there."""
    keys = [layout.stream_key(number) for number in numbers]
    for key, data in zip(keys, iter_present(run.store, keys), strict=True):
        if data is not None:
            yield from groups_of(decode_shard(data, source=run.store.url_of(key)))


def claim_in(data: bytes, source: str) -> Claim:
    """The claim that an object is. Raises CorruptObject naming `source`."""
    record = _record(data, source)
    try:
        names = ("chunk", "number", "policy_version")
        return Claim(
            **{name: int(record[name]) for name in names},
            worker=str(record["worker"]),
            claimed_at=datetime.fromisoformat(record["claimed_at"]).astimezone(UTC),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObject(f"{source}: expected a claim on groups: {error!r}") from None


def _record(data: bytes, source: str) -> dict[str, Any]:
    try:
        return open_sealed_json(data, format=CLAIM_FORMAT, version=CLAIM_VERSION)
    except (Malformed, NewerVersion) as error:
        raise CorruptObject(f"{source}: {error}") from None
