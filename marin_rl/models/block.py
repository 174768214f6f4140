"""Arithmetic of a layer, for trainer and engine alike.

Between the functions stands attention, which each side does its own way: the engine over its
cache, the trainer over the rows of a batch. A layer gives its products (`Linears`): fused and with
an engine's adapters there, by name and with adapters that are trained here.

Axes: K key/value heads, G query heads of each, H head size, D width, F width of the MLP, V
vocabulary, X experts; leading axes are free.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Float32, Int

from marin_rl.models.experts import (
    ExpertLoads,
    ExpertWeights,
    grouped_sum,
    loads_of,
    routing_of,
    shares_of_all,
    takes_grouped,
)
from marin_rl.models.spec import ACTIVATIONS, LayerKind, Rope, Spec

Take = Callable[[Array, Array], Array]

# In the place of -inf for scores out of sight, so that exp() of a difference is never NaN.
MASKED = -1e30


class Norm(NamedTuple):
    """Weight and bias of a norm."""

    weight: Any
    bias: Any = None


class Norms(NamedTuple):
    """Norms of a layer; None where a family has none."""

    attention: Norm | None
    mlp: Norm | None
    query: Norm | None = None
    key: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None


class Activation(NamedTuple):
    """Trained parameters of xIELU, a number each (arXiv:2411.13010)."""

    alpha_p: Any
    alpha_n: Any


class Linears(ABC):
    """A layer's arrays, and its products with what comes to them."""

    @property
    @abstractmethod
    def norms(self) -> Norms:
        """Norms of the layer."""

    @property
    @abstractmethod
    def activation(self) -> Activation | None:
        """Parameters of its activation."""

    @abstractmethod
    def qkv(self, x: Array) -> tuple[Array, Array, Array]:
        """Query [..., K, G, H], key and value [..., K, H]."""

    @abstractmethod
    def output(self, attended: Array) -> Array:
        """Of all heads [..., KGH] to the width."""

    @abstractmethod
    def gate_and_up(self, x: Array) -> tuple[Array | None, Array]:
        """Gate, where the MLP has one, and the other half, [..., F]."""

    @abstractmethod
    def down(self, x: Array) -> Array:
        """Back to the width; of experts the sum."""

    @abstractmethod
    def router(self, x: Array) -> Array:
        """Scores of experts [..., X], in float32."""

    @property
    @abstractmethod
    def experts(self) -> ExpertWeights:
        """Matrices of all experts, for products by group."""

    @property
    def pieces(self) -> int:
        """Pieces that F of each expert is cut into; `gate_and_up` has all experts of each."""
        return 1

    @property
    @abstractmethod
    def expert_bias(self) -> Array | None:
        """Bias of each expert's output, [X, D]."""

    @property
    @abstractmethod
    def sinks(self) -> Array | None:
        """Scores that have no value, [K, G]."""


class Rotation(NamedTuple):
    """Cosines and sines of some positions, [..., size], for both halves of what is rotated.

    `shared`: of a table that all layers read.
    """

    cos: Array
    sin: Array
    shared: bool = False


def angles_of(rope: Rope, positions: Int[Array, "..."]) -> tuple[Array, Array]:
    """Cosines and sines, in float32 whatever is computed in: bfloat16 has no position 257."""
    angles = positions[..., None].astype(jnp.float32) * rope.frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.factor != 1.0:
        cos, sin = cos * np.float32(rope.factor), sin * np.float32(rope.factor)
    return cos, sin


def _rows(table: Float[Array, "V D"], index: Int[Array, "..."]) -> Float[Array, "... D"]:
    return jnp.take(table, index, axis=0)


def embedded(
    spec: Spec,
    tokens: Array,
    embedding: Array,
    positions: Array,
    table: Array | None,
    take: Take = _rows,
) -> Float[Array, "... D"]:
    """Input of the first layer; `table` is that of learned positions, `take` reads its rows."""
    x = take(embedding, tokens)
    if table is not None:
        x = x + take(table, jnp.maximum(positions, 0))
    # In x's own dtype, as Gemma does: a float32 scale would widen everything after it.
    return x if spec.embedding_scale == 1.0 else x * x.dtype.type(spec.embedding_scale)


def normed(spec: Spec, norm: Norm | None, x: Array) -> Array:
    """The family's norm over the last axis; x itself where there is none."""
    if norm is None:
        return x
    # In float32, as the models were trained: a sum of bfloat16 squares keeps 8 bits.
    wide = x.astype(jnp.float32)
    if spec.norm == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + spec.norm_epsilon)
    out = wide * inverse
    # Gemma stores weight - 1 and multiplies before it rounds to x's dtype; Llama rounds first.
    if spec.norm == "gemma":
        return (out * (1.0 + norm.weight).astype(jnp.float32)).astype(x.dtype)
    out = norm.weight.astype(x.dtype) * out.astype(x.dtype)
    return out if norm.bias is None else out + norm.bias.astype(x.dtype)


def queries_keys_values(
    spec: Spec, kind: LayerKind, layer: Linears, x: Float[Array, "... D"], turn: Rotation | None
) -> tuple[Array, Array, Array]:
    """Query [..., K, G, H], not scaled yet, and key and value [..., K, H], at their positions."""
    query, key, value = layer.qkv(normed(spec, layer.norms.attention, x))
    query = _normed_heads(spec, layer.norms.query, query, 3)
    key = _normed_heads(spec, layer.norms.key, key, 2)
    if kind.rope is not None:
        assert turn is not None
        query, key = _rotated(query, turn, heads=2), _rotated(key, turn, heads=1)
    return query, key, value


def scaled(spec: Spec, query: Array) -> Array:
    """Queries are scaled and not scores: H numbers of each head instead of one per position."""
    scale = spec.head_size**-0.5 if spec.scale is None else spec.scale
    return query * np.float32(scale).astype(query.dtype)


def _normed_heads(spec: Spec, norm: Norm | None, x: Array, axes: int) -> Array:
    """Queries or keys normed by head, or over all of their last `axes` axes."""
    if norm is None or spec.qk_norm == "head":
        return normed(spec, norm, x)
    return normed(spec, norm, x.reshape(*x.shape[:-axes], -1)).reshape(x.shape)


def _rotated(x: Array, turn: Rotation, heads: int) -> Array:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), on the halves of what is rotated of a head.

    `heads` is the number of its axes before the last.
    """
    size = turn.cos.shape[-1]
    if size < x.shape[-1]:
        rotated = _rotated(x[..., :size], turn, heads)
        return jnp.concatenate([rotated, x[..., size:]], axis=-1)
    # The angles are exact; the rotation itself is in the model's dtype.
    at = (..., *(None,) * heads, slice(None))
    cos, sin = turn.cos.astype(x.dtype)[at], turn.sin.astype(x.dtype)[at]
    if turn.shared:
        # The order of these lines is that of terms of the gradient, whose last bits earlier runs
        # had so with a table.
        turned = jnp.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
        return x * cos + turned * sin
    kept = x * cos
    x1, x2 = x[..., : size // 2], x[..., size // 2 :]
    return kept + jnp.concatenate([-x2, x1], axis=-1) * sin


def capped(scores: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def softmax(
    scores: Float[Array, "... T"], seen: Bool[Array, "..."], sinks: Array | None
) -> Float[Array, "... T"]:
    """Shares of what is seen; `sinks` are further scores, [..., 1], whose shares are dropped."""
    scores = jnp.where(seen, scores, MASKED)
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = jnp.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]


def after_attention(
    spec: Spec, layer: Linears, x: Float[Array, "... D"], attended: Float[Array, "... KGH"]
) -> Float[Array, "... D"]:
    """The residual stream with what attention adds."""
    out = normed(spec, layer.norms.after_attention, layer.output(attended))
    return x + _scaled(spec, out)


def after_mlp(
    spec: Spec, layer: Linears, x: Float[Array, "... D"], *, grouped: bool | None = None
) -> Float[Array, "... D"]:
    """The residual stream with what the MLP adds, or the experts that a token takes.

    `grouped`: experts are computed for the tokens that take them, and not for all; None: where the
    devices have a kernel for that.
    """
    inputs = normed(spec, layer.norms.mlp, x)
    if spec.experts:
        by_group = takes_grouped(spec, inputs) if grouped is None else grouped
        out = _of_experts(spec, layer, inputs, by_group=by_group)
    else:
        out = layer.down(activated(spec, layer, *layer.gate_and_up(inputs)))
    return x + _scaled(spec, normed(spec, layer.norms.after_mlp, out))


def expert_loads(
    spec: Spec, layer: Linears, x: Float[Array, "... D"], mask: Bool[Array, "..."] | None
) -> ExpertLoads | None:
    """Loads [1, X] of the experts in `after_mlp` by tokens of a mask; None without either."""
    if mask is None or not spec.experts:
        return None
    # The router is computed there too: a compiler joins both.
    loads = loads_of(spec, layer.router(normed(spec, layer.norms.mlp, x)), mask)
    return jax.tree.map(lambda array: array[None], loads)


def _of_experts(spec: Spec, layer: Linears, inputs: Array, *, by_group: bool) -> Array:
    function = partial(activated, spec, layer)
    # All experts side by side as one MLP. Before the router: so the terms of the inputs' gradient
    # are in the order, and it has the last bits, that earlier runs had.
    inner = None if by_group else function(*layer.gate_and_up(inputs))
    routing = routing_of(spec, layer.router(inputs))
    shares = shares_of_all(spec, routing)
    if inner is None:
        out = grouped_sum(spec, layer.experts, inputs, routing, function)
    else:
        each = shares if layer.pieces == 1 else jnp.tile(shares, layer.pieces)
        each = jnp.repeat(each, spec.mlp_width // layer.pieces, axis=-1)
        out = layer.down(inner * each.astype(inner.dtype))
    if layer.expert_bias is not None:
        out = out + shares.astype(out.dtype) @ layer.expert_bias.astype(out.dtype)
    return out


def _scaled(spec: Spec, out: Array) -> Array:
    return out if spec.residual_scale == 1.0 else out * out.dtype.type(spec.residual_scale)


def activated(spec: Spec, layer: Linears, gate: Array | None, up: Array) -> Array:
    """Input of the MLP's last product."""
    if spec.clip is not None:  # of GPT-OSS
        assert gate is not None
        gate, up = jnp.minimum(gate, spec.clip), jnp.clip(up, -spec.clip, spec.clip)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    if gate is not None:
        return _FUNCTIONS[spec.activation](gate) * up
    if spec.activation != "xielu":
        return _FUNCTIONS[spec.activation](up)
    # x (alpha_p x + 1/2) above 0, below it alpha_n (exp(x) - 1 - x) + x/2
    assert layer.activation is not None
    alpha_p = jax.nn.softplus(layer.activation.alpha_p)
    alpha_n = 0.5 + jax.nn.softplus(layer.activation.alpha_n)
    below = (jnp.expm1(jnp.minimum(up, -1e-6)) - up) * alpha_n + 0.5 * up
    return jnp.where(up > 0, alpha_p * up * up + 0.5 * up, below).astype(up.dtype)


_FUNCTIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}
assert {*_FUNCTIONS, "xielu"} == {*ACTIVATIONS}


# Fewer rows than this a CPU multiplies faster in float32 (one row twice as fast).
NARROW_ROWS = 32


def times(x: Float[Array, "..."], weight: Float[Array, "..."], over: int = 1) -> Array:
    """The product over the last `over` axes of both, [*N, *out], in the dtype of `x`.

    XLA's CPU compiler multiplies 16 bits as such, at two to five times the speed of float32, only
    where the sums are asked for in float32, and the left side lies row by row.
    """
    last_of_x, last_of_weight = (tuple(range(a.ndim - over, a.ndim)) for a in (x, weight))
    rows = math.prod(x.shape[: x.ndim - over])
    if x.dtype.itemsize == 2 and jax.default_backend() == "cpu" and rows >= NARROW_ROWS:
        out: Array = narrow_product(over, x, weight)
        return out.astype(x.dtype)
    return jax.lax.dot_general(x, weight, ((last_of_x, last_of_weight), ((), ())))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def narrow_product(over: int, x: Float[Array, "..."], weight: Array) -> Float32[Array, "..."]:
    """`times` of 16 bits in float32, whose gradients are multiplied in 16 bits too.

    Their sums are in float32 all the same. A gradient in float32 on one side would take a GPU to
    TF32: half the speed, from twice the memory.
    """
    return _summed(x, weight, range(x.ndim - over, x.ndim), range(weight.ndim - over, weight.ndim))


def _summed(left: Array, right: Array, of_left: range, of_right: range) -> Float32[Array, "..."]:
    axes = ((tuple(of_left), tuple(of_right)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _narrow_product_backward(
    over: int, saved: tuple[Array, Array], by_product: Array
) -> tuple[Array, Array]:
    x, weight = saved
    rows, outputs = x.ndim - over, weight.ndim - over
    narrow = by_product.astype(x.dtype)
    by_x = _summed(narrow, weight, range(rows, narrow.ndim), range(outputs))
    outputs_first = jnp.moveaxis(narrow, range(rows), range(outputs, narrow.ndim))
    if jax.default_backend() == "cpu":  # a transpose would only be another layout
        in_order = Layout(major_to_minor=tuple(range(narrow.ndim)))
        outputs_first = with_layout_constraint(outputs_first, in_order)
    by_weight = _summed(outputs_first, x, range(outputs, narrow.ndim), range(rows))
    return by_x.astype(x.dtype), by_weight.astype(weight.dtype)


narrow_product.defvjp(
    lambda over, x, weight: (narrow_product(over, x, weight), (x, weight)), _narrow_product_backward
)


def logits_of(
    spec: Spec, head: Float[Array, "V D"], states: Float[Array, "... D"]
) -> Float32[Array, "... V"]:
    """Logits of the token after each position, of states after the final norm."""
    narrow = states.dtype.itemsize == 2
    out: Array = narrow_product(1, states, head) if narrow else times(states, head)
    if spec.logits_scale != 1.0:
        out = out * np.float32(spec.logits_scale)
    return capped(out, spec.final_cap)
