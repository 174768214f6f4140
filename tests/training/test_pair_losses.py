"""Losses of preference pairs: TRL's values and gradients, corners of formulas, refused keys."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.config import PreferenceLossConfig
from marin_rl.training.pair_losses import Pairs, counts_of, preference_loss, preference_metrics
from marin_rl.training.step_types import StepArrays

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/trl-preference.json").read_text())
# TRL's names where they are not ours.
METRICS = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "logps/chosen": "chosen_logprob",
    "logps/rejected": "rejected_logprob",
}


def array(tree: dict[str, Any]) -> np.ndarray:
    return np.array(tree["data"], tree["dtype"]).reshape(tree["shape"])


def in_pairs(array_BT: np.ndarray) -> np.ndarray:
    """TRL's rows, all chosen answers before all rejected ones, as a row for each pair."""
    return np.concatenate(np.split(array_BT, 2), axis=1)


def rows_of(data: dict[str, Any]) -> tuple[np.ndarray, StepArrays]:
    """Log-probabilities by the policy, and the rows that they are of."""
    mask = in_pairs(array(data["completion_mask"])[:, 1:]) > 0
    sign = np.where(np.arange(mask.shape[1]) < mask.shape[1] // 2, 1.0, -1.0)
    nothing = np.zeros(mask.shape, np.int32)
    return in_pairs(array(data["token_logps"])).astype(np.float32), StepArrays(
        token_ids=nothing,
        mask=mask,
        segment_ids=nothing,
        positions=nothing,
        policy_logprobs=in_pairs(array(data["ref_token_logps"])).astype(np.float32),
        advantages=(mask * sign).astype(np.float32),
    )


def loss_settings(**keys: Any) -> PreferenceLossConfig:
    return PreferenceLossConfig.model_validate(keys)


def loss_of(case: dict[str, Any]) -> tuple[PreferenceLossConfig, float]:
    """Our settings for a case of TRL's, and the factor of our loss in its."""
    args, kind, scale, sft = case["args"], case["name"].partition("/")[0], 1.0, 0.0
    name = {"cdpo": "sigmoid", "orpo": "orpo"}.get(kind) or args["loss_type"]
    mean = name == "sigmoid_norm"
    if isinstance(name, list):  # a weighted sum of the two
        name, (scale, sft) = "sigmoid", args["loss_weights"]
    settings = loss_settings(
        type="sigmoid" if mean else name,
        beta=args["beta"],
        normalise="mean" if mean else "type",
        label_smoothing=args.get("label_smoothing", 0.0),
        target_margin=args["simpo_gamma"] if name == "simpo" else 0.0,
        sft_coefficient=sft / scale,
    )
    return settings, scale


CASES = {False: [], True: []}  # by whether they are of labelled answers
for golden_case in GOLDEN["cases"]:
    CASES[golden_case["name"].startswith("kto")].append(golden_case)


@pytest.mark.parametrize("case", CASES[False], ids=lambda case: case["name"])
def test_values_gradients_and_metrics_are_those_of_trl(case: dict[str, Any]) -> None:
    logprobs, rows = rows_of(GOLDEN["data"][case["inputs"]["data"]])
    settings, factor = loss_of(case)
    counts = counts_of(rows)

    def loss(logprobs: jax.Array) -> jax.Array:
        return factor * preference_loss(settings, Pairs.of(logprobs, rows), counts)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logprobs))
    expected = in_pairs(array(case["outputs"]["grad_token_logps"]))
    np.testing.assert_allclose(value, case["outputs"]["loss"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, np.where(rows.mask, expected, 0), atol=1e-6)
    found = preference_metrics(settings, Pairs.of(jnp.asarray(logprobs), rows))
    for name, number in case["outputs"].get("metrics", {}).items():
        np.testing.assert_allclose(found[METRICS[name]], number, rtol=1e-5, atol=1e-6)


def labelled_rows(case: dict[str, Any]) -> tuple[np.ndarray, StepArrays]:
    """TRL's rows with a last token each, that of the mismatched answer."""
    data, inputs = GOLDEN["data"][case["inputs"]["data"]], case["inputs"]
    mask = np.pad(array(data["completion_mask"])[:, 1:] > 0, ((0, 0), (0, 1)), constant_values=True)
    sign = np.where(array(inputs["label"])[:, None] > 0, 1.0, -1.0) * mask
    sign[:, -1] = 0

    def joined(tokens: str, mismatched: str) -> np.ndarray:
        columns = array(data[tokens]), array(inputs[mismatched])[:, None]
        return np.concatenate(columns, axis=1).astype(np.float32)

    nothing = np.zeros(mask.shape, np.int32)
    return joined("token_logps", "kl_logps"), StepArrays(
        token_ids=nothing,
        mask=mask,
        segment_ids=nothing,
        positions=nothing,
        policy_logprobs=joined("ref_token_logps", "ref_kl_logps"),
        advantages=sign.astype(np.float32),
    )


@pytest.mark.parametrize("case", CASES[True], ids=lambda case: case["name"])
def test_answers_with_labels_have_values_gradients_and_metrics_of_trl(case: dict[str, Any]) -> None:
    logprobs, rows = labelled_rows(case)
    weights = {name: case["args"][name] for name in ("desirable_weight", "undesirable_weight")}
    settings = loss_settings(type="kto", beta=case["args"]["beta"], **weights)

    def loss(logprobs: jax.Array) -> jax.Array:
        return preference_loss(settings, Pairs.of(logprobs, rows), counts_of(rows))

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logprobs))
    expected = np.pad(array(case["outputs"]["grad_token_logps"]), ((0, 0), (0, 1)))
    expected[:, -1] = 0  # the KL has no gradient
    np.testing.assert_allclose(value, case["outputs"]["loss"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, np.where(rows.mask, expected, 0), atol=1e-6)
    found = preference_metrics(settings, Pairs.of(jnp.asarray(logprobs), rows))
    for name, number in case["outputs"]["metrics"].items():
        np.testing.assert_allclose(
            found[(METRICS | {"kl": "kl"})[name]], number, rtol=1e-5, atol=1e-6
        )


def test_the_kl_of_kto_is_of_a_microbatch_and_rows_that_fill_up_are_in_none() -> None:
    """Two microbatches of one row and two of them, the last filled up with an empty row."""
    ratio = np.array([[[0.5, 2.0], [-0.5, 4.0]], [[0.25, 3.0], [0.0, 0.0]]], np.float32)
    mask = np.array([[[1, 1], [1, 1]], [[1, 1], [0, 0]]], bool)
    sign = np.array([[[1, 0], [-1, 0]], [[1, 0], [0, 0]]], np.float32)
    nothing = np.zeros(mask.shape, np.int32)
    rows = StepArrays(nothing, mask, nothing, nothing, np.zeros_like(ratio), sign)
    settings = loss_settings(type="kto", beta=1.0)
    pairs = Pairs.of(jnp.asarray(ratio), rows)
    np.testing.assert_allclose(pairs.kl(settings), [[3, 3], [3, 3]])
    surplus = np.array([0.5 - 3, 3 + 0.5, 0.25 - 3])
    found = preference_metrics(settings, pairs)
    np.testing.assert_allclose(found["loss"], np.mean(1 / (1 + np.exp(surplus))), rtol=1e-6)
    np.testing.assert_allclose(found["chosen_reward"], 0.375)
    np.testing.assert_allclose(found["margin"], 0.875)
    assert "accuracy" not in found
    alone = jax.tree.map(lambda each: each[1], rows)
    metrics = preference_metrics(settings, Pairs.of(jnp.asarray(ratio[1]), alone))
    assert np.isnan(metrics["rejected_reward"])


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down"])
def test_a_policy_that_is_its_reference_has_no_difference_at_all(kind: str) -> None:
    logprobs, rows = rows_of(GOLDEN["data"]["far"])
    pairs = Pairs.of(jnp.asarray(logprobs), rows._replace(policy_logprobs=logprobs))
    found = preference_metrics(loss_settings(type=kind), pairs)
    assert (found["margin"], found["chosen_reward"], found["accuracy"]) == (0, 0, 0)
    known = {"sigmoid": np.log(2), "robust": np.log(2), "hinge": 1, "ipo": 25.0}
    np.testing.assert_allclose(found["loss"], known.get(kind, 1.0), rtol=1e-6)


def test_rows_that_fill_up_count_nowhere_and_answers_of_certain_tokens_are_finite() -> None:
    logprobs, rows = rows_of(GOLDEN["data"]["near"])
    filled = jax.tree.map(lambda each: np.concatenate([each, np.zeros_like(each[:1])]), rows)
    more = np.concatenate([logprobs, np.full_like(logprobs[:1], -np.inf)])
    settings = PreferenceLossConfig(type="orpo", sft_coefficient=0.5)
    expected = preference_metrics(settings, Pairs.of(jnp.asarray(logprobs), rows))
    found = preference_metrics(settings, Pairs.of(jnp.asarray(more), filled))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    certain = Pairs.of(jnp.zeros_like(logprobs), rows)
    value, gradient = jax.value_and_grad(
        lambda p: preference_loss(settings, Pairs.of(p, rows), counts_of(rows))
    )(jnp.zeros_like(logprobs))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert np.isfinite(preference_metrics(settings, certain)["loss"])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"type": "hinge", "label_smoothing": 0.1}, "type hinge has no label_smoothing"),
        ({"type": "ipo", "target_margin": 0.5}, "type ipo has no target_margin"),
        ({"type": "simpo", "normalise": "sum"}, "of mean log-probabilities"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"type": "ipo", "undesirable_weight": 2.0}, "type ipo has no desirable_weight; .* kto's"),
    ],
)
def test_a_key_that_a_loss_does_not_use_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PreferenceLossConfig(**wrong)
