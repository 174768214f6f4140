"""Losses: ratios, surrogates, KL estimators and aggregations, as pure functions.

Every function maps per-token arrays to per-token arrays; a loss is `weighted_sum(weights, losses)`,
where the weights are those of the whole step. A sum is the same however the rows are split, so
microbatches and devices change nothing but rounding. Off the mask nothing counts, in values or
gradients: not even NaN or infinity. Leaves out weights of tokens that another program drew
(`step_loss`).

Axes: B rows, T positions. `mask` is 1, or true, on trained tokens, `segment_ids` tells the
sequences of a row apart (0 is padding), log-probabilities are in nats.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from marin_rl.config import DivergenceConfig, ObjectiveConfig
from marin_rl.training.segments import (
    FloatArrayBT,
    FloatBT,
    IntBT,
    MaskBT,
    segment_sums,
    sequence_shares,
    trained_tokens,
    zeros_and_ones,
)

Values = Float[Array, "*shape"]
# Arguments may be arrays of JAX or NumPy, of any shape where each token is by itself.
FloatArray = Float[Array | np.ndarray, "*shape"]

# Log-ratios are clamped to this, in nats, before exp is taken of them: float32 ends at 88, and
# an infinite ratio makes the gradient of a clipped token 0 * inf. verl, tunix and OpenRLHF do so.
LOG_RATIO_MAX = 20.0
# The log-probability of a part is at most this where that of the rest, log(1 - exp(p)), follows.
CERTAIN = -1e-6
# Probabilities of all other tokens are at least this where dppo_kl divides by them; verl's.
OTHERS_MIN = 1e-8


def on_mask(values: FloatArray, mask: Shaped[Array | np.ndarray, "*shape"]) -> Values:
    """The values on the mask, 0 elsewhere, whatever stands there; so are their gradients."""
    return jnp.where(jnp.asarray(mask) != 0, values, 0.0)


def weighted_sum(weights: FloatArray, losses: FloatArray) -> Float[Array, ""]:
    """Sum of `weights * losses` where weights are not 0.

    A product alone would give NaN for a loss of NaN or infinity that has no weight.
    """
    return jnp.sum(weights * on_mask(losses, weights))


def scores_of_logits(
    logits_NV: Float[Array | np.ndarray, "*N V"],
    targets_N: Int[Array | np.ndarray, "*N"],
    temperature: float = 1.0,
) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
    """Log-probability of each target, and entropy of the distribution that it was drawn from."""
    # Shifted by its maximum inside of log_softmax: exp of a raw logit may be infinite.
    logp_NV = jax.nn.log_softmax(jnp.asarray(logits_NV) / temperature, axis=-1)
    logprobs_N = jnp.take_along_axis(logp_NV, jnp.asarray(targets_N)[..., None], axis=-1)[..., 0]
    return logprobs_N, -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=-1)


def divergence(
    settings: DivergenceConfig, teacher_NV: Float[Array, "*N W"], policy_NV: Float[Array, "*N V"]
) -> Float[Array, "*N"]:
    """Divergence of a teacher's and a policy's distribution by their logits, in nats.

    Generalised Jensen-Shannon (GKD, arXiv:2306.13649, eq. 1), with `top_k` over the teacher's
    likeliest tokens and the rest as one. Ids that only one of them has, which pad its vocabulary,
    are left out.
    """
    size = min(teacher_NV.shape[-1], policy_NV.shape[-1])
    theirs, ours = (jax.nn.log_softmax(each[..., :size]) for each in (teacher_NV, policy_NV))
    if settings.top_k is not None:
        theirs, ids = jax.lax.top_k(theirs, min(settings.top_k, size))
        theirs, ours = map(_with_rest, (theirs, jnp.take_along_axis(ours, ids, axis=-1)))

    def kl(logp: Array, logq: Array) -> Array:
        return jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1)

    beta = settings.beta
    if beta in (0.0, 1.0):
        return kl(ours, theirs) if beta else kl(theirs, ours)
    mixture = jnp.logaddexp(theirs + math.log(beta), ours + math.log1p(-beta))
    return beta * kl(theirs, mixture) + (1 - beta) * kl(ours, mixture)


def _with_rest(logprobs_NK: Array) -> Array:
    """Log-probabilities of K tokens, and that of all others together."""
    some = jnp.minimum(jax.nn.logsumexp(logprobs_NK, axis=-1, keepdims=True), CERTAIN)
    return jnp.concatenate([logprobs_NK, jnp.log(-jnp.expm1(some))], axis=-1)


def token_weights(
    mask_BT: MaskBT,
    segment_ids_BT: IntBT,
    aggregation: str,
    length_norm: int,
    shares_BT: FloatArrayBT | None = None,
) -> FloatBT:
    """The weight of each token's loss; arrays are those of the whole optimizer step.

    A sequence is a segment, or a rollout of several where `shares_BT` has 1 / the trained tokens of
    each token's rollout; a rollout then weighs what it would uncut.

    token_mean                    1 / tokens                    (DAPO, arXiv:2503.14476, eq. 8)
    sequence_mean_token_mean      1 / (sequences * own tokens)  (GRPO, arXiv:2402.03300, eq. 3)
    sequence_mean_token_sum       1 / sequences                 (RLOO, arXiv:2402.14740, eq. 6)
    sequence_mean_token_sum_norm  1 / (sequences * length_norm) (Dr. GRPO, arXiv:2503.20783)
    token_sum                     1                           (Tinker's losses)

    Only sequences with a trained token count. Weights are 0 off the mask; all are 0 when nothing
    is trained on. Raises ValueError for another aggregation.
    """
    mask_BT = zeros_and_ones(mask_BT)
    per_sequence_BT = sequence_shares(mask_BT, segment_ids_BT)
    if shares_BT is not None:
        per_sequence_BT = jnp.asarray(shares_BT)
    # At least 1: without a trained token the weights must be 0 and not 0 / 0.
    tokens = jnp.maximum(jnp.sum(mask_BT), 1.0)
    # The shares of a sequence sum to 1 but for rounding, which would leak into every weight.
    sequences = jnp.maximum(jnp.round(jnp.sum(per_sequence_BT)), 1.0)
    match aggregation:
        case "token_mean":
            return mask_BT / tokens
        case "sequence_mean_token_mean":
            return per_sequence_BT / sequences
        case "sequence_mean_token_sum":
            return mask_BT / sequences  # a long completion weighs by its length
        case "sequence_mean_token_sum_norm":
            # One constant for all: division by a sequence's own length would make each token of a
            # long wrong answer cost less, and answers grow longer.
            return mask_BT / (sequences * length_norm)
        case "token_sum":
            return mask_BT
    raise ValueError(
        "expected aggregation of token_mean, sequence_mean_token_mean, sequence_mean_token_sum, "
        f"sequence_mean_token_sum_norm, token_sum: found {aggregation}"
    )


def log_ratios(
    logprobs_BT: FloatArrayBT,
    old_logprobs_BT: FloatArrayBT,
    mask_BT: MaskBT,
    segment_ids_BT: IntBT,
    level: str,
) -> FloatBT:
    """Log importance ratio of each token, or of its whole completion at each token.

    token          log pi(y_t|...) - log pi_old(y_t|...)   (PPO, arXiv:1707.06347, eq. 6)
    sequence       the sum of these over the completion    (RLOO, arXiv:2402.14740, section 3.2)
    sequence_mean  their mean over the completion          (GSPO, arXiv:2507.18071, eq. 7)

    Clamped to -20 and 20, where exp is finite.
    """
    # Masked before the sum: what stands off the mask may be anything.
    log_BT = on_mask(jnp.asarray(logprobs_BT) - old_logprobs_BT, mask_BT)
    if level != "token":
        log_BT = segment_sums(log_BT, segment_ids_BT)
    if level == "sequence_mean":
        log_BT = log_BT / trained_tokens(mask_BT, segment_ids_BT).astype(log_BT.dtype)
    # After the sum: of a long completion it is the sum that leaves the range of exp.
    return jnp.clip(log_BT, -LOG_RATIO_MAX, LOG_RATIO_MAX)


def reinforce(logprobs_BT: FloatArray, advantages_BT: FloatArray) -> Values:
    """-A log pi: the policy gradient without importance ratio (Williams 1992)."""
    return -jnp.asarray(advantages_BT) * logprobs_BT


def ppo_clip(
    log_ratios_BT: FloatArray,
    advantages_BT: FloatArray,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> Values:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7).

    With `clip_dual`, where A < 0 at most -clip_dual A (dual clip, arXiv:1912.09729, eq. 5).
    """
    ratio_BT = jnp.exp(log_ratios_BT)
    clipped_BT = _clamped(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    # The lower of the two: a clip may take gain away, and never adds any.
    gain_BT = jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if clip_dual is not None:
        # Of a negative advantage the minimum is not bounded: a token that became a hundred times
        # likelier would weigh a hundred times.
        floor_BT = clip_dual * advantages_BT
        gain_BT = jnp.where(advantages_BT < 0, jnp.maximum(gain_BT, floor_BT), gain_BT)
    return -gain_BT


def _clamped(ratio_BT: Values, low: float, high: float) -> Values:
    """A ratio within its bounds; on a bound it still has its gradient, as torch's clamp gives it.

    jnp.clip would halve it there, so that a bound of 0 would cut what is on policy.
    """
    ratio_BT = jnp.where(ratio_BT < low, low, ratio_BT)
    return jnp.where(ratio_BT > high, high, ratio_BT)


def cispo(
    logprobs_BT: FloatArray,
    log_ratios_BT: FloatArray,
    advantages_BT: FloatArray,
    clip_high: float,
    clip_low: float | None = None,
) -> Values:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log pi, with no gradient through the ratio.

    MiniMax-M1, arXiv:2506.13585, eq. 4 and 5; None is no lower bound, as in the paper's runs. TRL
    gives the cap itself, 1 + clip_high.
    """
    low = None if clip_low is None else 1.0 - clip_low
    # The ratio weighs log pi; a gradient through it would be PPO's, cut off at the bound.
    ratio_BT = jax.lax.stop_gradient(jnp.clip(jnp.exp(log_ratios_BT), low, 1.0 + clip_high))
    return -ratio_BT * advantages_BT * logprobs_BT


def sapo(
    log_ratios_BT: FloatArray, advantages_BT: FloatArray, positive: float, negative: float
) -> Values:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of clipping.

    tau is `positive` where A > 0, else `negative` (arXiv:2511.20347, eq. 5 and 6).
    """
    tau_BT = jnp.where(advantages_BT > 0, positive, negative)
    # The sigmoid's slope is tau / 4 where r is 1, so 4 / tau makes the gradient on policy that of
    # -r A for any tau.
    gate_BT = jax.nn.sigmoid(tau_BT * (jnp.exp(log_ratios_BT) - 1.0)) * 4.0 / tau_BT
    return -gate_BT * advantages_BT


def dppo(
    logprobs_BT: FloatArray,
    log_ratios_BT: FloatArray,
    advantages_BT: FloatArray,
    low: float,
    high: float,
) -> Values:
    """-r A, but 0 where the update would push a probability further than `low` or `high` away.

    The bound is on pi - pi_old itself (total variation of the token against the rest), not on their
    ratio, so rare tokens may move (arXiv:2602.04879, section 4).
    """
    probability_BT = jnp.exp(logprobs_BT)
    # pi_old from the clamped log-ratio, like the ratio of the loss itself.
    moved_BT = probability_BT - jnp.exp(logprobs_BT - log_ratios_BT)
    risen_BT = (advantages_BT > 0) & (moved_BT > high)
    fallen_BT = (advantages_BT < 0) & (moved_BT < -low)
    return _unless(risen_BT | fallen_BT, log_ratios_BT, advantages_BT)


def dppo_kl(
    logprobs_BT: FloatArray,
    log_ratios_BT: FloatArray,
    advantages_BT: FloatArray,
    low: float,
    high: float,
) -> Values:
    """-r A, but 0 where the update would push a token's binary KL further than `low` or `high`.

    The KL is that of old to new, of the token against all others, in nats (`binary_kl`); `high`
    bounds what has risen and is to rise (A > 0), `low` what has fallen and is to fall (A < 0). DPPO
    with binary KL, arXiv:2602.04879, section 4.
    """
    divergence_BT = binary_kl(logprobs_BT, log_ratios_BT)
    risen_BT = (advantages_BT > 0) & (log_ratios_BT > 0) & (divergence_BT > high)
    fallen_BT = (advantages_BT < 0) & (log_ratios_BT < 0) & (divergence_BT > low)
    return _unless(risen_BT | fallen_BT, log_ratios_BT, advantages_BT)


def _unless(
    beyond_BT: Bool[Array | np.ndarray, "*shape"],
    log_ratios_BT: FloatArray,
    advantages_BT: FloatArray,
) -> Values:
    """-r A, and 0 with no gradient where a token is beyond its bound."""
    kept_BT = jax.lax.stop_gradient(jnp.where(beyond_BT, 0.0, 1.0))
    return -kept_BT * jnp.exp(log_ratios_BT) * advantages_BT


def binary_kl(logprobs_BT: FloatArray, log_ratios_BT: FloatArray) -> Values:
    """KL of old to new probability of the token against all others; no gradient is taken of it.

    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), with 1 - p of at least 1e-8.
    """
    # Rounding may leave a logprob a little above 0, where 1 - p would be negative.
    old_BT = jnp.minimum(logprobs_BT - log_ratios_BT, 0.0)
    # expm1 keeps the digits of 1 - p where p is near 1.
    others_BT = jnp.maximum(-jnp.expm1(jnp.minimum(logprobs_BT, 0.0)), OTHERS_MIN)
    old_others_BT = jnp.maximum(-jnp.expm1(old_BT), OTHERS_MIN)
    of_token_BT = -jnp.exp(old_BT) * log_ratios_BT
    return jax.lax.stop_gradient(
        of_token_BT + old_others_BT * (jnp.log(old_others_BT) - jnp.log(others_BT))
    )


def gmpo_log_ratios(
    log_ratios_BT: FloatArray, advantages_BT: FloatArray, clip_low: float, clip_high: float
) -> Values:
    """Log-ratios of tokens, clamped where their advantage drives them further; 0 where that is 0.

    `s min(s l, s clip(l, -clip_low, clip_high))` with s the sign of A: the bounds are on log-ratios
    (GMPO, arXiv:2507.20673, section 3; the paper's are 0.4).
    """
    # With the sign the minimum is the cautious side for either advantage, as in ppo_clip; an
    # advantage of 0 makes the log-ratio 0, and its gradient too.
    sign_BT = jnp.sign(advantages_BT)
    clamped_BT = _clamped(jnp.asarray(log_ratios_BT), -clip_low, clip_high)
    return sign_BT * jnp.minimum(sign_BT * log_ratios_BT, sign_BT * clamped_BT)


def dro_penalty(log_ratios_BT: FloatArray, beta: float) -> Values:
    """`beta / 2 (log r)^2`: what DRO adds to -A log pi, so that the policy stays near the sampler.

    Tinker's `dro`, after Richemond et al. 2024, arXiv:2405.19107.
    """
    return beta / 2 * jnp.square(jnp.asarray(log_ratios_BT))


def kl_estimate(
    logprobs_BT: FloatArray, reference_logprobs_BT: FloatArray, estimator: str
) -> Values:
    """Per-token estimate of KL(policy || reference) from tokens of the policy.

    With d = log pi - log ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) + d - 1
    (Schulman, "Approximating KL divergence", 2020). The gradient of k2 is that of the KL itself,
    k3's is not; k3_k2_gradient has the value of the one and the gradient of the other.
    """
    d_BT = jnp.asarray(logprobs_BT) - reference_logprobs_BT
    match estimator:
        case "k1":
            return d_BT
        case "k2":
            return jnp.square(d_BT) / 2
        case "k3":
            return _k3(d_BT)
        case "k3_k2_gradient":
            # k2 + (k3 - k2) with the bracket constant: the value is k3's, the derivative k2's.
            k2_BT, k3_BT = jnp.square(d_BT) / 2, _k3(d_BT)
            return k2_BT + jax.lax.stop_gradient(k3_BT - k2_BT)
    raise ValueError(f"expected estimator of k1, k2, k3, k3_k2_gradient: found {estimator}")


def _k3(d_BT: Values) -> Values:
    """exp(-d) + d - 1; below -20 nats its tangent there, for exp(-d) itself leaves float32 at -88.

    So it is continuous, and so is its derivative, which is -exp(20) from there on.
    """
    clamped_BT = jnp.minimum(-d_BT, LOG_RATIO_MAX)
    beyond_BT = jnp.maximum(-d_BT - LOG_RATIO_MAX, 0.0)
    # expm1 keeps the digits of exp(-d) - 1 near d = 0, where most tokens are.
    return jnp.expm1(clamped_BT) + d_BT + math.exp(LOG_RATIO_MAX) * beyond_BT


def policy_losses(
    objective: ObjectiveConfig,
    logprobs_BT: FloatArrayBT,
    old_logprobs_BT: FloatArrayBT,
    advantages_BT: FloatArrayBT,
    mask_BT: MaskBT,
    segment_ids_BT: IntBT,
) -> FloatBT:
    """The surrogate of each trained token, 0 elsewhere.

    At ratio level `sequence` the loss of a completion's one ratio is spread evenly over its tokens,
    so that they sum to it; at `sequence_mean` each token carries it whole, so that they average to
    it. On policy, every surrogate at every level has the gradient of `reinforce`.
    """
    mask_BT = zeros_and_ones(mask_BT)
    # Before any arithmetic: off the mask may be NaN, and 0 times its gradient is NaN again.
    logprobs_BT, old_logprobs_BT, advantages_BT = (
        on_mask(values_BT, mask_BT) for values_BT in (logprobs_BT, old_logprobs_BT, advantages_BT)
    )
    if objective.surrogate == "reinforce":
        return reinforce(logprobs_BT, advantages_BT) * mask_BT
    logs = (logprobs_BT, old_logprobs_BT, mask_BT, segment_ids_BT)
    if objective.surrogate == "gmpo":
        # Clamped before the mean: GMPO bounds each token's ratio, not their geometric mean.
        log_ratio_BT = gmpo_log_ratios(
            log_ratios(*logs, "token"), advantages_BT, objective.clip_low, objective.clip_high
        )
        log_ratio_BT = segment_sums(log_ratio_BT, segment_ids_BT)
        log_ratio_BT = log_ratio_BT / trained_tokens(mask_BT, segment_ids_BT)
    else:
        log_ratio_BT = log_ratios(*logs, objective.ratio_level)
    losses_BT = _surrogate(objective, logprobs_BT, log_ratio_BT, advantages_BT)
    # Each token has the loss of the completion's one ratio here, which must count once. cispo's has
    # the token's own log pi, so its sum over tokens is meant.
    if objective.ratio_level == "sequence" and objective.surrogate != "cispo":
        losses_BT = losses_BT / trained_tokens(mask_BT, segment_ids_BT)
    if objective.surrogate == "dro":
        # Added after the division: -A log pi is each token's own already.
        losses_BT = losses_BT + reinforce(logprobs_BT, advantages_BT)
    # A completion's one loss stands at all of its positions, trained or not.
    return losses_BT * mask_BT


def _surrogate(
    objective: ObjectiveConfig,
    logprobs_BT: FloatArrayBT,
    log_ratios_BT: FloatBT,
    advantages_BT: FloatArrayBT,
) -> FloatBT:
    low, high = objective.clip_low, objective.clip_high
    match objective.surrogate:
        case "ppo_clip" | "gspo":
            return ppo_clip(log_ratios_BT, advantages_BT, low, high, objective.clip_dual)
        case "gmpo":
            return -jnp.exp(log_ratios_BT) * advantages_BT
        case "cispo":
            lowest = objective.cispo_clip_low
            return cispo(logprobs_BT, log_ratios_BT, advantages_BT, high, lowest)
        case "sapo":
            taus = objective.sapo_temperature_positive, objective.sapo_temperature_negative
            return sapo(log_ratios_BT, advantages_BT, *taus)
        case "dppo":
            return dppo(logprobs_BT, log_ratios_BT, advantages_BT, low, high)
        case "dppo_kl":
            return dppo_kl(logprobs_BT, log_ratios_BT, advantages_BT, low, high)
        case "dro":
            assert objective.dro_beta is not None, "the configuration asks for it with dro"
            return dro_penalty(log_ratios_BT, objective.dro_beta)
    raise AssertionError(objective.surrogate)
