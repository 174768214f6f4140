"""Rollout shards: nouns to Parquet and back, their commit, and the manifest that seals a round.

A shard is one object and its own commit; its attempt and fingerprint are in the Parquet footer. A
round is sealed once all its shards are there, by a manifest with their digests and totals. Readers
of rounds go through that manifest and verify what it says.
"""

# pyarrow.compute takes as long to import as pyarrow itself, which readers spare, and makes its
# functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from marin_rl.errors import CorruptObject
from marin_rl.storage import commits
from marin_rl.storage.runs import Run, rollouts_slot, shard_key
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.tables import parquet
from marin_rl.storage.tables.records import check_groups, rollout_table
from marin_rl.storage.tables.records import groups_of as groups_of
from marin_rl.types import RolloutGroup, ServedPolicy, SlotRef
from schemas.manifests import Manifest, Parent, Part
from schemas.migrations import ROLLOUTS as LADDER
from schemas.tables import CONTENT_VERSION, ROLLOUTS

T = TypeVar("T")

SUMMARY_COLUMNS = (
    "group_id", "reward", "status", "n_prompt_tokens", "n_completion_tokens",
    "policy_version_min", "policy_version_max",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRecord:
    """Totals and further fields of a sealed round: which rule chose its examples, and metrics."""

    totals: Mapping[str, float] = field(default_factory=dict[str, float])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def encode_shard(  # noqa: PLR0913 - all that a shard says of itself
    groups: Sequence[RolloutGroup],
    *,
    run_id: str,
    round: int,
    shard: int,
    attempt: str,
    replica: str,
    fingerprint: str,
    policy: ServedPolicy,
    stamp: Mapping[str, str] | None = None,
) -> bytes:
    """The Parquet bytes of a shard: one row per rollout, groups adjacent in one row group.

    `stamp` is what else the footer says. Raises ValueError naming the rollout whose arrays
    disagree, InputError where metadata is not JSON.
    """
    check_groups(groups)
    constants = {
        "run_id": run_id,
        "round": round,
        "shard": shard,
        "attempt": attempt,
        "replica": replica,
        "policy_digest": policy.parameters_digest,
        "tokenizer_digest": policy.tokenizer_digest,
        "chat_template_digest": policy.chat_template_digest,
        "model": policy.model,
    }
    writer = parquet.TableWriter(
        LADDER, ROLLOUTS, {"attempt": attempt, "fingerprint": fingerprint, **(stamp or {})}
    )
    # Whole groups in each row group: a reader of one group reads no other.
    for part in _row_groups(groups, lambda group: len(group.rollouts)):
        writer.write(rollout_table(part, constants))
    return writer.finish()


def decode_shard(
    data: bytes | pa.Buffer, columns: Sequence[str] | None = None, *, source: str = "rollout shard"
) -> pa.Table:
    """The rows of a shard, upgraded to the newest schema; only `columns` where they are given."""
    return parquet.TableReader(data, source, LADDER).table(columns)


def identify_shard(data: bytes | pa.Buffer, source: str = "rollout shard") -> tuple[str, str]:
    return parquet.TableReader(data, source, LADDER).committed_as


def commit_groups(  # noqa: PLR0913 - what a shard says of itself, and its key
    run: Run,
    key: str,
    groups: Sequence[RolloutGroup],
    *,
    round: int,
    shard: int,
    fingerprint: str,
    policy: ServedPolicy,
    stamp: Mapping[str, str] | None = None,
    replica: str = "",
) -> tuple[bytes, bool]:
    """Create groups at a key; the bytes that are committed there, and True if they are these.

    `replica` names the process. Raises CommitConflict, CommitUnknown, StorageError, InputError.
    """
    data = encode_shard(
        groups,
        run_id=run.run_id,
        round=round,
        shard=shard,
        attempt=commits.new_attempt(),
        replica=replica,
        fingerprint=fingerprint,
        policy=policy,
        stamp=stamp,
    )
    return parquet.commit_table(run.store, key, data, LADDER)


def commit_shard(
    run: Run,
    round: int,
    shard: int,
    groups: Sequence[RolloutGroup],
    fingerprint: str,
    policy: ServedPolicy,
    stamp: Mapping[str, str] | None = None,
) -> SlotRef:
    """Commit a shard by one create; where another attempt was first, its shard is adopted."""
    key = shard_key(round, shard)
    data, ours = commit_groups(
        run,
        key,
        groups,
        round=round,
        shard=shard,
        fingerprint=fingerprint,
        policy=policy,
        stamp=stamp,
        replica=_replica(),
    )
    return _ref_of(run.store, key, data, reused=not ours)


def commit_tables(
    run: Run, round: int, shard: int, tables: Sequence[pa.Table], fingerprint: str
) -> SlotRef:
    """Commit a shard out of the rows of its groups, a table each, as those of this shard."""
    attempt = commits.new_attempt()
    constants = {"attempt": attempt, "replica": _replica(), "round": round, "shard": shard}
    writer = parquet.TableWriter(LADDER, ROLLOUTS, {"attempt": attempt, "fingerprint": fingerprint})
    for part in _row_groups(tables, len):
        table = pa.concat_tables(part)
        for name, value in constants.items():
            kind = ROLLOUTS.field(name)
            column = pa.repeat(pa.scalar(value, kind.type), table.num_rows)
            table = table.set_column(table.column_names.index(name), kind, column)
        writer.write(table)
    key = shard_key(round, shard)
    committed, ours = parquet.commit_table(run.store, key, writer.finish(), LADDER)
    return _ref_of(run.store, key, committed, reused=not ours)


def _replica() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def shard_ref(run: Run, round: int, shard: int, fingerprint: str) -> SlotRef | None:
    """The shard if it is committed, None if not. Raises CommitConflict on another fingerprint."""
    key = shard_key(round, shard)
    data = parquet.load_or_none(run.store, key)
    if data is None:
        return None
    source = run.store.url_of(key)
    attempt, committed = identify_shard(data, source)
    # An error and no absence: it would be sampled again, and conflict at its commit.
    commits.check_fingerprint(source, attempt, committed, fingerprint)
    return _ref_of(run.store, key, data, reused=True)


def seal_round(
    run: Run,
    round: int,
    shards: Sequence[SlotRef],
    parents: Sequence[Parent | SlotRef],
    sampling: SamplingRecord | None = None,
) -> SlotRef:
    """Commit the manifest of a round's rollouts: every shard once, in order, read back first.

    `sampling` is what else it says of how they were chosen. Raises ValueError when a shard is
    missing or foreign, CorruptObject when one differs, CommitConflict when the round is sealed with
    other shards or parents.
    """
    # In the order of their keys, whatever order they ended in: the fingerprint depends on it.
    shards = sorted(shards, key=lambda ref: ref.slot)
    count = run.config.rollouts.shards_per_round
    if run.config.samples_on:  # until enough groups differ: that may add shards
        count = max(count, len(shards))
    expected, keys = [shard_key(round, i) for i in range(count)], [ref.slot for ref in shards]
    if keys != sorted(expected):
        raise ValueError(f"expected the shards {', '.join(sorted(expected))}; found {keys}")
    slot = rollouts_slot(round)
    above = tuple(Parent(slot=parent.slot, sha256=parent.sha256) for parent in parents)
    content = {"shards": [[ref.slot, ref.sha256] for ref in shards]}
    decided = commits.fingerprint("rollouts", content, above, CONTENT_VERSION)
    # Before any shard is read back: to seal a round again costs one read.
    existing = commits.read_manifest(run.store, slot)
    if existing is not None and existing[0].fingerprint == decided:
        return commits.ref_of(existing[0], reused=True)
    parts, summaries = zip(*_entries(run.store, shards), strict=True)
    judges, config = dict[str, Any](), run.config
    used = {"reward_model": config.environment.reward_model, "teacher": config.rollout_teacher}
    if names := [name for name, settings in used.items() if settings is not None]:
        # Digests as footers name them.
        sources = (
            (parquet.load(run.store, ref.slot), run.store.url_of(ref.slot)) for ref in shards
        )
        stamps = [parquet.TableReader(data, source, LADDER).stamp for data, source in sources]
        judges = {name: sorted({s[name] for s in stamps if name in s}) for name in names}
    record = sampling or SamplingRecord()
    return commits.commit_slot(
        run.store,
        slot,
        attempt=commits.new_attempt(),
        fingerprint=decided,
        parents=above,
        parts=parts,
        totals={**_summary(pa.concat_tables(summaries)), **record.totals},
        extra={**judges, **record.extra},
    )


def manifest_to_be(run: Run, round: int, shards: Sequence[SlotRef]) -> Manifest:
    """The manifest of a round that has these shards so far; it is not committed."""
    parts = [part for part, _ in _entries(run.store, sorted(shards, key=lambda ref: ref.slot))]
    return commits.new_manifest(rollouts_slot(round), attempt="none", fingerprint="", parts=parts)


def rollouts_manifest(run: Run, round: int, ref: SlotRef | None = None) -> Manifest:
    """The manifest that seals a round, being `ref` where that is given.

    Raises ObjectMissing while the round is not sealed, CorruptObject when it is not `ref`.
    """
    hint = "the rollouts of this round are not sealed"
    manifest = commits.committed_manifest(run.store, rollouts_slot(round), hint)
    if ref is not None and (ref.slot, ref.sha256) != (manifest.slot, manifest.sha256):
        raise CorruptObject(
            f"{run.store.url_of(manifest.slot)}: expected {ref.slot} with SHA-256 {ref.sha256}, "
            f"found {manifest.sha256}: the reference is of another run or round"
        )
    return manifest


def iter_row_groups(
    run: Run, manifest: Manifest, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The row groups of a sealed round in shard order, verified."""
    for reader in _readers(run, manifest):
        yield from reader.groups(columns)


def iter_shards(run: Run, round: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The shards of a sealed round in order, verified against its manifest."""
    for reader in _readers(run, rollouts_manifest(run, round)):
        yield reader.table(columns)


def _readers(run: Run, manifest: Manifest) -> Iterator[parquet.TableReader]:
    def opened(part: Part) -> parquet.TableReader:
        return parquet.open_part(run.store, manifest.slot, part, LADDER)

    largest = max((part.bytes for part in manifest.parts), default=0)
    return parquet.in_order(run.store, opened, manifest.parts, parquet.fetches_at_once(largest))


def _row_groups(groups: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut into runs of about ROW_GROUP_ROWS rollouts, never inside a group."""
    part, rows = list[T](), 0
    for group in groups:
        # Readers of row groups see whole groups.
        if part and rows + size(group) > parquet.ROW_GROUP_ROWS:
            yield part
            part, rows = [], 0
        part.append(group)
        rows += size(group)
    if part:
        yield part


def _ref_of(store: ObjectStore, key: str, data: bytes | pa.Buffer, *, reused: bool) -> SlotRef:
    summary = _summary(decode_shard(data, SUMMARY_COLUMNS, source=store.url_of(key)))
    return SlotRef(slot=key, sha256=parquet.digest_of(data), reused=reused, summary=summary)


def _entries(store: ObjectStore, shards: Sequence[SlotRef]) -> Iterator[tuple[Part, pa.Table]]:
    """Entries of shards in the manifest, each with its columns for the summary."""
    import pyarrow.compute as pc

    def entry(ref: SlotRef) -> tuple[Part, pa.Table]:
        source = store.url_of(ref.slot)
        # Read back from the store: what a task returned may be another attempt's view of it.
        data = parquet.verified(parquet.load(store, ref.slot), ref.sha256, source)
        table = decode_shard(data, SUMMARY_COLUMNS, source=source)
        names = ("reward", "policy_version_min", "policy_version_max")
        columns = {name: _finite(table[name]) for name in names}
        minima = {n: float(pc.min(each).as_py()) for n, each in columns.items() if len(each)}
        maxima = {n: float(pc.max(each).as_py()) for n, each in columns.items() if len(each)}
        part = Part(
            name=ref.slot.rpartition("/")[2],
            bytes=data.size,
            sha256=ref.sha256,
            rows=table.num_rows,
            minima=minima,
            maxima=maxima,
        )
        return part, table

    return parquet.in_order(store, entry, shards, parquet.PARTS_MAX)


def _summary(table: pa.Table) -> dict[str, float]:
    """Totals of rollouts: counts, and the bounds of rewards and policy versions where any are."""
    import pyarrow.compute as pc

    rewards, completion_tokens = _finite(table["reward"]), pc.sum(table["n_completion_tokens"])
    totals = {
        "rows": table.num_rows,
        "groups": pc.count_distinct(table["group_id"]).as_py(),
        "tokens": pc.add(pc.sum(table["n_prompt_tokens"]), completion_tokens).as_py(),
        "completion_tokens": completion_tokens.as_py(),
        "errors": pc.sum(pc.is_in(table["status"], pa.array(["error", "aborted"]))).as_py(),
    }
    if len(rewards):
        least, most = pc.min_max(rewards).as_py().values()
        totals |= {"reward_mean": pc.mean(rewards).as_py(), "reward_min": least, "reward_max": most}
    if table.num_rows:
        totals["policy_version_min"] = pc.min(table["policy_version_min"]).as_py()
        totals["policy_version_max"] = pc.max(table["policy_version_max"]).as_py()
    return {name: float(value or 0) for name, value in totals.items()}


def _finite(column: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow.compute as pc

    column = column.drop_null()
    if pa.types.is_floating(column.type):
        # JSON has no infinities, and a bound that is one says nothing.
        column = column.filter(pc.is_finite(column))
    return column
