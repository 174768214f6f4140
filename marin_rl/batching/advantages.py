"""Advantages of a group: what each member's reward is worth against a baseline.

An estimator names the baseline, a scale what the difference is divided by; the methods of the field
are pairs of the two (docs/objectives.md). Each estimator is one function over one group, written
for the last axis, so that a round applies it to all groups of one size at once
(`round_advantages`). Their facts are in config/estimators.py. Rewards are numbers of any type, in
arrays or lists; NaN or None marks a rollout that has none or is masked out: it is left out of every
mean and gets 0. What is computed is float64. A group with fewer than two valid rewards carries no
signal against its own mean: all 0.

Returns over time are of one trajectory of T steps, in float64; generalised advantage estimation is
the training step's, over padded rows on the device (training/token_advantages.py).

Axes: G members of a group; `*P G` is one group or a stack of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64, Real

from marin_rl.config.estimators import ESTIMATORS
from marin_rl.finite import usable_rewards


def discounted_returns(
    reward_T: Real[np.ndarray, " T"], discount_T: Real[np.ndarray, " T"]
) -> Float64[np.ndarray, " T"]:
    """`G_t = r_t + d_t G_{t+1}`, with `G_T = 0` after the last step.

    `discount_T` is gamma, and 0 where an episode ends (Sutton and Barto, equation 3.9).
    """
    reward_T, discount_T = reward_T.astype(np.float64), discount_T.astype(np.float64)
    returns_T = np.empty_like(reward_T)
    following = 0.0
    # From the end: each step needs the return of the one after it.
    for t in reversed(range(len(reward_T))):
        following = reward_T[t] + discount_T[t] * following
        returns_T[t] = following
    return returns_T


def rewards_of(
    return_N: Float64[np.ndarray, " N"], sequence_N: Int64[np.ndarray, " N"]
) -> Float64[np.ndarray, " N"]:
    """The reward that is received at each token, from what is still to come at each.

    Such `returns`, the undiscounted sum of the rewards from a token on, are in the batches of
    estimators by token alone. Tokens lie in order, and those of a sequence, which has a number of
    its own, side by side.
    """
    reward_N = return_N.copy()
    goes_on = sequence_N[1:] == sequence_N[:-1]
    reward_N[:-1] -= np.where(goes_on, return_N[1:], 0.0)
    return reward_N


# TRL's; it only matters where the spread is of that order. Added to the root, not under it.
EPSILON = 1e-4

Rewards = Real[np.ndarray, "*P G"] | Sequence[float | int | None]
Advantages = Float64[np.ndarray, "*P G"]
PerGroup = Float64[np.ndarray, "*P 1"]


def rewards_array(rewards: Rewards) -> Advantages:
    """Rewards as float64, None as NaN; infinities and what is beyond bounds count as missing."""
    return usable_rewards(rewards)


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
    # At least 1: a group without valid rewards has a mean of 0, not NaN.
    mean = _total(np.where(valid_G, reward_G, 0.0)) / np.maximum(count, 1)
    # From the mean, in a second pass: E[x^2] - E[x]^2 cancels for rewards far from 0.
    squares = _total(np.where(valid_G, (reward_G - mean) ** 2, 0.0))
    # [*P, 1]; inf where none is valid.
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
    # r_i less the mean of the others is n / (n - 1) times r_i less the mean of all.
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


def gdpo(
    reward_G: Rewards, parts_GK: Float64[np.ndarray, "2 *P G K"], epsilon: float = EPSILON
) -> Advantages:
    """`A_i = sum_k w_k (r_ik - mean r_k) / (std r_k + epsilon)`, of the components of rewards.

    Liu et al. 2026, "GDPO", arXiv:2601.05242, equations 4 and 5; equation 6 is the scale
    `batch_whitening`. `parts_GK` are the components' values and weights, NaN where a member lacks
    one. Raises ValueError for a reward without components.
    """
    valid_G = np.isfinite(rewards_array(reward_G))
    value_KG, weight_KG = np.moveaxis(parts_GK, -1, 1)
    if (valid_G & ~np.isfinite(value_KG).any(axis=0)).any():
        raise ValueError("gdpo compares the components of rewards: found a reward without any")
    apart_KG = grpo(np.where(valid_G, value_KG, np.nan), epsilon)
    return np.sum(np.nan_to_num(weight_KG) * apart_KG, axis=0)


def reinforce(reward_G: Rewards) -> Advantages:
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
    # NaN marks missing rewards, and `initial` stands where all are missing.
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
    # A missing reward is no success, and by `valid_G` no failure either.
    success_G = np.where(valid_G, reward_G, -np.inf) >= threshold
    failed = (valid_G & ~success_G).sum(axis=-1, keepdims=True)
    none = _subsets_ratio(failed, count, k)  # no success among k: 1 - R
    others = _subsets_ratio(failed - 1, count - 1, k - 1)  # all of the other k - 1 failed too
    spread = np.sqrt(none * (1 - none))
    # Spread 0: every subset has a success, or none has. Dividing by infinity makes that 0.
    divisor = np.where(spread > 0, spread, np.inf)
    values_G = np.where(success_G, none / divisor, (none - others) / divisor)
    return np.where(valid_G & (count >= 2), values_G, 0.0)


def _subsets_ratio(part: np.ndarray, total: np.ndarray, k: int) -> np.ndarray:
    """C(part, k) / C(total, k), as a product of k fractions; 0 where part < k."""
    # Not by binomials, which overflow float64 for groups of over a thousand.
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
    # Without any trained token the weights are 0 / 0: the plain mean stands in.
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
    return np.zeros_like(rewards_array(reward_G))


OF_GROUP: dict[str, Callable[..., Advantages]] = {
    "rloo": rloo,
    "grpo": dr_grpo,  # its division by the std is the scale that is its default
    "dr_grpo": dr_grpo,
    "reinforce": reinforce,
    "reinforce_batch": reinforce_batch,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
    "opo": opo,
    "remax": remax,
    "gae": made_in_training,
    "optimal_token_baseline": made_in_training,
}
assert set(OF_GROUP) == set(ESTIMATORS), "every estimator of the configuration has a function"
