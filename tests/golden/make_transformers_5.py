"""Write transformers-5.json: the settings that transformers 5 writes for support/hf_models.py.

The project's own transformers is of version 4, so this runs in an environment of its own, from the
repository's root. The first line writes the folders with the project's environment, the last reads
them and saves them again with transformers 5:

    .venv/bin/python tests/golden/make_transformers_5.py write /tmp/hf-4
    uv venv /tmp/hf-5-venv && uv pip install -p /tmp/hf-5-venv transformers==5.23.0 torch==2.13.0
    /tmp/hf-5-venv/bin/python tests/golden/make_transformers_5.py save /tmp/hf-4 /tmp/hf-5
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hf_models import PARTICULARS, write_checkpoint

GOLDEN = Path(__file__).with_name("transformers-5.json")


def write(top: Path) -> None:
    """Every checkpoint as transformers 4 writes it."""
    from marin_rl.tokenizers import character_tokenizer

    for name in PARTICULARS:
        write_checkpoint(top / name, name, seed=0)
        character_tokenizer().save_pretrained(str(top / name))


def save(top: Path, out: Path) -> None:
    """Every checkpoint as transformers 5 saves it."""
    import transformers

    configs, tokenizer = {}, {}
    for name in PARTICULARS:
        model = transformers.AutoModelForCausalLM.from_pretrained(top / name)
        model.save_pretrained(out / name)
        configs[name] = json.loads((out / name / "config.json").read_text())
        # Not AutoTokenizer: it reads any folder of a Qwen2 model with Qwen2's own rules.
        transformers.TokenizersBackend.from_pretrained(top / name).save_pretrained(out / name)
        rules = json.loads((out / name / "tokenizer.json").read_text())
        tokenizer = {
            "tokenizer_config": json.loads((out / name / "tokenizer_config.json").read_text()),
            "post_processor": rules["post_processor"],
        }
    tree = {"transformers": transformers.__version__, "configs": configs, "tokenizer": tokenizer}
    GOLDEN.write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    {"write": write, "save": save}[sys.argv[1]](*map(Path, sys.argv[2:]))
