"""Models whose base lies quantised: what they compute, in training and in the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.adapters import random_adapter
from training.batches import VOCAB, random_batch, tiny_policy
from training.steps import make_step

from marin_rl.config import InferenceConfig, LoraConfig, ObjectiveConfig
from marin_rl.lora.adapter import initial_arrays, merged
from marin_rl.lora.quantization import dequantize_base, quantize_base
from marin_rl.serving.weights.canary import rehearse
from marin_rl.training.adapters import merged_model, policy_module, with_adapter, with_quantized
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.model import (
    build_model,
    named_parameters,
    parameter_shapes,
    with_gradient_checkpointing,
    with_parameters,
)
from marin_rl.training.state import fresh_state
from marin_rl.training.step_types import StepSettings, step_arrays

pytestmark = pytest.mark.slow
SPEC = LoraConfig(rank=3, alpha=6.0)
compiled_logprobs = jax.jit(token_logprobs)


@pytest.fixture(scope="module", params=["int8", "nf4"])
def world(request):
    """Scheme, base template, quantised parameters, the same dequantised, and an adapter."""
    family = {"int8": "llama", "nf4": "qwen3"}[request.param]
    base = build_model(tiny_policy(family=family, heads=4, kv_heads=2), VOCAB, 1)
    parameters = {name: np.asarray(array) for name, array in named_parameters(base).items()}
    adapter = random_adapter(SPEC, seed=2, shapes=parameter_shapes(base))
    frozen = quantize_base(parameters, request.param)
    plain = dequantize_base(frozen, parameter_shapes(base))
    return request.param, base, frozen, plain, adapter


def scored(model, parameters) -> np.ndarray:
    """Logprobs of a batch's tokens by these parameters."""
    batch = random_batch(3)
    mask = (batch.loss_mask != 0) & (batch.positions > 0)
    rows = map(jnp.asarray, (batch.token_ids, batch.segment_ids, batch.positions, mask))
    module = policy_module(model, {name: jnp.asarray(array) for name, array in parameters.items()})
    return np.asarray(compiled_logprobs(module, *rows).logprobs)


def test_a_quantised_base_computes_what_its_dequantised_weights_compute(world):
    scheme, base, frozen, plain, adapter = world
    template = with_quantized(with_adapter(base, adapter.modules), scheme)
    assert parameter_shapes(template) == {
        name: tuple(array.shape) for name, array in {**frozen, **adapter.arrays}.items()
    }
    apart = scored(template, {**frozen, **adapter.arrays})
    np.testing.assert_allclose(apart, scored(base, merged(plain, adapter)), atol=2e-5)
    alone = scored(template, frozen)
    np.testing.assert_allclose(alone, scored(base, plain), atol=2e-5)
    assert np.abs(alone - scored(base, named_parameters(base))).max() > 1e-4


def test_the_merged_model_is_one_of_plain_layers(world):
    scheme, base, frozen, plain, adapter = world
    template = with_quantized(with_adapter(base, adapter.modules), scheme)
    model = merged_model(with_parameters(template, {**frozen, **adapter.arrays}))
    expected = merged(plain, adapter)
    whole = named_parameters(model)
    assert set(whole) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(whole[name], array, atol=1e-5)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_moves_the_adapter_as_on_the_dequantised_base(world, recomputed):
    scheme, base, frozen, plain, adapter = world
    first = initial_arrays(adapter.modules, parameter_shapes(base), seed=0)
    template = with_adapter(base, adapter.modules)
    expected = _stepped(template, first, plain)
    if recomputed:
        template = with_gradient_checkpointing(template)
    stepped = _stepped(with_quantized(template, scheme), first, frozen)
    assert set(stepped) == set(first)
    for name, array in expected.items():
        largest = np.abs(array).max()
        np.testing.assert_allclose(stepped[name], array, atol=max(1e-6, 1e-5 * largest))
        assert name.endswith(":A") or largest > 1e-6


def _stepped(template, first, frozen):
    settings = StepSettings(objective=ObjectiveConfig())
    frozen = {name: jnp.asarray(array) for name, array in frozen.items()}
    first = {name: jnp.asarray(array) for name, array in first.items()}
    # Plain descent at rate 1: the change is the gradient.
    plain = optax.with_extra_args_support(optax.sgd(1.0))
    step = make_step(template, plain, lambda step: 1.0 + 0 * step, settings, frozen=frozen)
    rows = step_arrays(random_batch(4), 2, 2)
    return step(fresh_state(first, plain, 0), None, *rows).state.parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_decodes_what_the_trainer_computes(world, dtype):
    scheme, base, frozen, _, adapter = world
    template = with_quantized(with_adapter(base, adapter.modules), scheme)
    arrays = {**frozen, **adapter.arrays}
    model = with_parameters(template, {name: jnp.asarray(a) for name, a in arrays.items()})
    prompt = np.arange(9, dtype=np.int32)
    gap = rehearse(model, prompt, InferenceConfig(canary_tolerance=0.1), jnp.dtype(dtype))
    assert gap < (1e-4 if dtype == "float32" else 0.1)
