"""Log-probabilities of samples of one prompt by a model, for comparisons with an engine's."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from equinox import filter_jit
from jaxtyping import Array, Float, Float32, Int, Int32
from levanter.models.lm_model import LmHeadModel

from marin_rl.training.logprobs import token_logprobs

LENGTH_STEP = 64


def sequence_logprobs(
    model: LmHeadModel,
    prompt: Int32[np.ndarray, " P"],
    samples: Sequence[Int32[np.ndarray, " _"]],
    temperature: float,
) -> Float32[np.ndarray, " N"]:
    """The trainer's log-probability of each token of the samples, one sample after the other."""
    longest = max(map(len, samples))
    token_ids = np.zeros((len(samples), rounded_up(len(prompt) + longest)), np.int32)
    mask, segments = np.zeros_like(token_ids), np.zeros_like(token_ids)
    for row, sampled in enumerate(samples):
        used = len(prompt) + len(sampled)
        token_ids[row, :used] = np.concatenate([prompt, sampled])
        mask[row, len(prompt) : used] = 1
        segments[row, :used] = 1
    scores = np.asarray(sequence_program()(model, token_ids, segments, mask, temperature))
    return scores[mask > 0]


def rounded_up(length: int) -> int:
    """Few lengths, so that few programs are compiled."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


@lru_cache(maxsize=1)
def sequence_program() -> Any:
    """The program of `sequence_logprobs`, compiled at its first call for a shape."""

    # one function for all calls: a new one would compile its programs again
    @filter_jit
    def score(
        model: LmHeadModel,
        token_ids_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        mask_BT: Int[Array, "B T"],
        temperature: float,
    ) -> Float[Array, "B T"]:
        positions = jnp.arange(token_ids_BT.shape[1], dtype=jnp.int32)
        positions_BT = jnp.broadcast_to(positions, token_ids_BT.shape)
        rows = token_ids_BT, segment_ids_BT, positions_BT, mask_BT > 0
        return token_logprobs(model, *rows, temperature=temperature).logprobs

    return score
