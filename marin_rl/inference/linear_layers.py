"""Operands of a layer besides plain matrices: quantised weights, and LoRA adapters.

A quantised weight is dequantised for the one product that reads it and again in the backward pass,
and is never kept; training and engine read the same stacked arrays (`marin_rl.lora.quantization`).
Of an engine's adapters (`LowRank`) row 0 stands for none, row i for the i-th: a sequence's numbers
depend on its own alone. A quantised base is decoded with its adapter (`OwnLowRank`) apart, as it is
trained. Leaves out which layers of a model they replace (`training.adapters`).

Axes: L layers, n blocks of a layer or adapters, R rank, N sequences, T tokens of each, p parts of a
fused matrix, `in` and `out` those of a matrix.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn import Linear
from jaxtyping import Array, Float, Int32

from marin_rl.lora.adapter import LoraModule
from marin_rl.lora.quantization import FIELDS, dequantized_blocks, quantized_shapes
from marin_rl.models.block import times
from marin_rl.models.module import named_shape


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "absmax_steps", "absmax_mean"),
    meta_fields=("outputs", "inputs"),
)
@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Quantised matrices `[out, in]` of all layers; `absmax_*` are None for int8."""

    codes: Any
    scales: Any
    absmax_steps: Any
    absmax_mean: Any
    outputs: int
    inputs: int

    def times(self, x: Float[Array, "*N in"], layer: Any) -> Float[Array, "*N out"]:
        return _times(x, self, jnp.asarray(layer, jnp.int32))


@jax.custom_vjp
def _times(x: Array, matrix: QuantizedMatrix, layer: Array) -> Array:
    weight = dequantized(matrix, layer + _zero(x), x.dtype)
    return times(x, weight)


def _forward(x: Array, matrix: QuantizedMatrix, layer: Array) -> tuple[Array, Any]:
    # The codes and not the weight: kept for the backward pass, all layers would lie dequantised.
    return _times(x, matrix, layer), (matrix, layer)


def _backward(saved: Any, by_outputs: Array) -> Any:
    matrix, layer = saved
    weight = dequantized(matrix, layer + _zero(by_outputs), by_outputs.dtype)
    # no gradient of codes and scales: a quantised base is frozen
    return by_outputs @ weight, None, None


_times.defvjp(_forward, _backward)


def _zero(x: Array) -> Array:
    """0, in a way that a compiler cannot know without x.

    What depends on weights alone it would compute before the loops over microbatches and decode
    steps, for all layers, and keep; an `optimization_barrier` is gone by then on a CPU.
    """
    one = x.reshape(-1)[0]
    return ((one != one) & (one > 0)).astype(jnp.int32)


def dequantized(matrix: QuantizedMatrix, layer: Array, dtype: Any) -> Float[Array, "out in"]:
    """The matrix of one layer, computed in float32."""
    arrays = {
        name: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        for name in FIELDS
        if (array := getattr(matrix, name)) is not None
    }
    flat = dequantized_blocks(jnp, arrays).reshape(-1)
    # the last block may be padded
    size = matrix.outputs * matrix.inputs
    return flat[:size].reshape(matrix.outputs, matrix.inputs).astype(dtype)


class QuantizedWeight(eqx.Module):
    """Arrays of a stacked weight, all layers of it; see `marin_rl.lora.quantization`."""

    codes: NamedArray
    scales: NamedArray
    absmax_steps: NamedArray | None
    absmax_mean: NamedArray | None

    @staticmethod
    def like(weight: NamedArray, scheme: str) -> "QuantizedWeight":
        """Return shapes for the arrays of a stacked weight of a template."""
        shapes = quantized_shapes(tuple(axis.size for axis in weight.axes), scheme)
        dtypes = {"codes": jnp.int8, "scales": jnp.float32}
        if scheme == "nf4":
            # two codes of 4 bits in a byte, and scales that are quantised themselves
            dtypes = {"codes": jnp.uint8, "scales": jnp.int8}

        def shaped(field: str) -> Any:
            if field not in shapes:
                return None
            names = ("block", "in_block") if field == "codes" else (field,)
            inner = zip(names, shapes[field][1:], strict=False)
            axes = (weight.axes[0], *(Axis(f"quantized_{name}", size) for name, size in inner))
            return named_shape(*axes, dtype=dtypes.get(field, jnp.float32))

        return QuantizedWeight(*map(shaped, FIELDS))


class QuantizedLinear(eqx.Module):
    """A linear layer whose weight lies quantised, of all layers until `at` chooses one."""

    weight: QuantizedWeight
    bias: NamedArray | None
    layer: Any
    In: Any = eqx.field(static=True)
    Out: Any = eqx.field(static=True)

    @staticmethod
    def like(linear: Linear, scheme: str) -> "QuantizedLinear":
        weight = QuantizedWeight.like(linear.weight, scheme)
        return QuantizedLinear(weight, linear.bias, None, linear.In, linear.Out)

    def at(self, layer: Any) -> "QuantizedLinear":
        """The layer of this index, whose bias is in place already; no array is cut."""
        return dataclasses.replace(self, layer=layer)

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weight as matrices, by reference."""
        weight = self.weight
        named = weight.codes, weight.scales, weight.absmax_steps, weight.absmax_mean
        arrays = [None if each is None else each.array for each in named]
        outputs, inputs = (math.prod(a.size for a in axes_of(axes)) for axes in (self.Out, self.In))
        return QuantizedMatrix(*arrays, outputs=outputs, inputs=inputs)

    def __call__(self, inputs: NamedArray, *, key: Any = None) -> NamedArray:
        into, out = axes_of(self.In), axes_of(self.Out)
        # inputs last, as the matrix has its columns; haliax leaves the order of axes to the caller
        ordered = inputs.rearrange((..., *into))
        others = ordered.axes[: len(ordered.axes) - len(into)]
        x = ordered.array.reshape(*(axis.size for axis in others), -1)
        # dequantised within the product, one layer at a time: all at once would take the memory
        # that quantising saves
        product = self.matrix.times(x, self.layer)
        axes = (*others, *out)
        named = NamedArray(product.reshape([axis.size for axis in axes]), axes)
        return hax.auto_sharded(named if self.bias is None else named + self.bias)


class LoraLinear(eqx.Module):
    """A linear layer and its adapter: W x + scale B A x; A `[r, in...]`, B `[out..., r]`."""

    wrapped: Linear | QuantizedLinear
    lora_A: NamedArray
    lora_B: NamedArray
    rank: Axis = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    @staticmethod
    def like(linear: Linear, module: LoraModule, dtype: str) -> "LoraLinear":
        """Return the layer around a stacked `linear` of a template, with shapes for arrays."""
        inputs, outputs = axes_of(linear.In), axes_of(linear.Out)
        layer, rank = linear.weight.axes[0], Axis("lora_rank", module.rank)
        a = named_shape(layer, rank, *inputs, dtype=dtype)
        b = named_shape(layer, *outputs, rank, dtype=dtype)
        return LoraLinear(linear, a, b, rank, module.scale)

    def __call__(self, inputs: NamedArray, *, key: Any = None) -> NamedArray:
        # In the dtype of the inputs, as the base computes: masters of an adapter are float32 also
        # next to a base in bfloat16, and a scan over layers must return the dtype it is given.
        a, b = self.lora_A.astype(inputs.dtype), self.lora_B.astype(inputs.dtype)
        # Scaled at the rank, which is far narrower than the outputs.
        low = hax.dot(inputs, a, axis=self.wrapped.In) * self.scale
        change = hax.auto_sharded(hax.dot(low, b, axis=self.rank))
        return self.wrapped(inputs) + change


def axes_of(spec: Any) -> tuple[Axis, ...]:
    return (spec,) if isinstance(spec, Axis) else tuple(spec)


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
