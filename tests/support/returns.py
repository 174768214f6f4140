"""Generalised advantage estimation of one trajectory, in float64: the reference of training's."""

import numpy as np

from marin_rl.batching.advantages import discounted_returns


def gae(
    reward_T: np.ndarray, discount_T: np.ndarray, value_T1: np.ndarray, lambda_: float
) -> np.ndarray:
    """`A_t = sum_l (gamma lambda)^l delta_{t+l}`, with `delta_t = r_t + d_t V_{t+1} - V_t`.

    `value_T1` has the value after the last step as its last entry (0 where the episode ended).
    Schulman et al. 2016, equations 11 and 16, of which the second is a discounted sum of deltas.
    """
    reward_T, discount_T = reward_T.astype(np.float64), discount_T.astype(np.float64)
    delta_T = reward_T + discount_T * value_T1[1:] - value_T1[:-1]
    return discounted_returns(delta_T, discount_T * lambda_)
