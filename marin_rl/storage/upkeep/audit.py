"""Audit: conservation of rollouts, checked from the files alone, with the names of offenders.

Generated = consumed + filtered + stale + failed, each rollout once; every consumed one stands in
the batches where its disposition says, and nothing else does; no rollout is consumed twice in a
run, or in more rounds than `asynchrony.replay` allows; tokens add up as rollouts do; every digest
holds. Totals say also what was dropped and why, and whether it was longer than what was trained on:
a filter that drops the long ones teaches a policy to be short.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from marin_rl.errors import CorruptObject, NewerSchema, ObjectMissing
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, round_of, rounds_in
from marin_rl.storage.tables.batches import dispositions_of, iter_batch_names
from marin_rl.storage.tables.rollouts import iter_row_groups, rollouts_manifest
from marin_rl.storage.upkeep.inventory import MANIFEST
from schemas.manifests import Manifest
from schemas.tables import DISPOSITION_KINDS, ROLLOUTS

NAMES_MAX = 20
GENERATED, CONSUMED = "generated", "consumed"
COLUMNS = (
    "rollout_id", "run_id", "round", "environment", "policy_version_min", "policy_version_max",
    "policy_digest", "n_prompt_tokens", "n_completion_tokens", "segment_lengths",
)  # fmt: skip
PLACE = ("step", "row", "segment")

Offences = Mapping[str, Iterable[str]]  # offending names by kind of offence, also of none
Seen = dict[str, tuple[int, ...]]  # rounds that trained on each rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Rollouts dropped for one reason: number, tokens, mean completion length in tokens."""

    disposition: str
    reason: str
    rollouts: int
    tokens: int
    mean_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The rollouts of one environment and one policy version in a round.

    `rollouts` and `tokens` have `GENERATED` and the kinds of dispositions. `mean_length` is that of
    the completions that were trained on, `length_bias` how much longer (in tokens, on average) the
    dropped ones are; None where there are none of either.
    """

    environment: str
    policy_version: int
    rollouts: Mapping[str, int]
    tokens: Mapping[str, int]
    dropped: tuple[Dropped, ...]
    mean_length: float | None
    length_bias: float | None

    @property
    def balanced(self) -> bool:
        """True if generated = consumed + filtered + stale + failed, also in tokens."""
        return all(
            counts[GENERATED] == sum(counts[kind] for kind in DISPOSITION_KINDS)
            for counts in (self.rollouts, self.tokens)
        )


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
        return not self.offences

    @property
    def problems(self) -> tuple[str, ...]:
        """A line per kind of offence, with NAMES_MAX names at most and how many more there are."""
        lines = []
        for kind, names in self.offences.items():
            more = len(names) - NAMES_MAX
            shown = [*names[:NAMES_MAX], *([f"and {more} more"] if more > 0 else [])]
            lines.append(f"{kind}: {', '.join(shown)}")
        return tuple(lines)


def audit_run(run: Run) -> Iterator[RoundAudit]:
    """Audit every round that was processed, and count the uses of rollouts across them.

    A round without batches is audited once later rounds, its checkpoint or metrics say it had some.
    """
    seen: Seen = {}
    kinds = ("rollouts", "batches", "checkpoints", "metrics")
    sampled, batched, trained, closed = ({*rounds_in(run.store, kind)} for kind in kinds)
    # Checkpoint n + 1, or batches of round n + 1, can only exist once round n was trained on.
    followed = {number - 1 for number in batched | trained}
    latest = max(followed | closed, default=-1)
    for round in sorted({*range(latest + 1), *sampled, *batched}):
        # One that is sampled and has no batches yet is open, and cannot balance.
        if round <= latest or MANIFEST in run.store.children(batches_slot(round)):
            try:
                yield _compare(run, round, seen)
            # One round that cannot be read must not hide what is wrong with the others.
            except (CorruptObject, NewerSchema, ObjectMissing) as error:
                yield RoundAudit(round=round, offences={"unreadable": (str(error),)})


def _compare(run: Run, round: int, seen: Seen) -> RoundAudit:
    """The audit of a round; `seen` grows by the rollouts that it trained on."""
    committed = read_manifest(run.store, batches_slot(round))
    if committed is None:
        raise ObjectMissing(
            f"{run.store.url_of(batches_slot(round))} is not committed, though later slots are: "
            "nothing says where its rollouts went; run fsck"
        )
    batches, rollouts = committed[0], rollouts_manifest(run, round)
    generated = _rollouts(run, rollouts)
    everything = pl.DataFrame(dispositions_of(run, batches)).cast({"n_tokens": pl.Int64})
    # A round's own rollouts balance; those of earlier rounds are uses of what balanced there. Only
    # a round that has batches among its parents may use groups again.
    reuses = any(parent.slot.startswith("batches/") for parent in batches.parents)
    is_earlier = pl.lit(reuses) & (pl.col("round_generated") < round)
    dispositions, earlier = everything.filter(~is_earlier), everything.filter(is_earlier)
    again = generated.clear()
    for number in earlier["round_generated"].unique().sort():
        rows = _rollouts(run, rollouts_manifest(run, number))
        named = earlier.filter(round_generated=number)
        again = pl.concat([again, rows.join(named, on="rollout_id", how="semi")])
    known = pl.concat([generated, again])
    consumed = everything.filter(disposition=CONSUMED)
    counts = Counter(dispositions["disposition"])
    placed = [  # (rollout_id, step, row, segment) of everything that stands in the batches
        (name, step, row, segment)
        for table in iter_batch_names(run, batches)
        for step, row, names in pl.DataFrame(table).select("step", "row", "rollout_ids").rows()
        for segment, name in enumerate(names, start=1)
    ]
    source = (rollouts.slot, rollouts.sha256)
    parents = {(parent.slot, parent.sha256) for parent in batches.parents}
    offences: Offences = {
        **_foreign(run, rollouts, generated),
        **_mislabelled(run, generated),
        **_identities(generated, dispositions),
        **_states(dispositions),
        **_places(consumed, placed, known),
        **uses_offences(run, consumed, round, seen),
        "used again but never generated": _names(earlier.join(again, on="rollout_id", how="anti")),
        "batches made from other rollouts": [] if source in parents else [batches.slot],
        **_totals(rollouts, batches, generated.height, counts),
        **_contradictions(known, everything),
    }
    return RoundAudit(
        round=round,
        generated=generated.height,
        **{kind: counts.get(kind, 0) for kind in DISPOSITION_KINDS},
        offences={kind: listed for kind, names in offences.items() if (listed := tuple(names))},
        balances=_balances(generated, dispositions),
        reused=consumed.height - counts.get(CONSUMED, 0),
    )


def _rollouts(run: Run, manifest: Manifest) -> pl.DataFrame:
    """Rollouts as the shards describe them, with `n_tokens`."""
    empty = pa.Table.from_batches([], pa.schema([ROLLOUTS.field(name) for name in COLUMNS]))
    frame = pl.DataFrame(pa.concat_tables([empty, *iter_row_groups(run, manifest, COLUMNS)]))
    counts = pl.col("n_prompt_tokens", "n_completion_tokens").cast(pl.Int64)
    return frame.with_columns(n_tokens=pl.sum_horizontal(counts))


def _names(rows: pl.DataFrame) -> list[str]:
    return rows["rollout_id"].to_list()


def uses_offences(run: Run, consumed: pl.DataFrame, round: int, seen: Seen) -> Offences:
    """Rollouts that are trained on in more rounds than the run allows, or outside of their window.

    Without replay that is any round but the first. A rollout that is used again was sampled by an
    earlier round, and trained on by it.
    """
    replay = run.at_round(round).config.ahead.replay
    most, window = (1, 0) if replay is None else (replay.max_uses, replay.window_rounds)
    again, strange = list[str](), list[str]()
    for name, generated in consumed.select("rollout_id", "round_generated").rows():
        uses = seen.get(name, ())
        if len(uses) >= most:
            again.append(f"{name} (round {uses[-1]})")
        within = generated in uses and 0 < round - generated <= window
        if replay is not None and generated != round and not within:
            strange.append(name)
    # After the look-up: a repetition within this round is reported by `_identities`.
    for name in dict.fromkeys(_names(consumed)):
        seen[name] = (*seen.get(name, ()), round)
    return {
        "consumed in an earlier round": again,
        "used again though never trained on, or outside of the window": strange,
    }


def _foreign(run: Run, manifest: Manifest, generated: pl.DataFrame) -> Offences:
    """Rows of another run or round, and shard objects that the round's manifest does not name."""
    round = round_of(manifest.slot.rpartition("/")[2])
    assert round is not None, f"expected a slot of a round, found {manifest.slot}"
    # A fork's early rounds are its ancestor's, and so are the names in them.
    played_by = run.at_round(round).run_id
    foreign = generated.filter((pl.col("run_id") != played_by) | (pl.col("round") != round))
    named = {part.name for part in manifest.parts}
    # A shard that came after the seal would be missing from every sum.
    there = (name for name in run.store.children(manifest.slot) if name.startswith("shard-"))
    return {
        "rows of another run or round": _names(foreign),
        "shards outside the manifest": [name for name in there if name not in named],
    }


def _mislabelled(run: Run, generated: pl.DataFrame) -> Offences:
    """Rollouts with the digest of other parameters than the checkpoint of their version has.

    Those that several versions sampled are left out, as are versions without a checkpoint here.
    """
    least, most = pl.col("policy_version_min"), pl.col("policy_version_max")
    wrong, sampled = list[str](), generated.filter(least == most)
    for version in sampled["policy_version_min"].unique(maintain_order=True):
        checkpoint = read_manifest(run.store, checkpoint_slot(version))
        # By the checkpoint and not by the shard's own word: a wrong digest is what is looked for.
        expected = checkpoint and checkpoint[0].extra.get("parameters_digest")
        if expected:
            rows = sampled.filter(policy_version_min=version)
            wrong += _names(rows.filter(pl.col("policy_digest") != str(expected)))
    return {"sampled by other parameters than their version's": wrong}


def _identities(generated: pl.DataFrame, dispositions: pl.DataFrame) -> Offences:
    made, disposed = Counter(_names(generated)), Counter(_names(dispositions))
    return {
        "generated more than once": sorted(n for n, count in made.items() if count > 1),
        "without a disposition": sorted(made.keys() - disposed.keys()),
        "disposed of but never generated": sorted(disposed.keys() - made.keys()),
        "disposed of more than once": sorted(n for n, count in disposed.items() if count > 1),
    }


def _states(dispositions: pl.DataFrame) -> Offences:
    """Rows that contradict themselves: a place without being consumed, a drop without a reason."""
    consumed = pl.col("disposition") == CONSUMED
    placed = pl.col(*PLACE).is_not_null()
    # A consumed rollout has all three numbers, any other one has none of them.
    misplaced = (
        pl.when(consumed).then(~pl.all_horizontal(placed)).otherwise(pl.any_horizontal(placed))
    )
    offences = {
        "of unknown disposition": ~pl.col("disposition").is_in(list(DISPOSITION_KINDS)),
        "consumed without a place, or the reverse": misplaced,
        "dropped without a reason, or the reverse": consumed ^ pl.col("reason").is_null(),
    }
    return {kind: _names(dispositions.filter(wrong)) for kind, wrong in offences.items()}


def _places(
    consumed: pl.DataFrame, placed: list[tuple[str, int, int, int]], known: pl.DataFrame
) -> Offences:
    """Differences between the places in dispositions (a rollout's start) and in the batches."""
    several = known.filter(pl.col("segment_lengths").list.len() > 0)
    lengths = several.select("rollout_id", pl.col("segment_lengths").list.len()).rows()
    segments: dict[str, int] = dict(lengths)
    # Both ways: dispositions may name a wrong row, and the batches an unreported rollout.
    reported = set(consumed.select("rollout_id", *PLACE).rows())
    times = Counter(place[0] for place in placed)
    # Reversed, so that the first place of a name is the one that stays.
    firsts = set({place[0]: place for place in reversed(placed)}.values())
    # A later segment has no place of its own in the dispositions.
    unreported = {x for x in set(placed) - reported if x in firsts or x[0] not in segments}
    apart = {name: count - segments.get(name, 1) for name, count in times.items()}
    return {
        "not where its disposition says": sorted(str(x[0]) for x in reported - firsts),
        "in the batches and in no disposition": sorted(x[0] for x in unreported),
        "in the batches more than once": sorted(n for n, more in apart.items() if more > 0),
        "in the batches without all segments": sorted(n for n, more in apart.items() if more < 0),
    }


def _totals(
    rollouts: Manifest, batches: Manifest, generated: int, counts: Mapping[str, int]
) -> Offences:
    expected = [(rollouts, "rows", generated), (batches, "rollouts/generated", generated)]
    expected += [(batches, f"rollouts/{kind}", counts.get(kind, 0)) for kind in DISPOSITION_KINDS]
    wrong = [
        f"{manifest.slot} {name}: says {manifest.totals.get(name)}, counted {count}"
        for manifest, name, count in expected
        if manifest.totals.get(name) != count
    ]
    return {"manifest totals": wrong}


def _contradictions(known: pl.DataFrame, dispositions: pl.DataFrame) -> Offences:
    """Rollouts whose dispositions and shards disagree on tokens, environment or policy."""
    said = dispositions.unique("rollout_id", keep="first")
    pairs = known.join(said, on="rollout_id", suffix="_said", maintain_order="left")
    kinds = {
        "disposition of other tokens": "n_tokens",
        "disposition of another environment": "environment",
        "disposition of another policy": "policy_version_min",
    }
    return {
        kind: _names(pairs.filter(pl.col(name) != pl.col(f"{name}_said")))
        for kind, name in kinds.items()
    }


def _balances(generated: pl.DataFrame, dispositions: pl.DataFrame) -> tuple[Balance, ...]:
    """Balances by environment and policy version, sorted.

    What became of a rollout is counted as its disposition says: where shards say otherwise,
    `_contradictions` names the rollouts.
    """
    key = ["environment", "policy_version_min"]
    # The first, where a name is generated twice: an offence of its own (`_identities`).
    lengths = generated.unique("rollout_id", keep="first").select(
        "rollout_id", length=pl.col("n_completion_tokens").cast(pl.Int64)
    )
    fates = dispositions.join(lengths, on="rollout_id", how="left")
    places = pl.concat([generated.select(key), fates.select(key)]).unique().sort(key)
    return tuple(
        _balance(
            environment,
            version,
            generated.filter(environment=environment, policy_version_min=version),
            fates.filter(environment=environment, policy_version_min=version),
        )
        for environment, version in places.rows()
    )


def _balance(environment: str, version: int, made: pl.DataFrame, fates: pl.DataFrame) -> Balance:
    counted = {GENERATED: made}
    counted |= {kind: fates.filter(disposition=kind) for kind in DISPOSITION_KINDS}
    lost = fates.filter(pl.col("disposition") != CONSUMED)
    kept_mean, lost_mean = _mean_length(counted[CONSUMED]), _mean_length(lost)
    by_reason = lost.fill_null("").partition_by("disposition", "reason", as_dict=True)
    return Balance(
        environment=environment,
        policy_version=version,
        rollouts={kind: rows.height for kind, rows in counted.items()},
        tokens={kind: int(rows["n_tokens"].sum()) for kind, rows in counted.items()},
        dropped=tuple(
            Dropped(
                disposition=disposition,
                reason=reason,
                rollouts=rows.height,
                tokens=int(rows["n_tokens"].sum()),
                mean_length=_mean_length(rows) or 0.0,
            )
            for (disposition, reason), rows in sorted(by_reason.items())
        ),
        mean_length=kept_mean,
        # A filter that mostly drops long answers trains on a biased sample: this is how far.
        length_bias=None if kept_mean is None or lost_mean is None else lost_mean - kept_mean,
    )


def _mean_length(rows: pl.DataFrame) -> float | None:
    lengths = rows["length"].drop_nulls()
    return int(lengths.sum()) / len(lengths) if len(lengths) else None
