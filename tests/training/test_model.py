"""Building models, naming their parameters, and what of Hugging Face folders is accepted."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file
from support.cases import others_slow
from training.batches import VOCAB, random_batch, tiny_policy

from marin_rl.errors import InputError
from marin_rl.tokenizers import character_tokenizer, end_token_ids, load_tokenizer
from marin_rl.training import hf_folders
from marin_rl.training.hf_folders import load_hf, save_hf
from marin_rl.training.hf_weights import hf_template
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.model import (
    build_model,
    matrix_mask,
    model_template,
    named_parameters,
    parameter_shapes,
    parameters_digest,
    with_parameters,
)

FAMILIES = {
    "llama": {},
    "llama-untied": {"tie_embeddings": False},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_size": 12},
    "mistral": {"family": "mistral", "tie_embeddings": False},
    "gemma": {"family": "gemma"},
    "gemma-untied": {"family": "gemma", "tie_embeddings": False},
}
# Parameters of a layer that are no matrices, and where they start.
VECTORS = {
    "llama": {"input_layernorm/weight": 1, "post_attention_layernorm/weight": 1},
    "mistral": {"input_layernorm/weight": 1, "post_attention_layernorm/weight": 1},
    "gemma": {"input_layernorm/weight": 0, "post_attention_layernorm/weight": 0},
    "qwen2": {
        "input_layernorm/weight": 1,
        "post_attention_layernorm/weight": 1,
        "self_attn/q_proj/bias": 0,
        "self_attn/k_proj/bias": 0,
        "self_attn/v_proj/bias": 0,
    },
    "qwen3": {
        "input_layernorm/weight": 1,
        "post_attention_layernorm/weight": 1,
        "self_attn/q_norm/weight": 1,
        "self_attn/k_norm/weight": 1,
    },
}

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [2.0, 4.0],
    "long_factor": [8.0, 8.0],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def scores(model):
    batch = random_batch(3)
    arrays = (jnp.asarray(a) for a in (batch.token_ids, batch.segment_ids, batch.positions))
    return jax.jit(token_logprobs)(model, *arrays, jnp.asarray(batch.loss_mask != 0)).logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved model of each family, with the model."""
    root, tokenizer = tmp_path_factory.mktemp("hf"), character_tokenizer()
    result = {}
    for name, sizes in FAMILIES.items():
        model = build_model(tiny_policy(**sizes), VOCAB, 0)
        save_hf(model, tokenizer, root / name)
        result[name] = (model, root / name)
    return result


@pytest.fixture
def changed(folders, tmp_path):
    """A copy of a saved folder with keys of its config.json replaced (None removes one)."""

    def make(family, **keys):
        folder = tmp_path / family
        shutil.copytree(folders[family][1], folder)
        tree = json.loads((folder / "config.json").read_text()) | keys
        tree = {key: value for key, value in tree.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(tree))
        return folder

    return make


def test_weights_are_a_function_of_config_and_seed():
    policy = tiny_policy()
    first, again = build_model(policy, VOCAB, 3), build_model(policy, VOCAB, 3)
    assert parameters_digest(first) == parameters_digest(again)
    assert parameters_digest(first) != parameters_digest(build_model(policy, VOCAB, 4))


@pytest.mark.parametrize("family", VECTORS)
def test_matrices_have_the_configured_spread_and_norms_and_biases_their_start(family):
    sizes = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "initializer_range": 0.05}
    model = build_model(tiny_policy(**FAMILIES[family], **sizes), VOCAB, 0)
    matrices, stacked = matrix_mask(model), "transformer/layers/stacked/"
    vectors = {stacked + name: start for name, start in VECTORS[family].items()}
    vectors["transformer/norm/weight"] = vectors[stacked + "input_layernorm/weight"]
    assert {name for name, is_matrix in matrices.items() if not is_matrix} == set(vectors)
    for name, array in named_parameters(model).items():
        if matrices[name]:
            assert 0.045 < np.std(array) < 0.055, name
        else:
            np.testing.assert_array_equal(array, vectors[name])


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"family": "mistral"}, "expected tie_embeddings false"),
        ({"family": "qwen2", "head_size": 12}, "qwen2 has heads of hidden_size/heads, 8"),
        ({"family": "gemma", "head_size": 12}, "gemma has heads of hidden_size/heads, 8"),
        ({"family": "qwen3", "head_size": 7}, "even head_size: found 7"),
        ({"family": "gemma2"}, "'qwen2', 'qwen3', 'mistral' or 'gemma'"),
    ],
)
def test_options_that_a_family_lacks_are_refused(sizes, named):
    with pytest.raises(ValidationError, match=named):
        tiny_policy(**sizes)


def test_the_digest_covers_bytes_names_and_shapes():
    model = build_model(tiny_policy(), VOCAB, 0)
    parameters, digest = named_parameters(model), parameters_digest(model)
    for name in ("transformer/norm/weight", "embeddings/token_embeddings/weight"):
        touched = np.array(parameters[name])
        touched.reshape(-1)[0] = np.nextafter(touched.reshape(-1)[0], np.float32(9))
        assert parameters_digest(with_parameters(model, parameters | {name: touched})) != digest
    assert parameters_digest(with_parameters(model, parameters)) == digest


def test_the_template_is_the_architecture_of_the_model():
    policy = tiny_policy()
    model, template = build_model(policy, VOCAB, 0), model_template(policy, VOCAB)
    assert parameter_shapes(template) == parameter_shapes(model)


@pytest.mark.parametrize("family", others_slow(FAMILIES, "llama-untied", "mistral"))
def test_saved_and_loaded_models_are_equal(family, folders):
    model, folder = folders[family]
    loaded = load_hf(folder)
    assert parameters_digest(loaded) == parameters_digest(model)
    np.testing.assert_array_equal(scores(loaded), scores(model))
    tree = json.loads((folder / "config.json").read_text())
    assert tree["rope_theta"] == tree["rope_parameters"]["rope_theta"] == 10_000.0
    assert hf_template(folder).spec == loaded.spec


@pytest.mark.parametrize(
    ("family", "keys"),
    others_slow(
        [
            ("mistral", {"sliding_window": 64}),  # as long as the context
            ("mistral", {"sliding_window": None}),
            ("qwen2", {"use_sliding_window": False, "sliding_window": 32}),
            ("gemma", {"hidden_activation": None}),
            ("gemma", {"hidden_act": "gelu"}),  # hidden_activation says which one
        ],
        first=1,
        several=True,
    ),
)
def test_options_without_effect_are_accepted(changed, folders, family, keys):
    np.testing.assert_array_equal(
        scores(load_hf(changed(family, **keys))), scores(folders[family][0])
    )


def test_weights_above_a_size_are_several_files_and_their_index(folders, tmp_path, monkeypatch):
    model, folder = folders["llama-untied"]
    whole = load_file(folder / "model.safetensors")
    largest = max(array.nbytes for array in whole.values())
    monkeypatch.setattr(hf_folders, "FILE_BYTES_MAX", largest)
    save_hf(model, character_tokenizer(), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in whole.values())}
    files = sorted(tmp_path.glob("*.safetensors"))
    count = len(files)
    expected = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert [file.name for file in files] == expected
    assert 3 < count < len(whole)
    for file in files:
        tensors = load_file(file)
        assert {name for name, place in index["weight_map"].items() if place == file.name} == {
            *tensors
        }
        assert sum(array.nbytes for array in tensors.values()) <= largest
        for name, array in tensors.items():
            np.testing.assert_array_equal(array, whole.pop(name))
    assert not whole
    assert parameters_digest(load_hf(tmp_path)) == parameters_digest(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_scaled_rotary_embedding_survives_loading_and_saving(changed, folders, tmp_path, family):
    model = load_hf(changed(family, rope_scaling=YARN, rope_parameters=None))
    assert np.abs(scores(model) - scores(load_hf(folders[family][1]))).max() > 1e-3
    save_hf(model, character_tokenizer(), tmp_path / "again")
    np.testing.assert_array_equal(scores(load_hf(tmp_path / "again")), scores(model))


def test_a_rotary_base_is_read_in_either_form(changed):
    theta = 50_000.0
    new = changed(
        "llama", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    assert hf_template(new).spec.ropes[0].theta == theta


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("llama", {"hidden_act": "mish"}, "hidden_act mish"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks ['factor']"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "lacks"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic"}}, "lacks ['factor']"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, "lacks"),
        ("llama", {"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "cannot reshape"),
        ("llama", {"rope_scaling": YARN | {"other": 1}}, "'other'"),
        ("llama", {"rope_parameters": {"rope_theta": 5.0}}, "differ"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
        ("llama", {"model_type": "qwen2_vl"}, "'qwen2_vl'"),
        ("llama", {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidir"),
    ],
)
def test_settings_that_would_load_wrong_are_refused_by_name(changed, family, keys, named):
    with pytest.raises(InputError) as caught:
        hf_template(changed(family, **keys))
    assert named in str(caught.value)
    assert "expected" in str(caught.value) or "add" in str(caught.value)


def test_missing_pieces_are_named(tmp_path, folders, changed):
    with pytest.raises(InputError, match="no model folder at"):
        load_hf(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no safetensors"):
        load_hf(tmp_path)
    folder = changed("llama")
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"cannot read .*config\.json"):
        load_hf(folder)


def test_a_missing_or_misshapen_tensor_is_named(changed):
    folder = changed("llama")
    tensors = load_file(str(folder / "model.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, str(folder / "model.safetensors"))
    with pytest.raises(InputError, match=rf"{name} expected \(24, 16\), found absent"):
        load_hf(folder)
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32)}
    save_file(tensors | extra, str(folder / "model.safetensors"))
    with pytest.raises(InputError, match=r"q_proj.bias expected absent, found \(16,\)"):
        load_hf(folder)


def test_a_second_head_of_tied_embeddings_is_the_embedding_or_refused(changed):
    folder = changed("llama", tie_word_embeddings=True)
    file = str(folder / "model.safetensors")
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors, file)
    digest = parameters_digest(load_hf(folder))
    save_file(tensors | {"lm_head.weight": embedding.copy()}, file)
    assert parameters_digest(load_hf(folder)) == digest
    trained = embedding.copy()
    trained[3, 2] += 1e-3
    for head in (trained, embedding[:-1].copy(), embedding.astype(np.float16)):
        save_file(tensors | {"lm_head.weight": head}, file)
        with pytest.raises(
            InputError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"
        ):
            load_hf(folder)


@pytest.mark.parametrize(
    "name",
    ["lm_head.bias", "my_lm_head.weight", "model.lm_head_norm.weight", "a.rotary_emb.inv_freq.b"],
)
def test_only_what_repeats_another_tensor_is_left_out(changed, name):
    folder = changed("llama")
    tensors = load_file(str(folder / "model.safetensors"))
    save_file(tensors | {name: np.zeros(4, np.float32)}, str(folder / "model.safetensors"))
    with pytest.raises(InputError, match=rf"tensor {name} expected absent, found \(4,\)"):
        load_hf(folder)


def test_a_tensor_that_two_files_have_is_refused(changed):
    folder = changed("llama")
    file, other = folder / "model.safetensors", folder / "other.safetensors"
    tensors = load_file(str(file))
    name = "model.norm.weight"
    places = dict.fromkeys(tensors, file.name) | {name: other.name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({name: tensors[name] + 1}, str(other))
    with pytest.raises(InputError, match=rf"the tensor {name} is in .*{file.name} too"):
        load_hf(folder)
    save_file({key: value for key, value in tensors.items() if key != name}, str(file))
    load_hf(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named_with_its_file_and_place(changed, value):
    folder = changed("llama")
    file = folder / "model.safetensors"
    tensors = load_file(str(file))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][5, 7] = value
    save_file(tensors, str(file))
    with pytest.raises(InputError, match=rf"{file}: tensor {name} .* at \[5, 7\]: {value}"):
        load_hf(folder)


def test_a_truncated_file_is_named(changed):
    folder = changed("llama")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"cannot read .*model\.safetensors"):
        load_hf(folder)


def test_a_tokenizer_with_ids_outside_the_vocabulary_is_refused(tmp_path):
    model = build_model(tiny_policy(), 64, 0)
    save_hf(model, character_tokenizer(), tmp_path / "small")
    with pytest.raises(InputError, match="ids up to 102"):
        load_hf(tmp_path / "small")


def test_all_tokens_that_end_a_completion_go_with_the_model(tmp_path):
    tokenizer, first, second = character_tokenizer(), tmp_path / "first", tmp_path / "second"
    model = build_model(tiny_policy(), 128, 0)
    save_hf(model, tokenizer, first)
    assert not (first / "generation_config.json").exists()
    (first / "generation_config.json").write_text('{"eos_token_id": [4, 1], "top_p": 0.8}')
    save_hf(model, load_tokenizer(first), second)
    assert json.loads((second / "generation_config.json").read_text()) == {"eos_token_id": [1, 4]}
    assert end_token_ids(load_tokenizer(second)) == (1, 4)
