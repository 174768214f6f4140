"""A policy's model: built from a seed, and its parameters by name.

Layers are stacked, and master weights are in float32. What a model computes is described in
`marin_rl.models`; folders are read and written in hf_folders.py; running a model over tokens is in
logprobs.py.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marin_rl.compilation import device_array
from marin_rl.config import PolicyConfig
from marin_rl.lora.adapter import digest_of as digest_by_blocks
from marin_rl.lora.quantization import FIELDS
from marin_rl.models.families import described_model
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import Spec
from marin_rl.storage.array_files import cut, extents, whole_box
from marin_rl.storage.checkpoints import placed

LAYER_AXIS = "layer"
BLOCK_BYTES = 2**22  # of an array that is fetched in blocks
Parameters = dict[str, jax.Array]  # by path in the module

# A policy, or another tree of named arrays: a scalar model, a head.
M = TypeVar("M", bound=eqx.Module)

# ---------------------------------------------------------------- building


def build_model(
    config: PolicyConfig, vocab_size: int, seed: int, like: Mapping[str, Any] | None = None
) -> LanguageModel:
    """A model with random weights: normal of std `initializer_range`; norms scale by 1, biases 0.

    The weights are a function of (config, vocab_size, seed) only, on every platform. Where `like`
    has shardings, they are placed by these, one whole array at a time.
    """
    template = model_template(config, vocab_size)
    weights = {
        # A generator for each array by its index: none depends on how many numbers another one
        # took.
        path: placed(
            _initial(path, array, template.spec, np.random.default_rng([seed, index])),
            like and like[path],
        )
        for index, (path, array) in enumerate(_named_arrays(template).items())
    }
    return with_parameters(template, weights)


def _initial(path: str, template: NamedArray, spec: Spec, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(axis.size for axis in template.axes)
    if is_matrix(path, template):
        return rng.standard_normal(shape, np.float32) * np.float32(spec.initializer_range)
    # Gemma's norms multiply by 1 + weight, so theirs start at 0.
    start = 0.0 if _is_bias(path) or spec.norm == "gemma" else 1.0
    return np.full(shape, start, np.float32)


def is_matrix(path: str, array: NamedArray) -> bool:
    """True if a parameter is a matrix (embeddings included), not a norm's scale or a bias.

    A bias of attention has as many axes as a matrix, and so have its sinks: the name decides.
    """
    return (
        not _is_bias(path)
        and not path.endswith("/sinks")
        and sum(axis.name != LAYER_AXIS for axis in array.axes) >= 2
    )


def _is_bias(path: str) -> bool:
    return path.endswith("/bias")


def model_template(config: PolicyConfig, vocab_size: int) -> LanguageModel:
    spec = described_model(config.model, config.context_length)
    return model_of(dataclasses.replace(spec, vocabulary=vocab_size))


# ---------------------------------------------------------------- parameters by name


def _named_arrays(model: Any) -> dict[str, NamedArray]:
    leaves = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_named)[0]
    return {_name_of(path): leaf for path, leaf in leaves if _is_named(leaf)}


def _name_of(path: Any) -> str:
    """Name of a parameter by its path in the module.

    A layer with an adapter keeps the name of its weight, which the adapter's arrays are named for,
    and so are the arrays of a quantised weight.
    """
    name = "/".join(part.name for part in path if part.name != "wrapped")
    head, _, last = name.rpartition("/")
    if last in FIELDS:
        return f"{head}:{last}"
    return f"{head}/weight:{last[-1]}" if last in ("lora_A", "lora_B") else name


def _is_named(node: Any) -> bool:
    return isinstance(node, NamedArray)


def named_parameters(model: eqx.Module) -> dict[str, jax.Array]:
    """Parameters by path in the module, in a fixed order."""
    return {path: array.array for path, array in _named_arrays(model).items()}


def with_parameters(model: M, parameters: Mapping[str, Any]) -> M:
    """The module with its parameters replaced; `parameters` is keyed as `named_parameters`."""
    axes = {path: array.axes for path, array in _named_arrays(model).items()}
    # A name that is not asked for is refused, too: its weights would be dropped silently.
    assert set(axes) == set(parameters), sorted(set(axes) ^ set(parameters))

    def replace(path: Any, leaf: Any) -> Any:
        if not _is_named(leaf):
            return leaf
        name = _name_of(path)
        return NamedArray(device_array(parameters[name]), axes[name])

    return jax.tree_util.tree_map_with_path(replace, model, is_leaf=_is_named)


def parameter_shapes(model: eqx.Module) -> dict[str, tuple[int, ...]]:
    return {path: tuple(array.array.shape) for path, array in _named_arrays(model).items()}


def parameter_structs(model: eqx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(named.array.shape, named.array.dtype)
        for path, named in _named_arrays(model).items()
    }


def parameter_axes(model: eqx.Module) -> dict[str, tuple[Axis, ...]]:
    return {path: array.axes for path, array in _named_arrays(model).items()}


def with_gradient_checkpointing(model: LanguageModel, *, offload: bool = False) -> LanguageModel:
    """The same model, recomputing each layer's activations in the backward pass."""
    recomputed = "offload" if offload else True
    layers = dataclasses.replace(model.layers, recomputed=recomputed)
    return eqx.tree_at(lambda m: m.transformer.layers, model, layers)


def matrix_mask(model: eqx.Module) -> dict[str, bool]:
    """For every parameter, whether weight decay applies to it."""
    return {path: is_matrix(path, array) for path, array in _named_arrays(model).items()}


def digest_of(parameters: Mapping[str, Any]) -> str:
    """SHA-256 over path, dtype, shape and bytes of every array, as hex, whatever devices have them.

    Where arrays are spread over processes all of them call it: see `host_blocks`.
    """
    return digest_by_blocks(parameters, host_blocks)


def host_blocks(array: Any) -> Iterator[np.ndarray]:
    """The values of an array in their order, by blocks on the host.

    Those of an array over several devices are gathered one by one; where these are of several
    processes, that is a collective: see `compilation.gathered`.
    """
    if isinstance(array, jax.Array) and array.is_fully_replicated:
        array = array.addressable_data(0)
    platforms = [each.platform for each in array.devices()] if isinstance(array, jax.Array) else []
    if platforms in ([], ["cpu"]):
        yield np.asarray(array)  # no copy
        return
    sharding, shape = array.sharding, array.shape
    shared = zip(sharding.shard_shape(shape), shape, strict=True)
    # A slice along an axis that devices share would gather the array.
    axes = next((axis for axis, (own, all_) in enumerate(shared) if own != all_), None)
    for box in cut(whole_box(shape), array.dtype.itemsize, BLOCK_BYTES, axes):
        starts = [np.int32(start) for start, _ in box]
        block = _slicing(extents(box), sharding)(array, starts)
        yield np.asarray(block.addressable_data(0))


@cache
def _slicing(sizes: Sequence[int], sharding: Any) -> Any:
    """Return the program that gives every device of an array a slice of it."""
    everywhere = sharding
    if isinstance(sharding, NamedSharding):
        assert isinstance(sharding.mesh, Mesh), "arrays lie on devices"
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    slicing = partial(jax.lax.dynamic_slice, slice_sizes=sizes)
    return jax.jit(slicing, out_shardings=everywhere)


def parameters_digest(model: eqx.Module) -> str:
    """SHA-256 over path, dtype, shape and bytes of every parameter, as hex."""
    return digest_of(named_parameters(model))
