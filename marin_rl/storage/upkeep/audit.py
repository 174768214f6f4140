"""Audit: conservation of rollouts, checked from the files alone, with the names of offenders.

Generated = consumed + filtered + stale + failed, each rollout once; every consumed one stands in
the batches where its disposition says, and nothing else does; no rollout is consumed twice in a
run, or in more rounds than `asynchrony.replay` allows; tokens add up as rollouts do, by
environment and policy version; every digest holds. Nothing is changed here. Totals say also what
was dropped for which reason, and whether that was longer or shorter than what was trained on: a
filter that drops the long ones teaches a policy to be short.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from marin_rl.errors import CorruptObject, NewerSchema, ObjectMissing
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, round_of, rounds_in
from marin_rl.storage.tables.batches import dispositions_of, iter_batch_names
from marin_rl.storage.tables.rollouts import iter_row_groups, rollouts_manifest
from marin_rl.storage.upkeep.balances import Balance, balances, token_offences
from marin_rl.storage.upkeep.inventory import MANIFEST
from schemas.manifests import Manifest
from schemas.tables import DISPOSITION_KINDS

NAMES_MAX = 20
COLUMNS = (
    "rollout_id", "run_id", "round", "environment", "policy_version_min", "policy_version_max",
    "policy_digest", "n_prompt_tokens", "n_completion_tokens", "segment_lengths",
)  # fmt: skip


Offences = Mapping[str, Iterable[str]]  # offending names by kind of offence, also of none


class Seen(dict[str, tuple[int, ...]]):
    """Rounds that trained on each rollout; `complete` where all earlier rounds were audited."""

    def __init__(self, *, complete: bool = False) -> None:
        super().__init__()
        self.complete = complete


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAudit:
    """Audit of one round: counts of rollouts, and offending names by kind of offence.

    `reused` counts rollouts of earlier rounds that the round trained on again. `balances` have the
    same by environment and policy version.
    """

    round: int
    generated: int = 0
    consumed: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    reused: int = 0
    offences: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    balances: tuple[Balance, ...] = field(default=(), compare=False)

    @property
    def balanced(self) -> bool:
        """True if everything adds up."""
        return not self.offences

    @property
    def problems(self) -> tuple[str, ...]:
        """A line per kind of offence, with NAMES_MAX names at most and how many more there are."""
        return tuple(f"{kind}: {', '.join(_first(names))}" for kind, names in self.offences.items())


def audit_run(run: Run) -> Iterator[RoundAudit]:
    """Audit every round that was processed, and count the uses of rollouts across them.

    A round that has no batches, be it sampled or not, is audited once later rounds, its checkpoint
    or its metrics say that it had: its rollouts went somewhere.
    """
    seen = Seen(complete=True)
    kinds = ("rollouts", "batches", "checkpoints", "metrics")
    sampled, batched, trained, closed = ({*rounds_in(run.store, kind)} for kind in kinds)
    # Checkpoint n + 1, or batches of round n + 1, can only exist once round n was trained on.
    followed = {number - 1 for number in batched | trained}
    latest = max(followed | closed, default=-1)
    for round in sorted({*range(latest + 1), *sampled, *batched}):
        # One that is sampled and has no batches yet is open, and cannot balance.
        if round <= latest or _has_batches(run, round):
            yield _audited(run, round, seen)


def _has_batches(run: Run, round: int) -> bool:
    """True if batches are committed, also by a manifest that cannot be read."""
    return MANIFEST in run.store.children(batches_slot(round))


def audit_round(run: Run, round: int) -> RoundAudit:
    """Audit one round. Raises ObjectMissing while its batches are not committed."""
    if not _has_batches(run, round):
        raise ObjectMissing(
            f"{run.store.url_of(batches_slot(round))}: the batches of this round are not committed"
        )
    return _audited(run, round, Seen())


def _audited(run: Run, round: int, seen: Seen) -> RoundAudit:
    """The audit of a round; `seen` maps what was consumed to the rounds that did, and grows."""
    try:
        return _compare(run, round, seen)
    # One round that cannot be read must not hide what is wrong with the others.
    except (CorruptObject, NewerSchema, ObjectMissing) as error:
        return RoundAudit(round=round, offences={"unreadable": (str(error),)})


def _compare(run: Run, round: int, seen: Seen) -> RoundAudit:
    batches = read_manifest(run.store, batches_slot(round))
    if batches is None:
        raise ObjectMissing(
            f"{run.store.url_of(batches_slot(round))} is not committed, though later slots are: "
            "nothing says where its rollouts went; run fsck"
        )
    rollouts = rollouts_manifest(run, round)
    generated = pa.concat_tables(iter_row_groups(run, rollouts, COLUMNS))
    everything = dispositions_of(run, batches[0])
    # A round's own rollouts balance; those of earlier rounds are uses of what balanced there.
    own = pc.invert(pc.less(everything["round_generated"], round))
    dispositions = everything.filter(own) if _reuses(batches[0]) else everything
    counts = Counter(dispositions["disposition"].to_pylist())
    consumed = everything.filter(pc.equal(everything["disposition"], "consumed"))
    earlier = _rows_of_earlier(run, everything, round, COLUMNS) if _reuses(batches[0]) else ()
    # An empty table first, for its columns: there may be no earlier rows.
    again = pa.concat_tables([generated.slice(0, 0), *earlier])
    offences: Offences = {
        **_foreign(run, rollouts, generated),
        **_mislabelled(run, generated),
        **_identities(generated["rollout_id"].to_pylist(), dispositions),
        **_states(dispositions),
        **_places(consumed, _batch_places(run, batches[0]), _segments(generated, again)),
        **uses_offences(run, consumed, round, seen),
        **_unsampled(again, everything.filter(pc.invert(own)) if _reuses(batches[0]) else again),
        **_lineage(rollouts, batches[0]),
        **_totals(rollouts, batches[0], generated.num_rows, counts),
        **token_offences(pa.concat_tables([generated, again]), everything),
    }
    return RoundAudit(
        round=round,
        generated=generated.num_rows,
        **{kind: counts.get(kind, 0) for kind in DISPOSITION_KINDS},
        offences={kind: listed for kind, names in offences.items() if (listed := tuple(names))},
        balances=balances(generated, dispositions),
        reused=consumed.num_rows - counts.get("consumed", 0),
    )


def _reuses(batches: Manifest) -> bool:
    """True if a round may train on groups of earlier rounds again."""
    return any(parent.slot.startswith("batches/") for parent in batches.parents)


def _rows_of_earlier(
    run: Run, dispositions: pa.Table, round: int, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Rows of the rollouts that dispositions name of earlier rounds, by round."""
    for number in sorted({n for n in dispositions["round_generated"].to_pylist() if n < round}):
        rows = dispositions.filter(pc.equal(dispositions["round_generated"], number))
        names = rows["rollout_id"].combine_chunks()
        for table in iter_row_groups(run, rollouts_manifest(run, number), columns):
            yield table.filter(pc.is_in(table["rollout_id"], names))


def _unsampled(again: pa.Table, dispositions: pa.Table) -> Offences:
    """Rollouts that are said to be of earlier rounds, and are among the rollouts of none."""
    there = set(again["rollout_id"].to_pylist())
    named = dispositions["rollout_id"].to_pylist()
    return {"used again but never generated": [n for n in named if n not in there]}


def uses_offences(run: Run, consumed: pa.Table, round: int, seen: Seen) -> Offences:
    """Rollouts that are trained on in more rounds than the run allows, or outside of their window.

    Without replay that is any round but the first. A rollout that is used again was sampled by an
    earlier round, and trained on by it.
    """
    replay = run.at_round(round).config.replay
    most, window = (1, 0) if replay is None else (replay.max_uses, replay.window_rounds)
    names, rounds = (consumed[name].to_pylist() for name in ("rollout_id", "round_generated"))
    again, strange = list[str](), list[str]()
    for name, generated in zip(names, rounds, strict=True):
        uses = seen.get(name, ())
        if len(uses) >= most:
            again.append(f"{name} (round {uses[-1]})")
        if replay is not None and generated != round:
            # Only an audit of the whole run has seen the round that generated it.
            known = seen.complete and generated not in uses
            if known or not 0 < round - generated <= window:
                strange.append(name)
    # After the look-up: a repetition within this round is reported by `_identities`.
    for name in dict.fromkeys(names):
        seen[name] = (*seen.get(name, ()), round)
    return {
        "consumed in an earlier round": again,
        "used again though never trained on, or outside of the window": strange,
    }


def _foreign(run: Run, manifest: Manifest, generated: pa.Table) -> Offences:
    """Rows of another run or round, and shard objects that the round's manifest does not name."""
    round = round_of(manifest.slot.rpartition("/")[2])
    assert round is not None, f"expected a slot of a round, found {manifest.slot}"
    # A fork's early rounds are its ancestor's, and so are the names in them.
    played_by = run.at_round(round).run_id
    wrong = pc.or_(
        pc.not_equal(generated["run_id"], played_by), pc.not_equal(generated["round"], round)
    )
    named = {part.name for part in manifest.parts}
    # A shard that came after the seal was sampled and never trained on: it would be missing from
    # every sum.
    there = (name for name in run.store.children(manifest.slot) if name.startswith("shard-"))
    return {
        "rows of another run or round": generated.filter(wrong)["rollout_id"].to_pylist(),
        "shards outside the manifest": [name for name in there if name not in named],
    }


def _mislabelled(run: Run, generated: pa.Table) -> Offences:
    """Rollouts with the digest of other parameters than the checkpoint of their version has.

    Those that several versions sampled are left out, as are versions without a checkpoint here.
    """
    names = ("rollout_id", "policy_digest", "policy_version_min", "policy_version_max")
    sampled: dict[int, list[tuple[str, str]]] = {}
    for rollout, digest, least, most in zip(
        *(generated[n].to_pylist() for n in names), strict=True
    ):
        if least == most:
            sampled.setdefault(least, []).append((rollout, digest))
    wrong = list[str]()
    for version, rollouts in sampled.items():
        checkpoint = read_manifest(run.store, checkpoint_slot(version))
        # By the checkpoint and not by the shard's own word: a wrong digest is what is looked for.
        expected = checkpoint and checkpoint[0].extra.get("parameters_digest")
        wrong += [rollout for rollout, digest in rollouts if expected and digest != expected]
    return {"sampled by other parameters than their version's": wrong}


def _identities(generated: list[str], dispositions: pa.Table) -> Offences:
    disposed = dispositions["rollout_id"].to_pylist()
    return {
        "generated more than once": _repeated(generated),
        "without a disposition": sorted(set(generated) - set(disposed)),
        "disposed of but never generated": sorted(set(disposed) - set(generated)),
        "disposed of more than once": _repeated(disposed),
    }


def _states(dispositions: pa.Table) -> Offences:
    """Rows that contradict themselves: a place without being consumed, a drop without a reason."""
    consumed = pc.equal(dispositions["disposition"], "consumed")
    step, row, segment = (pc.is_valid(dispositions[name]) for name in ("step", "row", "segment"))
    everywhere = pc.and_(pc.and_(step, row), segment)
    anywhere = pc.or_(pc.or_(step, row), segment)
    unknown = pc.invert(pc.is_in(dispositions["disposition"], pa.array(DISPOSITION_KINDS)))
    # A consumed rollout has all three numbers, any other one has none of them.
    misplaced = pc.if_else(consumed, pc.invert(everywhere), anywhere)
    unreasoned = pc.xor(consumed, pc.is_null(dispositions["reason"]))
    names = dispositions["rollout_id"]
    return {
        "of unknown disposition": names.filter(unknown).to_pylist(),
        "consumed without a place, or the reverse": names.filter(misplaced).to_pylist(),
        "dropped without a reason, or the reverse": names.filter(unreasoned).to_pylist(),
    }


def _batch_places(run: Run, manifest: Manifest) -> list[tuple[str, int, int, int]]:
    """(rollout_id, step, row, segment) of everything that stands in the batches."""
    return [
        (name, step, row, segment)
        for table in iter_batch_names(run, manifest)
        for step, row, names in zip(
            table["step"].to_pylist(),
            table["row"].to_pylist(),
            table["rollout_ids"].to_pylist(),
            strict=True,
        )
        for segment, name in enumerate(names, start=1)
    ]


def _segments(*rollouts: pa.Table) -> dict[str, int]:
    """Number of segments of each rollout that has several."""
    table = pa.concat_tables(rollouts)
    pairs = zip(*(table[n].to_pylist() for n in ("rollout_id", "segment_lengths")), strict=True)
    return {name: len(lengths) for name, lengths in pairs if lengths}


def _places(
    consumed: pa.Table, placed: list[tuple[str, int, int, int]], segments: Mapping[str, int]
) -> Offences:
    """Differences between dispositions, which say where a rollout begins, and the batches."""
    columns = (consumed[name].to_pylist() for name in ("rollout_id", "step", "row", "segment"))
    # Both ways: dispositions may name a wrong row, and the batches an unreported rollout.
    reported = set(zip(*columns, strict=True))
    times = Counter(place[0] for place in placed)
    # Reversed, so that the first place of a name is the one that stays.
    begun = {place[0]: place for place in reversed(placed)}
    firsts = set(begun.values())
    absent = reported - firsts
    # A later segment has no place of its own in the dispositions.
    unreported = {x for x in set(placed) - reported if x in firsts or x[0] not in segments}
    expected = {name: segments.get(name, 1) for name in times}
    more = [name for name, count in times.items() if count > expected[name]]
    fewer = [name for name, count in times.items() if count < expected[name]]
    return {
        "not where its disposition says": sorted(str(x[0]) for x in absent),
        "in the batches and in no disposition": sorted(x[0] for x in unreported),
        "in the batches more than once": sorted(more),
        "in the batches without all segments": sorted(fewer),
    }


def _lineage(rollouts: Manifest, batches: Manifest) -> Offences:
    named = {(parent.slot, parent.sha256) for parent in batches.parents}
    wrong = (rollouts.slot, rollouts.sha256) not in named
    return {"batches made from other rollouts": [batches.slot] if wrong else []}


def _totals(
    rollouts: Manifest, batches: Manifest, generated: int, counts: Mapping[str, int]
) -> Offences:
    expected = {
        f"{rollouts.slot} rows": (rollouts.totals.get("rows"), generated),
        f"{batches.slot} rollouts/generated": (
            batches.totals.get("rollouts/generated"), generated,
        ),
        **{
            f"{batches.slot} rollouts/{kind}": (
                batches.totals.get(f"rollouts/{kind}"), counts.get(kind, 0),
            )
            for kind in DISPOSITION_KINDS
        },
    }  # fmt: skip
    wrong = [
        f"{name}: says {total}, counted {count}"
        for name, (total, count) in expected.items()
        if total != count
    ]
    return {"manifest totals": wrong}


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _first(names: tuple[str, ...]) -> tuple[str, ...]:
    more = len(names) - NAMES_MAX
    return (*names[:NAMES_MAX], f"and {more} more") if more > 0 else names
