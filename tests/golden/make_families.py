"""Write families.json: logits and gradients by transformers, of real configurations, shrunk.

PyTorch is no dependency, so this runs in an environment of its own, from the repository's root:

    uv venv --seed /tmp/hf-venv
    /tmp/hf-venv/bin/pip install torch==2.13.0 transformers==4.57.6
    /tmp/hf-venv/bin/python tests/golden/make_families.py CONFIG.json...

Each CONFIG.json is that of a model as its authors published it; its name is the file's. Widths,
depth and vocabulary are made small here, windows and lengths of rotary embeddings with them. For
each model: the shrunk configuration, shapes of all tensors, logits at some positions, and for every
tensor the sum of its gradient, weighed at random, of the mean log-probability of the next tokens.
All in float32, weights from a seed by a tensor's name. Models that are in the file already stay.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.family_folders import GOLDEN, KEPT, probe_of, tensors_of, tokens

POSITIONS, VOCABULARY, HEAD = 128, 112, 16


def shrunk(config: dict[str, Any]) -> dict[str, Any]:  # noqa: C901 - a line a setting
    """The same kind of model, of a few thousand weights."""
    small = dict(config, vocab_size=VOCABULARY, torch_dtype="float32")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if small.get(key) is not None:
            small[key] = 0 if key == "pad_token_id" else 1
    if small["model_type"] == "gpt2":
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return small | dropout | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    group = heads // keys if heads // keys in (3, 7) else min(heads // keys, 4)
    kept = 1 if keys == 1 else 2 if group > 1 else 4
    group = 4 if keys == 1 else group
    usual, declared = config["hidden_size"] // heads, config.get("head_dim")
    width = kept * group * HEAD if declared in (None, usual) else 48
    small |= {"num_attention_heads": kept * group, "num_key_value_heads": kept}
    small |= {"hidden_size": width, "intermediate_size": 96}
    if declared is not None:
        small["head_dim"] = HEAD
    if "query_pre_attn_scalar" in small:
        small["query_pre_attn_scalar"] *= HEAD / declared
    small |= {"moe_intermediate_size": 32} if "moe_intermediate_size" in small else {}
    for key in ("num_experts", "num_local_experts"):
        small |= {key: 8} if key in small else {}
    for key in ("num_experts_per_tok", "experts_per_token"):
        small |= {key: min(small[key], 3)} if key in small else {}
    layers = 8 if small["model_type"] == "gemma3_text" else 4
    small |= {"num_hidden_layers": layers}
    for key in ("layer_types", "no_rope_layers"):
        small |= {key: small[key][:layers]} if key in small else {}
    if "max_window_layers" in small:
        small["max_window_layers"] = min(small["max_window_layers"], layers)
    longest = config["max_position_embeddings"]
    small["max_position_embeddings"] = POSITIONS
    if small.get("sliding_window") is not None:
        small["sliding_window"] = POSITIONS if config["sliding_window"] >= longest else 12
    for key in ("original_max_position_embeddings", "initial_context_length"):
        small |= {key: POSITIONS} if key in small else {}
    if "short_factor" in (small.get("rope_scaling") or {}):
        pairs = int(width // (kept * group) * small.get("partial_rotary_factor", 1.0)) // 2
        extended = longest // config["original_max_position_embeddings"]
        small |= {"original_max_position_embeddings": 64, "max_position_embeddings": 64 * extended}
        small["rope_scaling"] = {
            # From the whole list, whose ends differ most.
            key: of[:: len(of) // pairs][:pairs] if isinstance(of, list) else of
            for key, of in small["rope_scaling"].items()
        }
    if "original_max_position_embeddings" in (small.get("rope_scaling") or {}):
        small["rope_scaling"] = small["rope_scaling"] | {"original_max_position_embeddings": 32}
    return small


def computed(config: dict[str, Any]) -> dict[str, Any]:
    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").float().eval()
    named = dict(model.named_parameters())
    shapes = {name: list(parameter.shape) for name, parameter in named.items()}
    for name, values in tensors_of(config, shapes).items():
        named[name].data.copy_(torch.from_numpy(values))
    ids = torch.from_numpy(tokens()).long()
    logits = model(ids).logits
    logprobs = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, ids[:, 1:, None])
    logprobs.mean().backward()
    gradients = {
        # Experts that no token took have none.
        name: 0.0
        if parameter.grad is None
        else float((parameter.grad.numpy() * probe_of(name, tuple(parameter.shape))).sum())
        for name, parameter in named.items()
    }
    kept = logits.detach().numpy()[:, KEPT].astype(np.float64).round(6).tolist()
    return {"config": config, "shapes": shapes, "logits": kept, "gradients": gradients}


def main(files: list[str]) -> None:
    """Add the models of these files to families.json."""
    torch.manual_seed(0)
    document = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.is_file() else {}
    for file in map(Path, files):
        if file.stem not in document:
            document[file.stem] = computed(shrunk(json.loads(file.read_text("utf-8"))))
            print(file.stem)
    GOLDEN.write_text(json.dumps(dict(sorted(document.items()))) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
