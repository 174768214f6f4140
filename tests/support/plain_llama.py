"""A Llama's logits from a Hugging Face folder, in NumPy and float64: a reader that owes us nothing.

Written from what config.json and the names of the tensors mean to transformers, whose recorded
numbers it is held to in test_exports.py. Shapes: T positions, N query heads, K key heads, H their
width, E the model's, V the vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


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
