"""GGUF files as llama.cpp's converter makes them, of shrunk models, by the library's own writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf import quantize as quantized

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
PERMUTED = ("llama", "smollm3", "granite")
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
# Byte-level characters of ASCII: a space and a line's end have letters of their own.
ALPHABET = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = [*SPECIAL, *ALPHABET, "th", "the", "Ġthe", "12"]
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "t", "h", "e", "\n", "th", "he", "the", "▁the"]


def model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a model without its architecture's name, as llama.cpp's converter writes them."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": size,
        "vocab_size": config["vocab_size"],
    }
    if config["model_type"] in ("gemma2", "gemma3_text", "phi3"):
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
    if config["model_type"] == "gemma2":
        keys["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        keys["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if config["model_type"] == "granite":
        for key, name in (
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ):
            keys[key] = float(config[name])
    if (config.get("rope_scaling") or {}).get("rope_type") == "yarn":
        scaling = config["rope_scaling"]
        keys["rope.scaling.type"] = "yarn"
        keys["rope.scaling.factor"] = float(scaling["factor"])
        keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return keys


def byte_level(vocabulary: int, rule: str = "smollm") -> dict[str, Any]:
    """Keys of a small byte-level tokenizer; rows above its tokens only fill the vocabulary up."""
    fill = [f"[PAD{index}]" for index in range(len(TOKENS), vocabulary)]
    normal = len(TOKENS) - len(SPECIAL)
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * normal
    return {
        "ggml.model": "gpt2",
        "ggml.pre": rule,
        "ggml.tokens": TOKENS + fill,
        "ggml.token_type": [int(each) for each in kinds] + [int(TokenType.UNUSED)] * len(fill),
        "ggml.merges": MERGES,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.eot_token_id": 0,
        "ggml.padding_token_id": 0,
        "ggml.add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }


def sentence_pieces() -> dict[str, Any]:
    """Keys of a small SentencePiece tokenizer as Gemma has them."""
    kinds = [TokenType.CONTROL] * 4 + [TokenType.NORMAL] * 4 + [TokenType.USER_DEFINED]
    kinds += [TokenType.NORMAL] * 4
    scores = [-1000.0] * 4 + [-9.0, -10.0, -11.0, -12.0, -1000.0, -2.0, -1.0, -3.0, -4.0]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": PIECES,
        "ggml.token_type": [int(kind) for kind in kinds],
        "ggml.scores": scores,
        "ggml.bos_token_id": 2,
        "ggml.eos_token_id": 1,
        "ggml.unknown_token_id": 3,
        "ggml.padding_token_id": 0,
        "ggml.add_bos_token": True,
        "ggml.add_space_prefix": False,
    }


def gguf_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Tensors of a folder as llama.cpp's converter stores them."""
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    (kind,) = (each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config["num_hidden_layers"])
    stored = {}
    for name, tensor in tensors.items():
        if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        stored[ours] = np.ascontiguousarray(tensor)
    return stored


def write_gguf(
    file: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
) -> None:
    """Write keys, and matrices of a type; vectors are float32."""
    writer = GGUFWriter(file, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        each = GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, quantized(tensor, each), raw_dtype=each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def keys_of(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    keys = {f"{architecture}.{key}": value for key, value in model_keys(config).items()}
    return keys | {f"tokenizer.{key}": value for key, value in tokenizer.items()}
