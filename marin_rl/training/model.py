"""The door to Levanter: families of models, building one, and its parameters by name.

A policy is one of Levanter's own modules, layers stacked, master weights in float32. Folders are
read and written in hf_folders.py; running a model over tokens is in logprobs.py.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args

import equinox as eqx
import jax
import numpy as np
from haliax import Axis, NamedArray
from haliax.nn.scan import ScanCheckpointPolicy
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.gemma import GemmaConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel
from levanter.models.mistral import MistralConfig
from levanter.models.qwen import Qwen3Config, QwenConfig

from marin_rl.compilation import device_array
from marin_rl.config import ModelConfig, ModelFamily, PolicyConfig
from marin_rl.digests import digest_of
from marin_rl.hf_settings import HF_FAMILIES, HfFamily
from marin_rl.lora.quantization import FIELDS

LAYER_AXES = ("layer", "layers")
Parameters = dict[str, jax.Array]  # by path in the module

# A policy, or another tree of named arrays: a scalar model, a head.
M = TypeVar("M", bound=eqx.Module)

# ---------------------------------------------------------------- families
LevanterConfig = LlamaConfig | GemmaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family in Levanter's and in Hugging Face's words.

    `norm_start` is the weight of a norm that scales by one.
    """

    levanter: type[LevanterConfig]
    hf: HfFamily
    architecture: str
    norm_start: float = 1.0


FAMILIES: dict[str, Family] = {
    "llama": Family(levanter=LlamaConfig, hf=HF_FAMILIES["llama"], architecture="LlamaForCausalLM"),
    "qwen2": Family(levanter=QwenConfig, hf=HF_FAMILIES["qwen2"], architecture="Qwen2ForCausalLM"),
    "qwen3": Family(levanter=Qwen3Config, hf=HF_FAMILIES["qwen3"], architecture="Qwen3ForCausalLM"),
    "mistral": Family(
        levanter=MistralConfig, hf=HF_FAMILIES["mistral"], architecture="MistralForCausalLM"
    ),
    "gemma": Family(
        levanter=GemmaConfig,
        hf=HF_FAMILIES["gemma"],
        architecture="GemmaForCausalLM",
        norm_start=0.0,
    ),
}


assert set(FAMILIES) == set(get_args(ModelFamily))


def family_of(config: Any) -> Family:
    return next(family for family in FAMILIES.values() if family.levanter is type(config))


def levanter_config(model: ModelConfig, context_length: int) -> LevanterConfig:
    """The Levanter configuration of an architecture that is described by our own."""
    return FAMILIES[model.family].levanter(
        max_seq_len=context_length,
        hidden_dim=model.hidden_size,
        intermediate_dim=model.intermediate_size,
        num_layers=model.layers,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        initializer_range=model.initializer_range,
        layer_norm_epsilon=model.norm_epsilon,
        tie_word_embeddings=model.tie_embeddings,
        rope=DefaultRotaryEmbeddingsConfig(theta=model.rope_theta),
        **_particular(model),
        **execution(),
    )


def _particular(model: ModelConfig) -> dict[str, Any]:
    """Settings that only some families have, or whose defaults are wrong for them."""
    match model.family:
        case "gemma":
            return {"head_dim": model.head_size or model.hidden_size // model.heads}
        case "mistral":
            # Levanter declares a window of 4,096 by default, and attends without any.
            return {"sliding_window": None}
        case "qwen2":
            return {}
        case _:
            return {"head_dim": model.head_size}


def execution() -> dict[str, Any]:
    """Choices that change speed and memory, never the function."""
    # Levanter's default on a CPU is a blocked attention written for accelerators; at the lengths a
    # CPU can train, the plain softmax is several times faster. On a GPU it is Transformer Engine's,
    # else a blocked one, only for multiples of 1,024 positions: hidden_states.py has its own there.
    plain = jax.default_backend() in ("cpu", "gpu")
    return {
        "attn_backend": AttentionBackend.VANILLA if plain else None,
        "gradient_checkpointing": False,
        "scan_layers": True,
    }


# ---------------------------------------------------------------- building


def build_model(config: PolicyConfig, vocab_size: int, seed: int) -> LmHeadModel:
    """A model with random weights: normal of std `initializer_range`; norms scale by 1, biases 0.

    The weights are a function of (config, vocab_size, seed) only, on every platform.
    """
    levanter = levanter_config(config.model, config.context_length)
    template = _template(levanter, vocab_size)
    weights = {
        # A generator for each array by its index: none depends on how many numbers another one
        # took.
        path: _initial(path, array, levanter, np.random.default_rng([seed, index]))
        for index, (path, array) in enumerate(_named_arrays(template).items())
    }
    return with_parameters(template, weights)


def _initial(
    path: str, template: NamedArray, config: LevanterConfig, rng: np.random.Generator
) -> np.ndarray:
    shape = tuple(axis.size for axis in template.axes)
    if is_matrix(path, template):
        return rng.standard_normal(shape, np.float32) * np.float32(config.initializer_range)
    # Gemma's norms multiply by 1 + weight, so theirs start at 0.
    start = 0.0 if _is_bias(path) else family_of(config).norm_start
    return np.full(shape, start, np.float32)


def is_matrix(path: str, array: NamedArray) -> bool:
    """True if a parameter is a matrix (embeddings included), not a norm's scale or a bias.

    A bias of attention has as many axes as a matrix, so the name decides; the axis over which
    layers are stacked is called "layers" in Gemma and "layer" elsewhere.
    """
    return not _is_bias(path) and sum(axis.name not in LAYER_AXES for axis in array.axes) >= 2


def _is_bias(path: str) -> bool:
    return path.endswith("/bias")


def model_template(config: PolicyConfig, vocab_size: int) -> LmHeadModel:
    return _template(levanter_config(config.model, config.context_length), vocab_size)


# Tracing a module's `init` takes longer than reading a small checkpoint, and each read needs it.
@lru_cache(maxsize=16)
def _template(config: LevanterConfig, vocab_size: int) -> LmHeadModel:
    vocab = Axis("vocab", vocab_size)
    return eqx.filter_eval_shape(config.model_type.init, vocab, config, key=jax.random.PRNGKey(0))


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


def with_gradient_checkpointing(model: LmHeadModel) -> LmHeadModel:
    """The same model, recomputing each layer's activations in the backward pass."""

    def where(m: Any) -> Any:
        return m.transformer.layers

    layers = where(model)
    policy = ScanCheckpointPolicy(save_carries=True)
    return eqx.tree_at(where, model, dataclasses.replace(layers, gradient_checkpointing=policy))


def matrix_mask(model: eqx.Module) -> dict[str, bool]:
    """For every parameter, whether weight decay applies to it."""
    return {path: is_matrix(path, array) for path, array in _named_arrays(model).items()}


def parameters_digest(model: eqx.Module) -> str:
    """SHA-256 over path, dtype, shape and bytes of every parameter, as hex."""
    return digest_of(named_parameters(model))
