"""Reported logprobs of a token: the model's own (raw) one, and the likeliest tokens.

Owns both, on the device, each under a conditional, so that unused ones cost nothing.
Leaves out the distribution that tokens are drawn from (`sampling`).

Axes: S sequence slots (rows), V vocabulary, K likeliest tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from marin_rl.inference.generation import TOP_LOGPROBS_MAX
from marin_rl.inference.sampling import Drawn


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


def report(logits_SV: Float32[Array, "S V"], drawn: Drawn, request: ReportRequest) -> Report:
    """Logprobs of the model's `logits_SV`, and of the distribution of `drawn`.

    The top ones are of the model's own distribution in a row that asks for raw logprobs, else of
    the one that was sampled from.
    """
    S, V = logits_SV.shape
    wanted = jnp.any(request.raw_S) | jnp.any(request.top_S > 0)
    return jax.lax.cond(
        wanted,
        lambda logits: _report(logits, drawn, request),
        lambda logits: empty_report(S, V),
        logits_SV,
    )


def _report(logits_SV: Array, drawn: Drawn, request: ReportRequest) -> Report:
    V = logits_SV.shape[1]
    raw_SV = log_softmax(logits_SV)
    raw_S = jnp.take_along_axis(raw_SV, drawn.tokens_S[:, None], axis=-1)[:, 0]
    shifted_SV = drawn.scores_SV - drawn.highest_S[:, None]
    sampled_SV = jnp.minimum(shifted_SV - drawn.log_total_S[:, None], 0)
    every_SV = jnp.where(request.raw_S[:, None], raw_SV, sampled_SV)
    top_SK, ids_SK = jax.lax.cond(
        jnp.any(request.top_S > 0),
        likeliest,
        lambda every: (
            jnp.zeros((every.shape[0], top_count(V)), jnp.float32),
            jnp.zeros((every.shape[0], top_count(V)), jnp.int32),
        ),
        every_SV,
    )
    return Report(raw_S, ids_SK, top_SK)


def log_softmax(logits: Float32[Array, "N V"]) -> Float32[Array, "N V"]:
    """Logprobs, never positive."""
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.minimum(shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)), 0)


def likeliest(
    logprobs: Float32[Array, "N V"],
) -> tuple[Float32[Array, "N K"], Int32[Array, "N K"]]:
    """The largest logprobs, largest first, and their tokens; of equals the lower token first."""
    top, ids = jax.lax.top_k(logprobs, top_count(logprobs.shape[1]))
    return top, ids
