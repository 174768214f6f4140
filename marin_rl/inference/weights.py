"""The arrays of a Levanter model, as the decoder wants to see them.

Owns the only reading of a model's insides: `read_model` takes references to its arrays (no copy,
so new weights cost nothing) and refuses by name what the decoder would compute otherwise than the
model does; `rotary_table` asks the model's own rotary module. Leaves out how they are cut and
joined (`weight_fusion`) and all arithmetic (`decoder`).

Axes: L layers, D width, F width of the MLP, V vocabulary, K key/value heads, G query heads per
key/value head, H head size, T positions.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import haliax as hax
import jax.numpy as jnp
import numpy as np
from equinox import filter_jit
from haliax.nn import Linear, RmsNorm
from haliax.nn.scan import Stacked
from jaxtyping import Array, Float, Float32, Int32
from levanter.layers.attention import Attention
from levanter.layers.rotary import RotaryEmbeddings
from levanter.models.gemma import GemmaConfig, GemmaDecoderLayer, GemmaLMHeadModel, GemmaRMSNorm
from levanter.models.llama import LlamaConfig, LlamaDecoderLayer, LlamaLMHeadModel
from levanter.models.lm_model import LmHeadModel
from levanter.models.mistral import MistralConfig, MistralLMHeadModel
from levanter.models.qwen import Qwen3Config, QwenConfig, QwenDecoderLayer, QwenLMHeadModel
from levanter.utils.activation import ActivationFunctionEnum

from marin_rl.errors import InputError
from marin_rl.inference.layer_matrices import (
    LayerAdapters,
    OwnAdapters,
    OwnLowRank,
    QuantizedLayers,
)
from marin_rl.inference.linear_layers import LoraLinear, QuantizedLinear, QuantizedMatrix

_Model = LlamaLMHeadModel | QwenLMHeadModel | MistralLMHeadModel | GemmaLMHeadModel
_Config = LlamaConfig | GemmaConfig
_DecoderLayer = LlamaDecoderLayer | QwenDecoderLayer | GemmaDecoderLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Static facts of a model: sizes, the norm's epsilon, the activation.

    `embedding_scale` multiplies what enters the first layer. A norm whose weight is `norm_offset`
    too small (Gemma's: it scales by 1 + weight) also multiplies before it rounds to the dtype.
    """

    layers: int
    kv_heads: int
    queries_per_kv: int
    head_size: int
    width: int
    vocabulary: int
    norm_epsilon: float
    activation: str
    embedding_scale: float = 1.0
    norm_offset: float = 0.0


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


class Norm(NamedTuple):
    """An RMSNorm: weight and bias [L, D] (or [D] where there is one), each may be None."""

    weight: Array | None
    bias: Array | None


class LayerNorms(NamedTuple):
    """Norms before attention and MLP, of queries and keys, and those that Llama's hybrid has."""

    attention: Norm
    mlp: Norm
    query: Norm | None
    key: Norm | None
    after_attention: Norm | None
    after_mlp: Norm | None


class Layers(NamedTuple):
    """Arrays of all layers, stacked on axis L exactly as the model holds them."""

    query: Affine
    key: Affine
    value: Affine
    output: Affine
    gate: Affine
    up: Affine
    down: Affine
    norms: LayerNorms


class Weights(NamedTuple):
    """References to a model's arrays: nothing is copied, so taking new ones costs nothing."""

    embedding: Float[Array, "V D"]
    embedding_norm: Norm | None
    layers: Layers
    final_norm: Norm
    head: Float[Array, "V D"]


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
    down_bias: Float[Array, " D"] | None
    norms: LayerNorms
    adapters: LayerAdapters | None = None
    own: OwnAdapters | None = None


class Ends(NamedTuple):
    """Weights before and after the layers: embedding, final norm, head."""

    embedding: Float[Array, "V D"]
    embedding_norm: Norm | None
    final_norm: Norm
    head: Float[Array, "V D"]


class Decoder(NamedTuple):
    """Weights in the layout and dtype that `decode_step` and `prefill` compute in.

    `quantized` are matrices of all layers that lie quantised: the model's own arrays.
    """

    embedding: Float[Array, "V D"]
    embedding_norm: Norm | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Float[Array, "V D"]
    quantized: QuantizedLayers | None = None

    def all_layers(self, spec: DecoderSpec) -> tuple[Layer, ...]:
        """The layers with their matrices; to be called inside a program."""
        quantized = self.quantized
        if quantized is None:
            return self.layers
        return tuple(
            layer._replace(**quantized.of_layer(index, spec.kv_heads))
            for index, layer in enumerate(self.layers)
        )


class Rotary(NamedTuple):
    """cos and sin of every position up to the cache's length."""

    cos: Float32[Array, "T half"]
    sin: Float32[Array, "T half"]


def read_model(model: LmHeadModel) -> tuple[DecoderSpec, Weights]:
    """The model's static description and references to its arrays.

    Raises InputError, naming what is not supported, rather than decode something else than the
    model computes.
    """
    if not isinstance(model, _Model):
        raise InputError(
            "the engine decodes Llama, Qwen2, Qwen3, Mistral and Gemma models; found "
            f"{type(model).__name__}"
        )
    stacked = model.transformer.layers
    if not isinstance(stacked, Stacked):
        raise InputError("the engine reads stacked layers: set scan_layers to true")
    # by reference: what the trainer updates by replacing arrays, and never in place, may be read
    # while it trains
    layer = cast(_DecoderLayer, stacked.stacked)
    _check_supported(model.config, layer)
    embedding = model.embeddings.token_embeddings.weight.array
    # Tied weights: the same array, not a copy.
    head = embedding if model.lm_head is None else _matrix(model.lm_head).float_weight
    assert head is not None, "a head never lies quantised"
    weights = Weights(
        embedding=embedding,
        embedding_norm=_norm(model.embeddings.norm),
        layers=_read_layers(layer),
        final_norm=_norm(model.transformer.norm),
        head=head,
    )
    return _spec(model.config, layer.self_attn, embedding.shape[0]), weights


def _spec(config: _Config, attention: Attention, vocabulary: int) -> DecoderSpec:
    gemma = isinstance(config, GemmaConfig)
    return DecoderSpec(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        queries_per_kv=config.num_heads // config.num_kv_heads,
        head_size=attention.config.head_size,
        width=config.hidden_dim,
        vocabulary=vocabulary,
        norm_epsilon=config.layer_norm_epsilon,
        activation=str(ActivationFunctionEnum(config.activation_function).value),
        # Gemma multiplies embeddings by sqrt(width), and its norms by 1 + weight.
        embedding_scale=math.sqrt(config.hidden_dim) if gemma else 1.0,
        norm_offset=1.0 if gemma else 0.0,
    )


def _check_supported(config: _Config, layer: _DecoderLayer) -> None:
    attention = layer.self_attn
    norm = GemmaRMSNorm if isinstance(config, GemmaConfig) else RmsNorm
    match config:
        case MistralConfig():
            # Levanter hands on the null of a Hugging Face configuration without one
            window = cast(int | None, config.sliding_window)
            has_window = window is not None and window < config.max_seq_len
        case QwenConfig() | Qwen3Config():
            has_window = config.use_sliding_window
        case _:
            has_window = False
    problems = {
        f"attention of type {type(attention).__name__}": type(attention) is not Attention,
        # Each would change the logits: an engine that ignored one would sample another policy.
        "a sliding window": attention.config.sliding_window is not None or has_window,
        "capped attention logits": attention.config.logits_soft_cap is not None,
        "another attention scale": attention.config.scaling_factor is not None,
        "no rotary embedding": attention.rot_embs is None,
        f"the norm {type(layer.input_layernorm).__name__}": type(layer.input_layernorm) is not norm,
    }
    unsupported = [name for name, wrong in problems.items() if wrong]
    if unsupported:
        raise InputError(f"the engine cannot decode a model with {', '.join(unsupported)}")


def _read_layers(layer: _DecoderLayer) -> Layers:
    attention, mlp = layer.self_attn, layer.mlp
    return Layers(
        query=_matrix(attention.q_proj),
        key=_matrix(attention.k_proj),
        value=_matrix(attention.v_proj),
        output=_matrix(attention.o_proj),
        gate=_matrix(mlp.gate_proj),
        up=_matrix(mlp.up_proj),
        down=_matrix(mlp.down_proj),
        norms=LayerNorms(
            attention=_norm(layer.input_layernorm),
            mlp=_norm(layer.post_attention_layernorm),
            query=_norm(attention.q_norm),
            key=_norm(attention.k_norm),
            # only Llama's hybrid norm has these two
            after_attention=_norm(getattr(layer, "post_attn_layernorm", None)),
            after_mlp=_norm(getattr(layer, "post_mlp_layernorm", None)),
        ),
    )


def _matrix(linear: Linear | LoraLinear | QuantizedLinear) -> Affine:
    if isinstance(linear, LoraLinear):
        a, b = linear.lora_A.array, linear.lora_B.array
        # one scale for each layer, so that slicing the stack by layer slices it too
        own = OwnLowRank(a, b, jnp.full(a.shape[:1], linear.scale, jnp.float32))
        return _matrix(linear.wrapped)._replace(own=own)
    bias = None if linear.bias is None else linear.bias.array
    if isinstance(linear, QuantizedLinear):
        return Affine(linear.matrix, bias)
    # Another layout would decode to other logits without any error.
    if linear.reparam.active_scale != 1 or not linear._out_first:
        raise InputError("the engine reads plain linear layers with the output axis first")
    return Affine(linear.weight.array, bias)


def _norm(norm: Any) -> Any:
    if norm is None:
        return None
    return Norm(
        None if norm.weight is None else norm.weight.array,
        None if norm.bias is None else norm.bias.array,
    )


def rotary_table(model: LmHeadModel, length: int) -> Rotary:
    """cos and sin [length, H/2] of every position, by the model's own rotary module.

    Rotating the vector (1…1, 0…0) gives (cos, sin) for any variant of rotary embedding.
    """
    layer = cast(_DecoderLayer, cast(Stacked, model.transformer.layers).stacked)  # type: ignore[attr-defined]
    embeddings = cast(RotaryEmbeddings, layer.self_attn.rot_embs)
    half = layer.self_attn.config.head_size // 2
    position = hax.Axis("position", length)
    axes = (position, layer.self_attn.config.HeadSize)
    # A rotation turns (1, 0) into (cos, sin), so no variant has to be known here.
    probe = np.zeros((length, 2 * half), np.float32)
    probe[:, :half] = 1
    return _rotated(embeddings, axes, probe, np.arange(length, dtype=np.int32))


@filter_jit
def _rotated(
    embeddings: RotaryEmbeddings,
    axes: tuple[hax.Axis, hax.Axis],
    rows_TH: Float32[Array | np.ndarray, "T H"],
    positions_T: Int32[Array | np.ndarray, " T"],
) -> Rotary:
    """Both halves of rows rotated by their positions: one program, not one for each operation.

    Positions are an argument, so that the table is not computed while it compiles.
    """
    turned = embeddings(hax.named(rows_TH, axes), hax.named(positions_T, axes[:1]))
    table_TH = turned.rearrange(axes).array
    half = table_TH.shape[1] // 2
    return Rotary(table_TH[:, :half], table_TH[:, half:])


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


def own_ends(weights: Weights) -> Ends:
    return Ends(weights.embedding, weights.embedding_norm, weights.final_norm, weights.head)
