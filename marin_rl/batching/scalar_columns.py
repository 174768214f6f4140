"""The scalar columns of a round's rollouts, those without tokens, and the metrics they decide.

Processing reads them to decide, and checks of a round read them again: the same function sums
them up in both places. Axes: N rollouts of a round, M reward components of all of them.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64

from marin_rl.batching.dispositions import numbers
from marin_rl.config import Config
from marin_rl.finite import usable_rewards
from marin_rl.rollouts.summary import (
    consumed_metrics,
    environment_metrics,
    replay_metrics,
    rollout_metrics,
    staleness_metrics,
    staleness_parts,
    waste_metrics,
)
from schemas.batches import DISPOSITION_KINDS
from schemas.rollouts import UNFINISHED

SCALAR_COLUMNS = (
    "rollout_id", "group_id", "environment", "round", "policy_version_min", "policy_version_max",
    "reward", "reward_components", "status", "n_prompt_tokens", "n_completion_tokens",
)  # fmt: skip
VERSIONS = ("policy_versions", "loss_mask")  # of tokens, where a rollout may be of several policies
VERSION_SUM = "policy_version_sum"  # over the sampled tokens of a rollout
# Sampled tokens of a rollout by an earlier policy than its newest, by a later one than its oldest.
TOKENS_KEPT, TOKENS_CONTINUED = "n_tokens_kept", "n_tokens_continued"
VERSION_COUNTS = (VERSION_SUM, TOKENS_KEPT, TOKENS_CONTINUED)


def columns_read(config: Config) -> tuple[str, ...]:
    """Columns of shards that the metrics of a round are decided by."""
    return (*SCALAR_COLUMNS, *versions_of(config))


def versions_of(config: Config) -> tuple[str, ...]:
    """Columns that say which policy sampled which token, where that is not one of each rollout."""
    return VERSIONS if config.mixes_policies else ()


def with_version_sums(table: pa.Table) -> pa.Table:
    """A row group with `VERSION_COUNTS` of its sampled tokens' policies in place of the tokens'."""
    versions, masks = (table[name].combine_chunks() for name in VERSIONS)
    several_N = versions.is_valid().to_numpy(zero_copy_only=False)
    versions, masks = (column.filter(pa.array(several_N)) for column in (versions, masks))
    counts = pc.list_value_length(versions).to_numpy()
    version_T = versions.flatten().to_numpy().astype(np.int64)
    sampled_T = masks.flatten().to_numpy().astype(np.int64)
    ends = np.append(0, np.cumsum(counts))

    def summed(value_T: np.ndarray) -> np.ndarray:
        """The sums of a number of tokens, by rollout of several policies."""
        # Differences of one running sum, exact in int64, in place of a loop over rollouts.
        return np.diff(np.append(0, np.cumsum(value_T * sampled_T))[ends])

    oldest_N, newest_N = (numbers(table, f"policy_version_{end}") for end in ("min", "max"))
    # Of one policy all tokens have its version; those of several are overwritten below.
    sums_N = oldest_N * numbers(table, "n_completion_tokens")
    sums_N[several_N] = summed(version_T)
    kept_N, continued_N = np.zeros_like(sums_N), np.zeros_like(sums_N)
    # Sampled before the newest policy.
    kept_N[several_N] = summed(version_T < np.repeat(newest_N[several_N], counts))
    continued_N[several_N] = summed(version_T > np.repeat(oldest_N[several_N], counts))
    table = table.drop_columns("policy_versions")
    for name, value_N in zip(VERSION_COUNTS, (sums_N, kept_N, continued_N), strict=True):
        table = table.append_column(name, pa.array(value_N, pa.int64()))
    return table


def scalar_metrics(scalars: pa.Table, disposition_N: np.ndarray, round: int) -> dict[str, float]:
    """Metrics that a round's rollouts and their dispositions decide, from the scalar columns.

    `env/{name}/rollouts` is among them, which is none: see `environment_metrics`.
    """
    # What cannot be trained on counts as missing, as for the decisions.
    reward_N = usable_rewards(numbers(scalars, "reward", np.float64))
    statuses, components = scalars["status"].to_pylist(), _components(scalars)
    group_N = _group_numbers(scalars)
    length_N = numbers(scalars, "n_completion_tokens")
    age_N = round - numbers(scalars, "policy_version_min")
    format_N, correct_N = (components.by_rollout(name) for name in ("format", "correct"))
    kept_N = disposition_N == "consumed"
    counts = {kind: float((disposition_N == kind).sum()) for kind in DISPOSITION_KINDS}
    return {
        **rollout_metrics(
            rewards=reward_N,
            groups=group_N,
            lengths=length_N,
            statuses=statuses,
            components=components.by_name(),
        ),
        **environment_metrics(
            environments=scalars["environment"].to_pylist(),
            rewards=reward_N,
            statuses=statuses,
            formats=format_N,
            groups=group_N,
            lengths=length_N,
        ),
        **consumed_metrics(
            rewards=reward_N[kept_N],
            lengths=length_N[kept_N],
            formats=format_N[kept_N],
            corrects=correct_N[kept_N],
        ),
        **{f"rollouts/{kind}": count for kind, count in counts.items()},
        **replay_metrics(counts),
        **staleness_metrics(age_N[kept_N]),
    }


def round_metrics(
    scalars: pa.Table, disposition_N: np.ndarray, reason_N: np.ndarray, config: Config, round: int
) -> dict[str, float]:
    """Metrics of a round's rollouts and of what it trains on, which may be other rounds' too.

    Rollouts of other rounds count in what is trained on alone: staleness, `train/*`, `replay/*`.
    """
    own_N = numbers(scalars, "round") == round
    if config.replay is None:
        own_N[:] = True
    own = scalars.filter(pa.array(own_N))
    metrics = scalar_metrics(own, disposition_N[own_N], round)
    metrics |= mode_metrics(own, disposition_N[own_N], reason_N[own_N], config, round)
    if config.replay is None:
        return metrics
    kept = scalars.filter(pa.array(disposition_N == "consumed"))
    trained = scalar_metrics(kept, np.full(len(kept), "consumed", object), round)
    again_N = ~own_N & (disposition_N == "consumed")
    of_training = {n: v for n, v in trained.items() if n.startswith(("train/", "staleness/"))}
    if "objective/scores" in trained:
        of_training["objective/scores"] = trained["objective/scores"]
    return metrics | of_training | {"replay/reused": float(again_N.sum())}


def _ages(kept: pa.Table, round: int) -> dict[str, float]:
    """`staleness/*` of consumed rollouts by part, and numbers by token where that is known."""
    oldest, newest, lengths = (
        numbers(kept, name)
        for name in ("policy_version_min", "policy_version_max", "n_completion_tokens")
    )
    result = staleness_parts(oldest, newest, round)
    if VERSION_SUM in kept.column_names and lengths.sum():
        versions = int(numbers(kept, VERSION_SUM).sum())
        result["staleness/tokens/mean"] = round - versions / int(lengths.sum())
        result["tokens/in_flight/kept"] = float(numbers(kept, TOKENS_KEPT).sum())
        result["tokens/in_flight/continued"] = float(numbers(kept, TOKENS_CONTINUED).sum())
    return result


def mode_metrics(
    scalars: pa.Table,
    disposition_N: np.ndarray,
    reason_N: np.ndarray,
    config: Config,
    round: int,
) -> dict[str, float]:
    """Metrics of a round that takes some of the groups that are sampled, else none."""
    kept_N, result = disposition_N == "consumed", dict[str, float]()
    length_N = numbers(scalars, "n_completion_tokens")
    if config.windowed or config.mixes_policies:
        result |= _ages(scalars.filter(pa.array(kept_N)), round)
    if config.windowed or config.selects_groups:
        result |= waste_metrics(length_N, disposition_N, reason_N)
    if not config.selects_groups:
        return result
    group_N = _group_numbers(scalars)
    unfinished_N = reason_N == UNFINISHED
    result |= {
        "selection/groups_sampled": float(len(np.unique(group_N))),
        "selection/groups_taken": float(len(np.unique(group_N[kept_N]))),
    }
    sampled_N = ~unfinished_N & (disposition_N != "failed")
    if kept_N.any() and sampled_N.any():
        # In tokens; below 0 where the selection prefers short completions.
        bias = length_N[kept_N].mean() - length_N[sampled_N].mean()
        result["selection/length_bias"] = float(bias)
    return result


@dataclass(frozen=True, slots=True)
class _Components:
    """The M reward components of N rollouts: each one's rollout, name and value."""

    rollouts: int
    rollout_M: np.ndarray
    name_M: np.ndarray
    value_M: np.ndarray

    def by_name(self) -> dict[str, Float64[np.ndarray, " K"]]:
        """The values of each component."""
        names = np.unique(self.name_M.astype(str))
        return {str(name): self.value_M[self.name_M == name] for name in names}

    def by_rollout(self, name: str) -> Float64[np.ndarray, " N"]:
        """The component of this name of every rollout, NaN where it has none."""
        value_N, here = np.full(self.rollouts, np.nan), self.name_M == name
        value_N[self.rollout_M[here]] = self.value_M[here]
        return value_N


def _components(scalars: pa.Table) -> _Components:
    column = scalars["reward_components"].combine_chunks()
    lists = column.flatten()
    names, values = (lists.field(name).to_numpy(zero_copy_only=False) for name in ("name", "value"))
    counts = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    rollout_M = np.repeat(np.arange(len(column)), counts)
    return _Components(len(column), rollout_M, names, usable_rewards(values))


def _group_numbers(scalars: pa.Table) -> np.ndarray:
    """The group of each rollout as a number, by which metrics add up; in order of the names."""
    names_N = scalars["group_id"].to_numpy(zero_copy_only=False).astype(str)
    return np.unique(names_N, return_inverse=True)[1]
