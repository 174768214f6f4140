"""Balances of an audit: rollouts and tokens by environment and policy version, and what differs.

Counts what shards say was generated and what dispositions say became of it. Leaves out where
consumed rollouts stand in the batches (`audit`).
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables import DISPOSITION_KINDS

GENERATED = "generated"
CONSUMED = "consumed"
KEY = ("environment", "policy_version_min")

Key = tuple[str, int]
Tally = Mapping[str, Any]  # a row of `_tallies`


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


def balances(generated: pa.Table, dispositions: pa.Table) -> tuple[Balance, ...]:
    """Balances by environment and policy version, sorted.

    `generated` has what the shards say of each rollout (environment, policy_version_min and the
    token counts), `dispositions` what became of it, which is counted as it says there: where shards
    say otherwise, `token_offences` names the rollouts.
    """
    lengths = generated["n_completion_tokens"]
    made = _tallies(
        generated.append_column("n_tokens", _tokens(generated)).append_column("length", lengths)
    )
    # The first, where a name is generated twice: an offence of its own (`audit`).
    known = lengths.take(_index(dispositions, generated))
    fates = _tallies(dispositions.append_column("length", known), "disposition", "reason")
    return tuple(_balance(key, made[key], fates[key]) for key in sorted({*made, *fates}))


def token_offences(generated: pa.Table, dispositions: pa.Table) -> Mapping[str, list[str]]:
    """Rollouts whose dispositions and shards disagree on tokens, environment or policy."""
    # What only one side has is null, differs from nothing, and is an offence of its own (`audit`).
    said = dispositions.take(_index(generated, dispositions))
    pairs = {
        "disposition of other tokens": (_tokens(generated), said["n_tokens"]),
        "disposition of another environment": (generated[KEY[0]], said[KEY[0]]),
        "disposition of another policy": (generated[KEY[1]], said[KEY[1]]),
    }
    names = generated["rollout_id"]
    return {
        kind: names.filter(pc.not_equal(stored, claimed)).to_pylist()
        for kind, (stored, claimed) in pairs.items()
    }


def _tokens(generated: pa.Table) -> pa.ChunkedArray:
    counts = (
        generated[name].cast(pa.int64()) for name in ("n_prompt_tokens", "n_completion_tokens")
    )
    return pc.add(*counts)


def _index(table: pa.Table, other: pa.Table) -> pa.ChunkedArray:
    """For each rollout of `table`, its first row in `other`; null where there is none."""
    names = other["rollout_id"].combine_chunks()
    return pc.index_in(table["rollout_id"], value_set=names)


def _tallies(table: pa.Table, *kinds: str) -> defaultdict[Key, list[Tally]]:
    """Rollouts, tokens and completion lengths, where these are known, by `KEY` and `kinds`."""
    sums = [([], "count_all"), ("n_tokens", "sum"), ("length", "sum"), ("length", "count")]
    tallies = defaultdict[Key, list[Tally]](list)
    for row in table.group_by([*KEY, *kinds]).aggregate(sums).to_pylist():
        tallies[row[KEY[0]], row[KEY[1]]].append(row)
    return tallies


def _balance(key: Key, made: Sequence[Tally], fates: Sequence[Tally]) -> Balance:
    by_kind = {kind: [t for t in fates if t["disposition"] == kind] for kind in DISPOSITION_KINDS}
    counted = {GENERATED: made, **by_kind}
    kept = _mean(by_kind[CONSUMED])
    lost = [tally for tally in fates if tally["disposition"] != CONSUMED]
    lost_mean = _mean(lost)
    return Balance(
        environment=key[0],
        policy_version=key[1],
        rollouts={kind: _sum(tallies, "count_all") for kind, tallies in counted.items()},
        tokens={kind: _sum(tallies, "n_tokens_sum") for kind, tallies in counted.items()},
        dropped=tuple(
            Dropped(
                disposition=tally["disposition"],
                reason=tally["reason"] or "",
                rollouts=tally["count_all"],
                tokens=tally["n_tokens_sum"],
                mean_length=_mean([tally]) or 0.0,
            )
            for tally in sorted(lost, key=lambda t: (t["disposition"], t["reason"] or ""))
        ),
        mean_length=kept,
        # A filter that mostly drops long answers trains on a biased sample: this is how far.
        length_bias=None if kept is None or lost_mean is None else lost_mean - kept,
    )


def _sum(tallies: Sequence[Tally], name: str) -> int:
    return sum(tally[name] or 0 for tally in tallies)


def _mean(tallies: Sequence[Tally]) -> float | None:
    lengths = _sum(tallies, "length_count")
    return _sum(tallies, "length_sum") / lengths if lengths else None
