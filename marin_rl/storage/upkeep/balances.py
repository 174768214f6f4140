"""Balances of an audit: rollouts and tokens by environment and policy version, and what differs.

Counts what shards say was generated and what dispositions say became of it, in plain Python: rounds
have thousands of rollouts, and importing a library of frames takes longer than counting them.
Leaves out where consumed rollouts stand in the batches (`audit`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from schemas.batches import DISPOSITION_KINDS

GENERATED = "generated"
CONSUMED = "consumed"

Key = tuple[str, int]  # environment, policy version


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


@dataclass(slots=True)
class _Tally:
    """Rollouts of one kind: number, tokens, and completion lengths where the rollout is known."""

    rollouts: int = 0
    tokens: int = 0
    lengths: list[int] = field(default_factory=list[int])

    def add(self, tokens: int, length: int | None) -> None:
        self.rollouts += 1
        self.tokens += tokens
        if length is not None:
            self.lengths.append(length)


Fates = dict[tuple[str, str | None], _Tally]  # by disposition and reason


def balances(generated: pa.Table, dispositions: pa.Table) -> tuple[Balance, ...]:
    """Balances by environment and policy version, sorted.

    `generated` has what the shards say of each rollout (environment, policy_version_min and the
    token counts), `dispositions` what became of it, which is counted as it says there.
    """
    made: defaultdict[Key, _Tally] = defaultdict(_Tally)
    lengths = dict[str, int]()
    for name, *key, prompt, completion in _rows(
        generated,
        ("rollout_id", "environment", "policy_version_min"),
        ("n_prompt_tokens", "n_completion_tokens"),
    ):
        made[key[0], key[1]].add(prompt + completion, completion)
        # The first, where a name is generated twice: an offence of its own (`audit`).
        lengths.setdefault(name, completion)
    fates: defaultdict[Key, Fates] = defaultdict(dict)
    for name, *key, tokens, disposition, reason in _rows(
        dispositions,
        ("rollout_id", "environment", "policy_version_min"),
        ("n_tokens", "disposition", "reason"),
    ):
        tally = fates[key[0], key[1]].setdefault((disposition, reason), _Tally())
        # As the dispositions say it: where shards say otherwise, `token_offences` names them.
        tally.add(tokens, lengths.get(name))
    return tuple(_balance(key, made[key], fates[key]) for key in sorted({*made, *fates}))


def token_offences(generated: pa.Table, dispositions: pa.Table) -> Mapping[str, list[str]]:
    """Rollouts whose dispositions and shards disagree on tokens, environment or policy."""
    reported: defaultdict[str, list[tuple[int, str, int]]] = defaultdict(list)
    for name, *facts in _rows(
        dispositions, ("rollout_id", "n_tokens", "environment", "policy_version_min")
    ):
        reported[name].append((facts[0], facts[1], facts[2]))
    offences: dict[str, list[str]] = {
        "disposition of other tokens": [],
        "disposition of another environment": [],
        "disposition of another policy": [],
    }
    for name, environment, version, prompt, completion in _rows(
        generated,
        ("rollout_id", "environment", "policy_version_min"),
        ("n_prompt_tokens", "n_completion_tokens"),
    ):
        # What only one side has is an offence of its own (`audit`).
        for facts in reported.get(name, ()):
            pairs = zip((prompt + completion, environment, version), facts, strict=True)
            for kind, (stored, said) in zip(offences, pairs, strict=True):
                if stored != said:
                    offences[kind].append(name)
    return offences


def _rows(table: pa.Table, *columns: Sequence[str]) -> Iterator[tuple]:
    """Rows of some columns as Python's values."""
    names = [name for some in columns for name in some]
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def _balance(key: Key, made: _Tally, fates: Fates) -> Balance:
    kept = _mean(tally for (kind, _), tally in fates.items() if kind == CONSUMED)
    lost = _mean(tally for (kind, _), tally in fates.items() if kind != CONSUMED)
    rollouts, tokens = Counter[str](), Counter[str]()
    for (kind, _), tally in fates.items():
        rollouts[kind] += tally.rollouts
        tokens[kind] += tally.tokens
    return Balance(
        environment=key[0],
        policy_version=key[1],
        rollouts={GENERATED: made.rollouts, **{kind: rollouts[kind] for kind in DISPOSITION_KINDS}},
        tokens={GENERATED: made.tokens, **{kind: tokens[kind] for kind in DISPOSITION_KINDS}},
        dropped=tuple(_dropped(fates)),
        mean_length=kept,
        # A filter that mostly drops long answers trains on a biased sample: this is how far.
        length_bias=None if kept is None or lost is None else lost - kept,
    )


def _mean(tallies: Iterable[_Tally]) -> float | None:
    lengths = [length for tally in tallies for length in tally.lengths]
    return sum(lengths) / len(lengths) if lengths else None


def _dropped(fates: Fates) -> Iterator[Dropped]:
    for (kind, reason), tally in sorted(
        fates.items(), key=lambda item: (item[0][0], item[0][1] or "")
    ):
        if kind != CONSUMED:
            yield Dropped(
                disposition=kind,
                reason=reason or "",
                rollouts=tally.rollouts,
                tokens=tally.tokens,
                mean_length=_mean([tally]) or 0.0,
            )
