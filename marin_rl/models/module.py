"""The arrays of a model: a tree of named arrays, layers stacked, whose paths are their names.

Modules and fields have the names that Hugging Face gives them. The axes have names too, from which
sharding, adapters and weight decay follow. Linear layers may be replaced by ones with an adapter
or quantised weights (`marin_rl.inference.linear_layers`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn import Linear
from jaxtyping import Array

from marin_rl.models.block import Activation, Linears, Norm, Norms, times
from marin_rl.models.experts import ExpertWeights, by_piece, pieces
from marin_rl.models.spec import Spec


class Scale(eqx.Module):
    weight: NamedArray
    bias: NamedArray | None = None

    @property
    def arrays(self) -> Norm:
        return Norm(self.weight.array, None if self.bias is None else self.bias.array)


class Attention(eqx.Module):
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    q_norm: Scale | None = None
    k_norm: Scale | None = None
    sinks: NamedArray | None = None


class Xielu(eqx.Module):
    alpha_p: NamedArray
    alpha_n: NamedArray


class Matrix(eqx.Module):
    """Weight and bias that no adapter changes: of a router, or of all experts."""

    weight: NamedArray
    bias: NamedArray | None = None


class Experts(eqx.Module):
    """Matrices of all experts: X, F, D of gate and up, and D, X, F of down."""

    gate_proj: Matrix
    up_proj: Matrix
    down_proj: Matrix


class Mlp(eqx.Module):
    """Matrices of an MLP, or of experts and what chooses among them."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Xielu | None = None
    router: Matrix | None = None
    experts: Experts | None = None


class DecoderLayer(eqx.Module):
    """A layer, or all of them stacked on the axis `layer`.

    `post_attention_layernorm` is before the MLP, but after attention where outputs are normed:
    so Hugging Face names them.
    """

    self_attn: Attention | None  # None where a layer is only to compute its MLP
    mlp: Mlp
    input_layernorm: Scale | None = None
    post_attention_layernorm: Scale | None = None
    pre_feedforward_layernorm: Scale | None = None
    post_feedforward_layernorm: Scale | None = None


class Layers(eqx.Module):
    """All layers; `recomputed`: with activations computed again in the backward pass.

    From the inputs of layers, which "offload" keeps in the host's memory meanwhile. `sums` are of
    gradients, for each array or None: see `training.adapters.with_sums`.
    """

    stacked: DecoderLayer
    recomputed: bool | Literal["offload"] = eqx.field(static=True, default=False)
    sums: list[Array | None] | None = None


class Transformer(eqx.Module):
    layers: Layers
    norm: Scale


class Table(eqx.Module):
    """A row for each token, or each position."""

    weight: NamedArray


class Embeddings(eqx.Module):
    token_embeddings: Table
    position_embeddings: Table | None = None


class LanguageModel(eqx.Module):
    """A policy: arrays, or their shapes in a template, and the description they are run by."""

    spec: Spec = eqx.field(static=True)
    transformer: Transformer
    embeddings: Embeddings
    lm_head: Linear | None

    @property
    def layers(self) -> Layers:
        return self.transformer.layers

    @property
    def embedding(self) -> Array:
        return self.embeddings.token_embeddings.weight.array

    @property
    def positions(self) -> Array | None:
        """Learned positions [T, D]."""
        table = self.embeddings.position_embeddings
        return None if table is None else table.weight.array

    @property
    def head(self) -> Array:
        """Output head [V, D]: the embedding itself where they are tied."""
        return self.embedding if self.lm_head is None else self.lm_head.weight.array

    @property
    def final_norm(self) -> Norm:
        return self.transformer.norm.arrays


def norms_of(spec: Spec, layer: DecoderLayer) -> Norms:
    """Norms by what they are for."""

    def of(scale: Scale | None) -> Norm | None:
        return None if scale is None else scale.arrays

    after, attention = of(layer.post_attention_layernorm), layer.self_attn
    return Norms(
        attention=of(layer.input_layernorm),
        mlp=of(layer.pre_feedforward_layernorm) if spec.post else after,
        query=None if attention is None else of(attention.q_norm),
        key=None if attention is None else of(attention.k_norm),
        after_attention=after if spec.post else None,
        after_mlp=of(layer.post_feedforward_layernorm),
    )


def activation_of(layer: DecoderLayer) -> Activation | None:
    by = layer.mlp.act_fn
    return None if by is None else Activation(by.alpha_p.array, by.alpha_n.array)


@dataclass(frozen=True, slots=True)
class TrainedLinears(Linears):
    """A layer's products as they are trained: by name, so that axes are sharded by theirs.

    `axes` are the names of the leading axes of what comes in.
    """

    spec: Spec
    layer: DecoderLayer
    axes: tuple[str, ...]

    @property
    def norms(self) -> Norms:
        return norms_of(self.spec, self.layer)

    @property
    def activation(self) -> Activation | None:
        return activation_of(self.layer)

    def qkv(self, x: Array) -> tuple[Array, Array, Array]:
        named, attention = hax.named(x, (*self.axes, "embed")), self.layer.self_attn
        assert attention is not None
        grouped = (*self.axes, "kv_head", "q_heads_per_group", "head_size")
        alone = (*self.axes, "kv_head", "head_size")
        return (
            attention.q_proj(named).rearrange(grouped).array,
            attention.k_proj(named).rearrange(alone).array,
            attention.v_proj(named).rearrange(alone).array,
        )

    def output(self, attended: Array) -> Array:
        attention = self.layer.self_attn
        assert attention is not None
        by_head = attended.reshape(*attended.shape[:-1], self.spec.heads, self.spec.head_size)
        named = hax.named(by_head, (*self.axes, "heads", "head_size"))
        return self._product(attention.o_proj, named, "embed")

    def gate_and_up(self, x: Array) -> tuple[Array | None, Array]:
        named, mlp = hax.named(x, (*self.axes, "embed")), self.layer.mlp
        if mlp.experts is not None:
            parts = mlp.experts.gate_proj, mlp.experts.up_proj
            out = (*self.axes, "experts", "mlp")
            gate, up = (_product(part, named, ("embed",), out) for part in parts)
            return gate.reshape(*x.shape[:-1], -1), up.reshape(*x.shape[:-1], -1)
        gate = None if mlp.gate_proj is None else self._product(mlp.gate_proj, named, "mlp")
        return gate, self._product(mlp.up_proj, named, "mlp")

    def down(self, x: Array) -> Array:
        mlp = self.layer.mlp
        if mlp.experts is not None:
            apart = x.reshape(*x.shape[:-1], self.spec.experts, self.spec.mlp_width)
            named = hax.named(apart, (*self.axes, "experts", "mlp"))
            weight = Matrix(mlp.experts.down_proj.weight)
            return _product(weight, named, ("experts", "mlp"), (*self.axes, "embed"))
        return self._product(mlp.down_proj, hax.named(x, (*self.axes, "mlp")), "embed")

    def router(self, x: Array) -> Array:
        router = self.layer.mlp.router
        assert router is not None
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), router)
        named = hax.named(x.astype(jnp.float32), (*self.axes, "embed"))
        return _product(wide, named, ("embed",), (*self.axes, "experts"))

    @property
    def experts(self) -> ExpertWeights:
        experts, cut = self.layer.mlp.experts, pieces(self.spec.mlp_width)
        assert experts is not None
        gate, up, down = experts.gate_proj, experts.up_proj, experts.down_proj
        arrays = (
            gate.weight.array,
            up.weight.array,
            jnp.moveaxis(down.weight.array, 0, -1),
            None if gate.bias is None else gate.bias.array,
            None if up.bias is None else up.bias.array,
        )
        return ExpertWeights(*jax.tree.map(lambda array: by_piece(array, cut), arrays))

    @property
    def expert_bias(self) -> Array | None:
        experts = self.layer.mlp.experts
        bias = None if experts is None else experts.down_proj.bias
        return None if bias is None else bias.array

    @property
    def sinks(self) -> Array | None:
        attention = self.layer.self_attn
        sinks = None if attention is None else attention.sinks
        return None if sinks is None else sinks.array

    def _product(self, linear: Any, named: NamedArray, out: str) -> Array:
        return linear(named).rearrange((*self.axes, out)).array


def _product(
    matrix: Matrix, named: NamedArray, over: tuple[str, ...], out: tuple[str, ...]
) -> Array:
    product = hax.auto_sharded(hax.dot(named, matrix.weight, axis=over, dot_general=MULTIPLY))
    return (product if matrix.bias is None else product + matrix.bias).rearrange(out).array


class Multiply(eqx.Module):
    """`times` as haliax calls it: with the last axes of both."""

    def __call__(self, lhs: Any, rhs: Any, dimension_numbers: Any, *_: Any, **__: Any) -> Any:
        return times(lhs, rhs, len(dimension_numbers[0][0]))


MULTIPLY: Any = Multiply()


# ---------------------------------------------------------------- templates


class _Axes:
    """Axes of a model's arrays; `layer` is that on which layers are stacked."""

    def __init__(self, spec: Spec) -> None:
        self.layer = Axis("layer", spec.layers)
        self.embed = Axis("embed", spec.width)
        self.mlp = Axis("mlp", spec.mlp_width)
        self.vocab = Axis("vocab", spec.vocabulary)
        self.experts = Axis("experts", spec.experts)
        self.kv_head = Axis("kv_head", spec.kv_heads)
        self.group = Axis("q_heads_per_group", spec.queries_per_kv)
        self.heads = Axis("heads", spec.heads)
        self.head_size = Axis("head_size", spec.head_size)


def model_of(spec: Spec) -> LanguageModel:
    """The model with shapes in place of arrays."""
    axes = _Axes(spec)
    of_layer = _scale_of(spec, (axes.layer,))
    width = of_layer(axes.embed)
    layer = DecoderLayer(
        self_attn=_attention_of(spec, axes, of_layer),
        mlp=_mlp_of(spec, axes),
        input_layernorm=width if spec.pre else None,
        post_attention_layernorm=width,
        pre_feedforward_layernorm=width if spec.pre and spec.post else None,
        post_feedforward_layernorm=width if spec.post else None,
    )
    positions = None
    if spec.learned_positions:
        positions = Table(named_shape(Axis("context", spec.context_length), axes.embed))
    head = None
    if not spec.tied:
        head = Linear(named_shape(axes.vocab, axes.embed), None, axes.embed, axes.vocab)
    return LanguageModel(
        spec=spec,
        transformer=Transformer(Layers(layer), _scale_of(spec, ())(axes.embed)),
        embeddings=Embeddings(Table(named_shape(axes.vocab, axes.embed)), positions),
        lm_head=head,
    )


def _attention_of(spec: Spec, axes: _Axes, of_layer: Callable[..., Scale]) -> Attention:
    heads, kept = (axes.kv_head, axes.group, axes.head_size), (axes.kv_head, axes.head_size)
    query, key = None, None
    match spec.qk_norm:
        case "head":
            query = key = of_layer(axes.head_size, plain=True)
        case "all":
            query = of_layer(Axis("query", spec.heads * spec.head_size), plain=True)
            key = of_layer(Axis("key", spec.kv_heads * spec.head_size), plain=True)
    return Attention(
        q_proj=_linear(axes, axes.embed, heads, bias=spec.qkv_bias),
        k_proj=_linear(axes, axes.embed, kept, bias=spec.qkv_bias),
        v_proj=_linear(axes, axes.embed, kept, bias=spec.qkv_bias),
        o_proj=_linear(axes, (axes.heads, axes.head_size), axes.embed, bias=spec.output_bias),
        q_norm=query,
        k_norm=key,
        sinks=named_shape(axes.layer, axes.kv_head, axes.group) if spec.sinks else None,
    )


def _mlp_of(spec: Spec, axes: _Axes) -> Mlp:
    if spec.experts:
        return _experts_of(spec, axes)
    number = named_shape(axes.layer, Axis("one", 1))
    return Mlp(
        gate_proj=_linear(axes, axes.embed, axes.mlp, bias=spec.mlp_bias) if spec.gated else None,
        up_proj=_linear(axes, axes.embed, axes.mlp, bias=spec.mlp_bias),
        down_proj=_linear(axes, axes.mlp, axes.embed, bias=spec.mlp_bias),
        act_fn=Xielu(number, number) if spec.activation == "xielu" else None,
    )


def _experts_of(spec: Spec, axes: _Axes) -> Mlp:
    def matrix(axes_of_weight: tuple[Axis, ...], axes_of_bias: tuple[Axis, ...]) -> Matrix:
        bias = named_shape(axes.layer, *axes_of_bias) if spec.mlp_bias else None
        return Matrix(named_shape(axes.layer, *axes_of_weight), bias)

    into = matrix((axes.experts, axes.mlp, axes.embed), (axes.experts, axes.mlp))
    out = matrix((axes.embed, axes.experts, axes.mlp), (axes.experts, axes.embed))
    router = matrix((axes.experts, axes.embed), (axes.experts,))
    return Mlp(None, None, None, router=router, experts=Experts(into, into, out))


def named_shape(*axes: Axis, dtype: Any = jnp.float32) -> NamedArray:
    """A shape in the place of an array, as a template has it."""
    shape: Any = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), jnp.dtype(dtype))
    return NamedArray(shape, axes)


def _linear(axes: _Axes, into: Any, out: Any, *, bias: bool) -> Linear:
    outputs = (out,) if isinstance(out, Axis) else out
    inputs = (into,) if isinstance(into, Axis) else into
    weight = named_shape(axes.layer, *outputs, *inputs)
    of_bias = named_shape(axes.layer, *outputs) if bias else None
    return Linear(weight, of_bias, into, out, dot_general=MULTIPLY)


def _scale_of(spec: Spec, stacked: tuple[Axis, ...]) -> Callable[..., Scale]:
    """Shapes of a norm over an axis; `plain`: without a bias, as those of heads are."""

    def of(axis: Axis, *, plain: bool = False) -> Scale:
        bias = spec.norm == "layer" and not plain
        return Scale(named_shape(*stacked, axis), named_shape(*stacked, axis) if bias else None)

    return of
