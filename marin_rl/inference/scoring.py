"""Logprobs of a given prompt's tokens, by one full forward pass.

Owns the compiled program, one per length bucket, and its result on the host. The logits of a long
prompt over a large vocabulary are never there at once: they come in tiles of a bounded size.
Leaves out the forward pass itself (`decoder`) and when a prompt is scored (`engine`).

Axes: P positions of a bucket, T of a tile, V vocabulary, K likeliest tokens.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from marin_rl.inference import decoder
from marin_rl.inference.generation import PromptScores
from marin_rl.inference.logprobs import likeliest, log_softmax, top_count
from marin_rl.inference.weights import Decoder, DecoderSpec, Rotary

# Entries of the largest tile of logits: 16 MB.
TILE_ENTRIES_MAX = 2**22


@partial(jax.jit, static_argnames="spec")
def score_tokens(
    fused: Decoder,
    rotary: Rotary,
    tokens_P: Int32[Array, " P"],
    wants_top: Bool[Array, ""],
    *,
    spec: DecoderSpec,
) -> tuple[Float32[Array, " P"], Int32[Array, "P K"], Float32[Array, "P K"]]:
    """For each position the logprob of the token after it, and the likeliest ones there.

    The last position's logprob means nothing; without `wants_top` the others are zeros.
    """
    hidden_PD = decoder.hidden_states(spec, fused, rotary, tokens_P[None])[0]
    P, V = len(tokens_P), spec.vocabulary
    T = math.gcd(P, tile_length(V))
    K = top_count(V)

    def score(tile):
        hidden_TD, next_T = tile
        logprobs = log_softmax(decoder.logits(spec, fused, hidden_TD))
        chosen_T = jnp.take_along_axis(logprobs, next_T[:, None], axis=-1)[:, 0]
        top_TK, ids_TK = jax.lax.cond(
            wants_top,
            likeliest,
            lambda every: (jnp.zeros((T, K), jnp.float32), jnp.zeros((T, K), jnp.int32)),
            logprobs,
        )
        return chosen_T, ids_TK, top_TK

    tiles = (hidden_PD.reshape(P // T, T, -1), jnp.roll(tokens_P, -1).reshape(P // T, T))
    chosen, ids, top = jax.lax.map(score, tiles)
    return chosen.reshape(P), ids.reshape(P, K), top.reshape(P, K)


def tile_length(vocabulary: int) -> int:
    """Positions of a tile: a power of two."""
    return 2 ** max(0, math.floor(math.log2(TILE_ENTRIES_MAX / vocabulary)))


def prompt_scores(
    length: int,
    top: int,
    chosen_P: Float32[np.ndarray, " P"],
    ids_PK: Int32[np.ndarray, "P K"],
    top_PK: Float32[np.ndarray, "P K"],
) -> PromptScores:
    """The scores of a prompt's own tokens: shifted by one, since nothing precedes the first."""
    logprobs_P = np.full(length, np.nan, np.float32)
    logprobs_P[1:] = chosen_P[: length - 1]
    if not top:
        return PromptScores(logprobs=logprobs_P)
    K = min(top, top_PK.shape[1])
    ids = np.zeros((length, K), np.int32)
    tops = np.full((length, K), np.nan, np.float32)
    ids[1:], tops[1:] = ids_PK[: length - 1, :K], top_PK[: length - 1, :K]
    return PromptScores(logprobs=logprobs_P, top_ids=ids, top_logprobs=tops)
