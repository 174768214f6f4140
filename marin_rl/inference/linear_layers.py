"""Linear layers with an adapter, or quantised weights, for training and engine alike.

A quantised weight is dequantised for the one product that reads it and again in the backward pass,
and is never kept. Training and engine read the same arrays, stacked over layers, and nothing cuts
them apart, for that would be a copy. The formats are those of `marin_rl.lora.quantization`. Leaves
out which layers of a model they replace (`training.adapters`).

Axes: L layers, n blocks of a layer, `in` and `out` those of a matrix.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn import Linear
from jaxtyping import Array, Float

from marin_rl.lora import LoraModule
from marin_rl.lora.quantization import ABSMAX_BLOCK, FIELDS, NF4_LEVELS, quantized_shapes
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
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


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

    def own(array: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)

    codes, scales = own(matrix.codes), own(matrix.scales)
    if matrix.absmax_steps is None:
        values = codes.astype(jnp.float32)
    else:
        # Halves of a block side by side: to interleave what is in a byte takes longer.
        levels = jnp.asarray(NF4_LEVELS, jnp.float32)
        values = jnp.concatenate([levels[codes & 15], levels[codes >> 4]], axis=-1)
        steps = jnp.repeat(own(matrix.absmax_steps), ABSMAX_BLOCK)[: scales.shape[0]]
        scales = scales.astype(jnp.float32) * steps + own(matrix.absmax_mean)
        scales = jnp.maximum(scales, 0)
    flat = (values * scales[:, None]).reshape(-1)
    # the last block may be padded
    size = math.prod((matrix.outputs, matrix.inputs))
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
