"""An export's tokenizer gives the ids of tokenizer.json, whatever class the folder named."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from marin_rl.tokenizers import export_tokenizer, load_tokenizer, tokenizer_digest

pytestmark = pytest.mark.slow

TEXTS = ("26", "\n\n26", "1234567", "a  b\t\n", "naïve 東京 🙂", "x=3.14159;", "<|im_end|>\n")


def test_an_export_names_the_plain_class_and_keeps_every_id(real_model: Path, tmp_path: Path):
    named = tmp_path / "named"
    shutil.copytree(real_model, named, ignore=shutil.ignore_patterns("*.safetensors"))
    config = named / "tokenizer_config.json"
    as_published = json.loads(config.read_text("utf-8")) | {"tokenizer_class": "GPT2Tokenizer"}
    config.write_text(json.dumps(as_published), "utf-8")
    source = load_tokenizer(named)
    assert type(source).__name__.startswith("GPT2Tokenizer")
    folder = tmp_path / "exported"
    folder.mkdir()
    export_tokenizer(source, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    exported = load_tokenizer(folder)
    assert tokenizer_digest(exported) == tokenizer_digest(source)
    assert exported.special_tokens_map == source.special_tokens_map
    file = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    others = AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        rendered = source.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = file.encode(rendered, add_special_tokens=False).ids
        for tokenizer in (source, exported, others):
            called = tokenizer(rendered, add_special_tokens=False)
            assert called["input_ids"] == ids
            assert set(called) == {"input_ids", "attention_mask"}
