"""Weights in the layout that the programs multiply with: matrices cut by layer, and joined.

Owns which matrices are joined, and how they are spread on a mesh. Leaves out reading a model's
arrays (`weights`) and when they are fused (`runner`).

Axes: D width, F width of the MLP, K key/value heads, G query heads per key/value head, H head size.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from marin_rl.inference.layer_matrices import OwnAdapters, QuantizedLayers
from marin_rl.inference.placement import TENSOR, UNDIVIDED, constrain
from marin_rl.inference.weights import (
    Decoder,
    Ends,
    Layer,
    Layers,
    Weights,
    own_layout,
    quantized_layers,
    without_quantized,
)
from marin_rl.models.experts import by_piece, pieces
from marin_rl.models.spec import Spec


@partial(jax.jit, static_argnames=("spec", "dtype"))
def compiled_layers(spec: Spec, layers: Layers, dtype: jnp.dtype) -> tuple[Layer, ...]:
    """Slice the stacked layers and join what is multiplied with the same vector.

    Compiled, so that the other programs read its results at full speed. On a mesh this is where
    weights that are spread over fsdp are gathered; what is spread over tensor stays so.
    """
    # Cast before joining: the joined copy is then of the small dtype from the start.
    layers = jax.tree.map(lambda leaf: leaf.astype(dtype), layers)
    return tuple(
        _fuse_layer(spec, jax.tree.map(lambda leaf, i=index: leaf[i], layers))
        for index in range(spec.layers)
    )


@partial(jax.jit, static_argnames="dtype")
def _compiled_ends(weights: Weights, dtype: jnp.dtype) -> Ends:
    """The same for what has no layers."""
    ends = jax.tree.map(lambda leaf: leaf.astype(dtype), weights.ends)
    return Ends(
        embedding=constrain(ends.embedding, TENSOR, UNDIVIDED),
        positions=jax.tree.map(constrain, ends.positions),
        final_norm=jax.tree.map(constrain, ends.final_norm),
        head=constrain(ends.head, TENSOR, UNDIVIDED),
    )


def _fuse_layer(spec: Spec, layer: Layers) -> Layer:
    own = OwnAdapters(
        qkv=(layer.query.own, layer.key.own, layer.value.own),
        output=(layer.output.own,),
        gate_up=(layer.gate.own, layer.up.own) if spec.gated else (layer.up.own,),
        down=(layer.down.own,),
    )
    # one product each for query, key and value and for gate and up: fewer and longer operations
    attention = (layer.query, layer.key, layer.value)
    qkv = _by_head(spec, [affine.float_weight for affine in attention])
    gate_up = _by_piece([_side_by_side(spec, each.float_weight) for each in (layer.gate, layer.up)])
    output, down = layer.output.float_weight, layer.down.float_weight
    if spec.experts:  # [D, X, F]
        down = jnp.moveaxis(by_piece(jnp.moveaxis(down, 0, -1), pieces(spec.mlp_width)), -1, 0)
    output, down = (
        None if matrix is None else constrain(matrix.reshape(spec.width, -1), UNDIVIDED, TENSOR)
        for matrix in (output, down)
    )
    return Layer(
        qkv=None if qkv is None else qkv.reshape(-1, spec.width),
        output=output,
        gate_up=gate_up,
        down=down,
        own=own if any(part is not None for parts in own for part in parts) else None,
        **_beside_matrices(spec, layer),
    )


def _beside_matrices(spec: Spec, layer: Layers) -> dict[str, Any]:
    """Fields of a layer but for its four matrices; biases are joined as these are."""
    replicated = jax.tree.map(constrain, layer)
    qkv_bias = _by_head(spec, [each.bias for each in (layer.query, layer.key, layer.value)])
    return {
        "qkv_bias": None if qkv_bias is None else qkv_bias.reshape(-1),
        "output_bias": replicated.output.bias,
        "gate_up_bias": _by_piece([_side_by_side(spec, b.bias) for b in (layer.gate, layer.up)]),
        "down_bias": replicated.down.bias,
        "norms": replicated.norms,
        "activation": replicated.activation,
        "router": replicated.router,
        "sinks": replicated.sinks,
    }


def _side_by_side(spec: Spec, array: Array | None) -> Array | None:
    """A matrix or bias of an MLP, [F, ...]; of experts, [X, F, ...], piece by piece of their F."""
    if array is None or not spec.experts:
        return array
    return by_piece(array, pieces(spec.mlp_width)).reshape(-1, *array.shape[2:])


def layer_of(spec: Spec, layer: Layers) -> Layer:
    """A layer that multiplies with the model's own arrays, one after the other; on one device."""
    weights = {name: getattr(layer, name).float_weight for name in QuantizedLayers._fields}
    matrices = QuantizedLayers(**weights).of_layer(None, spec.kv_heads)
    return Layer(**matrices, **_beside_matrices(spec, layer))


def _by_head(spec: Spec, parts: list[Array | None]) -> Array | None:
    """Weights [K, out, D] or biases [K, out] of query, key and value, joined for each head."""
    # key and value as one more query of their group each: so one product gives all three for a head
    query, *others = parts
    grouped = [query, *(other if other is None else other[:, None] for other in others)]
    present = [
        constrain(part, TENSOR).reshape(spec.kv_heads, -1, *part.shape[3:])
        for part in grouped
        if part is not None
    ]
    return constrain(jnp.concatenate(present, axis=1), TENSOR) if present else None


def _by_piece(parts: list[Array | None]) -> Array | None:
    """Gate and up [F, …] joined piece by piece, so that each device holds a piece of both.

    In one matrix and not on a further axis: XLA would transpose that at every step on a CPU.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    # by the mesh's pieces: gate and up of the same columns must lie on one device, where they are
    # multiplied
    count = pieces(present[0].shape[0])
    cut = [part.reshape(count, -1, *part.shape[1:]) for part in present]
    return constrain(jnp.concatenate(cut, axis=1).reshape(-1, *present[0].shape[1:]), TENSOR)


def split_gate_up(joined: Float[Array, "... F2"]) -> tuple[Array, Array]:
    """Gate and up [..., F] from what `Layer.gate_up` was multiplied to."""
    *lead, both = joined.shape
    cut = joined.reshape(*lead, pieces(both // 2), 2, -1)
    return cut[..., 0, :].reshape(*lead, -1), cut[..., 1, :].reshape(*lead, -1)


def fused_weights(spec: Spec, weights: Weights, dtype: jnp.dtype) -> Decoder:
    """Weights that the programs read at every step; arrays used as they are are not copied."""
    ends = weights.ends
    on_mesh = bool(jax.sharding.get_abstract_mesh().shape)
    if on_mesh or any(leaf.dtype != dtype for leaf in jax.tree.leaves(ends)):
        ends = _compiled_ends(weights, dtype=dtype)
    own = without_quantized(weights.layers)
    layers = compiled_layers(spec=spec, layers=own, dtype=dtype)
    return Decoder(ends, layers, quantized_layers(weights.layers))


def weights_in_place(spec: Spec, weights: Weights, dtype: jnp.dtype) -> Decoder | None:
    """The model's own memory as programs read it: nothing is copied, and nothing compiled.

    For one CPU. None where that is not possible: the weights lie quantised, have adapters of their
    own, or are of another dtype than `dtype`.
    """
    leaves = jax.tree.leaves(weights)
    if own_layout(weights.layers) or any(leaf.dtype != dtype for leaf in leaves):
        return None
    # a device on the CPU takes a view of memory that is aligned as it is; else it copies
    host = jax.tree.map(np.asarray, weights.layers)
    output = host.output.float_weight.reshape(spec.layers, spec.width, -1)
    down = host.down.float_weight.reshape(spec.layers, spec.width, -1)
    host = host._replace(
        output=host.output._replace(weight=output), down=host.down._replace(weight=down)
    )
    # all at once: a call for each array takes longer than a prompt's first layers
    layers = jax.device_put(
        [jax.tree.map(lambda leaf, i=index: leaf[i], host) for index in range(spec.layers)]
    )
    return Decoder(weights.ends, tuple(layer_of(spec, layer) for layer in layers))
