"""Losses against TRL's numbers, against values worked out by hand, and against their own laws."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.config import ObjectiveConfig
from marin_rl.training.losses import (
    kl_estimate,
    log_ratios,
    policy_losses,
    ppo_clip,
    segment_sums,
    token_weights,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/trl-losses.json").read_text())
AGGREGATIONS = {
    "rloo": "sequence_mean_token_sum",
    "grpo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "sequence_mean_token_sum_norm",
}


def decoded(value: Any) -> Any:
    if isinstance(value, dict) and "array" in value:
        found = GOLDEN["arrays"][value["array"]]
        data = [float(item) for item in found["data"]]
        return np.asarray(data, found["dtype"]).reshape(found["shape"])
    return value


def cases(prefix: str) -> list[Any]:
    return [
        pytest.param(case, id=case["name"])
        for case in GOLDEN["cases"]
        if case["name"].startswith(prefix)
    ]


def loss_of(case: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """TRL's loss as our own functions compose it, of the per-token log-probabilities."""
    inputs = {name: decoded(value) for name, value in case["inputs"].items()}
    args, mask = case["args"], inputs["completion_mask"].astype(np.float32)
    kind = "rloo" if case["name"].startswith("rloo") else args["loss_type"]
    objective = ObjectiveConfig(
        ratio_level="sequence" if kind == "rloo" else "token",
        clip_low=args["epsilon_low"],
        clip_high=args["epsilon_high"],
        aggregation=AGGREGATIONS[kind],
        kl_coefficient=args.get("beta", 0.0),
    )
    segments = np.ones(mask.shape, np.int32)
    weights = token_weights(
        jnp.asarray(mask),
        jnp.asarray(segments),
        objective.aggregation,
        args.get("max_completion_length", 1),
    )
    if kind == "dapo":  # TRL divides by the number of tokens of the whole batch, which it is told
        weights = weights * mask.sum() / args["num_items_in_batch"]
    advantages = np.broadcast_to(inputs["advantages"][:, None], mask.shape)

    def loss(logprobs: jax.Array) -> jax.Array:
        losses = policy_losses(
            objective,
            logprobs,
            jnp.asarray(inputs["old_per_token_logps"]),
            jnp.asarray(advantages, jnp.float32),
            jnp.asarray(mask),
            jnp.asarray(segments),
        )
        if "ref_per_token_logps" in inputs:
            kl = kl_estimate(logprobs, jnp.asarray(inputs["ref_per_token_logps"]), "k3")
            losses += objective.kl_coefficient * kl * mask
        return jnp.sum(weights * losses)

    return loss, inputs


@pytest.mark.parametrize("case", [*cases("rloo_loss"), *cases("grpo_loss")])
def test_loss_and_gradient_are_those_of_trl(case):
    loss, inputs = loss_of(case)
    found, gradient = jax.value_and_grad(loss)(jnp.asarray(inputs["per_token_logps"]))
    outputs = {name: decoded(value) for name, value in case["outputs"].items()}
    np.testing.assert_allclose(found, outputs["loss"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient, outputs["grad_per_token_logps"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases("k3_kl"))
def test_k3_is_that_of_trl(case):
    inputs = {name: decoded(value) for name, value in case["inputs"].items()}
    kl = kl_estimate(
        jnp.asarray(inputs["per_token_logps"]), jnp.asarray(inputs["ref_per_token_logps"]), "k3"
    )
    found = np.asarray(kl * inputs["completion_mask"])
    expected = decoded(case["outputs"]["kl"])
    if np.ndim(expected) == 0:
        found = found.sum() / inputs["completion_mask"].sum()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


# Two rows: a sequence of two trained tokens; two packed ones of one and three, after a prompt.
MASK = jnp.array([[0, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 1]], jnp.float32)
SEGMENTS = jnp.array([[1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 2, 2]])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [[0, 1 / 6, 1 / 6, 0, 0, 0], [0, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6]]),
        ("sequence_mean_token_mean", [[0, 1 / 6, 1 / 6, 0, 0, 0], [0, 1 / 3, 0, *[1 / 9] * 3]]),
        ("sequence_mean_token_sum", [[0, 1 / 3, 1 / 3, 0, 0, 0], [0, 1 / 3, 0, *[1 / 3] * 3]]),
        (
            "sequence_mean_token_sum_norm",
            [[0, 1 / 30, 1 / 30, 0, 0, 0], [0, 1 / 30, 0, *[1 / 30] * 3]],
        ),
    ],
)
def test_weights_of_packed_rows_by_hand(aggregation, expected):
    np.testing.assert_allclose(token_weights(MASK, SEGMENTS, aggregation, 10), expected, rtol=1e-6)


def test_nothing_to_train_on_weighs_nothing():
    for aggregation in set(AGGREGATIONS.values()):
        weights = token_weights(jnp.zeros((2, 6)), SEGMENTS, aggregation, 10)
        np.testing.assert_array_equal(weights, 0)


def test_a_segment_is_summed_by_itself():
    values = jnp.array([[1.0, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32]])
    expected = [[7, 7, 7, 56, 56, 56], [3, 3, 60, 60, 60, 60]]
    np.testing.assert_array_equal(segment_sums(values, SEGMENTS), expected)


def test_ratios_by_hand():
    logprobs, old = jnp.full((2, 6), -1.0), jnp.full((2, 6), -1.5)
    token = log_ratios(logprobs, old, MASK, SEGMENTS, "token")
    np.testing.assert_allclose(token, 0.5 * MASK)
    sequence = log_ratios(logprobs, old, MASK, SEGMENTS, "sequence")
    np.testing.assert_allclose(sequence, [[1, 1, 1, 0, 0, 0], [0.5, 0.5, 1.5, 1.5, 1.5, 1.5]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 1.0, -1.28), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5), (0.5, -1.0, 0.8), (1.0, 2.0, -2.0)],
)
def test_clipping_by_hand(ratio, advantage, expected):
    found = ppo_clip(jnp.log(jnp.full((1, 1), ratio)), jnp.full((1, 1), advantage), 0.2, 0.28)
    np.testing.assert_allclose(found, [[expected]], rtol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5)]
)
def test_kl_estimators_by_hand(estimator, expected):
    found = kl_estimate(jnp.full((1, 1), -1.0), jnp.full((1, 1), -1.5), estimator)
    np.testing.assert_allclose(found, [[expected]], rtol=1e-6)


@given(seed=st.integers(0, 2**31), surrogate=st.sampled_from(["reinforce", "ppo_clip"]))
def test_on_policy_all_surrogates_and_ratio_levels_have_the_policy_gradient(seed, surrogate):
    rng = np.random.default_rng(seed)
    logprobs = jnp.asarray(rng.normal(-1, 1, (2, 6)), jnp.float32) * MASK
    advantages = jnp.asarray([[0.7] * 6, [-1.3, -1.3, 0.4, 0.4, 0.4, 0.4]], jnp.float32)
    for level in ("token", "sequence"):
        objective = ObjectiveConfig(surrogate=surrogate, ratio_level=level)
        gradient = jax.grad(
            lambda lp, o=objective: jnp.sum(
                policy_losses(o, lp, logprobs, advantages, MASK, SEGMENTS)
            )
        )(logprobs)
        np.testing.assert_allclose(gradient, -advantages * MASK, rtol=1e-5, atol=1e-6)
