"""Tiny Hugging Face checkpoints from a seed.

Weights are uneven on purpose: norms that do not scale by one, biases that are not zero, rows of
different sizes, and logits far enough apart that rounding changes no argmax. No JAX here, so that
both sides of a comparison can use it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 103
CONTEXT = 96
LAYERS = 2

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
PARTICULARS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-gqa": LLAMA | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "llama3-rope": LLAMA
    | {"num_key_value_heads": 1, "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 2,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rope_theta": 1_000_000.0,
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
    "gemma": {
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a checkpoint."""
    return BASE | PARTICULARS[name]


def tensors_of(name: str, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint by its Hugging Face name, float32."""
    config, rng = config_of(name), np.random.default_rng(seed)
    gemma = config["model_type"] == "gemma"
    tensors = {}
    for path, shape in _shapes(config):
        noise = rng.standard_normal(shape, np.float32)
        if path.endswith("bias"):
            tensor = 0.5 * noise
        elif path == "model.norm.weight":
            # of either sign, so that a tied head does not give every token itself
            tensor = noise - np.float32(gemma)
        elif len(shape) == 1:
            tensor = 0.3 * noise + np.float32(not gemma)
        else:
            rows = np.exp(0.5 * rng.standard_normal((shape[0], 1), np.float32))
            tensor = noise * rows * np.float32(_gain(path, config) / np.sqrt(shape[1]))
        tensors[path] = tensor.astype(np.float32)
    return tensors


def _gain(path: str, config: dict[str, Any]) -> float:
    """Factor of a matrix over 1/sqrt(inputs); logits come out with a spread of about 4."""
    if "lm_head" in path or ("embed_tokens" in path and config["tie_word_embeddings"]):
        return 4.0
    return 4.0 if "o_proj" in path or "down_proj" in path else 1.5


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, mlp = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    family = config["model_type"]
    yield "model.embed_tokens.weight", (VOCABULARY, width)
    for layer in range(LAYERS):
        inside = f"model.layers.{layer}"
        outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        for name, size in outputs.items():
            yield f"{inside}.self_attn.{name}.weight", (size, width)
            if family == "qwen2":
                yield f"{inside}.self_attn.{name}.bias", (size,)
        yield f"{inside}.self_attn.o_proj.weight", (width, queries)
        if family == "qwen3":
            yield f"{inside}.self_attn.q_norm.weight", (head,)
            yield f"{inside}.self_attn.k_norm.weight", (head,)
        yield f"{inside}.mlp.gate_proj.weight", (mlp, width)
        yield f"{inside}.mlp.up_proj.weight", (mlp, width)
        yield f"{inside}.mlp.down_proj.weight", (width, mlp)
        yield f"{inside}.input_layernorm.weight", (width,)
        yield f"{inside}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCABULARY, width)


def write_checkpoint(folder: Path, name: str, seed: int) -> None:
    """Write config.json and model.safetensors; the tokenizer is the caller's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name)), "utf-8")
    save_file(tensors_of(name, seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
