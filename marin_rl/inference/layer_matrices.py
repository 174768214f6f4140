"""Operands of a layer besides plain matrices: quantised weights, and LoRA adapters.

An engine's own adapters (`LowRank`) are one or none for each sequence. Row 0 stands for no adapter,
row i for the i-th. Where every sequence has one token, all adapters are applied to all of them, and
the parts of other adapters become exact zeros at rank R: a sequence's numbers depend only on its
own adapter. Where a sequence has many tokens, as prompts do, it reads only its own adapter.
A model whose base is quantised is decoded with base and adapter (`OwnLowRank`) apart, as it is
trained: merged weights could not lie quantised.

Axes: n adapters, R rank, N sequences, T tokens of each, p parts of a fused matrix, L layers.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from marin_rl.inference.linear_layers import QuantizedMatrix


class LowRank(NamedTuple):
    """Additions of every adapter to a matrix of p parts: `a` [p, n, R, in], `b` [n, R, out] each.

    The scale alpha / rank is multiplied into `b`.
    """

    a: Float[Array, "p n R in"]
    b: tuple[Float[Array, "n R _"], ...]


class GatheredLowRank(LowRank):
    """Additions of which each sequence reads only its own adapter, however few tokens it has.

    For many adapters of a large rank, all of which would take longer than one.
    """


class LayerAdapters(NamedTuple):
    """Additions to a layer's four matrices; parts are query, key, value, and gate, up.

    Those of an MLP are None where it is one of experts.
    """

    qkv: LowRank
    output: LowRank
    gate_up: LowRank | None
    down: LowRank | None


def additions(
    adapters: LowRank, x: Float[Array, "N *T in"], row_N: Int32[Array, " N"]
) -> list[Array]:
    """Additions to each part's product with `x`, [N, *T, out]: of row 0 they are zeros."""
    if isinstance(adapters, GatheredLowRank) or x.ndim > 2:
        return _gathered(adapters, x, row_N)
    # Ranks first and sequences last: every part is contiguous, and the products have one width
    # whatever n is. On a CPU that takes a quarter less time than sequences first, and a sequence's
    # bits are the same however many adapters there are.
    p, n, R, size = adapters.a.shape
    z = jax.lax.dot_general(adapters.a.reshape(p * n * R, size), x, (((1,), (1,)), ((), ())))
    own_nN = jnp.arange(1, n + 1)[:, None] == row_N
    # `where` and not a product: another adapter may make an infinity of these numbers
    z = jnp.where(own_nN[:, None], z.reshape(p, n, R, -1), 0)
    parts = z.reshape(p, n * R, -1)
    rank_first = (((0,), (0,)), ((), ()))
    return [
        jax.lax.dot_general(part, b.reshape(n * R, -1), rank_first)
        for part, b in zip(parts, adapters.b, strict=True)
    ]


def _gathered(adapters: LowRank, x: Array, row_N: Array) -> list[Array]:
    # row 0 reads some adapter all the same, and its result is dropped below: every index is in
    # range
    at_N = jnp.maximum(row_N - 1, 0)
    z = jnp.einsum("n...i,pnri->pn...r", x, adapters.a[:, at_N])
    present = (row_N > 0).reshape(-1, *(1,) * (x.ndim - 1))
    parts = jnp.where(present, z, 0)
    return [
        jnp.einsum("n...r,nro->n...o", part, b[at_N])
        for part, b in zip(parts, adapters.b, strict=True)
    ]


class OwnLowRank(NamedTuple):
    """A model's own adapter on a weight: A [L, r, in...], B [L, out..., r], scale [L]."""

    a: Array
    b: Array
    scale: Array

    def change(self, x: Float[Array, "*N in"]) -> Float[Array, "*N out"]:
        # scale B A x of one layer's arrays, scaled at the rank, as the trainer does it
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
        products = [self._product(part, x) for part in self.parts]
        cut = [product.reshape(*x.shape[:-1], self.groups, -1) for product in products]
        return jnp.concatenate(cut, axis=-1).reshape(*x.shape[:-1], -1)

    def _product(self, part: Any, x: Float[Array, "*N in"]) -> Array:
        if isinstance(part, QuantizedMatrix):
            return part.times(x, self.layer)
        matrix = part.reshape(-1, part.shape[-1])
        return jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())))


class QuantizedLayers(NamedTuple):
    """Quantised matrices of all layers, or arrays of one: references to a model's."""

    query: Any
    key: Any
    value: Any
    output: Any
    gate: Any  # None of a plain MLP
    up: Any
    down: Any

    def of_layer(self, index: int | None, kv_heads: int) -> dict[str, LayerMatrix]:
        """The four matrices of a layer by name; no array is cut. `index` is None of one alone."""
        halves = self.gate, self.up
        return {
            # by key/value head, as the rows of `Layer.qkv` are sorted
            "qkv": LayerMatrix((self.query, self.key, self.value), index, kv_heads),
            "output": LayerMatrix((self.output,), index),
            # in one piece: no tensor axis cuts what lies quantised
            "gate_up": LayerMatrix(tuple(half for half in halves if half is not None), index),
            "down": LayerMatrix((self.down,), index),
        }
