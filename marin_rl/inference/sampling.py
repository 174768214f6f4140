"""Sampling: a token for every row of logits, on the device, and its logprob.

Owns the logits processors (bias, penalties, a constraint's mask), temperature, min-p, top-k, top-p,
greedy choice and the random numbers. Unused features cost nothing: each stands under a conditional,
or, where the host knows what rows ask for, is part of the program or not (`Asked`). A row that asks
for nothing keeps its logits bit for bit. Leaves out where the processors' arrays come from
(`logits_state`) and other reported logprobs (`logprobs`).

A row's random number for the token at position p is `fold_in(key(seed), p)`: it knows nothing of
the row, of the step, or of other requests. The inverse of the cumulative distribution turns it into
a token, for a hundredth of the random bits of one Gumbel variate per vocabulary entry.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32


class SlotSampling(NamedTuple):
    """Sampling parameters by row. Temperature 0 is greedy; min_p 0, top_p 1, top_k 0 are off."""

    temperature_S: Float32[Array | np.ndarray, " S"]
    top_p_S: Float32[Array | np.ndarray, " S"]
    top_k_S: Int32[Array | np.ndarray, " S"]
    min_p_S: Float32[Array | np.ndarray, " S"]
    seed_S2: UInt32[Array | np.ndarray, "S 2"]


class Asked(NamedTuple):
    """Wishes of the rows of a chunk, as far as the host knows them; None: the device looks.

    `filters` are min-p, top-k and top-p, `extras` those of `logits_state`. For an accelerator each
    conditional is a wait for the host: there a program computes what it is for, and has none.
    """

    filters: bool | None = None
    extras: bool | None = None


UNKNOWN = Asked()


def if_asked(
    wanted: Bool[Array, ""],
    then: Callable[[Array], Any],
    otherwise: Callable[[Array], Any],
    array: Array,
    *,
    known: bool | None,
) -> Any:
    """`then` of an array where it is `known` to be asked for, or the device sees it `wanted`."""
    if known is None:
        return jax.lax.cond(wanted, then, otherwise, array)
    return (then if known else otherwise)(array)


def _same(array: Array) -> Array:
    return array


def seed_words(seed: int) -> tuple[int, int]:
    """A seed of up to 64 bits as the two words of a threefry key; larger ones wrap around."""
    seed %= 2**64
    return seed >> 32, seed & 0xFFFFFFFF


class Drawn(NamedTuple):
    """A token per row, and the distribution it comes from.

    The logprob of token v in row s is `scores_SV[s, v] - highest_S[s] - log_total_S[s]`.
    """

    tokens_S: Int32[Array, " S"]
    logprobs_S: Float32[Array, " S"]
    scores_SV: Float32[Array, "S V"]
    highest_S: Float32[Array, " S"]
    log_total_S: Float32[Array, " S"]


def sample(
    logits_SV: Float32[Array, "S V"],
    sampling: SlotSampling,
    uniform_S: Float32[Array, " S"],
    asked: Asked = UNKNOWN,
) -> Drawn:
    """A token per row, as its number of `uniforms` chooses it, and its logprob in nats.

    The logprob is that of the distribution after temperature and filters. A greedy row takes the
    likeliest token and reports its logprob at temperature 1, since under the distribution that it
    was really drawn from every token's would be 0.
    """
    greedy_S = sampling.temperature_S == 0
    # greedy rows are scaled by 1, since their logprobs are reported at temperature 1
    scaled_SV = logits_SV / jnp.where(greedy_S, 1, sampling.temperature_S)[:, None]
    asked_S = (sampling.min_p_S > 0) | (sampling.top_k_S > 0) | (sampling.top_p_S < 1)
    masked = lambda scores: top_p_top_k_mask(scores, sampling, known=asked.filters)
    scores_SV = if_asked(
        jnp.any(asked_S & ~greedy_S),
        lambda scores: jnp.where(greedy_S[:, None], scores, masked(scores)),
        _same,
        scaled_SV,
        known=asked.filters,
    )
    # shifted by the maximum, so that no exponential overflows
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
    """A number in [0, 1) per row, a function of only its seed and position."""

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
    # rows of about sqrt(V) tokens make the two running sums equally short
    width = 2 ** math.ceil(math.log2(math.sqrt(V)))
    padded = jnp.pad(weights_SV, ((0, 0), (0, -V % width)))
    rows_SRW = padded.reshape(S, -1, width)
    sums_SR = rows_SRW.sum(-1)
    upto_SR = _cumulative(sums_SR)
    # scaled instead of dividing every weight by their sum
    target_S = uniform_S * upto_SR[:, -1]
    row_S = _first_above(upto_SR, sums_SR, target_S)
    before_S = jnp.take_along_axis(upto_SR - sums_SR, row_S[:, None], axis=1)[:, 0]
    row_SW = jnp.take_along_axis(rows_SRW, row_S[:, None, None], axis=1)[:, 0]
    return row_S * width + _first_above(_cumulative(row_SW), row_SW, target_S - before_S)


def _cumulative(terms: Float32[Array, "S N"]) -> Float32[Array, "S N"]:
    """Inclusive running sums, by a product with a triangle of ones."""
    # the default precision of a GPU or TPU would round the terms before it sums them
    triangle = np.triu(np.ones((terms.shape[1],) * 2, np.float32))
    return jax.lax.dot(terms, triangle, precision=jax.lax.Precision.HIGHEST)


def _first_above(
    upto: Float32[Array, "S N"], terms: Float32[Array, "S N"], target: Float32[Array, " S"]
) -> Int32[Array, " S"]:
    """The first index whose running sum exceeds the target and whose own term is positive.

    Where rounding leaves none above the target, the last index with a positive term.
    """
    # a running sum may round up at a token of weight 0, which must never be drawn
    positive = terms > 0
    index = jnp.arange(terms.shape[1], dtype=jnp.int32)
    above = positive & (upto > target[:, None])
    last = jnp.max(jnp.where(positive, index, 0), axis=1)
    return jnp.where(jnp.any(above, axis=1), jnp.argmax(above, axis=1).astype(jnp.int32), last)


def top_p_top_k_mask(
    scores_SV: Float32[Array, "S V"],
    sampling: SlotSampling,
    *,
    known: bool | None = None,
) -> Float32[Array, "S V"]:
    """Scores with -inf outside min-p, then top-k, then top-p, each where its row asks for it."""
    share_S = sampling.min_p_S
    least_S = jnp.max(scores_SV, axis=-1) + jnp.log(jnp.where(share_S > 0, share_S, 1))
    kept_SV = (share_S <= 0)[:, None] | (scores_SV >= least_S[:, None])
    scores_SV = jnp.where(kept_SV, scores_SV, -jnp.inf)
    sorts_S = (sampling.top_k_S > 0) | (sampling.top_p_S < 1)
    # sorting the vocabulary is expensive: done only if a request needs a rank
    return if_asked(
        jnp.any(sorts_S & (sampling.temperature_S > 0)),
        lambda scores: jnp.where(sorts_S[:, None], filter_logits(scores, sampling), scores),
        _same,
        scores_SV,
        known=known,
    )


def filter_logits(
    scores_SV: Float32[Array, "S V"], sampling: SlotSampling
) -> Float32[Array, "S V"]:
    """Scores with -inf outside top-k, and then outside the nucleus of what top-k left.

    Tokens that tie with the last one kept are kept too, so that the choice does not depend on the
    order of the vocabulary.
    """
    V = scores_SV.shape[1]
    # one sort serves both filters: ranks for top-k, running sums for top-p
    descending = -jnp.sort(-scores_SV, axis=-1)
    top_k = jnp.where(sampling.top_k_S > 0, jnp.minimum(sampling.top_k_S, V), V)
    rank = jnp.arange(V)
    within = jnp.where(rank < top_k[:, None], descending, -jnp.inf)
    shares = jax.nn.softmax(within, axis=-1)
    # a token is in the nucleus if those before it have less than top_p: the first always is
    before = jnp.cumsum(shares, axis=-1) - shares
    nucleus: Bool[Array, "S V"] = (before < sampling.top_p_S[:, None]) & (within > -jnp.inf)
    kept = jnp.maximum(jnp.where(sampling.top_p_S < 1, nucleus.sum(-1), top_k), 1)
    threshold = jnp.take_along_axis(descending, kept[:, None] - 1, axis=1)
    return jnp.where(scores_SV >= threshold, scores_SV, -jnp.inf)


class Bias(NamedTuple):
    """Logit biases by token id; ids beyond the vocabulary are padding."""

    asked_S: Bool[Array | np.ndarray, " S"]
    ids_SB: Int32[Array | np.ndarray, "S B"]
    values_SB: Float32[Array | np.ndarray, "S B"]


class Penalties(NamedTuple):
    """Penalties, and what they count: the first `prompt_S` tokens of a history are the prompt's.

    A repetition penalty of 1 and the others at 0 are off.
    """

    repetition_S: Float32[Array | np.ndarray, " S"]
    presence_S: Float32[Array | np.ndarray, " S"]
    frequency_S: Float32[Array | np.ndarray, " S"]
    prompt_S: Int32[Array | np.ndarray, " S"]
    history_ST: Int32[Array | np.ndarray, "S T"]


class Mask(NamedTuple):
    """Mask of the tokens that a constraint allows next: bit i of word w is token 32 w + i."""

    asked_S: Bool[Array | np.ndarray, " S"]
    words_SW: UInt32[Array | np.ndarray, "S W"]


class LogitsParams(NamedTuple):
    """Everything that changes logits."""

    bias: Bias
    penalties: Penalties
    mask: Mask


class TokenHistory(NamedTuple):
    """A row's tokens so far: its history up to `last_S`, then the first `steps` of the chunk."""

    last_S: Int32[Array | np.ndarray, " S"]
    tokens_CS: Int32[Array, "C S"]
    steps: Int32[Array, ""]


def penalised_rows(penalties: Penalties) -> Bool[Array, " S"]:
    others = (penalties.presence_S != 0) | (penalties.frequency_S != 0)
    return jnp.asarray((penalties.repetition_S != 1) | others)


def adjust(
    logits_SV: Float32[Array, "S V"],
    params: LogitsParams,
    past: TokenHistory,
    *,
    known: bool | None = None,
) -> Float32[Array, "S V"]:
    """Logits after bias, penalties and mask, in this order."""
    # most chunks change no logits, and skip passes over S x V numbers
    penalised = jnp.any(penalised_rows(params.penalties))
    biased, masked = jnp.any(params.bias.asked_S), jnp.any(params.mask.asked_S)

    def adjusted(logits: Array) -> Array:
        ways = (
            (biased, lambda x: add_bias(x, params.bias)),
            (penalised, lambda x: apply_penalties(x, params.penalties, past)),
            (masked, lambda x: apply_mask(x, params.mask)),
        )
        for wanted, change in ways:
            logits = if_asked(wanted, change, _same, logits, known=known)
        return logits

    return if_asked(biased | masked | penalised, adjusted, _same, logits_SV, known=known)


def add_bias(logits_SV: Float32[Array, "S V"], bias: Bias) -> Float32[Array, "S V"]:
    """Logits plus each row's bias; a row's ids are distinct."""
    rows = jnp.arange(logits_SV.shape[0])[:, None]
    return logits_SV.at[rows, bias.ids_SB].add(bias.values_SB, mode="drop")


def apply_penalties(
    logits_SV: Float32[Array, "S V"], penalties: Penalties, past: TokenHistory
) -> Float32[Array, "S V"]:
    """Logits after the repetition penalty (arXiv:1909.05858), then frequency and presence.

    A seen token's logit x becomes x / r where positive and x * r where negative; then a token that
    was sampled n > 0 times loses n * frequency + presence.
    """
    prompted_SV, sampled_SV = count_tokens(logits_SV.shape, penalties, past)
    # prompt and completion, as in the paper and in vLLM; the other penalties count sampled tokens
    # alone
    factor_SV = jnp.where(prompted_SV | (sampled_SV > 0), penalties.repetition_S[:, None], 1)
    out_SV = jnp.where(logits_SV > 0, logits_SV / factor_SV, logits_SV * factor_SV)
    out_SV = out_SV - penalties.frequency_S[:, None] * sampled_SV.astype(jnp.float32)
    out_SV = out_SV - jnp.where(sampled_SV > 0, penalties.presence_S[:, None], 0)
    # rows without a penalty keep their logits bit for bit
    return jnp.where(penalised_rows(penalties)[:, None], out_SV, logits_SV)


def count_tokens(
    shape: tuple[int, ...], penalties: Penalties, past: TokenHistory
) -> tuple[Bool[Array, "S V"], Int32[Array, "S V"]]:
    """(token is in the prompt, number of times it was sampled since), by row and token."""
    S = shape[0]
    history_ST = jnp.asarray(penalties.history_ST)
    rows = jnp.arange(S)[:, None]
    at_T = jnp.arange(history_ST.shape[1])
    prompt_ST = at_T < penalties.prompt_S[:, None]
    output_ST = ~prompt_ST & (at_T <= past.last_S[:, None])
    prompted_SV = jnp.zeros(shape, jnp.bool_).at[rows, history_ST].max(prompt_ST)
    sampled_SV = jnp.zeros(shape, jnp.int32).at[rows, history_ST].add(output_ST.astype(jnp.int32))
    # later steps of the chunk's buffer are not sampled yet
    chunk_C1 = (jnp.arange(past.tokens_CS.shape[0]) < past.steps).astype(jnp.int32)[:, None]
    return prompted_SV, sampled_SV.at[rows.T, past.tokens_CS].add(chunk_C1)


def apply_mask(logits_SV: Float32[Array, "S V"], mask: Mask) -> Float32[Array, "S V"]:
    """Set to -inf every token that the constraint of a row does not allow next."""
    S, V = logits_SV.shape
    # 32 tokens a word: a mask of bytes would take eight times as long to the device, for every
    # token
    bits = jnp.asarray(mask.words_SW)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed_SV = bits.reshape(S, -1)[:, :V] == 1
    return jnp.where(mask.asked_S[:, None] & ~allowed_SV, -jnp.inf, logits_SV)
