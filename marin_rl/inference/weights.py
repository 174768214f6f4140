"""The arrays of a model, as the decoder wants to see them.

`read_model` takes references to its arrays: no copy, so new weights cost nothing. Leaves out how
they are cut and joined (`weight_fusion`) and all arithmetic (`decoder`).

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

from marin_rl.inference.layer_matrices import (
    LayerAdapters,
    OwnAdapters,
    OwnLowRank,
    QuantizedLayers,
)
from marin_rl.inference.linear_layers import LoraLinear, QuantizedLinear, QuantizedMatrix
from marin_rl.models.block import Activation, Norm, Norms, angles_of
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
    """Weights before and after the layers: embedding, final norm, head."""

    embedding: Float[Array, "V D"]
    positions: Float[Array, "T D"] | None
    final_norm: Norm
    head: Float[Array, "V D"]


class Weights(NamedTuple):
    """References to a model's arrays: nothing is copied, so taking new ones costs nothing."""

    ends: Ends
    layers: Layers


class Layer(NamedTuple):
    """Layer, ready to multiply with: query, key and value in one matrix, gate and up in one.

    Rows of `qkv` are sorted by key/value head, those of `gate_up` by the piece that a device of the
    mesh's tensor axis holds: so both are cut at the same places as the model's own arrays.
    `adapters` is None in an engine that has none, `own` where the model itself has none. Matrices
    that lie quantised are None until `Decoder.all_layers` gives them.
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

    `quantized` are matrices of all layers that lie quantised: the model's own arrays.
    """

    ends: Ends
    layers: tuple[Layer, ...]
    quantized: QuantizedLayers | None = None

    def all_layers(self, spec: Spec) -> tuple[Layer, ...]:
        """The layers with their matrices; to be called inside a program."""
        quantized = self.quantized
        if quantized is None:
            return self.layers
        return tuple(
            layer._replace(**quantized.of_layer(index, spec.kv_heads))
            for index, layer in enumerate(self.layers)
        )


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
    matrices = {name: getattr(layers, name).weight for name in QuantizedLayers._fields}
    if not isinstance(layers.query.weight, QuantizedMatrix):
        return None
    return QuantizedLayers(**matrices)


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
