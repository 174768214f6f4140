"""Filters: pure masks over the rollouts of a round that are dropped, with the reason.

Each mask says "drop". Of those here the first that applies gives the reason, in this order: failed,
stale, truncated, short group, no signal, overlong; `dispositions` has others before and between
them. What is dropped before the groups are looked at is left out of its group's baseline too; what
is overlong is in it and not trained on.

Axes: N rollouts of a round, P groups.
"""

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64


def failed(
    status_N: np.ndarray, reward_N: Float64[np.ndarray, " N"], sampled_N: Int64[np.ndarray, " N"]
) -> Bool[np.ndarray, " N"]:
    """Rollouts of status error or aborted, without a finite reward, or without sampled tokens."""
    broken = (status_N == "error") | (status_N == "aborted")
    return broken | ~np.isfinite(reward_N) | (sampled_N == 0)


def stale(
    version_N: Int64[np.ndarray, " N"], round_number: int, rounds_max: int
) -> Bool[np.ndarray, " N"]:
    """Rollouts whose oldest policy is more than `rounds_max` rounds older than the round's."""
    # By the oldest version: weights may have been swapped in the middle of a completion.
    return round_number - version_N > rounds_max


def truncated(status_N: np.ndarray) -> Bool[np.ndarray, " N"]:
    """Rollouts cut off at max_tokens."""
    return status_N == "truncated"


def overlong_penalty(
    sampled_N: Int[np.ndarray, " N"], tokens_max: int, buffer: float, penalty: float
) -> Float64[np.ndarray, " N"]:
    """Penalty on the reward of a long completion.

    0 until the last `buffer` (a share) of `tokens_max` sampled tokens, then growing linearly to
    `penalty` at `tokens_max` (the soft punishment of DAPO, arXiv:2503.14476, eq. 13).
    """
    before = (1.0 - buffer) * tokens_max  # tokens that cost nothing
    return penalty * np.clip((sampled_N - before) / (buffer * tokens_max), 0.0, 1.0)


def short(valid_P: Int64[np.ndarray, " P"], members_min: int) -> Bool[np.ndarray, " P"]:
    """Groups with too few valid rewards for a baseline: fewer than `members_min`."""
    return valid_P < members_min


def zero_signal(spread_P: Float64[np.ndarray, " P"]) -> Bool[np.ndarray, " P"]:
    """Groups with a spread of 0: every advantage would be exactly 0."""
    # Exactly 0, not nearly: max - min of equal rewards has no rounding.
    return spread_P == 0.0
