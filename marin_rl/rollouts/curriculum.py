"""Curriculum: which environments and examples a round samples more, by what earlier rounds solved.

Decided once a round out of committed slots alone: the dispositions of the rounds that its policy
was trained on, within a window. So every process decides the same, and a round that is sampled
again asks for the same. The decision is part of the fingerprint of the round's shards and recorded
in the manifest that seals them. Leaves out sampling (`generate`).

A group of a round is of the environment whose turn it is by the weights, and its example is chosen
of `asynchrony.choices` ones, with probabilities by what is known of each.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.compute as pc

from marin_rl.config import Config, whole_weights
from marin_rl.environments.base import Environment
from marin_rl.environments.registry import Mixture, order_of
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.storage.tables.rollouts import (
    SamplingRecord,
    iter_row_groups,
    manifest_to_be,
    rollouts_manifest,
)
from marin_rl.types import Example, SlotRef
from schemas.manifests import Manifest, sha256_of

RECORD = "curriculum"  # in `extra` of the manifest that seals a round's rollouts

# Share of the full weight of examples that teach nothing: a change of that must be noticed.
LEAST = 0.1
WEIGHTS: Mapping[str, float] = {
    "never": LEAST, "hard": 0.75, "medium": 1.0, "easy": 0.75, "always": LEAST,
}  # fmt: skip
FINEST = 100  # whole numbers that weights of environments are rounded to

# Counts of committed rounds, by the store of the run and the round.
_counted: "WeakKeyDictionary[ObjectStore, dict[int, Sequence[GroupCount]]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCount:
    """Attempts at an example in one group, and successes among them; "" is the only environment."""

    label: str
    example_id: str
    attempts: int
    successes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Decision of a round: weights of its environments, and buckets of examples that are known.

    `rounds` are the trained rounds that it rests on, `policy_version` the policy that samples.
    `signal` is the mean of 4 p (1 - p) over the groups of an environment, p being the share of a
    group that was solved: 1 where half of them are, 0 where all or none.
    """

    kind: str
    policy_version: int
    rounds: tuple[int, ...]
    weights: Mapping[str, int]
    solve_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    signal: Mapping[str, float] = field(default_factory=dict[str, float])
    buckets: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    @property
    def record(self) -> dict[str, Any]:
        """The decision as plain JSON; examples by their number in each bucket and a digest."""
        examples = sorted((label, name, bucket) for (label, name), bucket in self.buckets.items())
        return {
            "kind": self.kind,
            "policy_version": self.policy_version,
            "rounds": list(self.rounds),
            "weights": dict(self.weights),
            "solve_rates": dict(self.solve_rates),
            "signal": dict(self.signal),
            "buckets": dict(sorted(Counter(bucket for *_, bucket in examples).items())),
            "examples": sha256_of(json.dumps(examples).encode()),
        }


def decide(run: Run, round: int, policy_version: int) -> Curriculum | None:
    """The decision of a round that this version samples; None for a run without a curriculum.

    Raises ObjectMissing, CorruptObject, NewerSchema for the rounds that it rests on.
    """
    config, window = run.config, run.config.ahead.curriculum
    if window is None:
        return None
    # A policy's own rounds are those before its number: later ones may be under way.
    rounds = range(max(0, policy_version - window), policy_version)
    known = _counted.setdefault(run.store, {})
    for number in rounds:
        if number not in known:
            known[number] = _read_counts(run, number)
    counts = [count for number in rounds for count in known[number]]
    # A single environment has the label "" and weight 1.
    entries = config.environment.mixture or ()
    base = {entry.shown_label: float(entry.weight) for entry in entries} or {"": 1.0}
    by_label: defaultdict[str, list[GroupCount]] = defaultdict(list)
    by_example: defaultdict[tuple[str, str], list[GroupCount]] = defaultdict(list)
    for count in counts:
        by_label[count.label].append(count)
        by_example[count.label, count.example_id].append(count)
    signal = {label: _signal(of) for label, of in sorted(by_label.items())}
    return Curriculum(
        kind="solve_rate",
        policy_version=policy_version,
        rounds=tuple(rounds),
        weights=_whole({k: w * max(LEAST, signal.get(k, 1.0)) for k, w in base.items()}),
        solve_rates={label: _solved(of) / _tried(of) for label, of in sorted(by_label.items())},
        signal=signal,
        buckets={key: _bucket(_solved(of), _tried(of)) for key, of in by_example.items()},
    )


def _whole(weights: Mapping[str, float]) -> dict[str, int]:
    """Weights as whole numbers up to FINEST, at least 1 where they are above 0."""
    most = max(weights.values())
    shares = {k: max(1, round(FINEST * w / most)) if w else 0 for k, w in weights.items()}
    above = [k for k, share in shares.items() if share]
    return {
        **shares,
        **dict(zip(above, whole_weights([float(shares[k]) for k in above]), strict=True)),
    }


def _signal(counts: Sequence[GroupCount]) -> float:
    shares = [count.successes / count.attempts for count in counts]
    return math.fsum(4 * share * (1 - share) for share in shares) / len(shares)


def _tried(counts: Sequence[GroupCount]) -> int:
    return sum(count.attempts for count in counts)


def _solved(counts: Sequence[GroupCount]) -> int:
    return sum(count.successes for count in counts)


def _bucket(successes: int, attempts: int) -> str:
    """Bucket of an example by its successes: hard below a quarter, easy above three quarters."""
    if successes in (0, attempts):
        return "always" if successes else "never"
    if 4 * successes < attempts:
        return "hard"
    return "easy" if 4 * successes > 3 * attempts else "medium"


def _read_counts(run: Run, round: int) -> Sequence[GroupCount]:
    names = pa.concat_tables(
        iter_row_groups(run, rollouts_manifest(run, round), ("group_id", "example_id"))
    )
    example_of = dict(
        zip(names["group_id"].to_pylist(), names["example_id"].to_pylist(), strict=True)
    )
    rows = read_dispositions(run, round)
    valid = pc.and_(
        pc.not_equal(rows["disposition"], "failed"), pc.equal(rows["round_generated"], round)
    )
    rows = rows.filter(valid)
    rows = rows.filter(pc.is_finite(rows["reward"]))  # null, which drops the row, without a reward
    solved = pc.greater_equal(rows["reward"], run.config.objective.success_threshold)
    table = pa.table({"group_id": rows["group_id"], "environment": rows["environment"]})
    table = table.append_column("solved", solved.cast(pa.int64()))
    groups = table.group_by(["group_id", "environment"], use_threads=False)
    several = run.config.environment.mixture is not None
    return [
        GroupCount(
            label=row["environment"] if several else "",
            example_id=example_of[row["group_id"]],
            attempts=row["solved_count"],
            successes=row["solved_sum"],
        )
        for row in groups.aggregate([("solved", "sum"), ("solved", "count")]).to_pylist()
    ]


def chosen_example(
    run: Run, round: int, number: int, environment: Environment, decision: Curriculum
) -> Example:
    """The example of a round's group by its number, as a decision weighs it."""
    config = run.config
    choices = config.ahead.choices
    weights = {label: weight for label, weight in decision.weights.items() if weight}
    order, begun = order_of(tuple(weights.values())), round * config.examples_per_round
    place, own = order.at(begun + number)
    label = [*weights][place]
    # Places within the round: each environment has `examples_reserved` of its own in every round.
    own -= order.count(place, begun)
    first = round * config.examples_reserved + choices * own
    # Between 0 and 1, both excluded.
    draws = [
        (run.seed_of("curriculum", round, number, choice) % 2**31 + 0.5) / 2**31
        for choice in range(choices)
    ]
    if not decision.buckets:  # all weigh the same
        return _example(environment, config, label, first + draws.index(max(draws)))
    examples = [_example(environment, config, label, first + n) for n in range(choices)]
    # The largest of u^(1/w) is each with probability w / sum(w) (Efraimidis and Spirakis 2006).
    keys = [
        math.log(u) / WEIGHTS.get(decision.buckets.get((label, example.example_id), ""), 1.0)
        for u, example in zip(draws, examples, strict=True)
    ]
    return examples[keys.index(max(keys))]


def _example(environment: Environment, config: Config, label: str, index: int) -> Example:
    seed = config.environment.train_seed
    if isinstance(environment, Mixture):
        return environment.own_example(label, seed, index, "train")
    return environment.example(seed, index, "train")


def sampling_record(
    run: Run, round: int, shards: Sequence[SlotRef], policy_version: int
) -> SamplingRecord | None:
    """Fields and metrics that a round's manifest has of its curriculum; None without one."""
    decision = decide(run, round, policy_version)
    if decision is None:
        return None
    metrics = curriculum_metrics(run, manifest_to_be(run, round, shards), decision)
    return SamplingRecord(totals=metrics, extra={RECORD: decision.record})


def curriculum_metrics(run: Run, manifest: Manifest, decision: Curriculum) -> dict[str, float]:
    """`curriculum/*` of a round's rollouts: shares of its groups whose examples were known.

    Runs with several environments also have their weights and solve rates.
    """
    columns = ("group_id", "environment", "example_id")
    table = pa.concat_tables(iter_row_groups(run, manifest, columns))
    several = run.config.environment.mixture is not None
    group_of = {row["group_id"]: row for row in table.to_pylist()}
    sampled = Counter(
        decision.buckets.get((row["environment"] if several else "", row["example_id"]), "new")
        for row in group_of.values()
    )
    known, total = Counter(decision.buckets.values()), sum(decision.weights.values())
    metrics = {f"env/{label}/weight": weight / total for label, weight in decision.weights.items()}
    metrics |= {f"env/{label}/solve_rate": rate for label, rate in decision.solve_rates.items()}
    metrics = {name: value for name, value in metrics.items() if several}
    if decision.kind == "solve_rate" and group_of:
        shares = {bucket: sampled[bucket] / len(group_of) for bucket in ("new", *WEIGHTS)}
        metrics |= {f"curriculum/sampled/{bucket}": share for bucket, share in shares.items()}
    if known:
        shares = {bucket: known[bucket] / known.total() for bucket in WEIGHTS}
        metrics |= {f"curriculum/known/{bucket}": share for bucket, share in shares.items()}
    return metrics
