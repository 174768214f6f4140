"""A GGUF file of a Llama model as a Hugging Face folder: `python gguf_folder.py FILE FOLDER`.

Run by the Python of `make test-real`, which has `gguf`. Dimensions, tokenizer and chat template are
the file's own; weights that it has quantised are stored as bfloat16.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def main(file: Path, folder: Path) -> None:
    reader = GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(facts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    write_tokenizer(facts, folder)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *layer, kind, _ = tensor.name.split(".")
        if kind in heads:
            weight = half_split(weight, config[heads[kind]])
        name = f"layers.{layer[1]}.{LAYER_NAMES[kind]}" if layer else TOP_NAMES[kind]
        weights[f"model.{name}.weight"] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of a Llama model whose output layer is its embedding."""
    assert facts["general.architecture"] == "llama", facts["general.architecture"]
    width, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    assert width == heads * facts["llama.rope.dimension_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        # the file has float32: 9.999999747378752e-06 is 1e-5
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": facts["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
    }


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in Hugging Face's order: GGUF has the two halves that rotary embeddings turn mixed."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """`tokenizer.json` and its settings, as SmolLM2's repository has them."""
    words = facts["tokenizer.ggml.tokens"]
    assert facts["tokenizer.ggml.pre"] == "smollm", facts["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(words, facts["tokenizer.ggml.token_type"], strict=True)
    control = [word for word, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {
        f"{short}_token": words[facts[f"tokenizer.ggml.{long}_token_id"]]
        for short, long in names.items()
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=1))
    settings = special | {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "additional_special_tokens": [special["bos_token"], special["eos_token"]],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
