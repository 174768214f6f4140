"""The model families that can be trained and decoded, in Levanter's words.

Owns the table of families, and the Levanter configuration of an architecture that is described by
our own. Leaves out what of a Hugging Face configuration is accepted (`marin_rl.hf_settings`), and
weights and files (`model`).
"""

from dataclasses import dataclass
from typing import Any, get_args

import jax
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.gemma import GemmaConfig
from levanter.models.llama import LlamaConfig
from levanter.models.mistral import MistralConfig
from levanter.models.qwen import Qwen3Config, QwenConfig

from marin_rl.config import ModelConfig, ModelFamily
from marin_rl.hf_settings import HF_FAMILIES, HfFamily

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
    # CPU can train, the plain softmax is several times faster. On a GPU it is Transformer Engine's,
    # else a blocked one for multiples of 1,024 positions alone: `hidden_states` has its own there.
    plain = jax.default_backend() in ("cpu", "gpu")
    return {
        "attn_backend": AttentionBackend.VANILLA if plain else None,
        "gradient_checkpointing": False,
        "scan_layers": True,
    }
