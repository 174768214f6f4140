"""Advantages: what each rollout's reward is worth against a baseline.

An estimator names the baseline, a scale what the difference is divided by; the methods of the field
are pairs of the two (docs/objectives.md). Each estimator is one function over one group, written
for the last axis, so that a round applies it to all groups of one size at once. Their facts are in
config/estimators.py. Rewards are numbers of any type, in arrays or lists; NaN or None marks a
rollout that has none or is masked out: it is left out of every mean and gets 0. What is computed is
float64. A group with fewer than two valid rewards carries no signal against its own mean: all 0.

Returns over time (discounted sums, generalised advantage estimation) are of one trajectory of T
steps, in float64; training has the same estimation over padded rows on the device
(training/critic.py), and a test compares them.

Axes: G members of a group, N rollouts of a round, P groups; `*P G` is one group or a stack of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64, Real

from marin_rl.config.estimators import ESTIMATORS, SCALES, Estimator


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

Rewards = Real[np.ndarray, "*P G"] | Sequence[float | int | None]
Advantages = Float64[np.ndarray, "*P G"]
PerGroup = Float64[np.ndarray, "*P 1"]
RoundRewards = Real[np.ndarray, " N"] | Sequence[float | int | None]


def rewards_array(rewards: Rewards) -> Advantages:
    """Rewards as float64, None as NaN; infinities count as missing too."""
    values = np.asarray(rewards, dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Number of valid rewards of a group, their mean, spread (max - min) and std with ddof 1.

    All are 0 for a group without valid rewards.
    """

    count: Int64[np.ndarray, "*P"]
    mean: Float64[np.ndarray, "*P"]
    spread: Float64[np.ndarray, "*P"]
    std: Float64[np.ndarray, "*P"]


def statistics(reward_G: Advantages) -> GroupStatistics:
    """Statistics over the last axis, which is kept with a length of 1."""
    valid_G = np.isfinite(reward_G)
    count = valid_G.sum(axis=-1, keepdims=True)
    mean = _total(np.where(valid_G, reward_G, 0.0)) / np.maximum(count, 1)
    squares = _total(np.where(valid_G, (reward_G - mean) ** 2, 0.0))
    low = np.min(reward_G, axis=-1, keepdims=True, where=valid_G, initial=np.inf)
    high = np.max(reward_G, axis=-1, keepdims=True, where=valid_G, initial=-np.inf)
    spread = np.subtract(high, low, out=np.zeros_like(low), where=count > 0)
    return GroupStatistics(count, mean, spread, np.sqrt(squares / np.maximum(count - 1, 1)))


def _total(value_G: Advantages) -> PerGroup:
    # Member by member: np.sum adds in pairs, by the shape of the stack, and a group would not have
    # the same bits alone and among others.
    before_G = np.zeros((*value_G.shape[:-1], 1))
    return np.cumsum(np.concatenate([before_G, value_G], axis=-1), axis=-1)[..., -1:]


def _less_baseline(
    reward_G: Advantages, of: GroupStatistics, baseline: PerGroup | float
) -> Advantages:
    """r - baseline; exactly 0 where a reward is missing, in groups of one or of equal rewards.

    Equal rewards need the check: the rounding of their mean would leave a difference.
    """
    signal_G = np.isfinite(reward_G) & (of.count >= 2) & (of.spread > 0)
    return np.where(signal_G, reward_G - baseline, 0.0)


def rloo(reward_G: Rewards) -> Advantages:
    """`A_i = r_i - mean_{j != i} r_j`, the exact leave-one-out baseline.

    Ahmadian et al. 2024, "Back to Basics", equation 8 (REINFORCE leave-one-out).
    """
    reward_G = rewards_array(reward_G)
    of = statistics(reward_G)
    return _less_baseline(reward_G, of, of.mean) * (of.count / np.maximum(of.count - 1, 1))


def dr_grpo(reward_G: Rewards) -> Advantages:
    """`A_i = r_i - mean r`: GRPO without the division by the spread.

    Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2.
    """
    reward_G = rewards_array(reward_G)
    of = statistics(reward_G)
    return _less_baseline(reward_G, of, of.mean)


def grpo(reward_G: Rewards, epsilon: float = EPSILON) -> Advantages:
    """`A_i = (r_i - mean r) / (std r + epsilon)`, std with ddof 1 as TRL and verl have it.

    Shao et al. 2024, "DeepSeekMath", section 4.1.2. The difference is that of `dr_grpo`, the
    divisor the scale `group_std`.
    """
    return dr_grpo(reward_G) / (statistics(rewards_array(reward_G)).std + epsilon)


def reinforce(reward_G: Rewards) -> Advantages:
    """`A_i = r_i`: no baseline. Williams 1992, REINFORCE."""
    return np.nan_to_num(rewards_array(reward_G))


def reinforce_batch(reward_G: Rewards) -> Advantages:
    """`A_i = r_i - mean r`, over the whole round (REINFORCE++, arXiv:2501.03262)."""
    reward_G = rewards_array(reward_G)
    valid = reward_G[np.isfinite(reward_G)]
    return _less_baseline(reward_G, statistics(reward_G), valid.mean() if len(valid) else 0.0)


def maxrl(reward_G: Rewards) -> Advantages:
    """`A_i = (r_i - mean r) / mean r`: ascends the log of the success rate instead of the rate.

    Tajwar et al. 2026, "Maximum Likelihood RL", arXiv:2602.02710. Rewards must be at least 0; a
    group whose mean is 0 has no success to learn from and gives 0. Raises ValueError for a negative
    reward.
    """
    reward_G = rewards_array(reward_G)
    lowest = np.nanmin(reward_G, initial=0.0)
    if lowest < 0:
        raise ValueError(f"maxrl needs rewards of at least 0, found {lowest:g}")
    of = statistics(reward_G)
    return _less_baseline(reward_G, of, of.mean) / np.where(of.mean > 0, of.mean, np.inf)


def pass_at_k(reward_G: Rewards, k: int, threshold: float) -> Advantages:
    """The advantage of the best of k, worked out over all subsets of k members.

    Chen et al. 2025, "Pass@k Training", equations 10 to 15: with n members, f of them failed
    (reward below `threshold`), `R = 1 - C(f, k) / C(n, k)` and `s = sqrt(R (1 - R))`, a success has
    `(1 - R) / s` and a failure `(1 - R - C(f - 1, k - 1) / C(n - 1, k - 1)) / s`. All 0 where every
    subset, or none, has a success. Raises ValueError unless 1 <= k <= n.
    """
    reward_G = rewards_array(reward_G)
    valid_G = np.isfinite(reward_G)
    count = valid_G.sum(axis=-1, keepdims=True)
    if k < 1 or (count[count >= 2] < k).any():
        raise ValueError(
            f"pass_at_k needs 1 <= k <= the group's valid rewards, found k = {k} and a group of "
            f"{count[count >= 2].min(initial=k)}: lower objective.pass_k"
        )
    success_G = np.where(valid_G, reward_G, -np.inf) >= threshold
    failed = (valid_G & ~success_G).sum(axis=-1, keepdims=True)
    none = _subsets_ratio(failed, count, k)  # no success among k: 1 - R
    others = _subsets_ratio(failed - 1, count - 1, k - 1)
    spread = np.sqrt(none * (1 - none))
    divisor = np.where(spread > 0, spread, np.inf)
    values_G = np.where(success_G, none / divisor, (none - others) / divisor)
    return np.where(valid_G & (count >= 2), values_G, 0.0)


def _subsets_ratio(part: np.ndarray, total: np.ndarray, k: int) -> np.ndarray:
    """C(part, k) / C(total, k), as a product of k fractions; 0 where part < k."""
    ratio = np.ones(part.shape)
    for i in range(k):
        ratio = ratio * (np.maximum(part - i, 0) / np.maximum(total - i, 1))
    return ratio


def opo(reward_G: Rewards, tokens_G: Int[np.ndarray, "*P G"]) -> Advantages:
    """`A_i = r_i - sum_j l_j r_j / sum_j l_j`, l the trained tokens of a member.

    Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585: the
    baseline of least variance where the squared norm of a completion's gradient grows with its
    length.
    """
    reward_G = rewards_array(reward_G)
    of, valid_G = statistics(reward_G), np.isfinite(reward_G)
    tokens = _total(np.where(valid_G, tokens_G, 0.0))
    weighed = _total(np.where(valid_G, tokens_G * reward_G, 0.0))
    baseline = np.where(tokens > 0, weighed / np.maximum(tokens, 1), of.mean)
    return _less_baseline(reward_G, of, baseline)


def remax(reward_G: Rewards, greedy_G: Bool[np.ndarray, "*P G"]) -> Advantages:
    """`A_i = r_i - r_greedy`, with the greedy member as the baseline; its own is 0.

    Li et al. 2024, "ReMax", arXiv:2310.10505. `greedy_G` marks at most one member; a group without
    its reward is all 0.
    """
    reward_G = rewards_array(reward_G)
    known_G = greedy_G & np.isfinite(reward_G)
    baseline = np.sum(reward_G, axis=-1, keepdims=True, where=known_G)
    apart_G = _less_baseline(reward_G, statistics(reward_G), baseline)
    return np.where(known_G.any(axis=-1, keepdims=True) & ~greedy_G, apart_G, 0.0)


def made_in_training(reward_G: Rewards) -> Advantages:
    """0 until the training stage makes advantages, token by token."""
    return np.zeros_like(rewards_array(reward_G))


_OF_GROUP: dict[str, Callable[..., Advantages]] = {
    "rloo": rloo,
    "grpo": dr_grpo,  # its division by the std is the scale that is its default
    "dr_grpo": dr_grpo,
    "reinforce": reinforce,
    "reinforce_batch": reinforce_batch,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "opo": opo,
    "remax": remax,
    "gae": made_in_training,
    "optimal_token_baseline": made_in_training,
}
assert set(_OF_GROUP) == set(ESTIMATORS), "every estimator of the configuration has a function"


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
        for what, value, known in (
            ("estimator", self.estimator, tuple(ESTIMATORS)),
            ("scale", self.scale, SCALES),
        ):
            if value not in known:
                raise ValueError(f"expected {what} of {', '.join(known)}: found {value}")

    @property
    def facts(self) -> Estimator:
        """Return what is known of the estimator."""
        return ESTIMATORS[self.estimator]

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
    def scale_used(self) -> str:
        """The scale, with the estimator's own in place of `default`."""
        return self.facts.scale if self.scale == "default" else self.scale

    @property
    def needs_tokens(self) -> bool:
        """Return True where advantages depend on the trained tokens of rollouts."""
        return "tokens_G" in self.facts.inputs or self.scale == "token_whitening"


def round_advantages(
    reward_N: RoundRewards,
    group_N: Int[np.ndarray, " N"],
    groups: int,
    choice: AdvantageChoice,
    tokens_N: Int[np.ndarray, " N"] | None = None,
    greedy_N: Bool[np.ndarray, " N"] | None = None,
) -> Float64[np.ndarray, " N"]:
    """The advantages of all rollouts of a round, 0 where there is no reward.

    `group_N` is in [0, groups). Advantages of `gae` and `optimal_token_baseline` are 0 here: they
    wait for a critic's values (training/critic.py) and for the policy's probabilities
    (training/token_baseline.py). Scales: `none`; `group_std` and `batch_std`,
    the std (ddof 1) of the rewards of the group or round; `batch_whitening`, which subtracts the
    mean of the advantages over the round's rollouts and divides by their std; `token_whitening`,
    the same over the round's tokens, of which a rollout has `tokens_N` (REINFORCE++, Hu et al.
    2025, section 3); `default` is the estimator's own. `greedy_N` marks the
    baselines of remax, at most one in a group. Raises ValueError where remax lacks them, where
    token_whitening or opo lack the tokens, where maxrl finds a negative reward, and where pass_at_k
    finds a group of fewer than `pass_k`.
    """
    reward_N = rewards_array(reward_N)
    if tokens_N is None:
        if choice.needs_tokens:
            name = choice.estimator if "tokens_G" in choice.facts.inputs else choice.scale
            raise ValueError(f"{name} needs the number of tokens of every rollout")
        tokens_N = np.zeros(len(reward_N), np.int64)
    if "greedy_G" in choice.facts.inputs and greedy_N is None:
        raise ValueError(f"{choice.estimator} needs to know the greedy member of every group")
    baseline_N = np.zeros_like(group_N) if choice.facts.over_round else group_N
    advantage_N, of_group = np.zeros(len(reward_N)), _OF_GROUP[choice.estimator]
    for _, index_PG in _stacks(baseline_N):
        inputs = {
            "tokens_G": tokens_N[index_PG],
            "greedy_G": None if greedy_N is None else greedy_N[index_PG],
            "k": choice.pass_k,
            "threshold": choice.success_threshold,
        }
        chosen = {name: inputs[name] for name in choice.facts.inputs}
        advantage_N[index_PG] = of_group(reward_N[index_PG], **chosen)
    return _scaled(advantage_N, reward_N, group_N, groups, tokens_N, choice)


def _stacks(group_N: Int[np.ndarray, " N"]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Groups of each size that occurs: their numbers `[P]`, their members' places `[P, G]`."""
    order = np.argsort(group_N, kind="stable")
    numbers, first, sizes = np.unique(group_N[order], return_index=True, return_counts=True)
    for size in np.unique(sizes):
        chosen = sizes == size
        yield numbers[chosen], order[first[chosen][:, None] + np.arange(size)]


def group_statistics(
    reward_N: RoundRewards, group_N: Int[np.ndarray, " N"], groups: int
) -> GroupStatistics:
    """Statistics over the valid rewards of each of `groups` groups; `group_N` is in [0, groups)."""
    reward_N = rewards_array(reward_N)
    count, (mean, spread, std) = np.zeros(groups, np.int64), np.zeros((3, groups))
    for numbers, index_PG in _stacks(group_N):
        of = statistics(reward_N[index_PG])
        count[numbers], mean[numbers] = of.count[:, 0], of.mean[:, 0]
        spread[numbers], std[numbers] = of.spread[:, 0], of.std[:, 0]
    return GroupStatistics(count, mean, spread, std)


def whitened(
    value_N: Real[np.ndarray, " N"], count_N: Int[np.ndarray, " N"]
) -> Float64[np.ndarray, " N"]:
    """`(v - mean) / sqrt(var + 1e-8)` of values that each count `count_N` times; ddof 1."""
    value_N, total = value_N.astype(np.float64), int(count_N.sum())
    mean = float((value_N * count_N).sum()) / max(total, 1)
    squares = float((np.square(value_N - mean) * count_N).sum())
    return (value_N - mean) / np.sqrt(squares / max(total - 1, 1) + WHITENING_VARIANCE_MIN)


def _scaled(
    advantage_N: np.ndarray,
    reward_N: np.ndarray,
    group_N: np.ndarray,
    groups: int,
    tokens_N: np.ndarray,
    choice: AdvantageChoice,
) -> Float64[np.ndarray, " N"]:
    valid_N = np.isfinite(reward_N)
    match choice.scale_used:
        case "group_std":
            std_N = group_statistics(reward_N, group_N, groups).std[group_N]
            return advantage_N / (std_N + choice.epsilon)
        case "batch_std":
            return advantage_N / (_std(reward_N[valid_N]) + choice.epsilon)
        case "batch_whitening":
            values = advantage_N[valid_N]
            centred_N = advantage_N - (values.mean() if len(values) else 0.0)
            return np.where(valid_N, centred_N / (_std(values) + choice.epsilon), 0.0)
        case "token_whitening":
            counted_N = np.where(valid_N, tokens_N, 0)
            return np.where(valid_N, whitened(advantage_N, counted_N), 0.0)
    return advantage_N


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
