"""What is minimised: ratios, surrogates, KL estimators and aggregations, as pure functions.

Every function maps per-token arrays to per-token arrays; a loss is the sum of `weights * losses`,
where the weights are those of the whole step. A sum is the same however the rows are split, so
microbatches and devices change nothing but rounding.

Axes: B rows, T positions. `mask` is 1 on trained tokens, `segment_ids` tells the sequences of a row
apart (0 is padding), log-probabilities are in nats.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from marin_rl.config import ObjectiveConfig

FloatBT = Float[Array, "B T"]
IntBT = Int[Array, "B T"]


def segment_sums(values_BT: FloatBT, segment_ids_BT: IntBT) -> FloatBT:
    """At every position, the sum of `values` over the position's own segment."""
    segments = segment_ids_BT.shape[1] + 1

    def of_row(values_T: Array, ids_T: Array) -> Array:
        return jax.ops.segment_sum(values_T, ids_T, num_segments=segments)[ids_T]

    return jax.vmap(of_row)(values_BT, segment_ids_BT)


def token_weights(
    mask_BT: FloatBT, segment_ids_BT: IntBT, aggregation: str, length_norm: int
) -> FloatBT:
    """The weight of each token's loss; arrays are those of the whole optimizer step.

    token_mean                    1 / tokens                    (DAPO, arXiv:2503.14476, eq. 8)
    sequence_mean_token_mean      1 / (sequences * own tokens)  (GRPO, arXiv:2402.03300, eq. 3)
    sequence_mean_token_sum       1 / sequences                 (RLOO, arXiv:2402.14740, eq. 6)
    sequence_mean_token_sum_norm  1 / (sequences * length_norm) (Dr. GRPO, arXiv:2503.20783)

    Only sequences with a trained token count. Weights are 0 off the mask; all are 0 when nothing
    is trained on.
    """
    own_tokens_BT = jnp.maximum(segment_sums(mask_BT, segment_ids_BT), 1.0)
    per_sequence_BT = mask_BT / own_tokens_BT
    tokens = jnp.maximum(jnp.sum(mask_BT), 1.0)
    sequences = jnp.maximum(jnp.round(jnp.sum(per_sequence_BT)), 1.0)
    match aggregation:
        case "token_mean":
            return mask_BT / tokens
        case "sequence_mean_token_mean":
            return per_sequence_BT / sequences
        case "sequence_mean_token_sum":
            return mask_BT / sequences
        case "sequence_mean_token_sum_norm":
            return mask_BT / (sequences * length_norm)
    raise AssertionError(aggregation)


def log_ratios(
    logprobs_BT: FloatBT,
    old_logprobs_BT: FloatBT,
    mask_BT: FloatBT,
    segment_ids_BT: IntBT,
    level: str,
) -> FloatBT:
    """Log importance ratio of each token, or at each token that of its whole completion.

    token     log pi(y_t|...) - log pi_old(y_t|...)   (PPO, arXiv:1707.06347, eq. 6)
    sequence  the sum of these over the completion    (RLOO, arXiv:2402.14740, section 3.2)
    """
    token_BT = (logprobs_BT - old_logprobs_BT) * mask_BT
    return token_BT if level == "token" else segment_sums(token_BT, segment_ids_BT)


def reinforce(logprobs_BT: FloatBT, advantages_BT: FloatBT) -> FloatBT:
    """-A log pi: the policy gradient without importance ratio (Williams 1992)."""
    return -advantages_BT * logprobs_BT


def ppo_clip(
    log_ratios_BT: FloatBT, advantages_BT: FloatBT, clip_low: float, clip_high: float
) -> FloatBT:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7)."""
    ratio_BT = jnp.exp(log_ratios_BT)
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


def kl_estimate(logprobs_BT: FloatBT, reference_logprobs_BT: FloatBT, estimator: str) -> FloatBT:
    """Per-token estimate of KL(policy || reference) from tokens of the policy.

    With d = log pi - log ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) + d - 1
    (Schulman, "Approximating KL divergence", 2020).
    """
    d_BT = logprobs_BT - reference_logprobs_BT
    match estimator:
        case "k1":
            return d_BT
        case "k2":
            return jnp.square(d_BT) / 2
        case "k3":
            return jnp.expm1(-d_BT) + d_BT
    raise AssertionError(estimator)


def policy_losses(
    objective: ObjectiveConfig,
    logprobs_BT: FloatBT,
    old_logprobs_BT: FloatBT,
    advantages_BT: FloatBT,
    mask_BT: FloatBT,
    segment_ids_BT: IntBT,
) -> FloatBT:
    """The surrogate of each trained token, 0 elsewhere.

    The loss of a completion's one ratio is spread evenly over its tokens, so that the tokens of a
    sequence sum to it, and both ratio levels have the same gradient where the ratio is 1.
    """
    if objective.surrogate == "reinforce":
        return reinforce(logprobs_BT, advantages_BT) * mask_BT
    log_ratio_BT = log_ratios(
        logprobs_BT, old_logprobs_BT, mask_BT, segment_ids_BT, objective.ratio_level
    )
    losses_BT = ppo_clip(log_ratio_BT, advantages_BT, objective.clip_low, objective.clip_high)
    if objective.ratio_level == "sequence":
        losses_BT = losses_BT / jnp.maximum(segment_sums(mask_BT, segment_ids_BT), 1.0)
    return losses_BT * mask_BT
