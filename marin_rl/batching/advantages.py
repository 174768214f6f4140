"""Advantages: what each rollout's reward is worth against a baseline.

An estimator names the baseline, a scale what the difference is divided by; the methods of the field
are pairs of the two (docs/objectives.md). One function per estimator, over all groups of a round:
that of a single group is the round of this one. Facts of estimators are in config/objective.py.
Rewards are numbers of any type, in arrays or lists; NaN or None marks a rollout that has none or is
masked out: it is left out of every mean and gets 0. What is computed is float64. A group with fewer
than two valid rewards carries no signal against its own mean: all 0, and the caller filters it.

Returns over time (discounted sums, generalised advantage estimation) are of one trajectory of T
steps, in float64; training has the same estimation over padded rows on the device
(training/critic.py), and a test compares them.

Axes: G members of a group, N rollouts of a round, P groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64, Real

from marin_rl.config.objective import ESTIMATORS as FACTS
from marin_rl.config.objective import Estimator


def discounted_returns(
    reward_T: Real[np.ndarray, " T"],
    discount_T: Real[np.ndarray, " T"],
    bootstrap: float = 0.0,
) -> Float64[np.ndarray, " T"]:
    """`G_t = r_t + d_t G_{t+1}`, with `G_T = bootstrap` after the last step.

    `discount_T` is gamma, and 0 where an episode ends (Sutton and Barto, equation 3.9).
    """
    reward_T, discount_T = reward_T.astype(np.float64), discount_T.astype(np.float64)
    returns_T = np.empty_like(reward_T)
    following = bootstrap
    for t in reversed(range(len(reward_T))):
        following = reward_T[t] + discount_T[t] * following
        returns_T[t] = following
    return returns_T


def gae(
    reward_T: Real[np.ndarray, " T"],
    discount_T: Real[np.ndarray, " T"],
    value_T1: Real[np.ndarray, " T1"],
    lambda_: float,
) -> Float64[np.ndarray, " T"]:
    """Generalised advantage estimation: `A_t = sum_l (gamma lambda)^l delta_{t+l}`.

    `delta_t = r_t + d_t V_{t+1} - V_t`; `value_T1` has the value after the last step as its last
    entry (0 where the episode ended). Schulman et al. 2016, equations 11 and 16. Raises ValueError
    unless there is one value more than rewards.
    """
    if len(value_T1) != len(reward_T) + 1:
        raise ValueError(f"expected {len(reward_T) + 1} values, found {len(value_T1)}")
    reward_T, discount_T = reward_T.astype(np.float64), discount_T.astype(np.float64)
    value_T1 = value_T1.astype(np.float64)
    delta_T = reward_T + discount_T * value_T1[1:] - value_T1[:-1]
    return discounted_returns(delta_T, discount_T * lambda_)


def rewards_of(
    return_N: Float64[np.ndarray, " N"], sequence_N: Int64[np.ndarray, " N"]
) -> Float64[np.ndarray, " N"]:
    """The reward that is received at each token, from what is still to come at each.

    A batch's `returns` are the undiscounted sum of the rewards from a token on; tokens lie in
    order, and those of a sequence, which has a number of its own, side by side.
    """
    reward_N = return_N.copy()
    goes_on = sequence_N[1:] == sequence_N[:-1]
    reward_N[:-1] -= np.where(goes_on, return_N[1:], 0.0)
    return reward_N


# TRL's; it only matters where the spread is of that order. Added to the root, not under it.
EPSILON = 1e-4
# Whitening over tokens has this under the root instead, as TRL, verl and others have it.
WHITENING_VARIANCE_MIN = 1e-8

SCALES = ("default", "none", "group_std", "batch_std", "batch_whitening", "token_whitening")

Rewards = Real[np.ndarray, " G"] | Sequence[float | int | None]
Advantages = Float64[np.ndarray, " G"]
RoundRewards = Real[np.ndarray, " N"] | Sequence[float | int | None]


def rewards_array(rewards: Rewards) -> Advantages:
    """Rewards as float64, None as NaN; infinities count as missing too."""
    values = np.asarray(rewards, dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def rloo(reward_G: Rewards) -> Advantages:
    """`A_i = r_i - mean_{j != i} r_j`, the exact leave-one-out baseline.

    Ahmadian et al. 2024, "Back to Basics", equation 8 (REINFORCE leave-one-out).
    """
    return _of_group(reward_G, AdvantageChoice(estimator="rloo"))


def grpo(reward_G: Rewards, epsilon: float = EPSILON) -> Advantages:
    """`A_i = (r_i - mean r) / (std r + epsilon)`, std with ddof 1 as TRL and verl have it.

    Shao et al. 2024, "DeepSeekMath", section 4.1.2.
    """
    return _of_group(reward_G, AdvantageChoice(estimator="grpo", epsilon=epsilon))


def dr_grpo(reward_G: Rewards) -> Advantages:
    """`A_i = r_i - mean r`: GRPO without the division by the spread.

    Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2. Rewards that are all equal
    give exactly 0, for any rounding of their mean.
    """
    return _of_group(reward_G, AdvantageChoice(estimator="dr_grpo"))


def maxrl(reward_G: Rewards) -> Advantages:
    """`A_i = (r_i - mean r) / mean r`: ascends the log of the success rate instead of the rate.

    Tajwar et al. 2026, "Maximum Likelihood RL", arXiv:2602.02710. Rewards must be at least 0; a
    group whose mean is 0 has no success to learn from and gives 0. Raises ValueError for a negative
    reward.
    """
    return _of_group(reward_G, AdvantageChoice(estimator="maxrl"))


def pass_at_k(reward_G: Rewards, k: int, threshold: float) -> Advantages:
    """The advantage of the best of k, worked out over all subsets of k members.

    Chen et al. 2025, "Pass@k Training", equations 10 to 15: with n members, f of them failed
    (reward below `threshold`), `R = 1 - C(f, k) / C(n, k)` and `s = sqrt(R (1 - R))`, a success has
    `(1 - R) / s` and a failure `(1 - R - C(f - 1, k - 1) / C(n - 1, k - 1)) / s`. All 0 where every
    subset, or none, has a success. Raises ValueError unless 1 <= k <= n.
    """
    choice = AdvantageChoice(estimator="pass_at_k", pass_k=k, success_threshold=threshold)
    return _of_group(reward_G, choice)


def opo(reward_G: Rewards, tokens_G: Int[np.ndarray, " G"]) -> Advantages:
    """`A_i = r_i - sum_j l_j r_j / sum_j l_j`, l the trained tokens of a member.

    Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585: the
    baseline of least variance where the squared norm of a completion's gradient grows with its
    length. Rewards that are all equal give exactly 0.
    """
    return _of_group(reward_G, AdvantageChoice(estimator="opo"), tokens_G)


def remax(reward_G: Rewards, greedy: int) -> Advantages:
    """`A_i = r_i - r_greedy`, with the member `greedy` as the baseline; its own is 0.

    Li et al. 2024, "ReMax", arXiv:2310.10505.
    """
    reward_G = rewards_array(reward_G)
    greedy_G = np.arange(len(reward_G)) == greedy
    groups = np.zeros(len(reward_G), np.int64)
    choice = AdvantageChoice(estimator="remax")
    return round_advantages(reward_G, groups, 1, choice, greedy_N=greedy_G)


def _of_group(
    reward_G: Rewards, choice: "AdvantageChoice", tokens_G: Int[np.ndarray, " G"] | None = None
) -> Advantages:
    """The round of this one group."""
    reward_G = rewards_array(reward_G)
    return round_advantages(reward_G, np.zeros(len(reward_G), np.int64), 1, choice, tokens_G)


def _pass_at_k_values(
    count_P: Int64[np.ndarray, " P"], failed_P: Int64[np.ndarray, " P"], k: int
) -> tuple[Float64[np.ndarray, " P"], Float64[np.ndarray, " P"]]:
    """Advantages of a success and of a failure, by size and failures of the group."""
    if k < 1 or (count_P[count_P >= 2] < k).any():
        raise ValueError(
            f"pass_at_k needs 1 <= k <= the group's valid rewards, found k = {k} and a group of "
            f"{count_P[count_P >= 2].min(initial=k)}: lower objective.pass_k"
        )
    none_P = _subsets_ratio(failed_P, count_P, k)  # no success among k: 1 - R
    others_P = _subsets_ratio(failed_P - 1, count_P - 1, k - 1)
    spread_P = np.sqrt(none_P * (1 - none_P))
    divisor_P = np.where(spread_P > 0, spread_P, np.inf)
    return none_P / divisor_P, (none_P - others_P) / divisor_P


def _subsets_ratio(
    part_P: Int64[np.ndarray, " P"], whole_P: Int64[np.ndarray, " P"], k: int
) -> Float64[np.ndarray, " P"]:
    """C(part, k) / C(whole, k), as a product of k fractions; 0 where part < k."""
    factors = [np.maximum(part_P - i, 0) / np.maximum(whole_P - i, 1) for i in range(k)]
    return np.prod([np.ones(len(part_P)), *factors], axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per group g of a round: number of valid rewards, their mean, spread (max - min) and std."""

    count: Int64[np.ndarray, " P"]
    mean: Float64[np.ndarray, " P"]
    spread: Float64[np.ndarray, " P"]
    std: Float64[np.ndarray, " P"]


def group_statistics(
    reward_N: RoundRewards, group_N: Int[np.ndarray, " N"], groups: int
) -> GroupStatistics:
    """Statistics over the valid rewards of each of `groups` groups; `group_N` is in [0, groups).

    Mean, spread and std are 0 for a group without valid rewards; std has ddof 1.
    """
    reward_N = rewards_array(reward_N)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageChoice:
    """Baseline and scale; `pass_k` and `success_threshold` are for pass_at_k alone.

    `epsilon` is added to the std that a scale divides by; verl's, NeMo-RL's and tunix's is 1e-6.
    Raises ValueError for an estimator or a scale that is not known.
    """

    estimator: str = "rloo"
    scale: str = "default"
    pass_k: int = 1
    success_threshold: float = 1.0
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        for what, found, known in (
            ("estimator", self.estimator, tuple(FACTS)),
            ("scale", self.scale, SCALES),
        ):
            if found not in known:
                raise ValueError(f"expected {what} of {', '.join(known)}: found {found}")

    @property
    def facts(self) -> Estimator:
        """Return what is known of the estimator."""
        return FACTS[self.estimator]

    @property
    def within_groups(self) -> bool:
        """Return True where a group of equal rewards has no signal, whatever other groups did."""
        return self.facts.within_groups

    @property
    def over_round(self) -> bool:
        """Return True where an advantage depends on rewards of other groups of the round too."""
        return self.facts.over_round or self.scale not in ("default", "none", "group_std")

    @property
    def members_min(self) -> int:
        """The fewest valid rewards of a group that is trained on."""
        return self.facts.members_min(self.pass_k)

    @property
    def needs_tokens(self) -> bool:
        """Return True where advantages depend on the trained tokens of rollouts."""
        return self.facts.weighs_tokens or self.scale == "token_whitening"


def round_advantages(
    reward_N: RoundRewards,
    group_N: Int[np.ndarray, " N"],
    groups: int,
    choice: AdvantageChoice,
    tokens_N: Int[np.ndarray, " N"] | None = None,
    greedy_N: Bool[np.ndarray, " N"] | None = None,
) -> Float64[np.ndarray, " N"]:
    """The advantages of all rollouts of a round, 0 where there is no reward.

    Estimators: those of one group (`ESTIMATORS` and pass_at_k), `reinforce` (the reward itself) and
    `reinforce_batch` (less the mean over the round); `gae` and `optimal_token_baseline` are 0 here,
    for they wait for a critic's values (training/critic.py) and for the policy's probabilities
    (training/token_baseline.py). Scales: `none`; `group_std` and `batch_std`,
    the std (ddof 1) of the rewards of the group or round; `batch_whitening`, which subtracts the
    mean of the advantages over the round's rollouts and divides by their std; `token_whitening`,
    the same over the round's tokens, of which a rollout has `tokens_N` (REINFORCE++, Hu et al.
    2025, section 3); `default` is group_std for grpo, none for others. `greedy_N` marks the
    baselines of remax, at most one in a group. Raises ValueError where remax lacks them, where
    token_whitening or opo lack the tokens, where maxrl finds a negative reward, and where pass_at_k
    finds a group of fewer than `pass_k`.
    """
    reward_N = rewards_array(reward_N)
    if tokens_N is None:
        if choice.needs_tokens:
            name = choice.estimator if choice.facts.weighs_tokens else choice.scale
            raise ValueError(f"{name} needs the number of tokens of every rollout")
        tokens_N = np.zeros(len(reward_N), np.int64)
    statistics = group_statistics(reward_N, group_N, groups)
    valid_N: Bool[np.ndarray, " N"] = np.isfinite(reward_N)
    if choice.estimator == "remax" and greedy_N is None:
        raise ValueError("remax needs to know the greedy member of every group")
    of = _Round(reward_N, group_N, tokens_N, statistics, choice, greedy_N)
    raw_N = np.where(valid_N, _BASELINES[choice.estimator](of), 0.0)
    if choice.scale == "token_whitening":
        return np.where(valid_N, whitened(raw_N, np.where(valid_N, tokens_N, 0)), 0.0)
    return _scaled(raw_N, reward_N, group_N, statistics, choice)


def whitened(
    value_N: Real[np.ndarray, " N"], count_N: Int[np.ndarray, " N"]
) -> Float64[np.ndarray, " N"]:
    """`(v - mean) / sqrt(var + 1e-8)` of values that each count `count_N` times; ddof 1."""
    value_N, total = value_N.astype(np.float64), int(count_N.sum())
    mean = float((value_N * count_N).sum()) / max(total, 1)
    squares = float((np.square(value_N - mean) * count_N).sum())
    return (value_N - mean) / np.sqrt(squares / max(total - 1, 1) + WHITENING_VARIANCE_MIN)


@dataclass(frozen=True, slots=True)
class _Round:
    """Inputs of a baseline: rewards (NaN for none), groups and tokens of N rollouts."""

    reward_N: Float64[np.ndarray, " N"]
    group_N: Int[np.ndarray, " N"]
    tokens_N: Int[np.ndarray, " N"]
    groups: GroupStatistics
    choice: AdvantageChoice
    greedy_N: Bool[np.ndarray, " N"] | None = None

    def against(self, baseline_P: Float64[np.ndarray, " P"]) -> Float64[np.ndarray, " N"]:
        """r - baseline of the group; exactly 0 in groups of one or of equal rewards."""
        signal_P = (self.groups.count >= 2) & (self.groups.spread > 0)
        return np.where(signal_P[self.group_N], self.reward_N - baseline_P[self.group_N], 0.0)


_Baseline = Callable[[_Round], Float64[np.ndarray, " N"]]


def _against_mean(of: _Round) -> np.ndarray:
    return of.against(of.groups.mean)


def _rloo(of: _Round) -> np.ndarray:
    factor_P = of.groups.count / np.maximum(of.groups.count - 1, 1)
    return _against_mean(of) * factor_P[of.group_N]


def _maxrl(of: _Round) -> np.ndarray:
    lowest = np.nanmin(of.reward_N, initial=0.0)
    if lowest < 0:
        raise ValueError(f"maxrl needs rewards of at least 0, found {lowest:g}")
    mean_P = of.groups.mean
    return _against_mean(of) / np.where(mean_P > 0, mean_P, np.inf)[of.group_N]


def _pass_at_k(of: _Round) -> np.ndarray:
    valid_N, count_P = np.isfinite(of.reward_N), of.groups.count
    threshold = of.choice.success_threshold
    success_N = np.greater_equal(
        of.reward_N, threshold, where=valid_N, out=np.zeros(len(valid_N), bool)
    )
    failed_P = np.bincount(of.group_N[valid_N & ~success_N], minlength=len(count_P))
    good_P, bad_P = _pass_at_k_values(count_P, failed_P, of.choice.pass_k)
    values_N = np.where(success_N, good_P[of.group_N], bad_P[of.group_N])
    return np.where(count_P[of.group_N] >= 2, values_N, 0.0)


def _opo(of: _Round) -> np.ndarray:
    valid_N, groups = np.isfinite(of.reward_N), len(of.groups.count)
    group_n, tokens_n = of.group_N[valid_N], of.tokens_N[valid_N].astype(np.float64)
    tokens_P = np.bincount(group_n, weights=tokens_n, minlength=groups)
    weighed_P = np.bincount(group_n, weights=tokens_n * of.reward_N[valid_N], minlength=groups)
    return of.against(np.where(tokens_P > 0, weighed_P / np.maximum(tokens_P, 1), of.groups.mean))


def _remax(of: _Round) -> np.ndarray:
    assert of.greedy_N is not None, "checked before"
    baseline_P = greedy_rewards(of.reward_N, of.group_N, len(of.groups.count), of.greedy_N)
    known_P = np.isfinite(baseline_P)
    apart_N = of.against(np.where(known_P, baseline_P, 0.0))
    return np.where(known_P[of.group_N] & ~of.greedy_N, apart_N, 0.0)


def greedy_rewards(
    reward_N: Float64[np.ndarray, " N"],
    group_N: Int[np.ndarray, " N"],
    groups: int,
    greedy_N: Bool[np.ndarray, " N"],
) -> Float64[np.ndarray, " P"]:
    """The reward of each group's greedy member, NaN where it has none.

    The baseline of ReMax (Li et al. 2024, arXiv:2310.10505).
    """
    baseline_P = np.full(groups, np.nan)
    baseline_P[group_N[greedy_N]] = reward_N[greedy_N]
    return baseline_P


def _reinforce(of: _Round) -> np.ndarray:
    return of.reward_N


def _nothing(of: _Round) -> np.ndarray:
    return np.zeros_like(of.reward_N)


def _against_round(of: _Round) -> np.ndarray:
    valid = of.reward_N[np.isfinite(of.reward_N)]
    if len(valid) < 2 or np.ptp(valid) == 0.0:
        return np.zeros_like(of.reward_N)
    return of.reward_N - valid.mean()


ESTIMATORS: Mapping[str, Callable[[Rewards], Advantages]] = MappingProxyType(
    {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo, "maxrl": maxrl}
)

_BASELINES: Mapping[str, _Baseline] = MappingProxyType(
    {
        "rloo": _rloo,
        "grpo": _against_mean,
        "dr_grpo": _against_mean,
        "maxrl": _maxrl,
        "pass_at_k": _pass_at_k,
        "opo": _opo,
        "remax": _remax,
        "reinforce": _reinforce,
        "reinforce_batch": _against_round,
        "gae": _nothing,
        "optimal_token_baseline": _nothing,
    }
)
assert set(_BASELINES) == set(FACTS), "every estimator of the configuration has a baseline"


def _scaled(
    advantage_N: np.ndarray,
    reward_N: np.ndarray,
    group_N: np.ndarray,
    statistics: GroupStatistics,
    choice: AdvantageChoice,
) -> Float64[np.ndarray, " N"]:
    default = "group_std" if choice.estimator == "grpo" else "none"
    valid_N = np.isfinite(reward_N)
    match default if choice.scale == "default" else choice.scale:
        case "none":
            return advantage_N
        case "group_std":
            return advantage_N / (statistics.std[group_N] + choice.epsilon)
        case "batch_std":
            return advantage_N / (_std(reward_N[valid_N]) + choice.epsilon)
        case "batch_whitening":
            values = advantage_N[valid_N]
            centred_N = advantage_N - (values.mean() if len(values) else 0.0)
            return np.where(valid_N, centred_N / (_std(values) + choice.epsilon), 0.0)
    raise AssertionError(choice.scale)


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
