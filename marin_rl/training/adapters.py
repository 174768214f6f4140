"""Models with an adapter: templates with and without it, which parameters are trained, merging.

A base's parameters keep their names, and an adapter's are named PATH:A and PATH:B after the weights
they change (see `marin_rl.lora`). So a policy with an adapter is one dictionary of arrays, of which
those named by `trained_names` are trained, and a template decides which names there are.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import Config, PolicyConfig
from marin_rl.errors import InputError
from marin_rl.inference.linear_layers import LoraLinear
from marin_rl.lora import (
    Adapter,
    LoraModule,
    a_name,
    b_name,
    configured_modules,
    initial_arrays,
    merged_weight,
    read_peft,
)
from marin_rl.training.model import parameter_shapes, parameter_structs, with_parameters
from marin_rl.training.step_types import Parameters

Modules = Mapping[str, LoraModule]
M = TypeVar("M", bound=eqx.Module)

HEAD = "head/"  # of a scalar model, which is trained whatever its trunk is


def modules_of(policy: PolicyConfig, template: LmHeadModel) -> dict[str, LoraModule]:
    """Adapted weights of a policy, by path; none without an adapter. Raises InputError."""
    return configured_modules(policy.lora, parameter_shapes(template))


def first_adapter(config: Config, modules: Modules, template: LmHeadModel) -> Parameters:
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


def with_adapter(template: LmHeadModel, modules: Modules, dtype: str = "float32") -> LmHeadModel:
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
    """The template of the base."""

    def unwrapped(node: Any) -> Any:
        return node.wrapped if isinstance(node, LoraLinear) else node

    return jax.tree.map(unwrapped, template, is_leaf=lambda node: isinstance(node, LoraLinear))


def is_adapters(name: str) -> bool:
    """True for the name of an adapter's array."""
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


def policy_module(template: LmHeadModel, parameters: Parameters) -> LmHeadModel:
    """The model of these parameters: the base alone where they have no adapter's arrays."""
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
    """Return the configuration of a stage that trains all parameters."""
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
