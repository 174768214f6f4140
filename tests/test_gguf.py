"""GGUF files: models of each architecture come in as they are, bad files are refused, and back."""

import json
import struct
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf import quantize as quantized
from safetensors.numpy import load_file
from support.cases import others_slow
from support.family_folders import KEPT, golden, tensors_of, tokens
from support.policy_runs import commit, small_run
from typer.testing import CliRunner

from marin_rl import cli
from marin_rl.errors import ConfigError, InputError
from marin_rl.gguf.conversion import export_gguf, import_gguf
from marin_rl.inference import decoder
from marin_rl.inference.weights import fused_weights, read_model, rotary_table
from marin_rl.models.families import described, described_folder
from marin_rl.tokenizers import load_tokenizer
from marin_rl.training.hf_folders import load_hf

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


GOLDEN = golden()
CASES = {
    "llama-3.1-8b": "llama-bpe", "smollm2-135m": "smollm", "mistral-7b-v0.3": "llama-bpe",
    "qwen2.5-0.5b": "qwen2", "qwen2.5-7b-yarn": "qwen2", "qwen3-4b": "qwen2", "gemma-2b": "",
    "gemma-2-2b": "", "gemma-3-1b": "", "phi-3-mini-4k": "", "phi-4-14b": "dbrx",
    "olmo-2-7b": "dbrx", "smollm3-3b": "llama-bpe", "granite-3-2b": "refact",
}  # fmt: skip
LOGITS = [case for case in CASES if case != "gemma-2b"]
TEXTS = ["the 12 3", " the\n\nthe", "<|im_start|>the<|im_end|>", "Hth the  the", "~!@ 1212"]

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def written(file: Path, case: str = "smollm2-135m", kind: str = "F32", **changes: Any) -> Path:
    """Write the file of a case; `changes` of keys and tensors, by their names, None for absent."""
    config, shapes = GOLDEN[case]["config"], GOLDEN[case]["shapes"]
    rule = CASES[case]
    tokenizer = byte_level(config["vocab_size"], rule) if rule else sentence_pieces()
    keys: dict[str, Any] = keys_of(config, tokenizer)
    tensors: dict[str, Any] = gguf_tensors(config, tensors_of(config, shapes))
    if case == "llama-3.1-8b":
        rope = described(config, file).ropes[0]
        tensors["rope_freqs.weight"] = type(rope)(theta=rope.theta, size=rope.size).frequencies
        tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"] / rope.frequencies
    keys |= changes.pop("keys", {})
    tensors |= changes.pop("tensors", {})
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    architecture = changes.pop("architecture", architecture)
    assert not changes
    keys = {key: value for key, value in keys.items() if value is not None}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    write_gguf(file, architecture, keys, tensors, kind)
    return file


@pytest.mark.parametrize("case", CASES)
def test_a_model_comes_in_as_it_is(case: str, tmp_path: Path) -> None:
    config = GOLDEN[case]["config"]
    imported = import_gguf(written(tmp_path / "m.gguf", case), tmp_path / "m", "float32")
    found = load_file(str(tmp_path / "m" / "model.safetensors"))
    expected = tensors_of(config, GOLDEN[case]["shapes"])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Gemma's norms have lost the bits of a sum with 1.
        near = 1e-7 if config["model_type"].startswith("gemma") and tensor.ndim == 1 else 0
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=near, err_msg=name)
    spec = described_folder(tmp_path / "m")
    # Of Gemma 1 files compute what its authors corrected its folders to.
    own = {"hidden_activation": "gelu_pytorch_tanh"} if config["model_type"] == "gemma" else {}
    assert spec == described(config | own, tmp_path)
    assert spec.context_length == config["max_position_embeddings"]
    assert imported.chat_template == bool(CASES[case])
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("case", others_slow(LOGITS, "llama-3.1-8b"))
def test_an_imported_model_has_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    chat = {"keys": {"tokenizer.chat_template": CHAT_TEMPLATE}}
    import_gguf(written(tmp_path / "m.gguf", case, **chat), tmp_path / "m", "float32")
    spec, weights = read_model(load_hf(tmp_path / "m"))
    fused = fused_weights(spec, weights, jnp.dtype(jnp.float32), rotary_table(spec, 64))
    states = jax.jit(partial(decoder.hidden_states, spec))(fused, jnp.asarray(tokens()))
    kept = states[:, np.asarray(KEPT)].reshape(-1, spec.width)
    logits = decoder.logits(spec, fused.ends, kept)
    expected = np.asarray(GOLDEN[case]["logits"])
    np.testing.assert_allclose(logits.reshape(expected.shape), expected, atol=2e-4)


@pytest.mark.parametrize(("kind", "near"), [("F16", 4e-3), ("BF16", 4e-3), ("Q8_0", 8e-3)])
def test_stored_types_are_dequantised(kind: str, near: float, tmp_path: Path) -> None:
    imported = import_gguf(written(tmp_path / "m.gguf", kind=kind), tmp_path / "m", "bfloat16")
    assert imported.tensors[kind] == 29
    found = load_file(str(tmp_path / "m" / "model.safetensors"))
    config = GOLDEN["smollm2-135m"]["config"]
    for name, tensor in tensors_of(config, GOLDEN["smollm2-135m"]["shapes"]).items():
        assert found[name].dtype == jnp.bfloat16
        off = np.abs(np.asarray(found[name], np.float32) - tensor).max()
        assert off <= near * np.abs(tensor).max()


def test_a_tokenizer_gives_the_ids_that_its_merges_say(tmp_path: Path) -> None:
    import_gguf(written(tmp_path / "m.gguf"), tmp_path / "m", "bfloat16")
    tokenizer = load_tokenizer(tmp_path / "m")
    tokens = byte_level(0)["ggml.tokens"]
    # Digits stand alone under the rule `smollm`, though 1 and 2 would merge.
    pieces = ["<|im_start|>", "the", "Ġthe", "Ċ", "1", "2", "<|im_end|>"]
    assert tokenizer("<|im_start|>the the\n12<|im_end|>").input_ids == list(
        map(tokens.index, pieces)
    )
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert len(tokenizer) == len(tokens)  # rows that fill up are no tokens
    ends = json.loads((tmp_path / "m" / "generation_config.json").read_text("utf-8"))
    assert ends == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}


def test_sentence_pieces_merge_by_their_scores(tmp_path: Path) -> None:
    import_gguf(written(tmp_path / "m.gguf", "gemma-3-1b"), tmp_path / "m", "bfloat16")
    (tmp_path / "m" / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    tokenizer = load_tokenizer(tmp_path / "m")
    # `he` comes before `th`, so `the` is t, he; nothing makes of these `the`, but th, e.
    assert tokenizer("the\nh").input_ids == [2, 11, 8, 6]
    assert tokenizer(" the", add_special_tokens=False).input_ids == [12]
    assert tokenizer.decode([12, 8, 9]) == " the\nth"


INFINITE = np.full(96, np.inf, np.float32)
REFUSED = {
    "architecture": ({"architecture": "gpt-oss"}, "one of the architectures llama"),
    "experts": ({"keys": {"llama.expert_count": 8}}, "llama.expert_count 8: it is not supported"),
    "rule": ({"keys": {"tokenizer.ggml.pre": "viking"}}, "tokenizer.ggml.pre as one of .*'viking'"),
    "kind": ({"keys": {"tokenizer.ggml.model": "bert"}}, "model gpt2 or llama, found 'bert'"),
    "split": ({"keys": {"split.count": 3}}, "3 parts: merge them by `llama-gguf-split --merge`"),
    "no end": ({"keys": {"tokenizer.ggml.eos_token_id": None}}, "eos_token_id, found none"),
    "end": ({"keys": {"tokenizer.ggml.eos_token_id": 999}}, "eos_token_id below 112, found 999"),
    "merges": ({"keys": {"tokenizer.ggml.merges": ["t x y"]}}, "merges of two tokens"),
    "types": ({"keys": {"tokenizer.ggml.token_type": [1, 2]}}, "each token once, with its type"),
    "no tokens": ({"keys": {"tokenizer.ggml.tokens": None}}, "a list at tokenizer.ggml.tokens"),
    "layers": ({"keys": {"llama.block_count": 2**31}}, "up to 1073741824 as llama.block_count"),
    "more layers": ({"keys": {"llama.block_count": 10**9}}, "tensors of 1000000000 layers"),
    "no heads": ({"keys": {"llama.attention.head_count": 0}}, "head_count, found none"),
    "odd": ({"keys": {"llama.attention.key_length": 15}}, "even number of dimensions"),
    "narrow": ({"keys": {"llama.embedding_length": 4, "llama.attention.key_length": None}}, "even"),
    "half a layer": ({"keys": {"llama.block_count": 2.5}}, "llama.block_count, found 2.5"),
    "text": ({"keys": {"llama.embedding_length": "wide"}}, "a number up to .*embedding_length"),
    "scaling": ({"keys": {"llama.rope.scaling.type": "longrope"}}, "none, linear or yarn"),
    "factors": ({"tensors": {"rope_freqs.weight": np.ones(9, np.float32)}}, "Llama 3.1's scaling"),
    "lacks": ({"tensors": {"blk.1.ffn_up.weight": None}}, r"ffn_up.weight .*, found absent"),
    "surplus": ({"tensors": {"../../x": np.ones(1, np.float32)}}, r"\.\./\.\./x absent"),
    "not finite": ({"tensors": {"output_norm.weight": INFINITE}}, "not finite in bfloat16"),
    "shape": ({"tensors": {"output_norm.weight": np.ones(7, np.float32)}}, r"\(96,\), found .7,"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_part_is_refused(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    file = written(tmp_path / "m.gguf", **changes)
    with pytest.raises(InputError, match=message):
        import_gguf(file, tmp_path / "m", "bfloat16")
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", kind="Q8_0")
    data = file.read_bytes()
    # The type stands after name, count of axes and two axes.
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    assert data[at : at + 4] == struct.pack("<I", 8)
    file.write_bytes(data[:at] + struct.pack("<I", 9) + data[at + 4 :])  # Q8_1
    with pytest.raises(InputError, match="quantization that the library gguf reads"):
        import_gguf(file, tmp_path / "m", "bfloat16")


def test_an_offset_past_64_bits_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    data = file.read_bytes()
    # The offset stands after name, count of axes, two axes and the type.
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16 + 4
    file.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
    with pytest.raises(InputError, match="a whole GGUF file of version 2 or 3"):
        import_gguf(file, tmp_path / "m", "bfloat16")


HOSTILE = {
    "another kind": b"PK\x03\x04 nothing",
    "empty": b"",
    "header alone": b"GGUF\x03\0\0\0",
    "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
    "keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
    "long name": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1) + b"x" * 99,
    "bytes of a name": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xff" + b"\0" * 8,
    "long list": b"GGUF" + struct.pack("<IQQQ4sIIQ", 3, 0, 1, 4, b"list", 9, 5, 2**62),
    "texts": b"GGUF" + struct.pack("<IQQQ4sIIQ", 3, 0, 1, 4, b"list", 9, 8, 2**60) + b"\0" * 999,
    "lists of lists": b"GGUF"
    + struct.pack("<IQQQ4sI", 3, 0, 1, 4, b"list", 9)
    + struct.pack("<IQ", 9, 1) * 5000,
    "type of a value": b"GGUF" + struct.pack("<IQQQ4sIQ", 3, 0, 1, 4, b"list", 77, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_hostile_file_is_one_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(HOSTILE[name])
    with pytest.raises(InputError, match=r"m\.gguf: expected .* found"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "m", "bfloat16")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(InputError, match="a whole GGUF file of version 2 or 3"):
        import_gguf(file, tmp_path / "m", "bfloat16")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("keep")
    with pytest.raises(InputError, match="is not empty"):
        import_gguf(written(tmp_path / "m.gguf"), tmp_path / "m", "bfloat16")
    with pytest.raises(InputError, match=r"no\.gguf.*name a GGUF file"):
        import_gguf(tmp_path / "no.gguf", tmp_path / "new", "bfloat16")
    assert [each.name for each in (tmp_path / "m").iterdir()] == ["mine"]


def weights_of(folder: Path) -> dict[str, bytes]:
    tensors = load_file(str(folder / "model.safetensors"))
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def exported(case: str, folder: Path, gguf_type: str) -> Path:
    """Import a case, and write it as a GGUF file again."""
    import_gguf(written(folder / "m.gguf", case), folder / "m", "float32")
    model, tokenizer = load_hf(folder / "m"), load_tokenizer(folder / "m")
    export_gguf(model, tokenizer, folder / "again.gguf", gguf_type)
    return folder / "again.gguf"


@pytest.mark.parametrize("case", others_slow([c for c in CASES if CASES[c]], "llama-3.1-8b"))
def test_an_exported_file_gives_the_model_back(case: str, tmp_path: Path) -> None:
    import_gguf(exported(case, tmp_path, "f32"), tmp_path / "again", "float32")
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "m")
    assert described_folder(tmp_path / "again") == described_folder(tmp_path / "m")
    first, second = (load_tokenizer(tmp_path / name) for name in ("m", "again"))
    assert [first(text).input_ids for text in TEXTS] == [second(text).input_ids for text in TEXTS]
    assert first.chat_template == second.chat_template
    assert (tmp_path / "again/generation_config.json").read_bytes() == (
        tmp_path / "m/generation_config.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("gguf_type", "kind"), [("f16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")]
)
def test_an_exported_file_has_the_type_asked_for(gguf_type: str, kind: str, tmp_path: Path) -> None:
    file = exported("smollm2-135m", tmp_path, gguf_type)
    assert import_gguf(file, tmp_path / "b", "float32").tensors == {kind: 29, "F32": 9}
    with pytest.raises(InputError, match="nothing is overwritten"):
        export_gguf(load_hf(tmp_path / "b"), load_tokenizer(tmp_path / "b"), file, gguf_type)


def test_models_and_tokenizers_without_a_word_in_gguf_are_not_exported(tmp_path: Path) -> None:
    import_gguf(written(tmp_path / "m.gguf", "gemma-3-1b"), tmp_path / "m", "float32")
    (tmp_path / "m" / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    model, tokenizer = load_hf(tmp_path / "m"), load_tokenizer(tmp_path / "m")
    with pytest.raises(InputError, match="expected byte-level BPE"):
        export_gguf(model, tokenizer, tmp_path / "out.gguf", "f16")
    assert not (tmp_path / "out.gguf").exists()


def test_the_command_imports_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", keys={"tokenizer.chat_template": None})
    arguments = ["import", "--gguf", str(file), "--output", str(tmp_path / "m")]
    result = CliRunner().invoke(cli.app, [*arguments, "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    assert "llama, float16 of 38 F32" in result.output.replace("\n", " ")
    assert "has no chat template" in result.stderr
    with pytest.raises(InputError, match="is not empty"):
        CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    with pytest.raises(ConfigError, match="--dtype: expected one of"):
        CliRunner().invoke(cli.app, [*arguments, "--dtype", "q4"], catch_exceptions=False)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as where it is not installed
    for name in [each for each in sys.modules if each.startswith("marin_rl.gguf")]:
        monkeypatch.delitem(sys.modules, name)
    arguments = ["import", "--gguf", str(tmp_path / "m.gguf"), "--output", str(tmp_path / "m")]
    with pytest.raises(ConfigError, match=r"pip install 'marin-rl\[gguf\]'"):
        CliRunner().invoke(cli.app, arguments, catch_exceptions=False)


def test_the_command_exports_a_checkpoint(tmp_path: Path) -> None:
    import_gguf(written(tmp_path / "m.gguf", "qwen3-4b"), tmp_path / "m", "float32")
    policy = ("policy.init=hf", f"policy.hf_path={tmp_path / 'm'}", "policy.context_length=64")
    run = small_run(tmp_path / "runs", *policy)
    commit(run, 1, load_hf(tmp_path / "m"), tokenizer=load_tokenizer(tmp_path / "m"))
    file = tmp_path / "out.gguf"
    arguments = ["export", run.run_id, "--root", run.config.root, "--gguf", str(file)]
    wrong = [*arguments, "--hf", str(tmp_path / "hf")]
    with pytest.raises(ConfigError, match="expected one of them"):
        CliRunner().invoke(cli.app, wrong, catch_exceptions=False)
    with pytest.raises(ConfigError, match="--gguf-type: expected one of f32"):
        CliRunner().invoke(cli.app, [*arguments, "--gguf-type", "q4"], catch_exceptions=False)
    result = CliRunner().invoke(cli.app, [*arguments, "--gguf-type", "f32", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["round"] == 1
    assert (facts["file"], facts["type"]) == (str(file), "f32")
    import_gguf(file, tmp_path / "again", "float32")
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "m")
