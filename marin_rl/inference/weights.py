"""The arrays of a Levanter model, as the decoder wants to see them.

Owns the only reading of a model's insides: `read_model` takes references to its arrays (no copy,
so new weights cost nothing) and refuses by name what the decoder would compute otherwise than the
model does; `fuse` cuts and joins them inside a compiled program; `rotary_table` asks the model's
own rotary module. Leaves out all arithmetic (`decoder`).

Axes: L layers, D width, F width of the MLP, V vocabulary, K key/value heads, G query heads per
key/value head, H head size, T positions.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.nn import Linear, RmsNorm
from haliax.nn.scan import Stacked
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Float32
from levanter.layers.attention import Attention
from levanter.layers.rotary import RotaryEmbeddings
from levanter.models.llama import LlamaConfig, LlamaDecoderLayer, LlamaLMHeadModel
from levanter.models.lm_model import LmHeadModel
from levanter.models.qwen import QwenConfig, QwenDecoderLayer, QwenLMHeadModel
from levanter.utils.activation import ActivationFunctionEnum

from marin_rl.errors import InputError

Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """What is static about a model: sizes, the norm's epsilon, the activation."""

    layers: int
    kv_heads: int
    queries_per_kv: int
    head_size: int
    width: int
    vocabulary: int
    norm_epsilon: float
    activation: str


class Affine(NamedTuple):
    """A linear map of every layer: weight [L, out..., in...], bias [L, out...] or None."""

    weight: Array
    bias: Array | None


class Norm(NamedTuple):
    """An RMSNorm: weight and bias [L, D] (or [D] where there is one), each may be None."""

    weight: Array | None
    bias: Array | None


class Layers(NamedTuple):
    """All layers' arrays, stacked on axis L exactly as the model holds them."""

    query: Affine
    key: Affine
    value: Affine
    output: Affine
    gate: Affine
    up: Affine
    down: Affine
    attention_norm: Norm
    mlp_norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    after_attention_norm: Norm | None
    after_mlp_norm: Norm | None


class Weights(NamedTuple):
    """References to a model's arrays: nothing is copied, so taking new ones costs nothing."""

    embedding: Float[Array, "V D"]
    embedding_norm: Norm | None
    layers: Layers
    final_norm: Norm
    head: Float[Array, "V D"]


class Layer(NamedTuple):
    """One layer, ready to multiply with: query, key and value in one matrix, gate and up in one."""

    qkv: Float[Array, "out D"]
    qkv_bias: Float[Array, " out"] | None
    output: Float[Array, "D out"]
    output_bias: Float[Array, " D"] | None
    gate_up: Float[Array, "F2 D"]
    gate_up_bias: Float[Array, " F2"] | None
    down: Float[Array, "D F"]
    down_bias: Float[Array, " D"] | None
    attention_norm: Norm
    mlp_norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    after_attention_norm: Norm | None
    after_mlp_norm: Norm | None


class Decoder(NamedTuple):
    """Weights in the layout and dtype that `decode_step` and `prefill` compute in."""

    embedding: Float[Array, "V D"]
    embedding_norm: Norm | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Float[Array, "V D"]


class Rotary(NamedTuple):
    """cos and sin of every position up to the cache's length."""

    cos: Float32[Array, "T half"]
    sin: Float32[Array, "T half"]


_DecoderLayer = LlamaDecoderLayer | QwenDecoderLayer


def read_model(model: LmHeadModel) -> tuple[DecoderSpec, Weights]:
    """The model's static description and references to its arrays.

    Raises InputError, naming what is not supported, rather than decode something else than the
    model computes.
    """
    if not isinstance(model, LlamaLMHeadModel | QwenLMHeadModel):
        raise InputError(
            f"the engine decodes Llama, Qwen2 and Qwen3 models; found {type(model).__name__}"
        )
    stacked = model.transformer.layers
    if not isinstance(stacked, Stacked):
        raise InputError("the engine reads stacked layers: set scan_layers to true")
    layer = cast(_DecoderLayer, stacked.stacked)
    _check_supported(model.config, layer)
    embedding = model.embeddings.token_embeddings.weight.array
    head = embedding if model.lm_head is None else _matrix(model.lm_head).weight
    weights = Weights(
        embedding=embedding,
        embedding_norm=_norm(model.embeddings.norm),
        layers=_read_layers(layer),
        final_norm=_present(_norm(model.transformer.norm)),
        head=head,
    )
    return _spec(model.config, layer.self_attn, embedding.shape[0]), weights


def on_device(arrays: Tree, place: SingleDeviceSharding) -> Tree:
    """The same arrays, committed to one device: references where they lie there already.

    Arrays that are spread over a mesh are gathered, which copies them. One placement for all means
    one compiled program, whoever made the arrays.
    """
    return jax.device_put(arrays, place)


def _spec(config: LlamaConfig, attention: Attention, vocabulary: int) -> DecoderSpec:
    return DecoderSpec(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        queries_per_kv=config.num_heads // config.num_kv_heads,
        head_size=attention.config.head_size,
        width=config.hidden_dim,
        vocabulary=vocabulary,
        norm_epsilon=config.layer_norm_epsilon,
        activation=str(ActivationFunctionEnum(config.activation_function).value),
    )


def _check_supported(config: LlamaConfig, layer: _DecoderLayer) -> None:
    attention = layer.self_attn
    problems = {
        f"attention of type {type(attention).__name__}": type(attention) is not Attention,
        "a sliding window": attention.config.sliding_window is not None
        or (isinstance(config, QwenConfig) and config.use_sliding_window)
        or bool(getattr(config, "use_sliding_window", False)),
        "capped attention logits": attention.config.logits_soft_cap is not None,
        "another attention scale": attention.config.scaling_factor is not None,
        "no rotary embedding": attention.rot_embs is None,
        f"the norm {type(layer.input_layernorm).__name__}": type(layer.input_layernorm)
        is not RmsNorm,
    }
    found = [what for what, wrong in problems.items() if wrong]
    if found:
        raise InputError(f"the engine cannot decode a model with {', '.join(found)}")


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
        attention_norm=_present(_norm(layer.input_layernorm)),
        mlp_norm=_present(_norm(layer.post_attention_layernorm)),
        query_norm=_norm(cast(RmsNorm | None, attention.q_norm)),
        key_norm=_norm(cast(RmsNorm | None, attention.k_norm)),
        # only Llama's hybrid norm has these two
        after_attention_norm=_norm(getattr(layer, "post_attn_layernorm", None)),
        after_mlp_norm=_norm(getattr(layer, "post_mlp_layernorm", None)),
    )


def _matrix(linear: Linear) -> Affine:
    if linear.reparam.active_scale != 1 or not linear._out_first:
        raise InputError("the engine reads plain linear layers with the output axis first")
    return Affine(linear.weight.array, None if linear.bias is None else linear.bias.array)


def _norm(norm: RmsNorm | None) -> Norm | None:
    if norm is None:
        return None
    return Norm(
        None if norm.weight is None else norm.weight.array,
        None if norm.bias is None else norm.bias.array,
    )


def _present(norm: Norm | None) -> Norm:
    assert norm is not None
    return norm


def rotary_table(model: LmHeadModel, length: int) -> Rotary:
    """cos and sin [length, H/2] of every position, by the model's own rotary module.

    Rotating the vector (1…1, 0…0) gives (cos, sin), whatever variant of rotary embedding it is.
    """
    layer = cast(_DecoderLayer, cast(Stacked, model.transformer.layers).stacked)  # type: ignore[attr-defined]
    embeddings = cast(RotaryEmbeddings, layer.self_attn.rot_embs)
    half = layer.self_attn.config.head_size // 2
    position = hax.Axis("position", length)
    axes = (position, layer.self_attn.config.HeadSize)
    probe = np.concatenate([np.ones((length, half)), np.zeros((length, half))], axis=1)
    turned = embeddings(hax.named(jnp.asarray(probe, jnp.float32), axes), hax.arange(position))
    table = turned.rearrange(axes).array
    return Rotary(table[:, :half], table[:, half:])


def fuse(spec: DecoderSpec, weights: Weights, dtype: jnp.dtype) -> Decoder:
    """Slice the stacked layers and join what is multiplied with the same vector.

    To be called inside a compiled program, before its loop: the slices are copies that the program
    makes once and then reads at full speed.
    """
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
    layers = weights.layers
    return Decoder(
        embedding=weights.embedding,
        embedding_norm=weights.embedding_norm,
        layers=tuple(
            _fuse_layer(spec, jax.tree.map(lambda leaf, i=index: leaf[i], layers))
            for index in range(spec.layers)
        ),
        final_norm=weights.final_norm,
        head=weights.head,
    )


def _fuse_layer(spec: DecoderSpec, layer: Layers) -> Layer:
    width = spec.width
    parts = [affine.weight.reshape(-1, width) for affine in (layer.query, layer.key, layer.value)]
    biases = [affine.bias for affine in (layer.query, layer.key, layer.value)]
    return Layer(
        qkv=jnp.concatenate(parts),
        qkv_bias=_joined(biases),
        output=layer.output.weight.reshape(width, -1),
        output_bias=layer.output.bias,
        gate_up=jnp.concatenate([layer.gate.weight, layer.up.weight]),
        gate_up_bias=_joined([layer.gate.bias, layer.up.bias]),
        down=layer.down.weight,
        down_bias=layer.down.bias,
        attention_norm=layer.attention_norm,
        mlp_norm=layer.mlp_norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        after_attention_norm=layer.after_attention_norm,
        after_mlp_norm=layer.after_mlp_norm,
    )


def _joined(biases: list[Array | None]) -> Array | None:
    present = [bias.reshape(-1) for bias in biases if bias is not None]
    return jnp.concatenate(present) if present else None
