"""Metrics of an optimizer step over its trained tokens: pure functions on the device.

Nothing here takes part in the gradient; the loss itself is in step_loss.py, definitions of the
metrics are in `marin_rl.metrics`.

Axes: M microbatches, R rows of one, B rows (M times R), T positions. `mask` is 1 on trained tokens,
`segment_ids` separates the sequences of a row, logprobs are in nats.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marin_rl.config import ObjectiveConfig
from marin_rl.metrics import LARGEST
from marin_rl.models.experts import load_metrics
from marin_rl.training.critic import value_metrics
from marin_rl.training.losses import binary_kl, kl_estimate, log_ratios, on_mask, weighted_sum
from marin_rl.training.pair_losses import Pairs, preference_metrics
from marin_rl.training.segments import segment_sums, sequence_shares, trained_sequences
from marin_rl.training.step_loss import (
    accepted_tokens,
    corrections,
    critic_targets,
    in_rows,
    old_logprobs,
    own_losses,
    step_loss,
    surrogate_losses,
)
from marin_rl.training.step_types import ForwardOutputs, StepArrays, StepSettings

Metrics = dict[str, jax.Array]
FloatBT = Float[Array, "B T"]
IntBT = Int[Array, "B T"]


class TokenMeasures(NamedTuple):
    """Measures of every trained token before the update; undefined elsewhere.

    `reference_logprobs` is None without a reference policy, `old_logprobs` where the ratio is taken
    against the sampler's, `values` without a critic. Arrays have the shape of the step's.
    """

    trainer_logprobs: Float[Array, "..."]
    entropies: Float[Array, "..."]
    reference_logprobs: Float[Array, "..."] | None
    old_logprobs: Float[Array, "..."] | None
    ratios: Float[Array, "..."]
    clipped: Bool[Array, "..."]
    values: Float[Array, "..."] | None = None


def step_metrics(
    settings: StepSettings, outputs: ForwardOutputs, coefficient: Array | None, arrays: StepArrays
) -> Metrics:
    """The loss and the metrics of a step, over all its rows at once."""
    if settings.preference is not None:
        pairs = Pairs.of(outputs.scores.logprobs, arrays)  # by microbatch, as the loss takes them
        return preference_metrics(settings.preference, pairs) | _loads(outputs)
    loss, surrogate = step_loss(settings, outputs, coefficient, arrays)
    scores, *others = outputs
    rows, (references, values) = jax.tree.map(in_rows, (arrays, tuple(others)))
    logprobs, entropies = in_rows(scores.logprobs), in_rows(scores.entropies)
    metrics = {"loss": loss, "entropy": _mean(entropies, rows.mask)}
    objective = settings.objective
    if objective is not None:
        mask = rows.mask.astype(jnp.float32)
        metrics["loss/policy_avg"] = surrogate
        metrics["policy/entropy_avg"] = metrics["entropy"]
        metrics["objective/entropy"] = sequence_entropy(logprobs, mask, trained_rollouts(rows))
        metrics |= _ratio_metrics(objective, logprobs, rows)
        metrics |= _mismatch_metrics(logprobs, rows)
        if objective.loss is not None:
            old = old_logprobs(objective, logprobs, rows)
            metrics |= own_losses(objective, logprobs, old, rows)[1]
    if objective is not None and references is not None and coefficient is not None:
        estimate = kl_estimate(logprobs, references, objective.kl_estimator)
        metrics["kl"] = _mean(estimate, rows.mask)
        # k1, summed over a rollout: the KL that a penalty on rewards would subtract.
        total = jnp.sum(on_mask(logprobs - references, rows.mask))
        metrics["objective/kl"] = total / trained_rollouts(rows)
        metrics["objective/kl_coefficient"] = coefficient
    if scores.divergences is not None:
        metrics["distillation/divergence"] = _mean(in_rows(scores.divergences), rows.mask)
    if values is not None:
        critic, old_values, returns = critic_targets(settings, rows)
        metrics |= value_metrics(critic, values, old_values, returns, rows.mask)
    return metrics | _loads(outputs)


def _loads(outputs: ForwardOutputs) -> Metrics:
    if (loads := outputs.scores.loads) is None:
        return {}
    return dict(load_metrics(jax.tree.map(lambda each: jnp.sum(each, axis=0), loads)))


def token_measures(
    settings: StepSettings, outputs: ForwardOutputs, arrays: StepArrays
) -> TokenMeasures | None:
    """The measures that are kept of every token, `[M, R, T]`; None when supervised."""
    if settings.objective is None:
        return None
    objective, rows = settings.objective, jax.tree.map(in_rows, arrays)
    scores, ref_logprobs, values = outputs
    logprobs, mask = in_rows(scores.logprobs), rows.mask.astype(jnp.float32)
    old = old_logprobs(objective, logprobs, rows)
    ratios = importance_ratios(objective, logprobs, old, mask, rows.segment_ids)
    clipped = clipped_tokens(objective, logprobs, old, corrections(objective, old, rows), rows)
    corrected = objective.importance_correction != "none"
    return TokenMeasures(
        trainer_logprobs=scores.logprobs,
        entropies=scores.entropies,
        reference_logprobs=ref_logprobs,
        old_logprobs=old.reshape(arrays.mask.shape) if corrected else None,
        ratios=ratios.reshape(arrays.mask.shape),
        clipped=clipped.reshape(arrays.mask.shape),
        values=values,
    )


def _ratio_metrics(
    objective: ObjectiveConfig, logprobs: Array, rows: StepArrays
) -> Mapping[str, Array]:
    mask = rows.mask.astype(jnp.float32)
    old = old_logprobs(objective, logprobs, rows)
    ratio = importance_ratios(objective, logprobs, old, mask, rows.segment_ids)
    bounds = beyond_bounds(objective, logprobs, old, ratio)
    mean = _mean(ratio, rows.mask)
    metrics = {
        "val/ratio": mean,
        "val/ratio_var": _mean(jnp.square(ratio - mean), rows.mask),
        # Schulman's k2, as TRL and PPO implementations report it.
        "policy/approxkl_avg": _mean(jnp.square(logprobs - old) / 2, rows.mask),
        **clip_fractions(objective, bounds, rows.advantages, mask, rows.segment_ids),
    }
    if objective.importance_correction != "none":
        weights = corrections(objective, old, rows)
        metrics["sampling/correction_weight/mean"] = _mean(weights, rows.mask)
    if objective.rejection is not None:
        logs = (old, rows.policy_logprobs, rows.mask, rows.segment_ids)
        rejected = ~accepted_tokens(objective, *logs)
        metrics["sampling/rejected"] = _mean(rejected.astype(jnp.float32), rows.mask)
    return metrics


def _mismatch_metrics(logprobs: Array, rows: StepArrays) -> Mapping[str, Array]:
    """Metrics of the difference between sampler's and trainer's logprobs, token by token."""
    difference = jnp.where(rows.mask, logprobs - rows.policy_logprobs, 0.0)
    # By token and not clamped: an outlier is what these metrics are to show.
    ratio = jnp.exp(difference)
    some = jnp.any(rows.mask)
    metrics = {
        "sampling/logp_difference/mean": _mean(jnp.abs(difference), rows.mask),
        "sampling/logp_difference/max": jnp.max(jnp.abs(difference)),
        # Without a trained token the minimum would be infinite, which no manifest holds.
        "sampling/importance_ratio/min": jnp.where(
            some, jnp.min(jnp.where(rows.mask, ratio, jnp.inf)), 1.0
        ),
        "sampling/importance_ratio/mean": _mean(ratio, rows.mask),
        "sampling/importance_ratio/max": jnp.max(jnp.where(rows.mask, ratio, 0.0)),
        # k3, an estimate of KL(sampler || trainer) that is never below 0; expm1, because exp(x) - 1
        # of a difference of 1e-7 has no correct digit in float32.
        "mismatch_kl": _mean(jnp.expm1(difference) - difference, rows.mask),
        # Chi-square of trainer to sampler: E[ratio^2] - 1 over tokens that the sampler drew.
        "sampling/chi2/token": _mean(jnp.expm1(2 * difference), rows.mask),
        **_completion_mismatch(logprobs, rows),
    }
    # A ratio of e^89 overflows float32. No manifest holds an infinity: the metric would be left out
    # of the rounds that it is there for.
    return {name: jnp.minimum(value, LARGEST) for name, value in metrics.items()}


def _completion_mismatch(logprobs: Array, rows: StepArrays) -> Mapping[str, Array]:
    """Perplexities of trainer and sampler, and their chi-square, as means over completions."""
    # 1 / length at each token, so that sums over a completion are its means.
    share = sequence_shares(rows.mask, rows.segment_ids)
    count = trained_sequences(rows.mask, rows.segment_ids)
    apart = segment_sums(on_mask(logprobs - rows.policy_logprobs, rows.mask), rows.segment_ids)
    # Mean log-probability of each completion.
    sampler = segment_sums(share * on_mask(rows.policy_logprobs, rows.mask), rows.segment_ids)

    def mean(values: Array) -> Array:
        return jnp.sum(jnp.where(rows.mask, share * values, 0.0)) / count

    return {
        # The trainer's mean is the sampler's plus their mean difference.
        "sampling/perplexity/trainer": mean(jnp.exp(-sampler - apart * share)),
        "sampling/perplexity/sampler": mean(jnp.exp(-sampler)),
        "sampling/perplexity/ratio": mean(jnp.exp(-apart * share)),
        # Of the whole completion's ratio: it grows with length where the one by token does not.
        "sampling/chi2/sequence": mean(jnp.expm1(2 * apart)),
    }


def _mean(values_BT: Array, mask_BT: Bool[Array, "B T"]) -> Array:
    """The mean over trained tokens, 0 when there are none."""
    total = jnp.sum(jnp.where(mask_BT, values_BT, 0.0))
    return total / jnp.maximum(jnp.sum(mask_BT), 1)


def importance_ratios(
    objective: ObjectiveConfig,
    logprobs_BT: FloatBT,
    old_logprobs_BT: FloatBT,
    mask_BT: FloatBT,
    segment_ids_BT: IntBT,
) -> FloatBT:
    level = objective.ratio_level
    return jnp.exp(log_ratios(logprobs_BT, old_logprobs_BT, mask_BT, segment_ids_BT, level))


def clipped_tokens(
    objective: ObjectiveConfig,
    logprobs_BT: FloatBT,
    old_logprobs_BT: FloatBT,
    corrections_BT: FloatBT,
    rows: StepArrays,
) -> Bool[Array, "B T"]:
    """Trained tokens that have an advantage, and whose log-probability gets no gradient.

    Asked of the surrogate's own derivative, so that it holds for every surrogate there is.
    reinforce, sapo and cispo take no gradient away: cispo cuts the ratio, but the term that it
    weighs stays.
    """

    def surrogate(logprobs: FloatBT) -> Array:
        losses_BT = surrogate_losses(objective, logprobs, old_logprobs_BT, rows)
        return weighted_sum(corrections_BT, losses_BT)

    # By the logprobs, not the model's parameters: a few elementwise operations.
    gradient_BT = jax.grad(surrogate)(logprobs_BT)
    # An advantage of 0 has no gradient either, and is no clip.
    return rows.mask & (rows.advantages != 0) & (gradient_BT == 0)


class Beyond(NamedTuple):
    """Tokens below and above the bounds of a surrogate, for advantages of either sign."""

    below: Bool[Array, "B T"]
    above: Bool[Array, "B T"]


def beyond_bounds(
    objective: ObjectiveConfig,
    logprobs_BT: FloatBT,
    old_logprobs_BT: FloatBT,
    ratios_BT: FloatBT,
) -> Beyond:
    """Tokens beyond the bounds of the objective's surrogate.

    ppo_clip, gspo   a ratio below 1 - clip_low, or above 1 + clip_high
    cispo            a ratio above 1 + clip_high, which is cut there; one below 1 - cispo_clip_low
    gmpo             a log-ratio of the token itself below -clip_low, or above clip_high
    dppo             a probability that fell by more than clip_low, or rose by more than clip_high
    dppo_kl          one that fell, or rose, with a binary KL of more than clip_low or clip_high
    reinforce, sapo, dro  none: they have no bounds; nor are those of a user's own loss known
    """
    low, high = objective.clip_low, objective.clip_high
    none_BT = jnp.zeros(ratios_BT.shape, bool)
    match objective.surrogate if objective.loss is None else None:
        case None | "reinforce" | "sapo" | "dro":
            return Beyond(none_BT, none_BT)
        case "cispo":
            lowest = objective.cispo_clip_low
            below_BT = none_BT if lowest is None else ratios_BT < 1 - lowest
            return Beyond(below_BT, ratios_BT > 1 + high)
        case "dppo":
            # By probability, not by its log.
            moved_BT = jnp.exp(logprobs_BT) - jnp.exp(old_logprobs_BT)
            return Beyond(moved_BT < -low, moved_BT > high)
        case "dppo_kl":
            divergence_BT = binary_kl(logprobs_BT, logprobs_BT - old_logprobs_BT)
            fell_BT, rose_BT = logprobs_BT < old_logprobs_BT, logprobs_BT > old_logprobs_BT
            return Beyond(fell_BT & (divergence_BT > low), rose_BT & (divergence_BT > high))
        case "gmpo":
            log_BT = logprobs_BT - old_logprobs_BT
            return Beyond(log_BT < -low, log_BT > high)
        case "ppo_clip" | "gspo":
            return Beyond(ratios_BT < 1 - low, ratios_BT > 1 + high)


def clip_fractions(
    objective: ObjectiveConfig,
    beyond: Beyond,
    advantages_BT: FloatBT,
    mask_BT: FloatBT,
    segment_ids_BT: IntBT,
) -> Mapping[str, Array]:
    """Fractions of tokens beyond a bound that their advantage drives them to, as TRL counts them.

    `policy/clipfrac_avg` counts tokens; `clip_ratio/*` do at ratio level `token`, and count each
    sequence once at the others.
    """
    # Beyond the bound on the other side the gradient leads back, and is not cut.
    low_BT = beyond.below & (advantages_BT < 0)
    high_BT = beyond.above & (advantages_BT > 0)
    share_BT = mask_BT
    # All tokens of a sequence have its ratio: counted by token, long ones would count more often.
    if objective.ratio_level != "token":
        share_BT = sequence_shares(mask_BT, segment_ids_BT)
    total = jnp.maximum(jnp.sum(share_BT), 1.0)

    def fraction(flags_BT: Array) -> Array:
        return jnp.sum(jnp.where(flags_BT, share_BT, 0.0)) / total

    tokens = jnp.sum(jnp.where(low_BT | high_BT, mask_BT, 0.0))
    return {
        "policy/clipfrac_avg": tokens / jnp.maximum(jnp.sum(mask_BT), 1.0),
        "clip_ratio/low": fraction(low_BT),
        "clip_ratio/high": fraction(high_BT),
        "clip_ratio/region": fraction(low_BT | high_BT),
    }


def trained_rollouts(rows: StepArrays) -> Float[Array, ""]:
    """Number of rollouts with a trained token, to rounding; 1 where none has."""
    if rows.rollout_shares is None:
        return trained_sequences(rows.mask.astype(jnp.float32), rows.segment_ids)
    return jnp.maximum(jnp.sum(rows.rollout_shares), 1.0)


def sequence_entropy(
    logprobs_BT: FloatBT, mask_BT: FloatBT, rollouts: Float[Array, ""]
) -> Float[Array, ""]:
    """Mean over the trained rollouts of minus their summed log-probability."""
    return -jnp.sum(on_mask(logprobs_BT, mask_BT)) / rollouts
