"""Settings of a Hugging Face configuration that Levanter reads as they are meant.

Refuses a config.json that Levanter would load to another function than it describes. Imports
transformers, whose classes have the defaults, and neither JAX nor Levanter, so that a run of such a
folder ends before it starts anything. Leaves out weights and files (`model_folders`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from transformers import PretrainedConfig
from transformers.models.gemma import GemmaConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from marin_rl.config import ModelFamily
from marin_rl.errors import InputError
from marin_rl.model_folders import check_family, read_hf_config

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
class HfFamily:
    """A family in transformers' words.

    `rope_scaling` tells whether Levanter reads and writes any scaling of the rotary embedding for
    it.
    """

    settings: type[PretrainedConfig]
    activation: str = "silu"
    rope_scaling: bool = True


HF_FAMILIES: dict[str, HfFamily] = {
    "llama": HfFamily(settings=LlamaConfig),
    "qwen2": HfFamily(settings=Qwen2Config),
    "qwen3": HfFamily(settings=Qwen3Config),
    "mistral": HfFamily(settings=MistralConfig, rope_scaling=False),
    "gemma": HfFamily(settings=GemmaConfig, activation=TANH_GELU, rope_scaling=False),
}
assert set(HF_FAMILIES) == set(get_args(ModelFamily))


def check_hf_folder(folder: str | Path) -> None:
    """Raise InputError, reading no weight, for settings that cannot be loaded exactly."""
    path = Path(folder).resolve()
    checked_hf_config(read_hf_config(path), path)


def checked_hf_config(tree: dict[str, Any], path: Path) -> PretrainedConfig:
    """A config.json as transformers reads it, once nothing in it is unsupported.

    Raises InputError naming what Levanter would ignore or misread; `path` is for the message.
    """
    name = check_family(tree, HF_FAMILIES, path)
    rope_theta, rope_scaling = _rope_of(tree, path)
    hf_config = HF_FAMILIES[name].settings(
        **(tree | {"rope_theta": rope_theta, "rope_scaling": rope_scaling})
    )
    for expected, actual in _unsupported(name, tree, hf_config):
        raise InputError(
            f"{path}: a {name} model with {actual} is not supported, expected {expected}: it "
            "would load and silently compute something else; choose another model"
        )
    return hf_config


def _unsupported(family: str, tree: dict[str, Any], hf: Any) -> list[tuple[str, str]]:
    """(expected, actual) of settings that Levanter would ignore or misread."""
    activation = HF_FAMILIES[family].activation
    # Gemma was trained with the tanh form; where a folder names both, `hidden_activation` is meant.
    own_activation = (family == "gemma" and hf.hidden_activation) or hf.hidden_act
    partial = tree.get("partial_rotary_factor")
    scaled = hf.rope_scaling is not None and not HF_FAMILIES[family].rope_scaling
    tied = family == "mistral" and hf.tie_word_embeddings
    layer_types = set(tree.get("layer_types") or ["full_attention"])
    head_size = hf.hidden_size // hf.num_attention_heads
    declared = hf.to_dict().get("head_dim")
    odd_head = family != "qwen3" and declared not in (None, head_size)
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
