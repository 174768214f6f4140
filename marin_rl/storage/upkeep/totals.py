"""Totals of a round's rollouts by disposition, environment and policy version, also in tokens.

Also what was dropped for which reason, and whether that was longer or shorter than what was trained
on: a filter that drops the long ones teaches a policy to be short, against the reward.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from schemas.batches import DISPOSITION_KINDS

GENERATED = "generated"
COUNTED = (GENERATED, *DISPOSITION_KINDS)
KEYS = ("environment", "policy_version")


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
    """The rollouts of one environment and one policy version in a round, by `COUNTED`.

    `mean_length` is that of the completions that were trained on, `length_bias` how much longer
    (in tokens, on average) the dropped ones are; None where there are none of either.
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
    """One per environment and policy version, sorted.

    `generated` has what the shards say of each rollout (environment, policy_version_min and the
    token counts), `dispositions` what became of it, which is counted as it says there.
    """
    made = _frame(generated).with_columns(
        policy_version=pl.col("policy_version_min"),
        n_tokens=pl.col("n_prompt_tokens") + pl.col("n_completion_tokens"),
    )
    lengths = made.select("rollout_id", "n_completion_tokens").unique("rollout_id", keep="first")
    fates = (
        _frame(dispositions)
        .with_columns(policy_version=pl.col("policy_version_min"))
        .join(lengths, on="rollout_id", how="left")
    )
    keys = sorted({*made.select(KEYS).unique().rows(), *fates.select(KEYS).unique().rows()})
    return tuple(
        _balance(
            environment, version, _of(made, environment, version), _of(fates, environment, version)
        )
        for environment, version in keys
    )


def token_offences(generated: pa.Table, dispositions: pa.Table) -> Mapping[str, list[str]]:
    """Rollouts whose dispositions and shards disagree on tokens, environment or policy."""
    made = _frame(generated).with_columns(
        n_tokens=pl.col("n_prompt_tokens") + pl.col("n_completion_tokens")
    )
    both = made.join(_frame(dispositions), on="rollout_id", suffix="_told")
    told = {
        "told of other tokens": pl.col("n_tokens") != pl.col("n_tokens_told"),
        "told of another environment": pl.col("environment") != pl.col("environment_told"),
        "told of another policy": pl.col("policy_version_min") != pl.col("policy_version_min_told"),
    }
    return {kind: both.filter(wrong)["rollout_id"].to_list() for kind, wrong in told.items()}


def _balance(environment: str, version: int, made: pl.DataFrame, fates: pl.DataFrame) -> Balance:
    kept = fates.filter(pl.col("disposition") == "consumed")["n_completion_tokens"].mean()
    gone = fates.filter(pl.col("disposition") != "consumed")["n_completion_tokens"].mean()
    mean, lost = (None if value is None else float(str(value)) for value in (kept, gone))
    return Balance(
        environment=environment,
        policy_version=version,
        rollouts={GENERATED: made.height, **_counted(fates, pl.len())},
        tokens={
            GENERATED: int(made["n_tokens"].sum()),
            **_counted(fates, pl.col("n_tokens").sum()),
        },
        dropped=tuple(_dropped(fates)),
        mean_length=mean,
        length_bias=None if mean is None or lost is None else lost - mean,
    )


def _counted(fates: pl.DataFrame, what: pl.Expr) -> dict[str, int]:
    found = dict(fates.group_by("disposition").agg(what.alias("count")).rows())
    return {kind: int(found.get(kind, 0)) for kind in DISPOSITION_KINDS}


def _dropped(fates: pl.DataFrame) -> Iterator[Dropped]:
    gone = fates.filter(pl.col("disposition") != "consumed")
    grouped = gone.group_by("disposition", "reason").agg(
        pl.len().alias("rollouts"),
        pl.col("n_tokens").sum().alias("tokens"),
        pl.col("n_completion_tokens").mean().alias("mean_length"),
    )
    for row in grouped.sort("disposition", "reason").to_dicts():
        yield Dropped(
            **row | {"reason": row["reason"] or "", "mean_length": row["mean_length"] or 0.0}
        )


def _of(frame: pl.DataFrame, environment: str, version: int) -> pl.DataFrame:
    return frame.filter(
        (pl.col("environment") == environment) & (pl.col("policy_version") == version)
    )


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame), "a table gives a frame"
    return frame
