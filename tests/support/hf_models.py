"""Tiny Hugging Face checkpoints from a seed, and their logits computed by NumPy in float64.

Weights are uneven on purpose: norms that do not scale by one, biases that are not zero, rows of
different sizes, and logits far enough apart that rounding changes no argmax. No JAX and no Levanter
here, so that both sides of a comparison can use it. `logits_TV` follows config.json and the names
of the tensors alone. Shapes: T positions, N query heads, K key heads, H head size, E model size,
V vocabulary.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

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


def digest_of(tensors: dict[str, np.ndarray]) -> str:
    """SHA-256 over names and bytes: whether two machines drew the same weights."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def write_checkpoint(folder: Path, name: str, seed: int) -> None:
    """Write config.json and model.safetensors; the tokenizer is the caller's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name)), "utf-8")
    save_file(tensors_of(name, seed), str(folder / "model.safetensors"), metadata={"format": "pt"})


def logits_TV(folder: Path, token_ids_T: np.ndarray) -> np.ndarray:
    """The logits after each token of one sequence, [T, V]."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["model_type"] == "llama"
    stored = load_file(str(folder / "model.safetensors"))
    weights = {name: tensor.astype(np.float64) for name, tensor in stored.items()}
    x_TE = weights["model.embed_tokens.weight"][token_ids_T]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        inside = {n.removeprefix(at): w for n, w in weights.items() if n.startswith(at)}
        normed_TE = _normed(x_TE, inside["input_layernorm.weight"], config)
        x_TE = x_TE + _attended(normed_TE, inside, config)
        normed_TE = _normed(x_TE, inside["post_attention_layernorm.weight"], config)
        gate = normed_TE @ inside["mlp.gate_proj.weight"].T
        up = normed_TE @ inside["mlp.up_proj.weight"].T
        x_TE = x_TE + (gate / (1 + np.exp(-gate)) * up) @ inside["mlp.down_proj.weight"].T
    tied = config["tie_word_embeddings"]
    head_VE = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return _normed(x_TE, weights["model.norm.weight"], config) @ head_VE.T


def _normed(x_TE: np.ndarray, weight_E: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return weight_E * x_TE / np.sqrt((x_TE**2).mean(-1, keepdims=True) + config["rms_norm_eps"])


def _attended(x_TE: np.ndarray, inside: dict[str, np.ndarray], config: dict[str, Any]) -> Any:
    """Causal attention; each key head serves as many query heads as come to it."""
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or config["hidden_size"] // n
    length = len(x_TE)

    def heads(name: str, count: int) -> np.ndarray:
        out = (x_TE @ inside[f"self_attn.{name}_proj.weight"].T).reshape(length, count, h)
        return np.repeat(out, n // count, axis=1)  # [T, N, H]

    angle_TH = np.arange(length)[:, None] * np.tile(_frequencies(h, config), 2)
    q_TNH, k_TNH = _turned(heads("q", n), angle_TH), _turned(heads("k", k), angle_TH)
    scores_NTT = np.einsum("tnh,snh->nts", q_TNH, k_TNH) / np.sqrt(h)
    scores_NTT[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights_NTT = np.exp(scores_NTT - scores_NTT.max(-1, keepdims=True))
    weights_NTT /= weights_NTT.sum(-1, keepdims=True)
    mixed_TNH = np.einsum("nts,snh->tnh", weights_NTT, heads("v", k))
    return mixed_TNH.reshape(length, n * h) @ inside["self_attn.o_proj.weight"].T


def _turned(x_TNH: np.ndarray, angle_TH: np.ndarray) -> np.ndarray:
    """Rotary embedding; a pair is a place of the first half and the same place of the second."""
    first, second = np.split(x_TNH, 2, axis=-1)
    other = np.concatenate([-second, first], axis=-1)
    return x_TNH * np.cos(angle_TH)[:, None] + other * np.sin(angle_TH)[:, None]


def _frequencies(h: int, config: dict[str, Any]) -> np.ndarray:
    """[H/2]; slow ones are slowed further where the config asks for Llama 3's scaling."""
    frequencies = config["rope_theta"] ** -(np.arange(0, h, 2) / h)
    scaling = config.get("rope_scaling")
    if not scaling:
        return frequencies
    assert scaling["rope_type"] == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])
