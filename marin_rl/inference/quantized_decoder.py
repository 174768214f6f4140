"""Matrices of layers that lie quantised, and adapters that a model has itself, as decoded.

A model whose base is quantised is decoded with base and adapter apart, as it is trained: merged
weights could not lie quantised. Leaves out the products (`quantized_matrix`), and adapters that an
engine loads (`adapters`, `low_rank`).

Axes: r rank, N sequences, D width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from marin_rl.inference.quantized_matrix import QuantizedMatrix


class OwnLowRank(NamedTuple):
    """A model's own adapter on a weight: A [L, r, in...], B [L, out..., r], scale [L]."""

    a: Array
    b: Array
    scale: Array

    def change(self, x: Float[Array, "*N in"]) -> Float[Array, "*N out"]:
        """scale B A x; of one layer's arrays."""
        # Scaled at the rank, as the trainer does it.
        low = (x @ self.a.reshape(self.a.shape[0], -1).T) * self.scale
        return low @ self.b.reshape(-1, self.b.shape[-1]).T


class OwnAdapters(NamedTuple):
    """Own adapters on a layer's four matrices; parts are query, key, value, and gate, up."""

    qkv: tuple[OwnLowRank | None, ...]
    output: tuple[OwnLowRank | None, ...]
    gate_up: tuple[OwnLowRank | None, ...]
    down: tuple[OwnLowRank | None, ...]


@partial(jax.tree_util.register_dataclass, data_fields=("parts", "layer"), meta_fields=("groups",))
@dataclass(frozen=True, eq=False)
class LayerMatrix:
    """Matrices of one layer, whose products are joined as a fused matrix joins them.

    Quantised ones, of which `layer` is the index, or arrays [out..., in] of the layer alone.
    Outputs of each part are cut into `groups`, and lie group by group.
    """

    parts: tuple[Any, ...]
    layer: Any = None
    groups: int = 1

    def times(self, x: Float[Array, "*N in"]) -> Float[Array, "*N out"]:
        """The products with x, joined."""
        products = [self._product(part, x) for part in self.parts]
        cut = [product.reshape(*x.shape[:-1], self.groups, -1) for product in products]
        return jnp.concatenate(cut, axis=-1).reshape(*x.shape[:-1], -1)

    def _product(self, part: Any, x: Float[Array, "*N in"]) -> Array:
        if isinstance(part, QuantizedMatrix):
            return part.times(x, self.layer)
        matrix = part.reshape(-1, part.shape[-1])
        return jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())))


class QuantizedLayers(NamedTuple):
    """Quantised matrices of all layers: references to a model's arrays."""

    query: QuantizedMatrix
    key: QuantizedMatrix
    value: QuantizedMatrix
    output: QuantizedMatrix
    gate: QuantizedMatrix
    up: QuantizedMatrix
    down: QuantizedMatrix

    def of_layer(self, index: int, kv_heads: int) -> dict[str, LayerMatrix]:
        """The four matrices of a layer by name; no array is cut."""
        return {
            # by key/value head, as the rows of `Layer.qkv` are sorted
            "qkv": LayerMatrix((self.query, self.key, self.value), index, kv_heads),
            "output": LayerMatrix((self.output,), index),
            # in one piece: no tensor axis cuts what lies quantised
            "gate_up": LayerMatrix((self.gate, self.up), index),
            "down": LayerMatrix((self.down,), index),
        }
