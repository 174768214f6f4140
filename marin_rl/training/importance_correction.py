"""Importance correction: weights of losses of tokens that another program drew than the trainer.

Leaves out ratios of the policy to its old self (`losses.log_ratios`), and the loss that the weights
are factors of (`step_loss`).

Axes: B rows, T positions, as in losses.py.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from marin_rl.config import ObjectiveConfig
from marin_rl.training.losses import kl_estimate, log_ratios
from marin_rl.training.segments import (
    FloatArrayBT,
    FloatBT,
    IntBT,
    MaskBT,
    segment_maxima,
    segment_sums,
    trained_tokens,
)


def correction_weights(
    objective: ObjectiveConfig,
    old_logprobs_BT: FloatArrayBT,
    sampler_logprobs_BT: FloatArrayBT,
    mask_BT: MaskBT,
    segment_ids_BT: IntBT,
) -> FloatBT:
    """Weight of each token's loss for having been drawn by another program than the trainer.

    The ratio of the trainer's probability, before any update, to the sampler's. truncated: clamped
    within `correction_low` and `correction_high` (Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"). masked: 0 outside of these (IcePop, Ling team
    2025). rejected: 1. With `rejection`, 0 for what it rejects (`accepted_tokens`).
    """
    ones_BT = jnp.ones(mask_BT.shape, jnp.float32)
    if objective.importance_correction == "none":
        return ones_BT
    logs = (old_logprobs_BT, sampler_logprobs_BT, mask_BT, segment_ids_BT)
    low, high = objective.correction_low, objective.correction_high
    weight_BT = ones_BT
    if objective.importance_correction != "rejected":
        weight_BT = jnp.exp(log_ratios(*logs, objective.correction_level))
    # Biased, with a variance that is bounded: no single token decides a step.
    if objective.importance_correction == "truncated":
        weight_BT = jnp.clip(weight_BT, low, high)
    # Further apart than by rounding, the two programs may differ by a fault: such a token is left
    # out rather than weighed less.
    if objective.importance_correction == "masked":
        weight_BT = jnp.where((weight_BT >= low) & (weight_BT <= high), weight_BT, 0.0)
    if objective.rejection is not None:
        weight_BT = jnp.where(accepted_tokens(objective, *logs), weight_BT, 0.0)
    # A factor of the loss and no part of it: a gradient through it would be another objective's.
    return jax.lax.stop_gradient(weight_BT)


def accepted_tokens(
    objective: ObjectiveConfig,
    old_logprobs_BT: FloatArrayBT,
    sampler_logprobs_BT: FloatArrayBT,
    mask_BT: MaskBT,
    segment_ids_BT: IntBT,
) -> Bool[Array, "B T"]:
    """False for tokens, or whole completions, on which sampler and trainer lie too far apart.

    What is at most `rejection_high`, in nats, is accepted: of each token |k1|, k2 or k3 of the
    sampler's KL to the trainer (k1 = -log r, k2 = (log r)^2 / 2, k3 = r - log r - 1, with r trainer
    over sampler), or their sum, mean or maximum over a completion (of k1 the sum or mean is made
    before its absolute value). As verl's `rollout_rs`.
    """
    assert objective.rejection is not None, "asked of an objective that rejects"
    assert objective.rejection_high is not None, "it goes with rejection"
    # By token, whatever `correction_level` is: `rejection_level` says how tokens are put together.
    log_BT = log_ratios(old_logprobs_BT, sampler_logprobs_BT, mask_BT, segment_ids_BT, "token")
    # The sampler takes the policy's place, so the estimators' d is -log r.
    value_BT = kl_estimate(-log_BT, jnp.zeros_like(log_BT), objective.rejection)
    match objective.rejection_level:
        case "sequence_sum":
            value_BT = segment_sums(value_BT, segment_ids_BT)
        case "sequence_mean":
            tokens_BT = trained_tokens(mask_BT, segment_ids_BT)
            value_BT = segment_sums(value_BT, segment_ids_BT) / tokens_BT
        case "sequence_max":
            # k1 has either sign; k2 and k3 are never below 0 and stay as they are.
            value_BT = segment_maxima(jnp.abs(value_BT), segment_ids_BT)
    return jnp.abs(value_BT) <= objective.rejection_high
