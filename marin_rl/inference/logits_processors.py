"""Logits processors: bias, penalties, a constraint's mask; on the device, before sampling.

Owns the arrays of these wishes, and the arithmetic. Leaves out where the arrays come from
(`logits_state`) and the drawing (`sampling`). Each step stands under a conditional of its own, so
that unused features cost nothing; a slot that asks for nothing keeps its logits bit for bit.

Token counts are computed from the history in every step that needs them: a state of [S, V]
would cost every request, and scattering a few hundred tokens costs only those who ask.

Axes: S slots, V vocabulary, B biased tokens of a slot, T positions of a slot, C steps of a chunk,
W words of 32 tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32


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
    """Tokens that a constrained slot may go on with: bit i of word w is token 32 w + i."""

    asked_S: Bool[Array | np.ndarray, " S"]
    words_SW: UInt32[Array | np.ndarray, "S W"]


class LogitsParams(NamedTuple):
    """Everything that changes logits."""

    bias: Bias
    penalties: Penalties
    mask: Mask


class TokenHistory(NamedTuple):
    """A slot's tokens so far: its history up to `last_S`, then the first `steps` of the chunk."""

    last_S: Int32[Array | np.ndarray, " S"]
    tokens_CS: Int32[Array, "C S"]
    steps: Int32[Array, ""]


def apply_penalties(penalties: Penalties) -> Bool[Array, " S"]:
    """The slots that ask for any penalty."""
    others = (penalties.presence_S != 0) | (penalties.frequency_S != 0)
    return jnp.asarray((penalties.repetition_S != 1) | others)


def adjust(
    logits_SV: Float32[Array, "S V"], wishes: LogitsParams, past: TokenHistory
) -> Float32[Array, "S V"]:
    """Logits after bias, penalties and mask, in this order."""
    penalised_S = apply_penalties(wishes.penalties)
    biased, masked = jnp.any(wishes.bias.asked_S), jnp.any(wishes.mask.asked_S)

    def adjusted(logits):
        same = lambda logits: logits
        logits = jax.lax.cond(biased, lambda x: add_bias(x, wishes.bias), same, logits)
        logits = jax.lax.cond(
            jnp.any(penalised_S),
            lambda x: apply_penalties_rows(x, wishes.penalties, past),
            same,
            logits,
        )
        return jax.lax.cond(masked, lambda x: apply_mask(x, wishes.mask), same, logits)

    return jax.lax.cond(
        biased | masked | jnp.any(penalised_S), adjusted, lambda logits: logits, logits_SV
    )


def add_bias(logits_SV: Float32[Array, "S V"], bias: Bias) -> Float32[Array, "S V"]:
    """Logits plus each slot's bias; a slot's ids are distinct."""
    slots = jnp.arange(logits_SV.shape[0])[:, None]
    return logits_SV.at[slots, bias.ids_SB].add(bias.values_SB, mode="drop")


def apply_penalties_rows(
    logits_SV: Float32[Array, "S V"], penalties: Penalties, past: TokenHistory
) -> Float32[Array, "S V"]:
    """Logits after the repetition penalty (arXiv:1909.05858), then frequency and presence.

    A seen token's logit x becomes x / r where positive and x * r where negative; then a token that
    was sampled n > 0 times loses n * frequency + presence.
    """
    prompted_SV, sampled_SV = count_tokens(logits_SV.shape, penalties, past)
    factor_SV = jnp.where(prompted_SV | (sampled_SV > 0), penalties.repetition_S[:, None], 1)
    out_SV = jnp.where(logits_SV > 0, logits_SV / factor_SV, logits_SV * factor_SV)
    out_SV = out_SV - penalties.frequency_S[:, None] * sampled_SV.astype(jnp.float32)
    out_SV = out_SV - jnp.where(sampled_SV > 0, penalties.presence_S[:, None], 0)
    return jnp.where(apply_penalties(penalties)[:, None], out_SV, logits_SV)


def count_tokens(
    shape: tuple[int, ...], penalties: Penalties, past: TokenHistory
) -> tuple[Bool[Array, "S V"], Int32[Array, "S V"]]:
    """(token is in the prompt, number of times it was sampled since), by slot and token."""
    S = shape[0]
    history_ST = jnp.asarray(penalties.history_ST)
    slots = jnp.arange(S)[:, None]
    at_T = jnp.arange(history_ST.shape[1])
    prompt_ST = at_T < penalties.prompt_S[:, None]
    output_ST = ~prompt_ST & (at_T <= past.last_S[:, None])
    prompted_SV = jnp.zeros(shape, jnp.bool_).at[slots, history_ST].max(prompt_ST)
    sampled_SV = jnp.zeros(shape, jnp.int32).at[slots, history_ST].add(output_ST.astype(jnp.int32))
    chunk_C1 = (jnp.arange(past.tokens_CS.shape[0]) < past.steps).astype(jnp.int32)[:, None]
    return prompted_SV, sampled_SV.at[slots.T, past.tokens_CS].add(chunk_C1)


def apply_mask(logits_SV: Float32[Array, "S V"], mask: Mask) -> Float32[Array, "S V"]:
    """-inf for every token that a constrained slot may not go on with."""
    S, V = logits_SV.shape
    bits = jnp.asarray(mask.words_SW)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed_SV = bits.reshape(S, -1)[:, :V] == 1
    return jnp.where(mask.asked_S[:, None] & ~allowed_SV, -jnp.inf, logits_SV)
