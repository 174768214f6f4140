"""Families of models, against what transformers computes for shrunk configurations of real ones."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cases import others_slow
from support.family_folders import KEPT, golden, probe_of, tensors_of, tokens, write_folder
from support.models import rows_of
from support.run_factories import character_tokenizer
from transformers import LlamaConfig

from marin_rl.config import MeshConfig
from marin_rl.errors import InputError
from marin_rl.inference import decoder
from marin_rl.inference.kv_cache import empty_cache
from marin_rl.inference.weights import fused_weights, read_model, rotary_table
from marin_rl.models.families import LLAMA_DEFAULTS, check_peft_names, described, described_folder
from marin_rl.models.module import LanguageModel
from marin_rl.models.spec import Rope
from marin_rl.storage.checkpoints import LocalBoxes
from marin_rl.training import hf_weights
from marin_rl.training.adapters import trained_shapes
from marin_rl.training.hf_folders import load_hf, save_hf
from marin_rl.training.hf_weights import exported, hf_template
from marin_rl.training.logprobs import ALONE, Packing, token_logprobs
from marin_rl.training.mesh import layout_of
from marin_rl.training.model import named_parameters, with_parameters

GOLDEN = golden()
TOLERANCE = 2e-4
LENGTH = 64

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module", params=others_slow(GOLDEN, "gemma-2-2b"))
def case(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    return GOLDEN[request.param]


@pytest.fixture(scope="module")
def folder(case: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_folder(path, case["config"], case["shapes"])
    character_tokenizer().save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return load_hf(folder)


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    """Largest difference from transformers by `model_type`, then by who computed it."""
    return {}


def assert_close(
    measured: dict[str, dict[str, float]],
    case: Mapping[str, Any],
    by: str,
    found: Any,
    expected: Any,
) -> None:
    """Assert equality within TOLERANCE, and keep the largest difference."""
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    own = measured.setdefault(case["config"]["model_type"], {})
    own[by] = max(own.get(by, 0.0), float(np.max(np.abs(np.asarray(found) - expected))))


def test_the_trainers_logprobs_and_gradients_are_those_of_transformers(case, model, measured):
    def mean(parameters: Any, packing: Packing) -> tuple[jax.Array, jax.Array]:
        scores = token_logprobs(
            with_parameters(model, parameters), *rows_of(tokens()), packing=packing
        )
        return jnp.sum(scores.logprobs) / jnp.sum(rows_of(tokens())[3]), scores.logprobs

    graded = jax.jit(jax.grad(mean, has_aux=True), static_argnums=1)
    kept = np.asarray(KEPT[:-1])
    logprobs = jax.nn.log_softmax(np.asarray(case["logits"])[:, :-1])
    expected = np.take_along_axis(logprobs, tokens()[:, kept + 1, None], -1)[..., 0]
    for packing in (ALONE, Packing(packed_rows=True)):
        gradients, found = graded(named_parameters(model), packing)
        assert_close(measured, case, "trainer", found[:, kept + 1], expected)
        for name, gradient in exported(with_parameters(model, gradients)):
            if name in case["gradients"]:
                ours = np.sum(gradient * probe_of(name, gradient.shape))
                # The norm is the deviation of such a sum.
                near = float(5e-3 * np.linalg.norm(gradient) + 1e-6)
                assert ours == pytest.approx(case["gradients"][name], abs=near), name


def test_the_engines_logits_are_those_of_transformers(case, model, measured):
    spec, weights = read_model(model)
    dtype, ids = jnp.dtype(jnp.float32), jnp.asarray(tokens())
    fused = fused_weights(spec, weights, dtype, rotary_table(spec, LENGTH))
    kept = np.asarray(KEPT)
    expected = np.asarray(case["logits"])

    @jax.jit
    def logits_of(fused: Any, ids: jax.Array) -> jax.Array:
        states = decoder.hidden_states(spec, fused, ids)
        return decoder.logits(spec, fused.ends, states[:, kept].reshape(-1, spec.width))

    logits = logits_of(fused, ids)
    assert_close(measured, case, "engine", logits.reshape(expected.shape), expected)
    cache, step = empty_cache(spec, 2, LENGTH, dtype), jax.jit(partial(decoder.decode_step, spec))
    for at in range(ids.shape[1]):
        each, cache = step(fused, cache, ids[:, at], jnp.full(2, at, jnp.int32))
        if at in KEPT:
            assert_close(measured, case, "engine", each, expected[:, KEPT.index(at)])


def test_each_device_has_its_own_part_of_a_folder(folder: Path, model: LanguageModel) -> None:
    template, layout = hf_template(folder), layout_of(MeshConfig(fsdp=2))
    like = layout.parameters_like(trained_shapes(template), template)
    placed = named_parameters(load_hf(folder, like))
    for name, array in named_parameters(model).items():
        assert placed[name].sharding == like[name].sharding
        np.testing.assert_array_equal(placed[name], array)


class OfLastDevice(LocalBoxes):
    """Boxes of a process whose only device is the last."""

    def __init__(self, like: Any) -> None:
        super().__init__(like)
        self.values = dict([list(self.values.items())[-1]])

    def array(self) -> Any:
        return next(iter(self.values.values()))


def test_a_process_reads_its_own_part_of_a_folder(
    folder: Path, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, layout = hf_template(folder), layout_of(MeshConfig(fsdp=2))
    like = layout.parameters_like(trained_shapes(template), template)
    monkeypatch.setattr(hf_weights, "LocalBoxes", OfLastDevice)
    found = hf_weights.read_parameters(template, folder, like)
    for name, array in named_parameters(model).items():
        (box,) = OfLastDevice(like[name]).values
        np.testing.assert_array_equal(found[name], array[tuple(slice(*span) for span in box)])


def test_an_exported_folder_has_the_same_tensors_and_describes_the_same_model(
    case: Mapping[str, Any], model: LanguageModel, tmp_path: Path
) -> None:
    save_hf(model, character_tokenizer(), tmp_path)
    saved = load_file(str(tmp_path / "model.safetensors"))
    expected = tensors_of(case["config"], case["shapes"])
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(saved[name], tensor)
    again = described_folder(tmp_path)
    assert again == model.spec
    assert again.context_length == model.spec.context_length
    written = json.loads((tmp_path / "config.json").read_text("utf-8"))
    ours = {"bos_token_id", "eos_token_id", "pad_token_id", "rope_scaling", "hidden_activation"}
    unchanged = case["config"].keys() - ours
    assert {key: written[key] for key in unchanged} == {k: case["config"][k] for k in unchanged}


@pytest.mark.parametrize(
    ("layers", "period"), [("gemma-2-2b", 2), ("olmo-3-7b", 4), ("smollm3-3b", 4), ("gpt2", 1)]
)
def test_layers_are_scanned_by_their_period(layers: str, period: int) -> None:
    assert described(GOLDEN[layers]["config"], Path(layers)).period == period


@pytest.mark.parametrize("name", ["phi-4-14b", "gpt2"])
def test_adapters_of_joined_projections_are_no_peft_folders(name: str) -> None:
    check_peft_names(described(GOLDEN["gemma-3-1b"]["config"], Path("gemma")))
    with pytest.raises(InputError, match=r"export RUN --hf FOLDER"):
        check_peft_names(described(GOLDEN[name]["config"], Path(name)))


def test_defaults_of_llama_are_those_of_transformers() -> None:
    theirs = LlamaConfig()
    # It writes the number of heads for None, and has no rotary base where there is none to name.
    defaults = LLAMA_DEFAULTS | {"num_key_value_heads": theirs.num_attention_heads}
    assert {name: getattr(theirs, name) for name in defaults} == defaults


def test_scalings_that_depend_on_a_length_hold_up_to_it() -> None:
    """LongRoPE by its short factors, dynamic NTK not at all; beyond, a context is refused."""
    of_long = {
        "rope_type": "longrope",
        "short_factor": (2.0, 4.0),
        "long_factor": (8.0, 9.0),
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
    }
    rope = Rope(theta=100.0, size=4, scaling=tuple(of_long.items()))
    np.testing.assert_allclose(rope.frequencies, [1 / 2, 1 / 40], rtol=1e-6)
    assert rope.factor == pytest.approx(math.sqrt(1 + 5 / 12))  # log 32 / log 4096
    own = Rope(theta=100.0, size=4, scaling=tuple((of_long | {"attention_factor": 1.5}).items()))
    assert own.factor == 1.5
    config = dict(GOLDEN["llama-3.2-3b"]["config"])
    plain = described(config | {"rope_scaling": None}, Path("llama"))
    spec = described(config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, Path("llama"))
    (rope,), (unscaled,) = spec.ropes, plain.ropes
    np.testing.assert_array_equal(rope.frequencies, unscaled.frequencies)
    assert rope.factor == 1.0
    assert spec.context_length == config["max_position_embeddings"]
    mini = described(GOLDEN["phi-4-mini"]["config"], Path("phi"))
    assert mini.context_length == 64
    assert mini.ropes[0].factor == pytest.approx(math.sqrt(1 + 5 / 6))  # log 32 / log 64


def test_a_description_leaves_a_config_as_it_is() -> None:
    config = json.loads(json.dumps(GOLDEN["qwen2.5-7b-yarn"]["config"]))
    described(config, Path("qwen"))
    assert config == GOLDEN["qwen2.5-7b-yarn"]["config"]
