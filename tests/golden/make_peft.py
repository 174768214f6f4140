"""Write peft.json: logprobs by PEFT for adapters of the models of support/hf_models.py.

PyTorch is no dependency, so this runs in an environment of its own, from the repository's root:

    uv venv /tmp/peft-venv
    uv pip install -p /tmp/peft-venv torch==2.13.0 transformers==4.57.6 peft==0.21.2
    /tmp/peft-venv/bin/python tests/golden/make_peft.py

For each case: adapter_config.json as PEFT writes it, names and shapes of its tensors, whose values
are NumPy's by a seed, and float64 logprobs of given tokens. `make_peft.py score BASE [ADAPTER]`
prints the logprobs of the tokens on standard input, for tests that are opted into with
MARIN_RL_PEFT_PYTHON=/tmp/peft-venv/bin/python.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.peft_folders import write_folder
from support.hf_models import VOCABULARY, write_checkpoint

GOLDEN = Path(__file__).with_name("peft.json")
GIVEN_TOKENS = 48
ROUNDING_MAX = 3e-5
SEEDS_MAX = 40
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama-gqa": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "qwen3": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.down_proj": 6},
        "alpha_pattern": {"self_attn.k_proj": 3},
    },
    "gemma": {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj"]},
}


def loaded(base, adapter=None, dtype=torch.float32):
    """A base folder, with an adapter folder where one is given."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager")
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


def logprobs(model, tokens):
    """Logprob of each token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    scores = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    return scores.numpy()


def written_by_peft(base, settings, folder):
    """adapter_config.json, and the shapes of the tensors, of a fresh adapter."""
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **settings)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    written = json.loads((folder / "adapter_config.json").read_text())
    written |= {
        "base_model_name_or_path": None,
        "target_modules": sorted(written["target_modules"]),
    }
    tensors = load_file(folder / "adapter_model.safetensors")
    return written, {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}


def case(name, seed):
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        write_checkpoint(top / "base", name, seed)
        config, shapes = written_by_peft(top / "base", CASES[name], top / "fresh")
        write_folder(top / "adapter", config, shapes, seed)
        tokens = np.random.default_rng([seed, 2]).integers(0, VOCABULARY, GIVEN_TOKENS).tolist()
        exact = logprobs(loaded(top / "base", top / "adapter", torch.float64), tokens)
        single = logprobs(loaded(top / "base", top / "adapter"), tokens)
        plain = logprobs(loaded(top / "base"), tokens)
    return {
        "seed": seed,
        "config": config,
        "shapes": shapes,
        "tokens": tokens,
        "logprobs": [round(float(value), 7) for value in exact],
        "rounding": float(np.abs(single - exact).max()),
        "moved": float(np.abs(plain - exact).max()),
    }


def main():
    golden = {}
    for name in CASES:
        made = (case(name, seed) for seed in range(SEEDS_MAX))
        golden[name] = next(each for each in made if each["rounding"] < ROUNDING_MAX)
        print(name, golden[name]["seed"], golden[name]["rounding"], golden[name]["moved"])
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["score"]:
        print(json.dumps(logprobs(loaded(*sys.argv[2:]), json.loads(sys.stdin.read())).tolist()))
    else:
        main()
