"""Models whose linear layers lie quantised: templates, layers one after the other, merging.

A base's weight PATH becomes the arrays PATH:codes, PATH:scales and so on. No array is cut into
layers, which would copy the base: each layer reads its part of the whole
(`marin_rl.inference.quantized_matrix`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax.nn import Linear
from levanter.models.lm_model import LmHeadModel

from marin_rl.compilation import device_array
from marin_rl.inference.linear_layers import LoraLinear, QuantizedLinear, QuantizedWeight, axes_of
from marin_rl.lora import merged_weight
from marin_rl.lora.quantization import FIELDS, dequantized


def with_quantized(template: LmHeadModel, scheme: str | None) -> LmHeadModel:
    """The template with its linear layers quantised, those next to adapters too; None: itself."""
    if scheme is None:
        return template

    def changed(node: Any) -> Any:
        return QuantizedLinear.like(node, scheme) if isinstance(node, Linear) else node

    # Linear layers within blocks alone: embeddings, norms and the head stay as they are.
    layers = template.transformer.layers  # pyright: ignore[reportAttributeAccessIssue]
    stacked = jax.tree.map(changed, layers.stacked, is_leaf=lambda node: isinstance(node, Linear))
    return eqx.tree_at(lambda model: model.transformer.layers.stacked, template, stacked)


def lies_quantized(layers: Any) -> bool:
    """True if the linear layers of stacked layers are quantised."""
    leaves = jax.tree.leaves(layers, is_leaf=_is_quantized)
    return any(map(_is_quantized, leaves))


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedWeight)


def _is_linear(node: Any) -> bool:
    return isinstance(node, QuantizedLinear)


class Blocks:
    """Layers one by one: of the arrays that are not quantised each has its part."""

    def __init__(self, layers: Any) -> None:
        leaves, self._structure = jax.tree.flatten(
            layers.stacked, is_leaf=lambda node: _is_quantized(node) or isinstance(node, NamedArray)
        )
        name = layers.Block.name
        stacked = [isinstance(x, NamedArray) and name in {a.name for a in x.axes} for x in leaves]
        self._leaves = list(zip(leaves, stacked, strict=True))
        # Stacked on the first axis.
        self.arrays = [leaf.array for leaf, cut in self._leaves if cut]

    def of(self, layer: Any, arrays: list[jax.Array]) -> Any:
        """The layer of this index, which has these parts of `arrays`."""
        own = iter(arrays)
        leaves = [NamedArray(next(own), leaf.axes[1:]) if c else leaf for leaf, c in self._leaves]
        block = self._structure.unflatten(leaves)

        def at(node: Any) -> Any:
            return node.at(layer) if _is_linear(node) else node

        return jax.tree.map(at, block, is_leaf=_is_linear)

    def __getitem__(self, layer: int) -> Any:
        """The layer of this index."""
        return self.of(np.int32(layer), [array[layer] for array in self.arrays])


def folded(layers: Any, count: int) -> Callable[..., Any]:
    """The first `count` layers as one block, in a scan."""
    blocks = Blocks(layers)

    def fold(states: NamedArray, mask: Any, *, pos_ids: Any) -> NamedArray:
        def body(states: NamedArray, own: Any) -> tuple[NamedArray, None]:
            index, arrays = own
            return blocks.of(index, arrays)(states, mask, pos_ids=pos_ids), None

        if not layers.gradient_checkpointing.disable:
            # A scan computes nothing in its forward pass that its backward pass could share.
            body = jax.checkpoint(body, prevent_cse=False)
        # Codes and scales are not among what the scan cuts: a layer reads its part by its index.
        own = jnp.arange(count), [array[:count] for array in blocks.arrays]
        return jax.lax.scan(body, states, own)[0]

    return fold


def merged_model(model: LmHeadModel) -> LmHeadModel:
    """The model with plain linear layers: weights dequantised, adapters merged; in float32.

    Itself where it has neither.
    """

    def plain(node: Any) -> Any:
        if isinstance(node, LoraLinear):
            linear = plain(node.wrapped)
            # In float32, so that a merged model is the same whatever dtype the adapter was trained
            # in.
            a, b = (jnp.asarray(array.array, jnp.float32) for array in (node.lora_A, node.lora_B))
            weight = merged_weight(linear.weight.array, a, b, node.scale)
            return dataclasses.replace(linear, weight=NamedArray(weight, linear.weight.axes))
        return _plain(node) if isinstance(node, QuantizedLinear) else node

    replaced = (LoraLinear, QuantizedLinear)
    return jax.tree.map(plain, model, is_leaf=lambda node: isinstance(node, replaced))


def _plain(linear: QuantizedLinear) -> Linear:
    layer = linear.weight.scales.axes[0]
    axes = (layer, *axes_of(linear.Out), *axes_of(linear.In))
    named = {field: getattr(linear.weight, field) for field in FIELDS}
    arrays = {field: each.array for field, each in named.items() if each is not None}
    weight = device_array(dequantized(arrays, tuple(axis.size for axis in axes)))
    return Linear(NamedArray(weight, axes), linear.bias, linear.In, linear.Out)
