"""From logits to a token in every slot, on the device.

Owns temperature, min-p, top-k, top-p, greedy choice, the random numbers, and the logprob of what
was drawn under the very distribution it was drawn from. Leaves out what changes logits before
(`logits_processors`), other reported logprobs (`logprobs`), stopping (`batch`) and logits
(`decoder`).

A slot's random number for the token at position p is `fold_in(key(seed), p)`: it knows nothing of
the slot, of the step, or of other requests. One uniform number per token is turned into a token
through the inverse of the cumulative distribution, which needs a hundredth of the random bits that
one Gumbel variate per vocabulary entry would.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

SEED_BITS = 64


class SlotSampling(NamedTuple):
    """Sampling parameters by slot. Temperature 0 is greedy; min_p 0, top_p 1, top_k 0 are off."""

    temperature_S: Float32[Array | np.ndarray, " S"]
    top_p_S: Float32[Array | np.ndarray, " S"]
    top_k_S: Int32[Array | np.ndarray, " S"]
    min_p_S: Float32[Array | np.ndarray, " S"]
    seed_S2: UInt32[Array | np.ndarray, "S 2"]


def seed_words(seed: int) -> tuple[int, int]:
    """A seed of up to 64 bits as the two words of a threefry key; larger ones wrap around."""
    seed %= 2**SEED_BITS
    return seed >> 32, seed & 0xFFFFFFFF


class Drawn(NamedTuple):
    """A token per slot, and the distribution it comes from.

    The logprob of token v in slot s is `scores_SV[s, v] - highest_S[s] - log_total_S[s]`.
    """

    tokens_S: Int32[Array, " S"]
    logprobs_S: Float32[Array, " S"]
    scores_SV: Float32[Array, "S V"]
    highest_S: Float32[Array, " S"]
    log_total_S: Float32[Array, " S"]


def sample(
    logits_SV: Float32[Array, "S V"], sampling: SlotSampling, uniform_S: Float32[Array, " S"]
) -> Drawn:
    """A token per slot, as its number of `uniforms` chooses it, and its logprob in nats.

    The logprob is that of the distribution after temperature and filters. A greedy slot takes the
    likeliest token and reports its logprob at temperature 1, since under the distribution that it
    was really drawn from every token's would be 0.
    """
    greedy_S = sampling.temperature_S == 0
    scaled_SV = logits_SV / jnp.where(greedy_S, 1, sampling.temperature_S)[:, None]
    asked_S = (sampling.min_p_S > 0) | (sampling.top_k_S > 0) | (sampling.top_p_S < 1)
    scores_SV = jax.lax.cond(
        jnp.any(asked_S & ~greedy_S),
        lambda scores: jnp.where(greedy_S[:, None], scores, top_p_top_k_mask(scores, sampling)),
        lambda scores: scores,
        scaled_SV,
    )
    highest_S = jnp.max(scores_SV, axis=-1)
    shifted_SV = scores_SV - highest_S[:, None]
    weights_SV = jnp.exp(shifted_SV)
    drawn_S = draw(weights_SV, uniform_S)
    likeliest_S = _likeliest(logits_SV)
    tokens_S = jnp.where(greedy_S, likeliest_S, drawn_S)
    chosen_S = jnp.take_along_axis(shifted_SV, tokens_S[:, None], axis=-1)[:, 0]
    log_total_S = jnp.log(jnp.sum(weights_SV, axis=-1))
    # a logprob of 0 is a certainty: rounding never makes it positive
    logprobs_S = jnp.minimum(chosen_S - log_total_S, 0)
    return Drawn(tokens_S, logprobs_S, scores_SV, highest_S, log_total_S)


def _likeliest(logits_SV: Float32[Array, "S V"]) -> Int32[Array, " S"]:
    """The first token with the highest logit; the last token where a logit is NaN.

    Two plain reductions: XLA's argmax is one of pairs, which a CPU computes six times as slowly.
    """
    V = logits_SV.shape[1]
    highest_S1 = jnp.max(logits_SV, axis=-1, keepdims=True)
    index_V = jnp.arange(V, dtype=jnp.int32)
    return jnp.min(jnp.where(logits_SV == highest_S1, index_V, V - 1), axis=-1)


def uniforms(
    seed_S2: UInt32[Array | np.ndarray, "S 2"], positions_S: Int32[Array, " S"]
) -> Float32[Array, " S"]:
    """One number in [0, 1) per slot, a function of its seed and position alone."""

    def uniform(words, position):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (), jnp.float32)

    return jax.vmap(uniform)(jnp.asarray(seed_S2), positions_S)


def draw(weights_SV: Float32[Array, "S V"], uniform_S: Float32[Array, " S"]) -> Int32[Array, " S"]:
    """Inverse-CDF sampling from unnormalised weights (>= 0, some > 0); never a token of weight 0.

    In two levels, rows of about sqrt(V) tokens and then tokens of one row, so that the cumulative
    sums stay short: cheap, and exact to float32 even for large vocabularies.
    """
    S, V = weights_SV.shape
    width = 2 ** math.ceil(math.log2(math.sqrt(V)))
    padded = jnp.pad(weights_SV, ((0, 0), (0, -V % width)))
    rows_SRW = padded.reshape(S, -1, width)
    sums_SR = rows_SRW.sum(-1)
    upto_SR = _cumulative(sums_SR)
    target_S = uniform_S * upto_SR[:, -1]
    row_S = _first_above(upto_SR, sums_SR, target_S)
    before_S = jnp.take_along_axis(upto_SR - sums_SR, row_S[:, None], axis=1)[:, 0]
    row_SW = jnp.take_along_axis(rows_SRW, row_S[:, None, None], axis=1)[:, 0]
    return row_S * width + _first_above(_cumulative(row_SW), row_SW, target_S - before_S)


def _cumulative(terms: Float32[Array, "S N"]) -> Float32[Array, "S N"]:
    """Inclusive running sums, by a product with a triangle of ones."""
    triangle = np.triu(np.ones((terms.shape[1],) * 2, np.float32))
    return jax.lax.dot(terms, triangle, precision=jax.lax.Precision.HIGHEST)


def _first_above(
    upto: Float32[Array, "S N"], terms: Float32[Array, "S N"], target: Float32[Array, " S"]
) -> Int32[Array, " S"]:
    """The first index whose running sum exceeds the target and whose own term is positive.

    Where rounding leaves none above the target, the last index with a positive term.
    """
    positive = terms > 0
    index = jnp.arange(terms.shape[1], dtype=jnp.int32)
    above = positive & (upto > target[:, None])
    last = jnp.max(jnp.where(positive, index, 0), axis=1)
    return jnp.where(jnp.any(above, axis=1), jnp.argmax(above, axis=1).astype(jnp.int32), last)


def top_p_top_k_mask(
    scores_SV: Float32[Array, "S V"], sampling: SlotSampling
) -> Float32[Array, "S V"]:
    """Scores with -inf outside min-p, then top-k, then top-p, each where its slot asks for it."""
    share_S = sampling.min_p_S
    least_S = jnp.max(scores_SV, axis=-1) + jnp.log(jnp.where(share_S > 0, share_S, 1))
    kept_SV = (share_S <= 0)[:, None] | (scores_SV >= least_S[:, None])
    scores_SV = jnp.where(kept_SV, scores_SV, -jnp.inf)
    sorts_S = (sampling.top_k_S > 0) | (sampling.top_p_S < 1)
    # sorting the vocabulary is expensive: done only if a request needs a rank
    return jax.lax.cond(
        jnp.any(sorts_S & (sampling.temperature_S > 0)),
        lambda scores: jnp.where(sorts_S[:, None], filter_logits(scores, sampling), scores),
        lambda scores: scores,
        scores_SV,
    )


def filter_logits(
    scores_SV: Float32[Array, "S V"], sampling: SlotSampling
) -> Float32[Array, "S V"]:
    """Scores with -inf outside top-k, and then outside the nucleus of what top-k left.

    Tokens that tie with the last one kept are kept too, so that the choice does not depend on the
    order of the vocabulary.
    """
    V = scores_SV.shape[1]
    descending = -jnp.sort(-scores_SV, axis=-1)
    top_k = jnp.where(sampling.top_k_S > 0, jnp.minimum(sampling.top_k_S, V), V)
    rank = jnp.arange(V)
    within = jnp.where(rank < top_k[:, None], descending, -jnp.inf)
    shares = jax.nn.softmax(within, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    nucleus: Bool[Array, "S V"] = (before < sampling.top_p_S[:, None]) & (within > -jnp.inf)
    kept = jnp.maximum(jnp.where(sampling.top_p_S < 1, nucleus.sum(-1), top_k), 1)
    threshold = jnp.take_along_axis(descending, kept[:, None] - 1, axis=1)
    return jnp.where(scores_SV >= threshold, scores_SV, -jnp.inf)
