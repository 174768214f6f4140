"""Advantages of all rollouts of a round: an estimator over each group, and a scale.

Leaves out the estimators, which know one group (`advantages`), and which rollouts are compared
(`plan`). Axes: N rollouts of a round, P groups, G members of a group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int, Real

from marin_rl.batching.advantages import (
    EPSILON,
    OF_GROUP,
    GroupStatistics,
    rewards_array,
    statistics,
)
from marin_rl.config.estimators import ESTIMATORS, SCALES, Estimator

# Under the root, as TRL, verl and others have it; the scales of rewards add EPSILON to the root.
WHITENING_VARIANCE_MIN = 1e-8

RoundRewards = Real[np.ndarray, " N"] | Sequence[float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageChoice:
    """Baseline and scale; `pass_k` and `success_threshold` are for pass_at_k alone.

    `epsilon` is added to the std that a scale divides by; verl's, NeMo-RL's and tunix's is 1e-6.
    """

    estimator: str = "rloo"
    scale: str = "default"
    pass_k: int = 1
    success_threshold: float = 1.0
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        assert self.estimator in ESTIMATORS, f"no estimator {self.estimator}"
        assert self.scale in SCALES, f"no scale {self.scale}"

    @property
    def facts(self) -> Estimator:
        return ESTIMATORS[self.estimator]

    @property
    def within_groups(self) -> bool:
        return self.facts.within_groups

    @property
    def over_round(self) -> bool:
        return self.facts.over_round or self.scale_used not in ("none", "group_std")

    @property
    def members_min(self) -> int:
        return self.facts.members_min(self.pass_k)

    @property
    def scale_used(self) -> str:
        return self.facts.scale if self.scale == "default" else self.scale

    @property
    def needs_tokens(self) -> bool:
        return "tokens_G" in self.facts.inputs or self.scale == "token_whitening"


def round_advantages(
    reward_N: RoundRewards,
    group_N: Int[np.ndarray, " N"],
    groups: int,
    choice: AdvantageChoice,
    tokens_N: Int[np.ndarray, " N"] | None = None,
    greedy_N: Bool[np.ndarray, " N"] | None = None,
    parts_NK: Float64[np.ndarray, "2 N K"] | None = None,
) -> Float64[np.ndarray, " N"]:
    """The advantages of all rollouts of a round, 0 where there is no reward.

    `group_N` is in [0, groups). Advantages of `gae` and `optimal_token_baseline` are 0 here: they
    wait for a critic's values (training/critic.py) and for the policy's probabilities
    (training/token_advantages.py). Scales: `none`; `group_std` and `batch_std`,
    the std (ddof 1) of the rewards of the group or round; `batch_whitening`, which subtracts the
    mean of the advantages over the round's rollouts and divides by their std; `token_whitening`,
    the same over the round's tokens, of which a rollout has `tokens_N` (REINFORCE++, Hu et al.
    2025, section 3); `default` is the estimator's own. `greedy_N` marks the
    baselines of remax, at most one in a group; `parts_NK` are values and weights of the components
    of rewards, for gdpo. Raises ValueError where remax lacks them, where token_whitening or
    opo lack the tokens, where maxrl finds a negative reward, gdpo one without components, and
    pass_at_k a group of fewer than `pass_k`.
    """
    reward_N = rewards_array(reward_N)
    if tokens_N is None:
        if choice.needs_tokens:
            name = choice.estimator if "tokens_G" in choice.facts.inputs else choice.scale
            raise ValueError(f"{name} needs the number of tokens of every rollout")
        tokens_N = np.zeros(len(reward_N), np.int64)
    if "greedy_G" in choice.facts.inputs and greedy_N is None:
        raise ValueError(f"{choice.estimator} needs to know the greedy member of every group")
    # One group of all: the estimator then has the same function for a group and a round.
    baseline_N = np.zeros_like(group_N) if choice.facts.over_round else group_N
    advantage_N, of_group = np.zeros(len(reward_N)), OF_GROUP[choice.estimator]
    for _, index_PG in _stacks(baseline_N):
        inputs = {
            "tokens_G": tokens_N[index_PG],
            "greedy_G": None if greedy_N is None else greedy_N[index_PG],
            "parts_GK": None if parts_NK is None else parts_NK[:, index_PG],
            "k": choice.pass_k,
            "threshold": choice.success_threshold,
        }
        chosen = {name: inputs[name] for name in choice.facts.inputs}
        advantage_N[index_PG] = of_group(reward_N[index_PG], **chosen)
    return _scaled(advantage_N, reward_N, group_N, groups, tokens_N, choice)


def _stacks(group_N: Int[np.ndarray, " N"]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Groups of each size that occurs: their numbers `[P]`, their members' places `[P, G]`."""
    # Stable: members stay in shard order, in which their rewards are added up.
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
    # As if each value were repeated `count_N` times, without the memory for it.
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
            # Of the rewards and not of the advantages, as TRL and verl have it.
            std_N = group_statistics(reward_N, group_N, groups).std[group_N]
            return advantage_N / (std_N + choice.epsilon)
        case "batch_std":
            return advantage_N / (_std(reward_N[valid_N]) + choice.epsilon)
        case "batch_whitening":
            # Valid ones alone: the 0 of a missing reward would pull mean and std.
            values = advantage_N[valid_N]
            centred_N = advantage_N - (values.mean() if len(values) else 0.0)
            return np.where(valid_N, centred_N / (_std(values) + choice.epsilon), 0.0)
        case "token_whitening":
            # Masked rollouts have an advantage of 0 here, which would pull the mean of the tokens.
            counted_N = np.where(valid_N, tokens_N, 0)
            return np.where(valid_N, whitened(advantage_N, counted_N), 0.0)
    return advantage_N


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0  # ddof 1 of one value is 0 / 0
