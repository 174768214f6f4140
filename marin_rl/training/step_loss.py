"""The loss of a step, from the scores of its tokens: losses, weights and metrics.

Pure functions of arrays that the step has computed. The formulas of losses are in losses.py, what
each metric means in marin_rl/metrics.py. Axes: M microbatches, R rows of one, B rows (M times R),
T positions.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marin_rl.config import CriticConfig, ObjectiveConfig
from marin_rl.training.critic import value_losses, value_metrics
from marin_rl.training.losses import (
    accepted_tokens,
    correction_weights,
    kl_estimate,
    on_mask,
    policy_losses,
    segment_sums,
    sequence_shares,
    token_weights,
    trained_sequences,
    weighted_sum,
)
from marin_rl.training.scoring import TokenScores
from marin_rl.training.step_types import StepArrays, StepSettings
from marin_rl.training.token_metrics import (
    TokenMeasures,
    beyond_bounds,
    clip_fractions,
    clipped_tokens,
    importance_ratios,
    sequence_entropy,
)

Metrics = dict[str, jax.Array]


def row_weights(arrays: StepArrays, settings: StepSettings) -> Float[Array, "B T"]:
    """The weight of each token's loss, over all rows of the step."""
    aggregation = settings.objective.aggregation if settings.objective else "token_mean"
    mask_BT, segment_ids_BT = _rows(arrays.mask.astype(jnp.float32)), _rows(arrays.segment_ids)
    return token_weights(mask_BT, segment_ids_BT, aggregation, settings.length_norm)


def _rows(array_MRT: Array) -> Array:
    return array_MRT.reshape(-1, array_MRT.shape[-1])


def step_losses(
    settings: StepSettings,
    scores: TokenScores,
    referred: Array | None,
    coefficient: Array | None,
    rows: StepArrays,
) -> tuple[Array, Array]:
    """Per token the surrogate, and its weighted KL less its weighted entropy; 0 off the mask."""
    objective, mask = settings.objective, rows.mask.astype(jnp.float32)
    if objective is None:
        return -on_mask(scores.logprobs, rows.mask), jnp.zeros_like(scores.logprobs)
    old = _old_logprobs(objective, scores.logprobs, rows)
    losses = policy_losses(objective, scores.logprobs, old, rows.advantages, mask, rows.segment_ids)
    losses *= _corrections(objective, old, rows)
    regularisers = -objective.entropy_coefficient * on_mask(scores.entropies, rows.mask)
    if referred is not None:
        logprobs, references = (on_mask(array, rows.mask) for array in (scores.logprobs, referred))
        kl = kl_estimate(logprobs, references, objective.kl_estimator) * mask
        regularisers += coefficient * kl
    return losses, regularisers


def _old_logprobs(objective: ObjectiveConfig, logprobs: Array, rows: StepArrays) -> Array:
    """Old logprobs: the denominator of importance ratios.

    Without importance correction, the sampler's own; with it, the trainer's before the first
    update, which in that update are the current ones.
    """
    if objective.importance_correction == "none":
        return rows.policy_logprobs
    return jax.lax.stop_gradient(logprobs) if rows.old_logprobs is None else rows.old_logprobs


def _corrections(objective: ObjectiveConfig, old: Array, rows: StepArrays) -> Array:
    mask = rows.mask.astype(jnp.float32)
    return correction_weights(objective, old, rows.policy_logprobs, mask, rows.segment_ids)


def measures_of(
    settings: StepSettings,
    scores: TokenScores,
    referred: Array | None,
    values: Array | None,
    arrays: StepArrays,
) -> TokenMeasures | None:
    """Measures that are kept of every token, in the shape of the arrays."""
    if settings.objective is None:
        return None
    objective, rows = settings.objective, jax.tree.map(_rows, arrays)
    logprobs, mask = _rows(scores.logprobs), rows.mask.astype(jnp.float32)
    old = _old_logprobs(objective, logprobs, rows)
    sequences = mask, rows.segment_ids
    ratios = importance_ratios(objective, logprobs, old, *sequences)
    weights = _corrections(objective, old, rows)
    clipped = clipped_tokens(objective, logprobs, old, rows.advantages, weights, *sequences)
    corrected = objective.importance_correction != "none"
    return TokenMeasures(
        trainer_logprobs=scores.logprobs,
        entropies=scores.entropies,
        reference_logprobs=referred,
        old_logprobs=old.reshape(arrays.mask.shape) if corrected else None,
        ratios=ratios.reshape(arrays.mask.shape),
        clipped=clipped.reshape(arrays.mask.shape),
        values=values,
    )


def step_loss(
    settings: StepSettings,
    scores: TokenScores,
    referred: Array | None,
    coefficient: Array | None,
    arrays: StepArrays,
    values: Array | None = None,
) -> tuple[Array, Array]:
    """The loss of a step and its surrogate part, from given scores; nothing is differentiated."""
    weights_BT = row_weights(arrays, settings)
    loss, metrics = report(settings, scores, referred, coefficient, values, arrays, weights_BT)
    return loss, metrics["loss/policy_avg"]


def report(
    settings: StepSettings,
    scores: TokenScores,
    reference_logprobs: Array | None,
    coefficient: Array | None,
    values: Array | None,
    arrays: StepArrays,
    weights_BT: Array,
) -> tuple[Array, Metrics]:
    """The loss and the step's metrics, over all rows at once (definitions: marin_rl/metrics.py)."""
    rows = jax.tree.map(_rows, arrays)
    scores = jax.tree.map(_rows, scores)
    logprobs = scores.logprobs
    referred = None if reference_logprobs is None else _rows(reference_logprobs)
    losses, regularisers = step_losses(settings, scores, referred, coefficient, rows)
    loss = weighted_sum(weights_BT, losses + regularisers)
    metrics = {"loss": loss, "entropy": _mean(scores.entropies, rows.mask)}
    if settings.objective is not None:
        mask = rows.mask.astype(jnp.float32)
        metrics["loss/policy_avg"] = weighted_sum(weights_BT, losses)
        metrics["policy/entropy_avg"] = metrics["entropy"]
        metrics["objective/entropy"] = sequence_entropy(logprobs, mask, rows.segment_ids)
        metrics |= _ratio_metrics(settings.objective, logprobs, rows)
        metrics |= _mismatch_metrics(logprobs, rows)
    if settings.objective is not None and referred is not None and coefficient is not None:
        estimate = kl_estimate(logprobs, referred, settings.objective.kl_estimator)
        metrics["kl"] = _mean(estimate, rows.mask)
        sequences = trained_sequences(rows.mask.astype(jnp.float32), rows.segment_ids)
        metrics["objective/kl"] = jnp.sum(on_mask(logprobs - referred, rows.mask)) / sequences
        metrics["objective/kl_coefficient"] = coefficient
    if values is not None:
        critic, told = _of_critic(settings, _rows(values), rows)
        loss = metrics["loss"] = loss + critic
        metrics |= told
    return loss, metrics


def _of_critic(
    settings: StepSettings, values: Array, rows: StepArrays
) -> tuple[Array, Mapping[str, Array]]:
    """The value loss as it enters the loss, and the critic's metrics."""
    critic, old_values, returns = _for_critic(settings, rows)
    told = value_metrics(critic, values, old_values, returns, rows.mask)
    return critic.value_coefficient * told["loss/value_avg"], told


def critic_losses(settings: StepSettings, values: Array, rows: StepArrays) -> Array:
    """The weighted value loss of each trained token, 0 elsewhere; to be divided by their number."""
    critic, old_values, returns = _for_critic(settings, rows)
    losses = value_losses(values, old_values, returns, critic.value_clip)
    return jnp.where(rows.mask, critic.value_coefficient * losses, 0.0)


def _for_critic(settings: StepSettings, rows: StepArrays) -> tuple[CriticConfig, Array, Array]:
    assert settings.critic is not None, "values need a critic"
    assert rows.old_values is not None, "the rows of a critic have its old values"
    assert rows.returns is not None, "the rows of a critic have its returns"
    return settings.critic, rows.old_values, rows.returns


def _ratio_metrics(
    objective: ObjectiveConfig, logprobs: Array, rows: StepArrays
) -> Mapping[str, Array]:
    mask = rows.mask.astype(jnp.float32)
    old = _old_logprobs(objective, logprobs, rows)
    ratio = importance_ratios(objective, logprobs, old, mask, rows.segment_ids)
    bounds = beyond_bounds(objective, logprobs, old, ratio)
    mean = _mean(ratio, rows.mask)
    metrics = {
        "val/ratio": mean,
        "val/ratio_var": _mean(jnp.square(ratio - mean), rows.mask),
        "policy/approxkl_avg": _mean(jnp.square(logprobs - old) / 2, rows.mask),
        **clip_fractions(objective, bounds, rows.advantages, mask, rows.segment_ids),
    }
    if objective.importance_correction != "none":
        weights = _corrections(objective, old, rows)
        metrics["sampling/correction_weight/mean"] = _mean(weights, rows.mask)
    if objective.rejection is not None:
        logs = (old, rows.policy_logprobs, rows.mask, rows.segment_ids)
        rejected = ~accepted_tokens(objective, *logs)
        metrics["sampling/rejected"] = _mean(rejected.astype(jnp.float32), rows.mask)
    return metrics


def _mismatch_metrics(logprobs: Array, rows: StepArrays) -> Mapping[str, Array]:
    """Metrics of the difference between sampler's and trainer's logprobs, token by token."""
    difference = jnp.where(rows.mask, logprobs - rows.policy_logprobs, 0.0)
    ratio = jnp.exp(difference)
    some = jnp.any(rows.mask)
    return {
        "sampling/logp_difference/mean": _mean(jnp.abs(difference), rows.mask),
        "sampling/logp_difference/max": jnp.max(jnp.abs(difference)),
        "sampling/importance_ratio/min": jnp.where(
            some, jnp.min(jnp.where(rows.mask, ratio, jnp.inf)), 1.0
        ),
        "sampling/importance_ratio/mean": _mean(ratio, rows.mask),
        "sampling/importance_ratio/max": jnp.max(jnp.where(rows.mask, ratio, 0.0)),
        "mismatch_kl": _mean(jnp.expm1(difference) - difference, rows.mask),
        "sampling/chi2/token": _mean(jnp.expm1(2 * difference), rows.mask),
        **_completion_mismatch(logprobs, rows),
    }


def _completion_mismatch(logprobs: Array, rows: StepArrays) -> Mapping[str, Array]:
    """Perplexities of trainer and sampler, and their chi-square, as means over completions."""
    share = sequence_shares(rows.mask, rows.segment_ids)
    count = trained_sequences(rows.mask, rows.segment_ids)
    apart = segment_sums(on_mask(logprobs - rows.policy_logprobs, rows.mask), rows.segment_ids)
    sampler = segment_sums(share * on_mask(rows.policy_logprobs, rows.mask), rows.segment_ids)

    def mean(values: Array) -> Array:
        return jnp.sum(jnp.where(rows.mask, share * values, 0.0)) / count

    return {
        "sampling/perplexity/trainer": mean(jnp.exp(-sampler - apart * share)),
        "sampling/perplexity/sampler": mean(jnp.exp(-sampler)),
        "sampling/perplexity/ratio": mean(jnp.exp(-apart * share)),
        "sampling/chi2/sequence": mean(jnp.expm1(2 * apart)),
    }


def _mean(values_BT: Array, mask_BT: Bool[Array, "B T"]) -> Array:
    """The mean over trained tokens, 0 when there are none."""
    total = jnp.sum(jnp.where(mask_BT, values_BT, 0.0))
    return total / jnp.maximum(jnp.sum(mask_BT), 1)
