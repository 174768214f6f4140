"""Model folders as transformers 5 writes them: the same model and tokenizer as transformers 4's.

tests/golden/transformers-5.json holds what transformers 5 wrote for the checkpoints of
support/hf_models.py; tests/golden/make_transformers_5.py writes it again.
"""

import json
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
from safetensors.numpy import load_file, save_file
from support.cases import others_slow
from support.hf_models import PARTICULARS, config_of, write_checkpoint
from support.models import full_logits
from transformers import AutoConfig, AutoTokenizer

from marin_rl.config import ModelFamily, parse_config
from marin_rl.errors import InputError
from marin_rl.plain_files import WEIGHTS_FILE, WEIGHTS_INDEX, weight_files
from marin_rl.planning import plan
from marin_rl.tokenizers import character_tokenizer, load_tokenizer
from marin_rl.training.hf_folders import load_hf, save_hf
from marin_rl.training.hf_weights import hf_template
from marin_rl.training.model import parameters_digest

pytestmark = pytest.mark.usefixtures("compiled_quickly")

GOLDEN = json.loads((Path(__file__).parent / "golden/transformers-5.json").read_text("utf-8"))
TEXT = "<|user|>Hello, <|end|> x\n<|assistant|>é"


def written_by_4(folder: Path, name: str) -> Path:
    """A checkpoint as transformers 4 writes it."""
    write_checkpoint(folder, name, seed=0)
    character_tokenizer().save_pretrained(str(folder))
    return folder


def written_by_5(folder: Path, name: str) -> Path:
    """The same checkpoint with the settings that transformers 5 wrote for it."""
    written_by_4(folder, name)
    rewrite(folder / "config.json", GOLDEN["configs"][name])
    rewrite(folder / "tokenizer_config.json", GOLDEN["tokenizer"]["tokenizer_config"])
    rules = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    rules["post_processor"] = GOLDEN["tokenizer"]["post_processor"]
    rewrite(folder / "tokenizer.json", rules)
    (folder / "special_tokens_map.json").unlink()  # transformers 5 writes none
    return folder


def rewrite(file: Path, tree: dict[str, Any]) -> None:
    file.write_text(json.dumps(tree), "utf-8")


def shard(folder: Path, count: int = 3) -> None:
    """Split the weights into files with an index, as both versions do above a size."""
    tensors = load_file(str(folder / WEIGHTS_FILE))
    (folder / WEIGHTS_FILE).unlink()
    places = {}
    for part in range(count):
        file = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
        own = {name: t for n, (name, t) in enumerate(tensors.items()) if n % count == part}
        save_file(own, str(folder / file), metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    rewrite(folder / WEIGHTS_INDEX, {"metadata": {"total_size": size}, "weight_map": places})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written_by_5(tmp_path / "llama-gqa", "llama-gqa")


@pytest.mark.parametrize("name", PARTICULARS)
def test_both_versions_describe_the_same_architecture(tmp_path, name):
    old, new = written_by_4(tmp_path / "4", name), written_by_5(tmp_path / "5", name)
    assert "rope_theta" not in GOLDEN["configs"][name]
    assert "torch_dtype" not in GOLDEN["configs"][name]
    assert hf_template(new).spec == hf_template(old).spec


@pytest.mark.parametrize("name", others_slow(PARTICULARS, "llama3-rope"))
def test_both_versions_load_to_equal_logits(tmp_path, name):
    old = load_hf(written_by_4(tmp_path / "4", name))
    folder = written_by_5(tmp_path / "5", name)
    shard(folder)
    new = load_hf(folder)
    token_ids = np.arange(3, 60, dtype=np.int32)
    np.testing.assert_array_equal(full_logits(new, token_ids), full_logits(old, token_ids))
    assert parameters_digest(new) == parameters_digest(old)


def test_every_family_is_among_the_folders():
    assert {config_of(name)["model_type"] for name in PARTICULARS} == {*get_args(ModelFamily)}


def test_rotary_settings_may_be_nested_by_layer_type(folder):
    config = GOLDEN["configs"]["llama3-rope"]
    rewrite(folder / "config.json", config)
    flat = hf_template(folder).spec
    nested = {"full_attention": {**config["rope_parameters"], "partial_rotary_factor": 1.0}}
    rewrite(folder / "config.json", config | {"rope_parameters": nested})
    assert hf_template(folder).spec == flat
    nested["full_attention"]["partial_rotary_factor"] = 0.5
    rewrite(folder / "config.json", config | {"rope_parameters": nested})
    with pytest.raises(InputError, match="partial_rotary_factor"):
        hf_template(folder)


def test_weights_in_bfloat16_are_read_exactly(folder):
    expected = load_file(str(folder / WEIGHTS_FILE))
    half = {name: jnp.asarray(tensor, jnp.bfloat16) for name, tensor in expected.items()}
    safetensors.flax.save_file(half, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    rewrite(folder / "config.json", GOLDEN["configs"]["llama-gqa"] | {"dtype": "bfloat16"})
    head = load_hf(folder).lm_head.weight.array
    assert head.dtype == jnp.float32
    np.testing.assert_array_equal(head, half["lm_head.weight"].astype(jnp.float32))


# ---------------------------------------------------------------- tokenizers


def test_a_tokenizer_of_version_5_is_that_of_version_4(tmp_path, folder, caplog):
    old = load_tokenizer(written_by_4(tmp_path / "4", "llama-gqa"))
    new = load_tokenizer(folder)
    assert GOLDEN["tokenizer"]["tokenizer_config"]["tokenizer_class"] == "TokenizersBackend"
    assert new.encode(TEXT) == old.encode(TEXT)
    assert new.get_vocab() == old.get_vocab()
    assert new.special_tokens_map == old.special_tokens_map
    assert new.chat_template == old.chat_template
    assert not caplog.records


@pytest.mark.parametrize(
    "extra",
    [
        [{"content": "<|tool|>", "__type": "AddedToken", "special": True, "lstrip": False}],
        {"image_token": "<|tool|>"},
        [],
        None,
    ],
    ids=["objects", "named", "empty", "absent"],
)
def test_extra_tokens_come_in_several_shapes(folder, extra):
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8")) | {"extra_special_tokens": extra}
    rewrite(file, {key: value for key, value in settings.items() if value is not None})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(TEXT) == character_tokenizer().encode(TEXT)
    assert ("<|tool|>" in tokenizer.all_special_tokens) == bool(extra)


def test_settings_that_are_no_object_are_refused(folder):
    (folder / "tokenizer_config.json").write_text("[]", "utf-8")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: expected a JSON object"):
        load_tokenizer(folder)


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("name", others_slow(["llama3-rope", "qwen2", "gemma"], "llama3-rope"))
def test_a_model_of_version_5_is_exported_for_both(tmp_path, name):
    model = load_hf(written_by_5(tmp_path / "5", name))
    out = tmp_path / "out"
    save_hf(model, load_tokenizer(tmp_path / "5"), out)
    assert parameters_digest(load_hf(out)) == parameters_digest(model)
    # transformers 4 reads it with its own classes, and 5 finds the keys that it writes itself
    config: Any = AutoConfig.from_pretrained(str(out))
    source = config_of(name)
    assert config.rope_theta == source["rope_theta"]
    assert config.rope_scaling == source.get("rope_scaling")
    written = json.loads((out / "config.json").read_text("utf-8"))
    golden = GOLDEN["configs"][name]
    assert written["rope_parameters"] == golden["rope_parameters"]
    assert written["dtype"] == written["torch_dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(str(out))
    assert tokenizer.encode(TEXT) == character_tokenizer().encode(TEXT)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("family", ["gemma3", 7])
def test_another_family_is_refused_with_the_list_before_anything_is_loaded(folder, family):
    rewrite(folder / "config.json", {"model_type": family})
    config = parse_config({"policy": {"init": "hf", "hf_path": str(folder)}})
    for work in (lambda: plan(config), lambda: load_hf(folder)):
        with pytest.raises(InputError) as caught:
            work()
        assert f"model_type {family!r} is not supported" in str(caught.value)
        assert "llama, mistral, mixtral" in str(caught.value)


def test_only_files_of_the_index_are_read(folder):
    shard(folder)
    save_file({"tok_embeddings.weight": np.zeros(3)}, str(folder / "consolidated.safetensors"))
    load_hf(folder)
    assert [file.name for file in weight_files(folder)] == [
        f"model-{part:05d}-of-00003.safetensors" for part in (1, 2, 3)
    ]


def test_rotary_tables_in_the_weights_are_left_out(folder):
    tensors = load_file(str(folder / WEIGHTS_FILE))
    expected = parameters_digest(load_hf(folder))
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    save_file(tensors | table, str(folder / WEIGHTS_FILE))
    assert parameters_digest(load_hf(folder)) == expected


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("[]", "expected a JSON object"),
        ("{", "cannot read"),
        ('{"weight_map": []}', "expected `weight_map`"),
        ('{"weight_map": {"a": 1}}', "expected `weight_map`"),
        ('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}', "download the missing"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "which is not in"),
    ],
)
def test_an_unfit_index_is_refused(folder, index, named):
    (folder / WEIGHTS_INDEX).write_text(index, "utf-8")
    with pytest.raises(InputError, match=named):
        load_hf(folder)
