"""Returns over time: discounted sums, and generalised advantage estimation.

One trajectory at a time, of numbers of any type, computed in float64; the last axis is time. For
rewards by turn or by token, where group baselines (advantages.py) see only their sum. Training has
the same estimation over padded rows on the device (training/critic.py); a test compares them.

Axes: T steps of a trajectory, N trained tokens one after the other.
"""

import numpy as np
from jaxtyping import Float64, Int64, Real


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
