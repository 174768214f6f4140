"""Models with an adapter: templates with and without it, which parameters are trained, merging.

A base's parameters keep their names, and an adapter's are named PATH:A and PATH:B after the weights
they change (see `marin_rl.lora`). So a policy with an adapter is one dictionary of arrays, of which
those named by `trained_names` are trained, and a template decides which names there are. The base
may be quantised: its weight PATH is then the arrays PATH:codes, PATH:scales and so on. No array is
cut into layers, which would copy the base: each layer reads its part of the whole
(`marin_rl.inference.linear_layers`).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax.nn import Linear
from jaxtyping import Array

from marin_rl.compilation import device_array
from marin_rl.config import Config, PolicyConfig
from marin_rl.errors import InputError
from marin_rl.inference.linear_layers import LoraLinear, QuantizedLinear, QuantizedWeight, axes_of
from marin_rl.lora.adapter import Adapter, LoraModule, a_name, b_name, initial_arrays, merged_weight
from marin_rl.lora.peft import configured_modules, read_peft
from marin_rl.lora.quantization import FIELDS, dequantized, is_quantized
from marin_rl.models.module import DecoderLayer, LanguageModel, Layers
from marin_rl.models.spec import STACKED
from marin_rl.training.model import Parameters, parameter_shapes, parameter_structs, with_parameters

Modules = Mapping[str, LoraModule]

M = TypeVar("M", bound=eqx.Module)

HEAD = "head/"  # of a scalar model, which is trained whatever its trunk is


def modules_of(policy: PolicyConfig, template: LanguageModel) -> dict[str, LoraModule]:
    return configured_modules(policy.lora, parameter_shapes(template))


def first_adapter(config: Config, modules: Modules, template: LanguageModel) -> Parameters:
    """A and B before any training: of the folder `init_from`, else A random by the seed, B zero.

    Raises InputError for a folder whose ranks are no longer those that the run began with.
    """
    lora, shapes = config.policy.lora, parameter_shapes(template)
    assert lora is not None, "the run has an adapter"
    if lora.init_from is None:
        arrays: Mapping[str, Any] = initial_arrays(modules, shapes, config.seed)
    else:
        adapter = read_peft(lora.init_from, shapes)
        if adapter.modules != modules:
            raise InputError(f"{lora.init_from} is another adapter than when the run began")
        arrays = adapter.arrays
    # In the dtype that is trained: updates are applied to these arrays themselves.
    return {name: jnp.asarray(array, lora.dtype) for name, array in arrays.items()}


def with_adapter(
    template: LanguageModel, modules: Modules, dtype: str = "float32"
) -> LanguageModel:
    """The template with adapters at these weights; the template itself for none."""
    for path, module in modules.items():
        layer = path.removesuffix("/weight").split("/")

        def where(model: Any, layer: Iterable[str] = layer) -> Any:
            for name in layer:
                model = getattr(model, name)
            return model

        adapted = LoraLinear.like(where(template), module, dtype)
        template = eqx.tree_at(where, template, adapted)
    return template


def without_adapter(template: M) -> M:
    def unwrapped(node: Any) -> Any:
        return node.wrapped if isinstance(node, LoraLinear) else node

    return jax.tree.map(unwrapped, template, is_leaf=lambda node: isinstance(node, LoraLinear))


def is_adapters(name: str) -> bool:
    return name.endswith((":A", ":B"))


def changes_nothing(parameters: Parameters) -> bool:
    """True for an adapter whose B are all zero: the policy is its base."""
    return not any(name.endswith(":B") and bool(jnp.any(a)) for name, a in parameters.items())


def trained_names(names: Iterable[str]) -> list[str]:
    """Names of the parameters that are trained: an adapter's and a scalar head's, else all."""
    listed = list(names)
    if not any(map(is_adapters, listed)):
        return listed
    return [name for name in listed if is_adapters(name) or name.startswith(HEAD)]


def policy_module(template: LanguageModel, parameters: Parameters) -> LanguageModel:
    """The model of these parameters; without an adapter's arrays it is the base."""
    if not any(map(is_adapters, parameters)):
        template = without_adapter(template)
    return with_parameters(template, parameters)


def merged_parameters(base: Parameters, adapter: Adapter) -> Parameters:
    """Return the base's parameters with the adapter added, in float32, on their devices."""
    scales = {path: module.scale for path, module in adapter.modules.items()}
    # Only what is adapted goes through the program; the rest stays the same arrays.
    changed = {path: base[path] for path in scales}
    return {**base, **_merged(changed, dict(adapter.arrays), tuple(sorted(scales.items())))}


@partial(jax.jit, static_argnums=2)
def _merged(
    weights: Parameters, arrays: Mapping[str, Array], scales: tuple[tuple[str, float], ...]
) -> Parameters:
    def wide(array: Array) -> Array:
        return array.astype(jnp.float32)

    return {
        path: merged_weight(
            wide(weights[path]), wide(arrays[a_name(path)]), wide(arrays[b_name(path)]), scale
        )
        for path, scale in scales
    }


def without_lora(config: Config) -> Config:
    policy = config.policy.model_copy(update={"lora": None, "quantize_base": None})
    return config.model_copy(update={"policy": policy})


def warm_start_config(config: Config) -> Config:
    """Return the configuration of the warm start, which trains an adapter only where asked to."""
    lora = config.policy.lora
    return config if lora is None or lora.begins == "sft" else without_lora(config)


def trained_shapes(template: eqx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the parameters that are trained: float32 but for an adapter's own."""
    structs = parameter_structs(template)
    return {
        name: structs[name] if is_adapters(name) else structs[name].update(dtype=jnp.float32)
        for name in trained_names(structs)
    }


def with_quantized(template: LanguageModel, scheme: str | None) -> LanguageModel:
    """The template with its linear layers quantised, those next to adapters too; None: itself."""
    if scheme is None:
        return template
    if template.spec.experts:
        raise InputError(
            "policy.quantize_base: expected a model without experts, which are not quantised; "
            "leave it null"
        )

    def changed(node: Any) -> Any:
        return QuantizedLinear.like(node, scheme) if isinstance(node, Linear) else node

    # Only linear layers within blocks: embeddings, norms and the head stay as they are.
    layers = template.layers
    stacked = jax.tree.map(changed, layers.stacked, is_leaf=lambda node: isinstance(node, Linear))
    return eqx.tree_at(lambda model: model.transformer.layers.stacked, template, stacked)


def _is_linear(node: Any) -> bool:
    return isinstance(node, QuantizedLinear)


# Arrays by layer, to which the backward pass adds the gradients of layers; None of frozen ones.
Sums = list[Array | None]


class Blocks:
    """Layers one by one: of the arrays that are not quantised each has its part.

    Gradients of parts are added to `sums` in place, layer by layer, in the order of the backward
    pass: gradients of whole arrays, to be joined or added up, would lie beside these. The sums are
    carried forward through all that takes a layer, so that they are carried back.
    """

    def __init__(self, layers: Layers) -> None:
        def is_leaf(node: Any) -> bool:
            return isinstance(node, QuantizedWeight | NamedArray)

        self._leaves, self._structure = jax.tree.flatten(layers.stacked, is_leaf=is_leaf)
        # Stacked on the first axis.
        self.arrays = [leaf.array for leaf in self._leaves if isinstance(leaf, NamedArray)]
        self._begun = None if layers.sums is None else list(layers.sums)
        self.sums: Sums = [*self.arrays] if self._begun is None else self._begun

    def of(self, layer: Any, arrays: Sequence[jax.Array]) -> DecoderLayer:
        """The layer of this index, which has these parts of `arrays`."""
        own = iter(arrays)
        leaves = [
            NamedArray(next(own), leaf.axes[1:]) if isinstance(leaf, NamedArray) else leaf
            for leaf in self._leaves
        ]
        block = self._structure.unflatten(leaves)

        def at(node: Any) -> Any:
            return node.at(layer) if _is_linear(node) else node

        return jax.tree.map(at, block, is_leaf=_is_linear)

    def at(self, layer: Any, sums: Sums) -> tuple[DecoderLayer, Sums]:
        """The layer of an index, which may be traced, and the sums that it is to be taken after."""
        pairs = zip(self.arrays, sums, strict=True)
        taken = [_part_of(jax.lax.stop_gradient(array), layer, total) for array, total in pairs]
        return self.of(layer, [part for part, _ in taken]), [total for _, total in taken]

    def take(self, layer: int) -> DecoderLayer:
        block, self.sums = self.at(np.int32(layer), self.sums)
        return block

    def first(self, count: int) -> list[DecoderLayer]:
        """The first `count` layers."""
        # Cut all at once: the gradients of the parts are then joined, and not added up.
        cut = [jnp.unstack(array) for array in self.arrays]
        return [self.of(np.int32(i), [parts[i] for parts in cut]) for i in range(count)]

    def begin_sums(self, states: Array) -> Array:
        """The states: where the backward pass begins with the sums so far, if there are any."""
        return states if self._begun is None else _begin_with(states, self.sums)


@jax.custom_vjp
def _part_of(whole: Array, layer: Any, total: Array | None) -> tuple[Array, Array | None]:
    """The part of a layer; its gradient is added to what is carried back as that of `total`."""
    return jax.lax.dynamic_index_in_dim(whole, layer, keepdims=False), total


def _part_forward(whole: Array, layer: Any, total: Array | None) -> Any:
    return _part_of(whole, layer, total), layer


def _part_backward(layer: Any, gradients: tuple[Array, Array | None]) -> Any:
    part, total = gradients
    return None, None, None if total is None else total.at[layer].add(part.astype(total.dtype))


_part_of.defvjp(_part_forward, _part_backward)


@jax.custom_vjp
def _begin_with(states: Array, sums: Sums) -> Array:
    """The states; what is carried back as the gradients of `sums` are the sums themselves."""
    return states


_begin_with.defvjp(lambda states, sums: (states, sums), lambda sums, gradient: (gradient, sums))


def with_sums(model: LanguageModel, sums: Mapping[str, Array]) -> LanguageModel:
    """The model whose gradients by `sums` are these sums and the gradients of its own arrays."""
    names = (name for name in parameter_shapes(model) if name.startswith(STACKED))
    by_array = [sums.get(name) for name in names if not is_quantized(name)]
    layers = dataclasses.replace(model.layers, sums=by_array)
    return eqx.tree_at(lambda model: model.transformer.layers, model, layers)


def merged_model(model: LanguageModel) -> LanguageModel:
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
