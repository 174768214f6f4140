"""The loss that an optimizer step minimises, from the scores of its tokens.

That is, of every trained token, the surrogate times its correction, KL to the reference and entropy
(`step_losses`), times the token's weight in the step (`row_weights`), and the critic's loss where
there is one (`critic_losses`); `step_loss` is their sum. Each formula by itself is in losses.py,
the call of a loss of the user's own in custom_loss.py,
metrics of the same arrays are in step_metrics.py.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from marin_rl.config import CriticConfig, ObjectiveConfig
from marin_rl.training.critic import value_losses
from marin_rl.training.custom_loss import LossArrays, custom_losses
from marin_rl.training.importance_correction import correction_weights
from marin_rl.training.logprobs import TokenScores
from marin_rl.training.losses import (
    kl_estimate,
    on_mask,
    policy_losses,
    token_weights,
    weighted_sum,
)
from marin_rl.training.step_types import StepArrays, StepSettings


def step_loss(
    settings: StepSettings,
    scores: TokenScores,
    ref_logprobs: Array | None,
    coefficient: Array | None,
    arrays: StepArrays,
    values: Array | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the loss of a step and its surrogate part, from scores of all its rows [M, R, T].

    `ref_logprobs` and `coefficient` are None without a KL in the loss, `values` without a critic.
    """
    rows = jax.tree.map(in_rows, arrays)
    scores = jax.tree.map(in_rows, scores)
    ref_logprobs = None if ref_logprobs is None else in_rows(ref_logprobs)
    losses, regularisers = step_losses(settings, scores, ref_logprobs, coefficient, rows)
    weights_BT = row_weights(arrays, settings)
    loss = weighted_sum(weights_BT, losses + regularisers)
    if values is not None:
        critic = critic_losses(settings, in_rows(values), rows)
        # At least 1: a step without trained tokens has a loss of 0, and not NaN.
        loss += jnp.sum(critic) / jnp.maximum(jnp.sum(rows.mask), 1)
    return loss, weighted_sum(weights_BT, losses)


def in_rows(array_MRT: Array) -> Array:
    """Flatten microbatches: [M, R, T] to [B, T]."""
    return array_MRT.reshape(-1, array_MRT.shape[-1])


def row_weights(arrays: StepArrays, settings: StepSettings) -> Float[Array, "B T"]:
    """Return the weight of each token's loss, over all rows of the step."""
    # Supervised, all tokens of a step count alike, as in pretraining.
    aggregation = settings.objective.aggregation if settings.objective else "token_mean"
    mask_BT, segment_ids_BT = in_rows(arrays.mask.astype(jnp.float32)), in_rows(arrays.segment_ids)
    shares_BT = None if arrays.rollout_shares is None else in_rows(arrays.rollout_shares)
    return token_weights(mask_BT, segment_ids_BT, aggregation, settings.length_norm, shares_BT)


def step_losses(
    settings: StepSettings,
    scores: TokenScores,
    ref_logprobs: Array | None,
    coefficient: Array | None,
    rows: StepArrays,
) -> tuple[Array, Array]:
    """Per token the surrogate, and its weighted KL less its weighted entropy; 0 off the mask."""
    objective, mask = settings.objective, rows.mask.astype(jnp.float32)
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
        logprobs, references = (
            on_mask(array, rows.mask) for array in (scores.logprobs, ref_logprobs)
        )
        kl = kl_estimate(logprobs, references, objective.kl_estimator) * mask
        regularisers += coefficient * kl
    return losses, regularisers


def surrogate_losses(
    objective: ObjectiveConfig, logprobs: Array, old: Array, rows: StepArrays
) -> Array:
    """Return the surrogate of each token of rows [B, T]: the user's own, or that of its name."""
    if objective.loss is not None:
        return own_losses(objective, logprobs, old, rows)[0]
    mask = rows.mask.astype(jnp.float32)
    return policy_losses(objective, logprobs, old, rows.advantages, mask, rows.segment_ids)


def own_losses(
    objective: ObjectiveConfig, logprobs: Array, old: Array, rows: StepArrays
) -> tuple[Array, dict[str, Array]]:
    """Return the user's own loss of each token of rows [B, T], and its metrics."""
    return custom_losses(
        objective,
        LossArrays(
            logprobs=logprobs,
            old_logprobs=old,
            policy_logprobs=rows.policy_logprobs,
            advantages=rows.advantages,
            mask=rows.mask,
            segment_ids=rows.segment_ids,
        ),
    )


def old_logprobs(objective: ObjectiveConfig, logprobs: Array, rows: StepArrays) -> Array:
    """Return old logprobs: the denominator of importance ratios.

    Without importance correction, the sampler's own; with it, the trainer's before the first
    update, which in that update are the current ones.
    """
    if objective.importance_correction == "none":
        return rows.policy_logprobs
    # Stopped: the ratio is 1 in value, and its gradient is that of the logprobs.
    return jax.lax.stop_gradient(logprobs) if rows.old_logprobs is None else rows.old_logprobs


def corrections(objective: ObjectiveConfig, old: Array, rows: StepArrays) -> Array:
    """Return the correction weight of each token of rows; see `losses.correction_weights`."""
    mask = rows.mask.astype(jnp.float32)
    return correction_weights(objective, old, rows.policy_logprobs, mask, rows.segment_ids)


def critic_losses(settings: StepSettings, values: Array, rows: StepArrays) -> Array:
    """The weighted value loss of each trained token, 0 elsewhere; to be divided by their number."""
    critic, old_values, returns = critic_targets(settings, rows)
    losses = value_losses(values, old_values, returns, critic.value_clip)
    # `where` rather than times the mask: values of padding may be anything, and 0 * inf is NaN.
    return jnp.where(rows.mask, critic.value_coefficient * losses, 0.0)


def critic_targets(settings: StepSettings, rows: StepArrays) -> tuple[CriticConfig, Array, Array]:
    """Return the critic's settings, its values before the first update, and its returns."""
    assert settings.critic is not None, "values need a critic"
    assert rows.old_values is not None, "the rows of a critic have its old values"
    assert rows.returns is not None, "the rows of a critic have its returns"
    return settings.critic, rows.old_values, rows.returns
