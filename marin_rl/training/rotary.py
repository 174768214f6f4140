"""Rotary embedding by a table of cosines and sines that all layers of a pass share.

Levanter computes both from the positions in every layer, for queries and keys each, and XLA again
in the backward pass; a CPU spends 6 % of a small model's step on that. Here they are computed once
for the rows of a pass, by the model's own rotary module, so every variant of rotary embedding is
covered. XLA rounds the rotation itself differently in the last bit when the table is an operand, so
rows of one sequence, whose steps must replay to the bits of earlier runs, keep Levanter's way.
"""

import dataclasses
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.layers.rotary import RotaryEmbeddings


class Rotation(NamedTuple):
    """Cosine and sine of every position and coordinate: [batch, position, head_size]."""

    cos: NamedArray
    sin: NamedArray


class TableRotary(RotaryEmbeddings):
    """A rotary module that is given a `Rotation` in the place of positions."""

    def __call__(self, q: NamedArray, position_ids: Rotation) -> NamedArray:  # type: ignore[override]
        """Rotate the halves of each head of `q`, as Levanter's modules do."""
        axis = q.resolve_axis("head_size")
        half = axis.size // 2
        turned = hax.concatenate(axis, (-q[axis, half:], q[axis, :half]))
        return q * position_ids.cos + turned * position_ids.sin


def with_rotation(
    layers: Any, positions: NamedArray, dtype: jnp.dtype
) -> tuple[Any, NamedArray | Rotation]:
    """Stacked layers that take a `Rotation` as their `pos_ids`, and that of `positions`.

    Both are returned as they are where the layers have no rotary module.
    """
    attention = layers.stacked.self_attn
    if attention.rot_embs is None:
        return layers, positions
    rotation = _rotation(attention.rot_embs, positions, attention.config.HeadSize, dtype)
    changed = dataclasses.replace(attention, rot_embs=TableRotary())
    stacked = dataclasses.replace(layers.stacked, self_attn=changed)
    return dataclasses.replace(layers, stacked=stacked), rotation


def _rotation(
    embeddings: RotaryEmbeddings, positions: NamedArray, head_size: hax.Axis, dtype: jnp.dtype
) -> Rotation:
    """The table: rotating the vector (1…1, 0…0) gives (cos, sin), whatever the variant is."""
    half = head_size.size // 2
    probe = hax.named((jnp.arange(head_size.size) < half).astype(dtype), (head_size,))
    table = embeddings(probe.broadcast_axis(positions.axes), positions)
    cos, sin = table[head_size, :half], table[head_size, half:]
    # Without the barrier XLA computes both again in every layer, next to what they are used for.
    arrays = jax.lax.optimization_barrier(
        tuple(hax.concatenate(head_size, (each, each)).array for each in (cos, sin))
    )
    axes = (*(axis for axis in cos.axes if axis.name != head_size.name), head_size)
    return Rotation(*(hax.named(each, axes) for each in arrays))
