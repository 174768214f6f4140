"""Groups that a round trains on again (`asynchrony.replay`), with a bound on uses and on age.

A pure function of committed batches: the dispositions of earlier rounds say which groups were
trained on, and in how many rounds. So nothing is kept in memory, a round that is processed again
takes the same groups, and an audit counts uses from the same files. Leaves out a round's own
groups, which are in its rollouts.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from marin_rl.config import Config
from marin_rl.errors import CorruptObject
from marin_rl.storage.commits import committed_manifest, parent_of, read_manifest, ref_of
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.storage.tables.batches import dispositions_of
from marin_rl.storage.tables.rollouts import iter_row_groups, rollouts_manifest
from schemas.manifests import Manifest, Parent

RECORD = "replay"  # in `extra` of the manifest of a round's batches

GROUP_COLUMNS = (
    "group_id", "round_generated", "environment", "policy_version_min", "disposition", "advantage",
)  # fmt: skip

Groups = Mapping[int, tuple[str, ...]]  # ids of groups by the round that sampled them


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedGroup:
    """A group that rounds trained on: who sampled it, in which rounds it was used, and its worth.

    `priority` is the mean absolute advantage of its rollouts when it was used first.
    """

    round: int
    group_id: str
    environment: str
    version: int
    uses: int
    priority: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Groups that a round trains on again, the parents that say so, and the pool they are from.

    `tables` are the dispositions of the rounds of its window, which decide both.
    """

    groups: Groups
    parents: tuple[Parent, ...]
    pool: tuple[UsedGroup, ...]
    tables: Mapping[int, pa.Table]

    @property
    def record(self) -> dict[str, Any]:
        return {str(round): list(names) for round, names in self.groups.items()}


def reuse_of(run: Run, round: int, config: Config) -> Reuse | None:
    """The groups that a round uses again; None for a run without replay.

    Raises ObjectMissing, CorruptObject, NewerSchema for the rounds of the window.
    """
    settings = config.ahead.replay
    if settings is None:
        return None
    first = max(0, round - settings.window_rounds)  # there is no round below 0
    manifests = {n: committed_manifest(run.store, batches_slot(n)) for n in range(first, round)}
    tables = {number: dispositions_of(run, manifest) for number, manifest in manifests.items()}
    pool = available(tables, round, config)

    def rank(group: UsedGroup) -> tuple[Any, ...]:
        # The name last, so that the order of rows in the shards decides nothing.
        newest = (-group.round, group.group_id)
        if settings.select == "by_group":
            return (group.uses, *newest)
        return newest if settings.select is None else (-group.priority, *newest)

    chosen = sorted(pool, key=rank)[: settings.groups or config.rollouts.groups_per_round]
    return Reuse(
        groups={
            number: tuple(sorted(group.group_id for group in chosen if group.round == number))
            for number in sorted({group.round for group in chosen})
        },
        parents=tuple(parent_of(ref_of(manifest)) for manifest in manifests.values()),
        pool=tuple(pool),
        tables=tables,
    )


def available(tables: Mapping[int, pa.Table], round: int, config: Config) -> list[UsedGroup]:
    """Groups that a round may use again, by the dispositions of the rounds of its window.

    `tables` has the dispositions by the round that decided them; groups that no round of the tables
    sampled are beyond the window.
    """
    settings = config.ahead.replay
    assert settings is not None, "a run without replay has no pool"
    first = round - settings.window_rounds
    return [
        group
        for group in used_groups(tables)
        if group.round >= first
        and group.uses < settings.max_uses
        # By the oldest policy, as `filters.stale` drops rollouts.
        and round - group.version <= config.staleness_rounds_max
    ]


def used_groups(tables: Mapping[int, pa.Table]) -> list[UsedGroup]:
    """The groups that rounds trained on, by the dispositions of these rounds, sorted by round."""
    uses, firsts = Counter[str](), dict[str, dict[str, Any]]()
    for number, dispositions in sorted(tables.items()):
        rows = dispositions.select(GROUP_COLUMNS)
        rows = rows.filter(pc.equal(rows["disposition"], "consumed"))
        rows = rows.append_column("size", pc.abs(rows["advantage"]))
        # One thread: with several, the order of sums and so the last bit of a priority may differ.
        groups = rows.group_by("group_id", use_threads=False).aggregate(
            [
                ("round_generated", "min"), ("environment", "min"), ("policy_version_min", "min"),
                ("size", "mean"),
            ]
        )  # fmt: skip
        for row in groups.to_pylist():
            uses[row["group_id"]] += 1
            # A group is used first by the round that sampled it; without that among the tables it
            # is beyond the window.
            if row["round_generated_min"] == number:
                firsts[row["group_id"]] = row
    return sorted(
        (
            UsedGroup(
                round=row["round_generated_min"],
                group_id=name,
                environment=row["environment_min"],
                version=row["policy_version_min_min"],
                uses=uses[name],
                priority=row["size_mean"] or 0.0,  # null where training makes advantages
            )
            for name, row in firsts.items()
        ),
        key=lambda group: (group.round, group.group_id),
    )


def reused_in(manifest: Manifest, source: str) -> Groups:
    """The groups that committed batches name as used again. Raises CorruptObject."""
    record = manifest.extra.get(RECORD, {})
    try:
        return {int(round): tuple(map(str, names)) for round, names in record.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptObject(f"{source}: expected groups by round: {error!r}") from None


def reused_by(run: Run, round: int) -> Groups:
    """Groups that a round reuses: as its batches record, else as it would choose them.

    Raises as `reuse_of` does.
    """
    committed = read_manifest(run.store, batches_slot(round))
    if committed is not None:
        return reused_in(committed[0], run.store.url_of(committed[0].slot))
    reuse = reuse_of(run, round, run.config)
    return {} if reuse is None else reuse.groups


def iter_sources(
    run: Run, rollouts: Manifest, reused: Groups, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Row groups of a round's own rollouts, then of the groups that it uses again, by round.

    Raises CorruptObject where a group is not among the rollouts of the round that sampled it.
    """
    # The order is that of the plan's rollouts: both passes over the shards read by this function.
    yield from iter_row_groups(run, rollouts, columns)
    for round, names in reused.items():
        yield from _iter_groups(run, round, names, columns)


def _iter_groups(
    run: Run, round: int, names: Sequence[str], columns: Sequence[str]
) -> Iterator[pa.Table]:
    wanted, seen = pa.array(names, pa.string()), set[str]()
    manifest = rollouts_manifest(run, round)
    # The filter needs it, the caller may not.
    with_group = tuple(dict.fromkeys((*columns, "group_id")))
    for table in iter_row_groups(run, manifest, with_group):
        chosen = table.filter(pc.is_in(table["group_id"], wanted))
        if chosen.num_rows:
            seen.update(chosen["group_id"].to_pylist())
            yield chosen.select(columns)
    if lost := sorted(set(names) - seen):
        raise CorruptObject(
            f"{run.store.url_of(manifest.slot)}: expected the groups {', '.join(lost[:5])}, which "
            "a later round trains on again, found none of them; run fsck"
        )


def reuse_metrics(
    round: int, config: Config, reuse: Reuse | None, own: pa.Table
) -> dict[str, float]:
    """`replay/*` of a round: groups that entered the pool, left it, were used again or are there.

    The pool is what the next round chooses from; `own` are the round's dispositions. Groups leave
    it after their number of uses, or too old. Also by environment. {} for a run without replay.
    """
    settings = config.ahead.replay
    if reuse is None or settings is None:
        return {}
    most, before = settings.max_uses, reuse.pool
    after = available({**reuse.tables, round: own}, round + 1, config)
    names = {name for of_round in reuse.groups.values() for name in of_round}
    staying, there = {group.group_id for group in after}, {group.group_id for group in before}
    left = [group for group in before if group.group_id not in staying]
    # `uses` are those before this round, which may have been the last one.
    used_up = {group.group_id for group in left if group.uses + (group.group_id in names) >= most}
    counts = {
        "pool": after,
        "pool_enqueued": [group for group in after if group.group_id not in there],
        "pool_dequeued": [group for group in before if group.group_id in names],
        "evicted_uses": [group for group in left if group.group_id in used_up],
        "evicted_age": [group for group in left if group.group_id not in used_up],
    }
    metrics = {f"replay/{kind}": float(len(groups)) for kind, groups in counts.items()}
    environments = sorted({group.environment for group in (*before, *after)})
    for kind in ("pool", "pool_enqueued", "pool_dequeued"):
        number = Counter(group.environment for group in counts[kind])
        metrics |= {f"env/{name}/replay/{kind}": float(number[name]) for name in environments}
    evicted = Counter(group.environment for group in left)
    return metrics | {f"env/{name}/replay/evicted": float(evicted[name]) for name in environments}
