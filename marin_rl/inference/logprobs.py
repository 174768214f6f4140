"""Reported logprobs: of sampled tokens, and of a prompt's tokens by a separate forward pass.

Unused ones cost nothing. Leaves out the distribution that
tokens are drawn from (`sampling`) and the forward pass (`decoder`).

Axes: S sequence slots (rows), V vocabulary, K likeliest tokens; P positions of a bucket, T of a
tile.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from marin_rl.inference import decoder
from marin_rl.inference.generation import TOP_LOGPROBS_MAX, PromptScores
from marin_rl.inference.sampling import Drawn, if_asked
from marin_rl.inference.weights import Decoder
from marin_rl.models.spec import Spec

# Entries of the largest tile of a prompt's logits: 16 MB.
TILE_ENTRIES_MAX = 2**22


class ReportRequest(NamedTuple):
    """Rows that want raw logprobs, and the number of likeliest tokens that each wants."""

    raw_S: Bool[Array | np.ndarray, " S"]
    top_S: Int32[Array | np.ndarray, " S"]


class Report(NamedTuple):
    """Logprobs in nats; zeros where not requested. The likeliest tokens come first.

    Those of a chunk have an axis of its steps before that of rows.
    """

    raw_S: Float32[Array | np.ndarray, "*steps S"]
    top_ids_SK: Int32[Array | np.ndarray, "*steps S K"]
    top_logprobs_SK: Float32[Array | np.ndarray, "*steps S K"]


def top_count(vocabulary: int) -> int:
    """Number of likeliest tokens that are computed: TOP_LOGPROBS_MAX, or the vocabulary's size."""
    return min(TOP_LOGPROBS_MAX, vocabulary)


def empty_report(slots: int, vocabulary: int) -> Report:
    """Zeros, of the shapes that `report` gives."""
    K = top_count(vocabulary)
    return Report(
        jnp.zeros(slots, jnp.float32),
        jnp.zeros((slots, K), jnp.int32),
        jnp.zeros((slots, K), jnp.float32),
    )


def report(
    logits_SV: Float32[Array, "S V"],
    drawn: Drawn,
    request: ReportRequest,
    *,
    known: bool | None = None,
) -> Report:
    """Logprobs of the model's `logits_SV`, and of the distribution of `drawn`.

    The top ones are of the model's own distribution in a row that asks for raw logprobs, else of
    the one that was sampled from.
    """
    # most chunks need neither the softmax over the vocabulary nor the top-k
    return if_asked(
        jnp.any(request.raw_S) | jnp.any(request.top_S > 0),
        lambda logits: _report(logits, drawn, request, known=known),
        lambda logits: empty_report(*logits.shape),
        logits_SV,
        known=known,
    )


def _report(
    logits_SV: Array,
    drawn: Drawn,
    request: ReportRequest,
    *,
    known: bool | None,
) -> Report:
    # before bias, penalties and temperature: what the model itself says of the token
    raw_SV = log_softmax(logits_SV)
    raw_S = jnp.take_along_axis(raw_SV, drawn.tokens_S[:, None], axis=-1)[:, 0]
    shifted_SV = drawn.scores_SV - drawn.highest_S[:, None]
    # Rounding may leave a logprob slightly above 0, and clients take exp of it for a probability.
    sampled_SV = jnp.minimum(shifted_SV - drawn.log_total_S[:, None], 0)
    every_SV = jnp.where(request.raw_S[:, None], raw_SV, sampled_SV)
    top_SK, ids_SK = likeliest(every_SV, jnp.any(request.top_S > 0), known=known)
    return Report(raw_S, ids_SK, top_SK)


def log_softmax(logits: Float32[Array, "N V"]) -> Float32[Array, "N V"]:
    """Logprobs, never positive."""
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.minimum(shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)), 0)


def likeliest(
    logprobs: Float32[Array, "N V"],
    wanted: Bool[Array, ""],
    *,
    known: bool | None = None,
) -> tuple[Float32[Array, "N K"], Int32[Array, "N K"]]:
    """The largest logprobs, largest first, and their tokens; zeros where they are not `wanted`.

    Of equals the lower token comes first.
    """
    shape = len(logprobs), top_count(logprobs.shape[1])
    top, ids = if_asked(
        wanted,
        lambda every: tuple(jax.lax.top_k(every, shape[1])),
        lambda every: (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)),
        logprobs,
        known=known,
    )
    return top, ids


@partial(jax.jit, static_argnames="spec")
def score_tokens(
    fused: Decoder,
    tokens_P: Int32[Array, " P"],
    wants_top: Bool[Array, ""],
    adapter: Int32[Array, "1"] | None = None,
    *,
    spec: Spec,
) -> tuple[Float32[Array, " P"], Int32[Array, "P K"], Float32[Array, "P K"]]:
    """At each position, the logprob of the token after it, and the likeliest ones there.

    The last position's logprob means nothing; without `wants_top` the others are zeros.
    """
    hidden_PD = decoder.hidden_states(spec, fused, tokens_P[None], adapter)[0]
    P, V = len(tokens_P), spec.vocabulary
    # A divisor of both: tiles of one shape need no padding and one program.
    T = math.gcd(P, tile_length(V))

    def score(tile):
        hidden_TD, next_T = tile
        # without temperature, bias or penalties: a prompt's scores are those of the model itself
        logprobs = log_softmax(decoder.logits(spec, fused.ends, hidden_TD))
        chosen_T = jnp.take_along_axis(logprobs, next_T[:, None], axis=-1)[:, 0]
        top_TK, ids_TK = likeliest(logprobs, wants_top)
        return chosen_T, ids_TK, top_TK

    # Tile by tile: logits of a whole prompt, [P, V] in float32, may exceed the weights.
    tiles = (hidden_PD.reshape(P // T, T, -1), jnp.roll(tokens_P, -1).reshape(P // T, T))
    chosen, ids, top = jax.lax.map(score, tiles)
    return chosen.reshape(P), ids.reshape(P, -1), top.reshape(P, -1)


def tile_length(vocabulary: int) -> int:
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
    # Position i scores token i + 1; the first token has nothing before it.
    logprobs_P[1:] = chosen_P[: length - 1]
    if not top:
        return PromptScores(logprobs=logprobs_P)
    K = min(top, top_PK.shape[1])
    ids = np.zeros((length, K), np.int32)
    tops = np.full((length, K), np.nan, np.float32)
    ids[1:], tops[1:] = ids_PK[: length - 1, :K], top_PK[: length - 1, :K]
    return PromptScores(logprobs=logprobs_P, top_ids=ids, top_logprobs=tops)
