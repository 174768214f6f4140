"""The model families that can be trained and decoded, and what of their configurations is accepted.

Owns the table of families, the Levanter configuration of an architecture that is described by our
own, and the refusal of Hugging Face configurations that Levanter would load to a different function
than they describe. Leaves out weights and files (`model`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.gemma import GemmaConfig
from levanter.models.llama import LlamaConfig
from levanter.models.mistral import MistralConfig
from levanter.models.qwen import Qwen3Config, QwenConfig
from transformers import PretrainedConfig
from transformers.models.gemma import GemmaConfig as HfGemmaConfig
from transformers.models.llama import LlamaConfig as HfLlamaConfig
from transformers.models.mistral import MistralConfig as HfMistralConfig
from transformers.models.qwen2 import Qwen2Config as HfQwen2Config
from transformers.models.qwen3 import Qwen3Config as HfQwen3Config

from marin_rl.config import ModelConfig, ModelFamily
from marin_rl.errors import InputError
from marin_rl.model_folders import check_family

LevanterConfig = LlamaConfig | GemmaConfig
ROPE_KEYS = {
    "default": set[str](),
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"},
}
TANH_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family in Levanter's and in Hugging Face's words.

    `norm_start` is the weight of a norm that scales by one. `rope_scaling` tells whether Levanter
    reads and writes any scaling of the rotary embedding for it.
    """

    levanter: type[LevanterConfig]
    hf: type[PretrainedConfig]
    architecture: str
    activation: str = "silu"
    norm_start: float = 1.0
    rope_scaling: bool = True


FAMILIES: dict[str, Family] = {
    "llama": Family(levanter=LlamaConfig, hf=HfLlamaConfig, architecture="LlamaForCausalLM"),
    "qwen2": Family(levanter=QwenConfig, hf=HfQwen2Config, architecture="Qwen2ForCausalLM"),
    "qwen3": Family(levanter=Qwen3Config, hf=HfQwen3Config, architecture="Qwen3ForCausalLM"),
    "mistral": Family(
        levanter=MistralConfig,
        hf=HfMistralConfig,
        architecture="MistralForCausalLM",
        rope_scaling=False,
    ),
    "gemma": Family(
        levanter=GemmaConfig,
        hf=HfGemmaConfig,
        architecture="GemmaForCausalLM",
        activation=TANH_GELU,
        norm_start=0.0,
        rope_scaling=False,
    ),
}
assert set(FAMILIES) == set(get_args(ModelFamily))


def family_of(config: Any) -> Family:
    """The family of a Levanter configuration."""
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
    # CPU can train, the plain softmax is several times faster.
    plain = jax.default_backend() == "cpu"
    return {
        "attn_backend": AttentionBackend.VANILLA if plain else None,
        "gradient_checkpointing": False,
        "scan_layers": True,
    }


# ---------------------------------------------------------------- Hugging Face configurations


def checked_hf_config(tree: dict[str, Any], path: Path) -> PretrainedConfig:
    """A config.json as transformers reads it, once nothing in it is unsupported.

    Raises InputError naming what Levanter would ignore or misread; `path` is for the message.
    """
    name = check_family(tree, FAMILIES, path)
    rope_theta, rope_scaling = _rope_of(tree, path)
    hf_config = FAMILIES[name].hf(
        **(tree | {"rope_theta": rope_theta, "rope_scaling": rope_scaling})
    )
    problems = _unsupported(name, tree, hf_config) + _unsupported_attention(name, tree, hf_config)
    for expected, actual in problems:
        raise InputError(
            f"{path}: a {name} model with {actual} is not supported, expected {expected}: it "
            "would load and silently compute something else; choose another model"
        )
    return hf_config


def _unsupported(family: str, tree: dict[str, Any], hf: Any) -> list[tuple[str, str]]:
    """(expected, actual) of settings outside of attention that Levanter would ignore or misread."""
    activation = FAMILIES[family].activation
    # Gemma was trained with the tanh form; where a folder names both, `hidden_activation` is meant.
    own_activation = (family == "gemma" and hf.hidden_activation) or hf.hidden_act
    partial = tree.get("partial_rotary_factor")
    scaled = hf.rope_scaling is not None and not FAMILIES[family].rope_scaling
    tied = family == "mistral" and hf.tie_word_embeddings
    rules: list[tuple[bool, str, str]] = [
        (bool(tree.get("mlp_bias")), "mlp_bias false", "mlp_bias true"),
        ("quantization_config" in tree, "plain weights", "quantized weights"),
        (
            own_activation != activation,
            f"hidden_act {activation}",
            f"hidden_act {own_activation}",
        ),
        (scaled, "no rope_scaling", f"rope_scaling {hf.rope_scaling}"),
        (partial not in (None, 1, 1.0), "full rotary", f"partial rotary {partial}"),
        (tied, "tie_word_embeddings false", "tie_word_embeddings true"),
    ]
    return [(expected, actual) for wrong, expected, actual in rules if wrong]


def _unsupported_attention(family: str, tree: dict[str, Any], hf: Any) -> list[tuple[str, str]]:
    """(expected, actual) of attention settings that Levanter would ignore or misread."""
    layer_types = set(tree.get("layer_types") or ["full_attention"])
    head_size = hf.hidden_size // hf.num_attention_heads
    declared = hf.to_dict().get("head_dim")
    odd_head = family != "qwen3" and declared not in (None, head_size)
    rules: list[tuple[bool, str, str]] = [
        (bool(tree.get("attention_bias")), "attention_bias false", "attention_bias true"),
        (_has_window(family, hf), "no sliding window", "an active sliding window"),
        (layer_types != {"full_attention"}, "full attention", f"layer types {layer_types}"),
        (odd_head, f"head_dim {head_size} (hidden/heads)", f"head_dim {declared}"),
    ]
    return [(expected, actual) for wrong, expected, actual in rules if wrong]


def _has_window(family: str, hf: Any) -> bool:
    """True if a position may see less than all before it: a window shorter than the context."""
    if family == "mistral":
        return hf.sliding_window is not None and hf.sliding_window < hf.max_position_embeddings
    return family.startswith("qwen") and hf.use_sliding_window and hf.sliding_window is not None


def _rope_of(tree: dict[str, Any], path: Path) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from `rope_theta`/`rope_scaling` or from `rope_parameters`.

    transformers 5 writes the latter, by layer type where these differ; all supported layers are of
    the type full_attention.
    """
    parameters = tree.get("rope_parameters") or {}
    parameters = dict(parameters.get("full_attention") or parameters)
    if parameters.get("partial_rotary_factor") in (None, 1):  # of all dimensions
        parameters.pop("partial_rotary_factor", None)
    bases = {float(b) for b in (tree.get("rope_theta"), parameters.pop("rope_theta", None)) if b}
    if len(bases) > 1:
        raise InputError(
            f"{path}: rope_theta and rope_parameters.rope_theta differ ({sorted(bases)}); expected "
            "one rotary base; remove the wrong one from config.json"
        )
    scaling = dict(tree.get("rope_scaling") or parameters)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    scaling.pop("rope_theta", None)
    base = next(iter(bases), 10_000.0)
    if kind == "default" and not scaling:
        return base, None
    if kind not in ROPE_KEYS or set(scaling) - ROPE_KEYS[kind]:
        raise InputError(
            f"{path}: rotary scaling {kind!r} with {sorted(scaling)} is not supported; expected "
            f"one of { {name: sorted(keys) for name, keys in ROPE_KEYS.items()} }"
        )
    if missing := {"factor", "original_max_position_embeddings"} - set(scaling):
        raise InputError(f"{path}: rotary scaling {kind!r} lacks {sorted(missing)}; add them")
    return base, {"rope_type": kind, **scaling}
