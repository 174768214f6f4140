"""Products with weights that lie quantised, for training and the engine alike.

A weight is dequantised for the one product that reads it and again in the backward pass, and is
never kept. Both read the same arrays, stacked over layers, and nothing cuts them apart, for that
would be a copy. The formats are those of `marin_rl.lora.quantization`.

Axes: L layers, n blocks of a layer, `in` and `out` those of a matrix.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from marin_rl.lora.quantization import ABSMAX_BLOCK, NF4_LEVELS


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
        """The products of x with the matrix of a layer, in x's dtype."""
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
