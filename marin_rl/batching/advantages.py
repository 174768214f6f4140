"""Group-relative advantages: what each rollout's reward is worth against its group's.

One function per estimator over one group, and one over a whole round of adjacent groups (what
processing uses; tested equal). Rewards are float64; NaN marks a rollout that has none or is masked
out: it is left out of the baseline and gets 0. A group with fewer than two valid rewards carries no
signal: all 0, and the caller filters it. Axes: G members of a group, N rollouts of a round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jaxtyping import Bool, Float64, Int64

GRPO_EPSILON = 1e-4  # TRL's; it only matters where the spread is of that order


def rewards_array(rewards: Sequence[float | None]) -> Float64[np.ndarray, " G"]:
    """Rewards as float64, None as NaN; infinities count as missing too."""
    values = np.array([np.nan if r is None else r for r in rewards], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def rloo(reward_G: Float64[np.ndarray, " G"]) -> Float64[np.ndarray, " G"]:
    """`A_i = r_i - mean_{j != i} r_j`, the exact leave-one-out baseline.

    Ahmadian et al. 2024, "Back to Basics", equation 8 (REINFORCE leave-one-out).
    """
    valid = np.isfinite(reward_G)
    n = int(valid.sum())
    if n < 2:
        return np.zeros_like(reward_G)
    return dr_grpo(reward_G) * (n / (n - 1))


def grpo(
    reward_G: Float64[np.ndarray, " G"], epsilon: float = GRPO_EPSILON
) -> Float64[np.ndarray, " G"]:
    """`A_i = (r_i - mean r) / (std r + epsilon)`, std with ddof 1 as TRL and verl have it.

    Shao et al. 2024, "DeepSeekMath", section 4.1.2.
    """
    valid = np.isfinite(reward_G)
    if valid.sum() < 2:
        return np.zeros_like(reward_G)
    return dr_grpo(reward_G) / (reward_G[valid].std(ddof=1) + epsilon)


def dr_grpo(reward_G: Float64[np.ndarray, " G"]) -> Float64[np.ndarray, " G"]:
    """`A_i = r_i - mean r`: GRPO without the division by the spread.

    Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2. Rewards that are all equal
    give exactly 0, whatever the rounding of their mean.
    """
    valid = np.isfinite(reward_G)
    if valid.sum() < 2 or np.ptp(reward_G[valid]) == 0.0:
        return np.zeros_like(reward_G)
    return np.where(valid, reward_G - reward_G[valid].mean(), 0.0)


ESTIMATORS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per group g of a round: number of valid rewards, their mean, spread (max - min) and std."""

    count: Int64[np.ndarray, " P"]
    mean: Float64[np.ndarray, " P"]
    spread: Float64[np.ndarray, " P"]
    std: Float64[np.ndarray, " P"]


def group_statistics(
    reward_N: Float64[np.ndarray, " N"], group_N: Int64[np.ndarray, " N"], groups: int
) -> GroupStatistics:
    """Statistics over the valid rewards of each of `groups` groups; `group_N` is in [0, groups).

    Mean, spread and std are 0 for a group without valid rewards; std has ddof 1.
    """
    valid = np.isfinite(reward_N)
    reward, group = reward_N[valid], group_N[valid]
    count = np.bincount(group, minlength=groups)
    mean = np.bincount(group, weights=reward, minlength=groups) / np.maximum(count, 1)
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group, reward)
    np.maximum.at(high, group, reward)
    squares = np.bincount(group, weights=(reward - mean[group]) ** 2, minlength=groups)
    return GroupStatistics(
        count=count.astype(np.int64),
        mean=mean,
        spread=np.subtract(high, low, out=np.zeros(groups), where=count > 0),
        std=np.sqrt(squares / np.maximum(count - 1, 1)),
    )


def round_advantages(
    reward_N: Float64[np.ndarray, " N"],
    group_N: Int64[np.ndarray, " N"],
    groups: int,
    estimator: str,
) -> Float64[np.ndarray, " N"]:
    """The advantages of all groups of a round at once, equal to `ESTIMATORS` group by group."""
    statistics = group_statistics(reward_N, group_N, groups)
    signal: Bool[np.ndarray, " P"] = (statistics.count >= 2) & (statistics.spread > 0)
    centred = reward_N - statistics.mean[group_N]
    scaled = centred * _scale(statistics, estimator)[group_N]
    return np.where(np.isfinite(reward_N) & signal[group_N], scaled, 0.0)


def _scale(statistics: GroupStatistics, estimator: str) -> Float64[np.ndarray, " P"]:
    if estimator == "rloo":
        return statistics.count / np.maximum(statistics.count - 1, 1)
    if estimator == "grpo":
        return 1.0 / (statistics.std + GRPO_EPSILON)
    if estimator == "dr_grpo":
        return np.ones_like(statistics.mean)
    raise ValueError(f"expected an advantage of {', '.join(ESTIMATORS)}, found {estimator!r}")
