"""Segments of packed rows: sums and counts over them, and the rollouts that they belong to.

A batch names the rollout of every segment, and a rollout that was cut is named by several, which
lie in one step, side by side and in order. What is counted, summed or discounted over a rollout
goes over all of its segments; an importance ratio at the level of sequences is that of each segment
by itself.

Axes: B rows, T positions, S named segments of some batches, N trained tokens of a batch, row by
row. `mask` is 1, or true, on trained tokens, `segment_ids` tells the sequences of a row apart (0 is
padding).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int64, Shaped

from marin_rl.types import TrainingBatch

FloatBT = Float[Array, "B T"]
# Arguments may be arrays of JAX or NumPy.
FloatArrayBT = Float[Array | np.ndarray, "B T"]
IntBT = Int[Array | np.ndarray, "B T"]
MaskBT = Shaped[Array | np.ndarray, "B T"]


def segment_sums(values_BT: FloatArrayBT, segment_ids_BT: IntBT) -> FloatBT:
    """At every position, the sum of `values` over the position's own segment."""
    return _by_segment(jax.ops.segment_sum, values_BT, segment_ids_BT)


def segment_maxima(values_BT: FloatArrayBT, segment_ids_BT: IntBT) -> FloatBT:
    return _by_segment(jax.ops.segment_max, values_BT, segment_ids_BT)


def _by_segment(
    reduce: Callable[..., Array], values_BT: FloatArrayBT, segment_ids_BT: IntBT
) -> FloatBT:
    # A row of T positions has at most T segments, and 0 for padding: one size, so one program.
    segments = segment_ids_BT.shape[1] + 1

    def of_row(values_T: Array, ids_T: Array) -> Array:
        # Static under jit: a number of segments that depends on the data has no shape.
        return reduce(values_T, ids_T, num_segments=segments)[ids_T]

    return jax.vmap(of_row)(jnp.asarray(values_BT), jnp.asarray(segment_ids_BT))


def zeros_and_ones(mask_BT: MaskBT) -> FloatBT:
    return jnp.asarray(mask_BT, jnp.float32)


def sequence_shares(mask_BT: MaskBT, segment_ids_BT: IntBT) -> FloatBT:
    """At each trained token 1 / the trained tokens of its sequence, 0 elsewhere."""
    mask_BT = zeros_and_ones(mask_BT)
    # At least 1: a segment without a trained token has a share of 0, not 0 / 0.
    return mask_BT / jnp.maximum(segment_sums(mask_BT, segment_ids_BT), 1.0)


def trained_sequences(mask_BT: MaskBT, segment_ids_BT: IntBT) -> Float[Array, ""]:
    """Number of sequences with a trained token, to rounding; 1 where none has."""
    return jnp.maximum(jnp.sum(sequence_shares(mask_BT, segment_ids_BT)), 1.0)


def trained_tokens(mask_BT: MaskBT, segment_ids_BT: IntBT) -> FloatBT:
    return jnp.maximum(segment_sums(zeros_and_ones(mask_BT), segment_ids_BT), 1.0)


def rollout_numbers(batches: Sequence[TrainingBatch]) -> tuple[Int64[np.ndarray, " S"], list[str]]:
    """The rollout of each named segment as a number, and the names by these numbers."""
    return numbered([name for batch in batches for row in batch.rollout_ids for name in row])


def numbered(names: Sequence[str]) -> tuple[Int64[np.ndarray, " _"], list[str]]:
    # Numbered by first appearance, not by a set's order, which differs between processes.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64), list(numbers)


def is_cut(batch: TrainingBatch) -> bool:
    names = [name for row in batch.rollout_ids for name in row]
    return len(set(names)) < len(names)


def rollouts_of_tokens(
    batch: TrainingBatch, mask_BT: Bool[np.ndarray, "B T"]
) -> Int64[np.ndarray, " N"]:
    """The rollout of each token of the mask as an ascending number, or its segment without names.

    Rows of the mask beyond the batch's have no tokens.
    """
    row_N, position_N = np.nonzero(mask_BT)
    segment_N = batch.segment_ids[row_N, position_N]
    if not batch.rollout_ids:
        return np.unique(np.stack([row_N, segment_N]), axis=1, return_inverse=True)[1].reshape(-1)
    number_S, _ = rollout_numbers([batch])
    counts = np.array([len(row) for row in batch.rollout_ids], np.int64)
    first = np.cumsum(counts) - counts
    # Segments of a row count from 1: 0 is padding.
    return number_S[first[row_N] + segment_N - 1]


def rollout_shares(
    batch: TrainingBatch, mask_BT: Bool[np.ndarray, "B T"]
) -> Float32[np.ndarray, "B T"] | None:
    """At each trained token 1 / the trained tokens of its rollout, 0 elsewhere.

    None where every segment is a rollout: `sequence_shares` gives the same then.
    """
    if not is_cut(batch):
        return None
    rollout_N = rollouts_of_tokens(batch, mask_BT)
    shares_BT = np.zeros(mask_BT.shape, np.float32)
    shares_BT[mask_BT] = 1.0 / np.bincount(rollout_N)[rollout_N]
    return shares_BT
