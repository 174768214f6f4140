"""Metrics of an objective by token: pure functions on the device.

Nothing here takes part in the gradient. Definitions are in `marin_rl.metrics`.

Axes: B rows, T positions. `mask` is 1 on trained tokens, `segment_ids` tells the sequences of a row
apart, log-probabilities are in nats.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marin_rl.config import ObjectiveConfig
from marin_rl.training.losses import (
    binary_kl,
    log_ratios,
    on_mask,
    policy_losses,
    sequence_shares,
    trained_sequences,
    weighted_sum,
)

FloatBT = Float[Array, "B T"]
IntBT = Int[Array, "B T"]


class TokenMeasures(NamedTuple):
    """Of every trained token, before the update; what stands elsewhere means nothing.

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


def importance_ratios(
    objective: ObjectiveConfig,
    logprobs_BT: FloatBT,
    old_logprobs_BT: FloatBT,
    mask_BT: FloatBT,
    segment_ids_BT: IntBT,
) -> FloatBT:
    """The ratio of each token at the objective's level; see `losses.log_ratios`."""
    level = objective.ratio_level
    return jnp.exp(log_ratios(logprobs_BT, old_logprobs_BT, mask_BT, segment_ids_BT, level))


def clipped_tokens(
    objective: ObjectiveConfig,
    logprobs_BT: FloatBT,
    old_logprobs_BT: FloatBT,
    advantages_BT: FloatBT,
    corrections_BT: FloatBT,
    mask_BT: FloatBT,
    segment_ids_BT: IntBT,
) -> Bool[Array, "B T"]:
    """Trained tokens that have an advantage, and whose log-probability gets no gradient.

    Asked of the surrogate's own derivative, so that it holds for every surrogate there is: a PPO
    ratio beyond its bound, dual or not; a token whose probability dppo lets go no further; a whole
    completion where the ratio is a completion's; a correction weight of 0. reinforce, sapo and
    cispo take no gradient away by themselves: cispo cuts the ratio, but what it weighs stays.
    """

    def surrogate(logprobs: FloatBT) -> Array:
        losses_BT = policy_losses(
            objective, logprobs, old_logprobs_BT, advantages_BT, mask_BT, segment_ids_BT
        )
        return weighted_sum(corrections_BT, losses_BT)

    gradient_BT = jax.grad(surrogate)(logprobs_BT)
    return (mask_BT > 0) & (advantages_BT != 0) & (gradient_BT == 0)


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
    reinforce, sapo, dro  none: they have no bounds
    """
    low, high = objective.clip_low, objective.clip_high
    none_BT = jnp.zeros(ratios_BT.shape, bool)
    match objective.surrogate:
        case "reinforce" | "sapo" | "dro":
            return Beyond(none_BT, none_BT)
        case "cispo":
            lowest = objective.cispo_clip_low
            below_BT = none_BT if lowest is None else ratios_BT < 1 - lowest
            return Beyond(below_BT, ratios_BT > 1 + high)
        case "dppo":
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
    low_BT = beyond.below & (advantages_BT < 0)
    high_BT = beyond.above & (advantages_BT > 0)
    share_BT = mask_BT
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


def sequence_entropy(
    logprobs_BT: FloatBT, mask_BT: FloatBT, segment_ids_BT: IntBT
) -> Float[Array, ""]:
    """Mean over the trained sequences of minus their summed log-probability."""
    return -jnp.sum(on_mask(logprobs_BT, mask_BT)) / trained_sequences(mask_BT, segment_ids_BT)
