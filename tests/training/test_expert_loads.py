"""Loads of experts over trained tokens, their metrics, and the load-balancing loss."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.family_folders import golden
from support.run_factories import character_tokenizer, configuration
from training.batches import random_batch

from marin_rl.config import ObjectiveConfig
from marin_rl.errors import ConfigError
from marin_rl.models.experts import ExpertLoads, balance_loss, load_metrics, loads_of
from marin_rl.models.families import described
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import Spec
from marin_rl.training.compiled_step import CompiledStep, policy_settings
from marin_rl.training.logprobs import Packing, token_logprobs
from marin_rl.training.model import (
    named_parameters,
    parameter_shapes,
    with_gradient_checkpointing,
    with_parameters,
)
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.step import ForwardBackward
from marin_rl.training.step_types import StepSettings, TrainableParams, step_arrays

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def spec_of(name: str = "qwen3-30b-a3b", layers: int = 3) -> Spec:
    spec = described(golden()[name]["config"], Path(name))
    return dataclasses.replace(spec, kinds=spec.kinds[:layers])


def model_with(layers: int) -> LanguageModel:
    rng, template = np.random.default_rng(0), model_of(spec_of(layers=layers))
    shapes = parameter_shapes(template)
    return with_parameters(
        template, {n: (0.3 * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}
    )


def transformers_loss(logits: np.ndarray, mask: np.ndarray, k: int) -> float:
    """`load_balancing_loss_func` of transformers 4.57, line by line in NumPy.

    `logits` are [layers, tokens, X], `mask` [tokens].
    """
    layers, _, experts = logits.shape
    together, kept = logits.reshape(-1, experts).astype(np.float64), np.tile(mask, layers)
    routing = np.exp(together) / np.exp(together).sum(-1, keepdims=True)
    chosen = np.argsort(-routing, axis=-1)[:, :k]
    expert_mask = np.eye(experts)[chosen] * kept[:, None, None]
    tokens_per_expert = expert_mask.sum(0) / kept.sum()  # [k, X]
    router_prob_per_expert = (routing * kept[:, None]).sum(0) / kept.sum()
    return float((tokens_per_expert * router_prob_per_expert).sum() * experts)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_balance_of_experts_is_that_of_transformers(name: str) -> None:
    spec, rng = spec_of(name), np.random.default_rng(3)
    logits = 2 * rng.standard_normal((3, 40, spec.experts)).astype(np.float32)
    mask = rng.random(40) < 0.6
    of_layer = jax.vmap(lambda scores: loads_of(spec, scores, jnp.asarray(mask)))
    balance = jax.jit(lambda logits: balance_loss(of_layer(logits)))
    expected = transformers_loss(logits, mask, spec.experts_chosen)
    assert float(balance(logits)) == pytest.approx(expected, rel=1e-5)
    assert expected > spec.experts_chosen  # its value where all experts are taken alike


def test_metrics_of_loads_by_hand() -> None:
    counts = np.array([[6, 2, 0, 0], [2, 2, 2, 2]], np.float32)
    measured = jax.jit(load_metrics)
    metrics = measured(ExpertLoads(np.full(2, 4, np.float32), counts, None))
    assert float(metrics["experts/load_max"]) == pytest.approx((3 + 1) / 2)
    assert float(metrics["experts/unused"]) == pytest.approx(0.25)
    nothing = measured(ExpertLoads(np.zeros(1, np.float32), np.zeros((1, 4), np.float32), None))
    assert {name: float(value) for name, value in nothing.items()} == {
        "experts/load_max": 0.0,
        "experts/unused": 1.0,
    }


def rows(batch: Any) -> tuple[jax.Array, ...]:
    arrays = step_arrays(batch, len(batch.token_ids), 1).arrays
    return jax.tree.map(lambda array: jnp.asarray(array[0]), arrays).inputs


def test_loads_are_the_same_however_layers_run() -> None:
    inputs, model = rows(random_batch(4)), model_with(3)
    scanned = with_gradient_checkpointing(model)

    @partial(jax.jit, static_argnums=1)
    def run(parameters: Any, recomputed: bool) -> Any:  # noqa: FBT001
        module = with_parameters(scanned if recomputed else model, parameters)
        return token_logprobs(module, *inputs, packing=Packing(packed_rows=True)).loads

    one, other = run(named_parameters(model), False), run(named_parameters(model), True)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), one, other)
    tokens = float(jnp.sum(inputs[3]))
    np.testing.assert_array_equal(one.tokens, np.full(3, tokens))
    np.testing.assert_array_equal(one.counts.sum(-1), np.full(3, 3 * tokens))
    np.testing.assert_allclose(one.probabilities.sum(-1), np.full(3, tokens), rtol=1e-5)


@pytest.mark.slow
def test_the_coefficient_adds_the_gradient_of_the_balance_of_each_microbatch() -> None:
    model = model_with(1)  # balances of several layers are those of transformers above
    batch, parameters = random_batch(6), named_parameters(model)
    arrays, used = step_arrays(batch, 2, 4)

    def step(coefficient: float) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        settings = StepSettings(objective=ObjectiveConfig(), load_balance_coefficient=coefficient)
        passes = ForwardBackward(model, settings)
        (gradients,), metrics, _ = passes(TrainableParams(parameters), {}, None, arrays, used)
        assert gradients.policy is not None
        policy = {name: np.asarray(array) for name, array in gradients.policy.items()}
        return policy, {name: float(value) for name, value in metrics.items()}

    def balance(parameters: Any) -> tuple[jax.Array, ExpertLoads]:
        def of(microbatch: Any) -> tuple[jax.Array, ExpertLoads]:
            loads = token_logprobs(with_parameters(model, parameters), *microbatch.inputs).loads
            assert loads is not None
            return jnp.sum(microbatch.mask) / arrays.mask.sum() * balance_loss(loads), loads

        shares, loads = jax.lax.map(of, jax.tree.map(lambda array: array[:used], arrays))
        return jnp.sum(shares), jax.tree.map(partial(jnp.sum, axis=0), loads)

    (without, plain), (added, metrics) = step(0.0), step(0.5)
    expected, loads = jax.jit(jax.grad(balance, has_aux=True))(parameters)
    assert np.abs(expected["transformer/layers/stacked/mlp/router/weight"]).max() > 1e-3
    for name, gradient in added.items():
        near = 1e-5 + 1e-4 * np.abs(gradient).max()
        sum_ = without[name] + 0.5 * np.asarray(expected[name])
        np.testing.assert_allclose(gradient, sum_, rtol=0, atol=near, err_msg=name)
    assert metrics == pytest.approx(plain, rel=1e-5)
    expected_metrics = {name: float(value) for name, value in load_metrics(loads).items()}
    assert 1 < expected_metrics["experts/load_max"] < 8 / 3
    assert metrics == pytest.approx(metrics | expected_metrics, rel=1e-6)


def test_a_model_without_experts_has_no_loads_and_refuses_the_coefficient() -> None:
    config = configuration("nowhere")
    training = config.training.model_copy(update={"load_balance_coefficient": 0.01})
    config, tokenizer = config.model_copy(update={"training": training}), character_tokenizer()
    settings = policy_settings(config)
    assert settings.load_balance_coefficient == 0.01
    with pytest.raises(ConfigError, match=r"load_balance_coefficient: expected null .* found 0.01"):
        CompiledStep(config, tokenizer, policy_adamw(training), settings)
