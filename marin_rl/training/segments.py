"""Sums over the sequences of packed rows, and counts of their trained tokens.

Axes: B rows, T positions. `mask` is 1, or true, on trained tokens, `segment_ids` tells the
sequences of a row apart (0 is padding).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

FloatBT = Float[Array, "B T"]
# Arguments may be arrays of JAX or NumPy.
FloatArrayBT = Float[Array | np.ndarray, "B T"]
IntBT = Int[Array | np.ndarray, "B T"]
MaskBT = Shaped[Array | np.ndarray, "B T"]


def segment_sums(values_BT: FloatArrayBT, segment_ids_BT: IntBT) -> FloatBT:
    """At every position, the sum of `values` over the position's own segment."""
    return _by_segment(jax.ops.segment_sum, values_BT, segment_ids_BT)


def segment_maxima(values_BT: FloatArrayBT, segment_ids_BT: IntBT) -> FloatBT:
    """At every position, the largest of `values` in the position's own segment."""
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
    """Return a mask as float32."""
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
    """Trained tokens of the sequence of each position, at least 1."""
    return jnp.maximum(segment_sums(zeros_and_ones(mask_BT), segment_ids_BT), 1.0)
