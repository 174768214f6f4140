"""The loss that an optimizer step minimises, from the scores of its tokens.

That is, of every trained token, the surrogate times its correction, KL to the reference and entropy
(`step_losses`), times the token's weight in the step (`row_weights`), and the critic's loss where
there is one (`critic_losses`); `step_loss` is their sum. The correction weighs losses of tokens
that another program drew than the trainer. Surrogates are in losses.py, the call of a loss of the
user's own in custom_loss.py, metrics of the same arrays in step_metrics.py.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marin_rl.config import CriticConfig, ObjectiveConfig
from marin_rl.training.critic import value_losses
from marin_rl.training.custom_loss import LossArrays, custom_losses
from marin_rl.training.losses import (
    kl_estimate,
    log_ratios,
    on_mask,
    policy_losses,
    token_weights,
    weighted_sum,
)
from marin_rl.training.segments import (
    FloatArrayBT,
    FloatBT,
    IntBT,
    MaskBT,
    segment_maxima,
    segment_sums,
    trained_tokens,
)
from marin_rl.training.step_types import ForwardOutputs, StepArrays, StepSettings


def step_loss(
    settings: StepSettings, outputs: ForwardOutputs, coefficient: Array | None, arrays: StepArrays
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the loss of a step and its surrogate part, from outputs of all its rows [M, R, T].

    `coefficient` is None without a KL in the loss. The balance of experts and the divergence to a
    teacher are no part of it: no file has them, from which it could be computed again.
    """
    outputs = outputs._replace(scores=outputs.scores._replace(loads=None, divergences=None))
    outputs, rows = jax.tree.map(in_rows, (outputs, arrays))
    losses, regularisers = step_losses(settings, outputs, coefficient, rows)
    weights_BT = row_weights(arrays, settings)
    loss = weighted_sum(weights_BT, losses + regularisers)
    if outputs.values is not None:
        critic = critic_losses(settings, outputs.values, rows)
        # At least 1: a step without trained tokens has a loss of 0, and not NaN.
        loss += jnp.sum(critic) / jnp.maximum(jnp.sum(rows.mask), 1)
    return loss, weighted_sum(weights_BT, losses)


def in_rows(array_MRT: Array) -> Array:
    return array_MRT.reshape(-1, array_MRT.shape[-1])


def row_weights(arrays: StepArrays, settings: StepSettings) -> Float[Array, "B T"]:
    """The weight of each token's loss, over all rows of the step."""
    if settings.objective is None and arrays.loss_weights is not None:
        weights_BT = on_mask(in_rows(arrays.loss_weights), in_rows(arrays.mask))
        total = jnp.sum(weights_BT)
        return weights_BT / jnp.where(total > 0, total, 1.0)
    # Supervised, all tokens of a step count alike, as in pretraining.
    aggregation = settings.objective.aggregation if settings.objective else "token_mean"
    mask_BT, segment_ids_BT = in_rows(arrays.mask.astype(jnp.float32)), in_rows(arrays.segment_ids)
    shares_BT = None if arrays.rollout_shares is None else in_rows(arrays.rollout_shares)
    return token_weights(mask_BT, segment_ids_BT, aggregation, settings.length_norm, shares_BT)


def step_losses(
    settings: StepSettings, outputs: ForwardOutputs, coefficient: Array | None, rows: StepArrays
) -> tuple[Array, Array]:
    """Per token the surrogate, and its weighted KL less its weighted entropy; 0 off the mask."""
    scores, ref_logprobs, _ = outputs
    objective = settings.objective
    if objective is None:
        return -on_mask(scores.logprobs, rows.mask), jnp.zeros_like(scores.logprobs)
    old = old_logprobs(objective, scores.logprobs, rows)
    # Both kept apart, and not summed here: metrics report the surrogate by itself.
    losses = surrogate_losses(objective, scores.logprobs, old, rows)
    # Outside of the clip: the correction weighs the clipped loss, by a constant without a gradient.
    losses *= corrections(objective, old, rows)
    regularisers = -objective.entropy_coefficient * on_mask(scores.entropies, rows.mask)
    if ref_logprobs is not None:
        # Masked before the estimate: exp of padding's difference may be infinite, and 0 * inf NaN.
        ours, reference = on_mask(scores.logprobs, rows.mask), on_mask(ref_logprobs, rows.mask)
        kl = kl_estimate(ours, reference, objective.kl_estimator) * rows.mask.astype(jnp.float32)
        regularisers += coefficient * kl
    return losses, regularisers


def surrogate_losses(
    objective: ObjectiveConfig, logprobs: Array, old: Array, rows: StepArrays
) -> Array:
    """The surrogate of each token of rows [B, T], by `objective.surrogate` or the user's loss."""
    if objective.loss is not None:
        return own_losses(objective, logprobs, old, rows)[0]
    mask = rows.mask.astype(jnp.float32)
    return policy_losses(objective, logprobs, old, rows.advantages, mask, rows.segment_ids)


def own_losses(
    objective: ObjectiveConfig, logprobs: Array, old: Array, rows: StepArrays
) -> tuple[Array, dict[str, Array]]:
    """The user's own loss of each token of rows [B, T], and its metrics."""
    sampled = rows.policy_logprobs, rows.advantages
    return custom_losses(
        objective, LossArrays(logprobs, old, *sampled, rows.mask, rows.segment_ids)
    )


def old_logprobs(objective: ObjectiveConfig, logprobs: Array, rows: StepArrays) -> Array:
    """The denominator of importance ratios.

    Without importance correction, the sampler's own; with it, the trainer's before the first
    update, which in that update are the current ones.
    """
    if objective.importance_correction == "none":
        return rows.policy_logprobs
    # Stopped: the ratio is 1 in value, and has the gradient of the logprobs.
    return jax.lax.stop_gradient(logprobs) if rows.old_logprobs is None else rows.old_logprobs


def corrections(objective: ObjectiveConfig, old: Array, rows: StepArrays) -> Array:
    mask = rows.mask.astype(jnp.float32)
    return correction_weights(objective, old, rows.policy_logprobs, mask, rows.segment_ids)


def critic_losses(settings: StepSettings, values: Array, rows: StepArrays) -> Array:
    """The weighted value loss of each trained token, 0 elsewhere; to be divided by their number."""
    critic, old_values, returns = critic_targets(settings, rows)
    losses = value_losses(values, old_values, returns, critic.value_clip)
    # `where` rather than times the mask: values of padding may be anything, and 0 * inf is NaN.
    return jnp.where(rows.mask, critic.value_coefficient * losses, 0.0)


def critic_targets(settings: StepSettings, rows: StepArrays) -> tuple[CriticConfig, Array, Array]:
    """The critic's settings, its values before the first update, and its returns."""
    assert settings.critic is not None, "values need a critic"
    assert rows.old_values is not None, "the rows of a critic have its old values"
    assert rows.returns is not None, "the rows of a critic have its returns"
    return settings.critic, rows.old_values, rows.returns


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
    """False for tokens, or whole completions, on which sampler and trainer are too far apart.

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
