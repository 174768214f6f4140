"""The arrays of a model as the decoder multiplies with them: read, cut by layer, and joined.

`read_model` takes references to a model's arrays: no copy, so new weights cost nothing. Owns which
matrices are joined, and how they are spread on a mesh. Leaves out when they are fused (`runner`)
and all arithmetic (`decoder`).

Axes: L layers, D width, F width of the MLP, V vocabulary, K key/value heads, G query heads per
key/value head, H head size, T positions.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax.nn import Linear
from jaxtyping import Array, Float, Float32

from marin_rl.inference.linear_layers import (
    LayerAdapters,
    LoraLinear,
    OwnAdapters,
    OwnLowRank,
    QuantizedLayers,
    QuantizedLinear,
    QuantizedMatrix,
)
from marin_rl.inference.placement import TENSOR, UNDIVIDED, constrain
from marin_rl.models.block import Activation, Norm, Norms, angles_of
from marin_rl.models.experts import by_piece, pieces
from marin_rl.models.module import LanguageModel, Matrix, activation_of, norms_of
from marin_rl.models.spec import Spec

# Cosines and sines of every position up to the cache's length, of each of `Spec.ropes`.
Rotary = tuple[tuple[Float32[Array, "T size"], Float32[Array, "T size"]], ...]


class Affine(NamedTuple):
    """A linear map of every layer: weight [L, out..., in...], bias [L, out...] or None.

    `own` is the model's own adapter on it. A weight may lie quantised.
    """

    weight: Array | QuantizedMatrix | None
    bias: Array | None
    own: OwnLowRank | None = None

    @property
    def float_weight(self) -> Any:
        """The weight, or its shape in a template; None for one that lies quantised."""
        assert not isinstance(self.weight, QuantizedMatrix), "a program would copy it"
        return self.weight


class Layers(NamedTuple):
    """Arrays of all layers, stacked on axis L exactly as the model holds them."""

    query: Affine
    key: Affine
    value: Affine
    output: Affine
    gate: Affine  # of a plain MLP, without a weight
    up: Affine
    down: Affine
    norms: Norms
    activation: Activation | None
    router: Affine | None = None
    sinks: Array | None = None


class Ends(NamedTuple):
    """Weights before and after the layers: embedding, final norm, head.

    Those of a decoder have its rotary table too.
    """

    embedding: Float[Array, "V D"]
    positions: Float[Array, "T D"] | None
    final_norm: Norm
    head: Float[Array, "V D"]
    rotary: Rotary = ()


class Weights(NamedTuple):
    """References to a model's arrays: nothing is copied, so taking new ones costs nothing."""

    ends: Ends
    layers: Layers


class Layer(NamedTuple):
    """Layer, ready to multiply with: query, key and value in one matrix, gate and up in one.

    Rows of `qkv` are sorted by key/value head, those of `gate_up` by the piece that a device of the
    mesh's tensor axis holds: so both are cut at the same places as the model's own arrays.
    `adapters` is None in an engine that has none, `own` where the model itself has none. Matrices
    that lie quantised are None until `Decoder.layer` gives them.
    """

    qkv: Any
    qkv_bias: Float[Array, " out"] | None
    output: Any
    output_bias: Float[Array, " D"] | None
    gate_up: Any
    gate_up_bias: Float[Array, " F2"] | None
    down: Any
    down_bias: Float[Array, "*X D"] | None
    norms: Norms
    activation: Activation | None
    router: Affine | None = None
    sinks: Float[Array, "K G"] | None = None
    adapters: LayerAdapters | None = None
    own: OwnAdapters | None = None


class Decoder(NamedTuple):
    """Weights in the layout and dtype that `decode_step` and `prefill` compute in.

    `quantized` are matrices of all layers that lie quantised: the model's own arrays. Others are an
    array for each layer: a scan over layers would copy each layer's weights before it reads them.
    """

    ends: Ends
    layers: tuple[Layer, ...]
    quantized: QuantizedLayers | None = None

    def layer(self, spec: Spec, index: int) -> Layer:
        """A layer with its matrices; to be called inside a program."""
        layer = self.layers[index]
        if self.quantized is None:
            return layer
        return layer._replace(**self.quantized.of_layer(index, spec.kv_heads))


def read_model(model: LanguageModel) -> tuple[Spec, Weights]:
    """The model's description and references to its arrays."""
    # By reference: what the trainer updates by replacing arrays, and never in place, may be read
    # while it trains.
    ends = Ends(model.embedding, model.positions, model.final_norm, model.head)
    spec, layer = model.spec, model.layers.stacked
    attention, mlp = layer.self_attn, layer.mlp
    assert attention is not None
    # Experts lie side by side: [L, X, F, D] and [L, D, X, F].
    matrices = mlp if mlp.experts is None else mlp.experts
    layers = Layers(
        query=_matrix(attention.q_proj),
        key=_matrix(attention.k_proj),
        value=_matrix(attention.v_proj),
        output=_matrix(attention.o_proj),
        gate=Affine(None, None) if matrices.gate_proj is None else _matrix(matrices.gate_proj),
        up=_matrix(matrices.up_proj),
        down=_matrix(matrices.down_proj),
        norms=norms_of(spec, layer),
        activation=activation_of(layer),
        router=None if mlp.router is None else _matrix(mlp.router),
        sinks=None if attention.sinks is None else attention.sinks.array,
    )
    return spec, Weights(ends, layers)


def _matrix(linear: Linear | LoraLinear | QuantizedLinear | Matrix) -> Affine:
    if isinstance(linear, LoraLinear):
        a, b = linear.lora_A.array, linear.lora_B.array
        # one scale for each layer, so that slicing the stack by layer slices it too
        own = OwnLowRank(a, b, jnp.full(a.shape[:1], linear.scale, jnp.float32))
        return _matrix(linear.wrapped)._replace(own=own)
    bias = None if linear.bias is None else linear.bias.array
    if isinstance(linear, QuantizedLinear):
        return Affine(linear.matrix, bias)
    return Affine(linear.weight.array, bias)


def rotary_table(spec: Spec, length: int) -> Rotary:
    return _rotary_table(np.arange(length, dtype=np.int32), spec=spec)


@partial(jax.jit, static_argnames="spec")
def _rotary_table(positions: Array | np.ndarray, spec: Spec) -> Rotary:
    # Positions are an argument, so that the table is not computed while it compiles.
    return tuple(angles_of(rope, jnp.asarray(positions)) for rope in spec.ropes)


def quantized_layers(layers: Layers) -> QuantizedLayers | None:
    if not isinstance(layers.query.weight, QuantizedMatrix):
        return None
    return QuantizedLayers(*(getattr(layers, name).weight for name in QuantizedLayers._fields))


def without_quantized(layers: Layers) -> Layers:
    """The layers but for matrices that lie quantised: no program is to copy them."""
    if not isinstance(layers.query.weight, QuantizedMatrix):
        return layers
    names = QuantizedLayers._fields
    return layers._replace(**{n: getattr(layers, n)._replace(weight=None) for n in names})


def own_layout(layers: Layers) -> str:
    """Layout of what lies quantised, and the model's own ranks; empty for plain weights."""
    quantized = quantized_layers(layers)
    named = [(name, getattr(layers, name).own) for name in QuantizedLayers._fields]
    ranks = [f"{name} {own.a.shape[1]}" for name, own in named if own is not None]
    codes = [] if quantized is None else [str(quantized.query.codes.dtype)]
    return ", ".join([*codes, *ranks])


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


def fused_weights(
    spec: Spec,
    weights: Weights,
    dtype: jnp.dtype,
    rotary: Rotary = (),
) -> Decoder:
    """Arrays that the programs read at every step; those used as they are are not copied."""
    ends = weights.ends
    on_mesh = bool(jax.sharding.get_abstract_mesh().shape)
    if on_mesh or any(leaf.dtype != dtype for leaf in jax.tree.leaves(ends)):
        ends = _compiled_ends(weights, dtype=dtype)
    own = without_quantized(weights.layers)
    ends, quantized = ends._replace(rotary=rotary), quantized_layers(weights.layers)
    return Decoder(ends, compiled_layers(spec=spec, layers=own, dtype=dtype), quantized)


def decoder_of(
    spec: Spec, weights: Weights, dtype: jnp.dtype, rotary: Rotary = (), *, in_place: bool = False
) -> Decoder:
    """Weights as the programs read them: `in_place` where that is possible, else a joined copy."""
    found = weights_in_place(spec, weights, dtype, rotary) if in_place else None
    return fused_weights(spec, weights, dtype, rotary) if found is None else found


def fit_in_place(weights: Weights, dtype: jnp.dtype) -> bool:
    """False if weights lie quantised, have adapters of their own, or are of another dtype."""
    leaves = jax.tree.leaves(weights)
    return not own_layout(weights.layers) and all(leaf.dtype == dtype for leaf in leaves)


def weights_in_place(
    spec: Spec, weights: Weights, dtype: jnp.dtype, rotary: Rotary
) -> Decoder | None:
    """The model's own memory as programs read it: nothing is copied, and nothing compiled.

    For one CPU. None where that is not possible: see `fit_in_place`.
    """
    if not fit_in_place(weights, dtype):
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
    ends = weights.ends._replace(rotary=rotary)
    return Decoder(ends, tuple(layer_of(spec, layer) for layer in layers))
