"""Families of models with adapters, quantised bases, recomputed activations, and on a mesh."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import others_slow
from support.family_folders import golden, tokens, write_folder
from support.models import rows_of
from support.run_factories import character_tokenizer

from marin_rl.config import LoraConfig, MeshConfig
from marin_rl.errors import InputError
from marin_rl.inference import decoder
from marin_rl.inference.weights import fused_weights, read_model, rotary_table
from marin_rl.lora.adapter import initial_arrays
from marin_rl.lora.peft import configured_modules
from marin_rl.lora.quantization import quantize_base
from marin_rl.models.module import LanguageModel
from marin_rl.training.adapters import merged_model, policy_module, with_adapter, with_quantized
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.mesh import SINGLE_DEVICE, Layout, layout_of
from marin_rl.training.model import (
    named_parameters,
    parameter_shapes,
    with_gradient_checkpointing,
    with_parameters,
)

GOLDEN = golden()
# One with each particular: windows by layer, norms around, a fused file, a plain MLP with biases,
# caps, an activation with parameters, experts and sinks.
NAMES = (
    "gemma-3-1b",
    "olmo-2-7b",
    "phi-3-mini-4k",
    "gpt2",
    "gemma-2-2b",
    "apertus-8b",
    "gpt-oss-20b",
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module", params=others_slow(NAMES, "gemma-2-2b"))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    folder: Path = tmp_path_factory.mktemp("model")
    write_folder(folder, GOLDEN[request.param]["config"], GOLDEN[request.param]["shapes"])
    character_tokenizer().save_pretrained(str(folder))
    return load_hf(folder)


def scores(*models: LanguageModel) -> list[np.ndarray]:
    """Scores by models that differ in their parameters alone."""
    run = jax.jit(
        lambda p: token_logprobs(with_parameters(models[0], p), *rows_of(tokens())).logprobs
    )
    return [np.asarray(run(named_parameters(model))) for model in models]


def adapted(model: LanguageModel, scheme: str | None) -> LanguageModel:
    """The model with an adapter that changes everything, next to its base or a quantised one."""
    shapes = parameter_shapes(model)
    modules = configured_modules(LoraConfig(rank=3, alpha=6.0), shapes)
    rng = np.random.default_rng(3)
    arrays = {
        name: jnp.asarray(0.1 * rng.standard_normal(np.shape(array)), jnp.float32)
        for name, array in initial_arrays(modules, shapes, 0).items()
    }
    template = with_quantized(with_adapter(model, modules), scheme)
    base: dict[str, Any] = dict(named_parameters(model))
    if scheme is not None:
        on_host = {name: np.asarray(array) for name, array in base.items()}
        base = {name: jnp.asarray(each) for name, each in quantize_base(on_host, scheme).items()}
    return policy_module(template, base | arrays)


@pytest.mark.parametrize("scheme", others_slow([None, "int8", "nf4"], "nf4"))
def test_adapters_and_quantised_bases_compute_what_merged_weights_do(model, scheme):
    if model.spec.experts and scheme is not None:
        with pytest.raises(InputError, match="without experts"):
            adapted(model, scheme)
        return
    policy = adapted(model, scheme)
    expected, before = scores(merged_model(policy), model)
    assert np.abs(expected - before).max() > 0.05
    np.testing.assert_allclose(*scores(policy), expected, atol=3e-4)
    spec, weights = read_model(policy)
    dtype, ids = jnp.dtype(jnp.float32), jnp.asarray(tokens())
    fused = fused_weights(spec, weights, dtype, rotary_table(spec, ids.shape[1]))

    @jax.jit
    def decoded(fused: Any, ids: jax.Array) -> jax.Array:
        states = decoder.hidden_states(spec, fused, ids)
        logits = decoder.logits(spec, fused.ends, states.reshape(-1, spec.width))
        logprobs = jax.nn.log_softmax(logits).reshape(*ids.shape, -1)[:, :-1]
        return jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]

    found = decoded(fused, ids)
    np.testing.assert_allclose(found, expected[:, 1:], atol=3e-4)


def gradients(model: LanguageModel, layout: Layout = SINGLE_DEVICE) -> dict[str, np.ndarray]:
    def total(parameters: Any) -> jax.Array:
        return jnp.sum(
            token_logprobs(with_parameters(model, parameters), *rows_of(tokens())).logprobs
        )

    with layout.active():
        placed = layout.place_parameters(named_parameters(model), model)
        return {name: np.asarray(g) for name, g in jax.jit(jax.grad(total))(placed).items()}


def assert_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    # Where nothing is rotated (GPT-2) a key's bias moves all scores of a query alike: its gradient
    # is zero but for rounding, so each is measured by the largest of all too.
    floor = 1e-3 * max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        size = np.abs(gradient).max() + floor
        np.testing.assert_allclose(found[name] / size, gradient / size, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_recomputed_activations_and_scanned_layers_have_the_same_gradients(model):
    assert_near(gradients(with_gradient_checkpointing(model)), gradients(model))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"data": 2}, {"context": 2}])
def test_a_mesh_computes_the_same_gradients(model: LanguageModel, sizes: dict[str, int]) -> None:
    layout = layout_of(MeshConfig(**sizes))
    assert layout.devices == 2
    assert_near(gradients(model, layout), gradients(model))
