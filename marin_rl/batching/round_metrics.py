"""Metrics of a round's rollouts, by the scalar columns of its shards (those without tokens).

Processing reads these columns to decide, and checks of a round read them again: the same functions
sum them up in both places. The metrics have their definitions in `marin_rl.metrics`; means over
nothing are left out, never reported as 0.

Axes: N rollouts of a round, M reward components of all of them.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float64, Int64

from marin_rl.batching.dispositions import numbers
from marin_rl.config import Config
from marin_rl.finite import usable_rewards
from schemas.tables import DISPOSITION_KINDS, UNFINISHED

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


def round_metrics(
    scalars: pa.Table, disposition_N: np.ndarray, reason_N: np.ndarray, config: Config, round: int
) -> dict[str, float]:
    """Metrics of a round's rollouts and of what it trains on, which may be other rounds' too.

    Rollouts of other rounds count in what is trained on alone: staleness, `train/*`, `replay/*`.
    `env/{name}/rollouts` is among them, which is no metric: see `environment_metrics`.
    """
    own_N = numbers(scalars, "round") == round
    if config.ahead.replay is None:
        own_N[:] = True
    own = scalars.filter(pa.array(own_N))
    metrics = _of_rollouts(own, disposition_N[own_N], round)
    metrics |= _of_modes(own, disposition_N[own_N], reason_N[own_N], config, round)
    if config.ahead.replay is None:
        return metrics
    consumed_N = disposition_N == "consumed"
    kept = scalars.filter(pa.array(consumed_N))
    trained = _of_rollouts(kept, np.full(len(kept), "consumed", object), round)
    of_training = ("train/", "staleness/", "objective/scores")
    metrics |= {name: value for name, value in trained.items() if name.startswith(of_training)}
    return metrics | {"replay/reused": float((~own_N & consumed_N).sum())}


def _of_rollouts(scalars: pa.Table, disposition_N: np.ndarray, round: int) -> dict[str, float]:
    """Metrics that rollouts and their dispositions decide, in every mode."""
    # What cannot be trained on counts as missing, as for the decisions.
    reward_N = usable_rewards(numbers(scalars, "reward", np.float64))
    statuses, components = scalars["status"].to_pylist(), _Components(scalars)
    group_N, length_N = _group_numbers(scalars), numbers(scalars, "n_completion_tokens")
    format_N, kept_N = components.by_rollout("format"), disposition_N == "consumed"
    counts = {kind: float((disposition_N == kind).sum()) for kind in DISPOSITION_KINDS}
    drops = counts["filtered"] + counts["stale"] + counts["failed"]
    result = {
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
        **{f"rollouts/{kind}": count for kind, count in counts.items()},
        "replay/enqueue": counts["consumed"] + drops,
        "replay/dequeue": counts["consumed"],
        "replay/drops": drops,
    }
    if not kept_N.any():
        return result
    reward = float(reward_N[kept_N].mean())
    result |= {"objective/scores": reward, "train/rewards": reward}
    result["train/output_length"] = float(length_N[kept_N].mean())
    for name, value_N in (("format", format_N), ("correct", components.by_rollout("correct"))):
        known = value_N[kept_N & np.isfinite(value_N)]
        if len(known):
            result[f"train/{name}_rewards"] = float(known.mean())
    age_K = round - numbers(scalars, "policy_version_min")[kept_N]
    return result | _mean_max("staleness", age_K)


def _of_modes(
    scalars: pa.Table, disposition_N: np.ndarray, reason_N: np.ndarray, config: Config, round: int
) -> dict[str, float]:
    """Metrics of rounds that sample ahead, mix policies, or take some of the sampled groups."""
    kept_N, result = disposition_N == "consumed", dict[str, float]()
    length_N = numbers(scalars, "n_completion_tokens")
    if (config.windowed or config.mixes_policies) and kept_N.any():
        kept = scalars.filter(pa.array(kept_N))
        oldest, newest = (numbers(kept, f"policy_version_{end}") for end in ("min", "max"))
        result |= _mean_max("staleness/in_flight", newest - oldest)
        result |= _mean_max("staleness/in_queue", round - newest)
        if VERSION_SUM in kept.column_names and (tokens := int(length_N[kept_N].sum())):
            versions = int(numbers(kept, VERSION_SUM).sum())
            result["staleness/tokens/mean"] = round - versions / tokens
            result["tokens/in_flight/kept"] = float(numbers(kept, TOKENS_KEPT).sum())
            result["tokens/in_flight/continued"] = float(numbers(kept, TOKENS_CONTINUED).sum())
    if config.windowed or config.ahead.selects_groups:
        for reason in sorted({str(reason) for reason in reason_N[~kept_N]}):
            wasted = length_N[~kept_N & (reason_N == reason)].sum()
            result[f"tokens/wasted/{reason}"] = float(wasted)
    if not config.ahead.selects_groups:
        return result
    group_N = _group_numbers(scalars)
    result["selection/groups_sampled"] = float(len(np.unique(group_N)))
    result["selection/groups_taken"] = float(len(np.unique(group_N[kept_N])))
    sampled_N = (reason_N != UNFINISHED) & (disposition_N != "failed")
    if kept_N.any() and sampled_N.any():
        # In tokens; below 0 where the selection prefers short completions.
        bias = length_N[kept_N].mean() - length_N[sampled_N].mean()
        result["selection/length_bias"] = float(bias)
    return result


def rollout_metrics(
    *,
    rewards: Float64[np.ndarray, " N"],
    groups: Int64[np.ndarray, " N"],
    lengths: Int64[np.ndarray, " N"],
    statuses: Sequence[str],
    components: Mapping[str, Float64[np.ndarray, " M"]],
) -> dict[str, float]:
    """Metrics of the rollouts of one round, before any of them is trained on.

    `rewards` is NaN where a rollout has none; `groups` are arbitrary integers equal within a group;
    `lengths` count sampled tokens.
    """
    status = np.asarray(statuses, dtype=object)
    valid = np.isfinite(rewards)
    result = {"rollouts/generated": float(len(rewards)), "rollouts/errors": _mean(_broken(status))}
    if valid.any():
        result["reward"] = float(rewards[valid].mean())
        result |= _group_metrics(rewards[valid], groups[valid])
    sampled = ~_broken(status)
    if sampled.any():
        result |= _lengths(lengths[sampled], "length")
        result["completions/clipped_ratio"] = _mean(status[sampled] == "truncated")
    if (status == "complete").any():
        result |= _lengths(lengths[status == "complete"], "terminated_length")
    for name, values in components.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            result[f"rewards/{name}/mean"] = float(finite.mean())
            result[f"rewards/{name}/std"] = float(finite.std(ddof=1)) if len(finite) > 1 else 0.0
    return result


def environment_metrics(
    *,
    environments: Sequence[str],
    rewards: Float64[np.ndarray, " N"],
    statuses: Sequence[str],
    formats: Float64[np.ndarray, " N"],
    groups: Int64[np.ndarray, " N"],
    lengths: Int64[np.ndarray, " N"],
) -> dict[str, float]:
    """`env/{name}/*` of a round's rollouts, and how many each has as `env/{name}/rollouts`.

    The last is not a metric: divided by the seconds of the round it becomes `env/{name}/eps`. Where
    there are several environments, also signal-free groups, lengths and cut-off completions of
    each.
    """
    names, status = np.asarray(environments, dtype=object), np.asarray(statuses, object)
    broken, several = _broken(status), len(set(environments)) > 1
    result: dict[str, float] = {}
    for name in sorted(set(environments)):
        own = names == name
        valid, formatted = own & np.isfinite(rewards), own & np.isfinite(formats)
        result[f"env/{name}/rollouts"] = float(own.sum())
        result[f"env/{name}/errors"] = _mean(broken[own])
        if valid.any():
            result[f"env/{name}/reward"] = float(rewards[valid].mean())
        if formatted.any():
            result[f"env/{name}/format_rate"] = _mean(formats[formatted] > 0)
        sampled = own & ~broken
        if several and sampled.any():
            result[f"env/{name}/mean_length"] = float(lengths[sampled].mean())
            result[f"env/{name}/clipped_ratio"] = _mean(status[sampled] == "truncated")
        if several and valid.any():
            spread = _group_metrics(rewards[valid], groups[valid])
            result[f"env/{name}/frac_reward_zero_std"] = spread["frac_reward_zero_std"]
    return result


class _Components:
    """The M reward components of N rollouts: each one's rollout, name and value."""

    def __init__(self, scalars: pa.Table) -> None:
        column = scalars["reward_components"].combine_chunks()
        lists, self.rollouts = column.flatten(), len(column)
        self.name_M = lists.field("name").to_numpy(zero_copy_only=False)
        self.value_M = usable_rewards(lists.field("value").to_numpy(zero_copy_only=False))
        counts_N = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        self.rollout_M = np.repeat(np.arange(self.rollouts), counts_N)

    def by_name(self) -> dict[str, Float64[np.ndarray, " K"]]:
        names = np.unique(self.name_M.astype(str))
        return {str(name): self.value_M[self.name_M == name] for name in names}

    def by_rollout(self, name: str) -> Float64[np.ndarray, " N"]:
        value_N, here = np.full(self.rollouts, np.nan), self.name_M == name
        value_N[self.rollout_M[here]] = self.value_M[here]
        return value_N


def _group_numbers(scalars: pa.Table) -> np.ndarray:
    """The group of each rollout as a number, by which metrics add up; in order of the names."""
    names_N = scalars["group_id"].to_numpy(zero_copy_only=False).astype(str)
    return np.unique(names_N, return_inverse=True)[1]


def _lengths(lengths: Int64[np.ndarray, " N"], what: str) -> dict[str, float]:
    return {
        f"completions/mean_{what}": float(lengths.mean()),
        f"completions/min_{what}": float(lengths.min()),
        f"completions/max_{what}": float(lengths.max()),
    }


def _group_metrics(
    rewards: Float64[np.ndarray, " N"], groups: Int64[np.ndarray, " N"]
) -> dict[str, float]:
    _, index = np.unique(groups, return_inverse=True)
    count = np.bincount(index)
    mean = np.bincount(index, weights=rewards) / count
    squares = np.bincount(index, weights=(rewards - mean[index]) ** 2)
    several = count > 1
    low = np.full(len(count), np.inf)
    high = np.full(len(count), -np.inf)
    np.minimum.at(low, index, rewards)
    np.maximum.at(high, index, rewards)
    result = {"frac_reward_zero_std": float((low == high).mean())}
    if several.any():
        result["reward_std"] = float(np.sqrt(squares[several] / (count[several] - 1)).mean())
    return result


def _broken(statuses: np.ndarray) -> Bool[np.ndarray, " N"]:
    return (statuses == "error") | (statuses == "aborted")


def _mean(flags: np.ndarray) -> float:
    return float(np.mean(flags)) if len(flags) else 0.0


def _mean_max(name: str, ages: Int64[np.ndarray, " K"]) -> dict[str, float]:
    return {f"{name}/mean": float(ages.mean()), f"{name}/max": float(ages.max())}
