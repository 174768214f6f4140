"""Losses against TRL's numbers, against values worked out by hand, and against their own laws."""

import json
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.config import ObjectiveConfig
from marin_rl.config.objective import RATIO_LEVELS
from marin_rl.training.losses import (
    binary_kl,
    dppo_kl,
    dro_penalty,
    gmpo_log_ratios,
    kl_estimate,
    log_ratios,
    policy_losses,
    ppo_clip,
    reinforce,
    sapo,
    scores_of_logits,
    token_weights,
    weighted_sum,
)
from marin_rl.training.segments import segment_sums
from marin_rl.training.step_loss import correction_weights
from marin_rl.training.step_metrics import beyond_bounds, clip_fractions, importance_ratios

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/trl-losses.json").read_text())
AGGREGATIONS = {
    "cispo": "token_mean",
    "sapo": "sequence_mean_token_mean",
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


def objective_of_trl(case: dict[str, Any]) -> ObjectiveConfig:
    """Our objective for the arguments of a case."""
    args = case["args"]
    kind = "rloo" if case["name"].startswith("rloo") else args["loss_type"]
    level = {"sequence": "sequence_mean", "token": "token", None: "sequence"}
    return ObjectiveConfig(
        surrogate=kind if kind in ("cispo", "sapo") else "ppo_clip",
        ratio_level=level[args.get("importance_sampling_level")],
        clip_low=args["epsilon_low"],
        # TRL's cap of cispo is the ratio itself
        clip_high=args["epsilon_high"] - (kind == "cispo"),
        aggregation=AGGREGATIONS[kind],
        kl_coefficient=args.get("beta", 0.0),
    )


@partial(jax.jit, static_argnums=(0, 1))
def loss_of_trl(objective, length_norm, scale, logprobs, old, advantages, mask, reference):
    """TRL's loss as our own functions compose it, and its gradient by the log-probabilities.

    `scale` multiplies the loss; `reference` may be None.
    """
    segments = np.ones(mask.shape, np.int32)

    def loss(logprobs):
        weights = token_weights(mask, segments, objective.aggregation, length_norm)
        losses = policy_losses(objective, logprobs, old, advantages, mask, segments)
        if reference is not None:
            losses += objective.kl_coefficient * kl_estimate(logprobs, reference, "k3") * mask
        return scale * jnp.sum(weights * losses)

    return jax.value_and_grad(loss)(logprobs)


@pytest.mark.parametrize("case", [*cases("rloo_loss"), *cases("grpo_loss")])
def test_loss_and_gradient_are_those_of_trl(case):
    inputs = {name: decoded(value) for name, value in case["inputs"].items()}
    args, mask = case["args"], inputs["completion_mask"].astype(np.float32)
    objective = objective_of_trl(case)
    scale = 1.0
    if not case["name"].startswith("rloo") and args["loss_type"] in ("dapo", "cispo"):
        # TRL divides by the number of tokens of the whole batch, which is an argument
        scale = mask.sum() / args["num_items_in_batch"]
    found, gradient = loss_of_trl(
        objective,
        args.get("max_completion_length", 1),
        np.float32(scale),
        inputs["per_token_logps"],
        inputs["old_per_token_logps"],
        np.broadcast_to(inputs["advantages"][:, None], mask.shape).astype(np.float32),
        mask,
        inputs.get("ref_per_token_logps"),
    )
    outputs = {name: decoded(value) for name, value in case["outputs"].items()}
    np.testing.assert_allclose(found, outputs["loss"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient, outputs["grad_per_token_logps"], rtol=1e-4, atol=1e-4)


@partial(jax.jit, static_argnums=0)
def fractions_of_trl(objective, logprobs, old, advantages, mask, segments):
    """Clip fractions of whole rows."""
    ratios = importance_ratios(objective, logprobs, old, mask, segments)
    beyond = beyond_bounds(objective, logprobs, old, ratios)
    return clip_fractions(objective, beyond, advantages, mask, segments)


def clip_ratio_of_trl(told: Any, name: str) -> float:
    """TRL gives the one bound of cispo a name of its own; sapo has none to report."""
    if f"clip_ratio/{name}_mean" in told:
        return told[f"clip_ratio/{name}_mean"]
    return 0.0 if name == "low" else told.get("cispo_clip_ratio", 0.0)


@pytest.mark.parametrize(
    "case", [each for each in cases("") if "metrics" in each.values[0]["outputs"]]
)
def test_clip_ratios_entropy_and_kl_are_those_of_trl(case):
    inputs = {name: decoded(value) for name, value in case["inputs"].items()}
    objective, mask = objective_of_trl(case), inputs["completion_mask"].astype(np.float32)
    segments = np.ones(mask.shape, np.int32)
    advantages = (inputs["advantages"][:, None] * mask).astype(np.float32)
    logprobs, expected = inputs["per_token_logps"], case["outputs"]["metrics"]
    rows = (inputs["old_per_token_logps"], advantages, mask, segments)
    found = fractions_of_trl(objective, logprobs, *rows)
    for name in ("low", "high", "region"):
        theirs = clip_ratio_of_trl(expected, name)
        assert float(found[f"clip_ratio/{name}"]) == pytest.approx(theirs, abs=1e-6)
    entropy = (inputs["entropies"] * mask).sum() / mask.sum()
    assert float(entropy) == pytest.approx(expected["entropy"], rel=1e-5)
    if "kl" in expected:
        kl = kl_estimate(logprobs, inputs["ref_per_token_logps"], "k3")
        assert float((kl * mask).sum() / mask.sum()) == pytest.approx(expected["kl"], rel=1e-5)


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


LOGITS = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "golden/logits.json").read_text())["cases"]
}


def of_logits(name: str) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The settings, inputs and outputs of a case, in the precision that they were computed in."""
    case = LOGITS[name]
    inputs, outputs = (
        {
            key: np.asarray(value, np.int32 if key in ("a_t", "index") else np.float32)
            for key, value in case[part].items()
        }
        for part in ("inputs", "outputs")
    )
    return case["args"], inputs, outputs


@pytest.mark.parametrize("name", ["clipped_surrogate_0.1", "clipped_surrogate_0.2"])
def test_the_clipped_surrogate_and_its_gradient_are_those_of_rlax(name):
    args, given, expected = of_logits(name)

    def loss(ratios):
        epsilon = args["epsilon"]
        return jnp.mean(ppo_clip(jnp.log(ratios), given["adv_t"], epsilon, epsilon))

    found, gradient = jax.jit(jax.value_and_grad(loss))(given["prob_ratios_t"])
    np.testing.assert_allclose(found, expected["loss"], rtol=5e-5)
    np.testing.assert_allclose(gradient, expected["grad_prob_ratios"], rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["policy_gradient_loss", "entropy_loss"])
def test_policy_gradient_and_entropy_of_logits_are_those_of_rlax(name):
    _, given, expected = of_logits(name)
    targets = given.get("a_t", np.zeros(12, np.int32))

    def loss(logits):
        logprobs, entropies = scores_of_logits(logits, targets)
        tokens = -entropies if name == "entropy_loss" else reinforce(logprobs, given["adv_t"])
        return jnp.mean(given["w_t"] * tokens)

    found, gradient = jax.jit(jax.value_and_grad(loss))(given["logits_t"])
    np.testing.assert_allclose(found, expected["loss"], rtol=5e-5)
    np.testing.assert_allclose(gradient, expected["grad_logits"], rtol=5e-5, atol=5e-5)


def test_importance_ratios_of_logits_are_those_of_rlax():
    _, given, expected = of_logits("importance_ratios")

    @jax.jit
    def ratios(*logits):
        now, then = (scores_of_logits(each, given["a_t"])[0][None] for each in logits)
        mask, segments = np.ones((1, 12), bool), np.ones((1, 12), int)
        return jnp.exp(log_ratios(now, then, mask, segments, "token"))

    found = ratios(given["pi_logits_t"], given["mu_logits_t"])
    np.testing.assert_allclose(found[0], expected["rho"], rtol=5e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_a_kl_estimate_over_the_policy_is_the_kl_of_rlax(estimator):
    _, given, expected = of_logits("categorical_kl")
    p, q = (jax.nn.log_softmax(given[name]) for name in ("p_logits", "q_logits"))
    found = jnp.sum(jnp.exp(p) * kl_estimate(p, q, estimator), axis=-1)
    np.testing.assert_allclose(found, expected["kl"], rtol=5e-5, atol=5e-5)


def test_log_probabilities_and_entropies_of_logits_are_those_of_trl():
    _, given, expected = of_logits("selective_log_softmax")
    found, _ = scores_of_logits(given["logits"], given["index"])
    np.testing.assert_allclose(found, expected["logprobs"], rtol=1e-4, atol=1e-4)
    _, given, expected = of_logits("entropy_from_logits")
    _, found = scores_of_logits(given["logits"], np.zeros((12, 10), int))
    np.testing.assert_allclose(found, expected["entropy"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_arrays_that_others_recorded_are_taken_as_they_are(shape, precision):
    rng = np.random.default_rng(0)
    new, old, advantages = (rng.normal(-1, 0.3, shape).astype(precision) for _ in range(3))
    expected = -np.minimum(
        np.exp(new - old) * advantages, np.clip(np.exp(new - old), 0.8, 1.2) * advantages
    )
    recorded = (new, old, advantages)
    for now, then, worth in (recorded, map(jnp.asarray, recorded)):
        found = ppo_clip(now - then, worth, 0.2, 0.2)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(kl_estimate(now, then, "k1"), new - old, rtol=1e-4)
        np.testing.assert_allclose(reinforce(now, worth), -new * advantages, rtol=1e-5)


@pytest.mark.parametrize("kind", [bool, np.int32, np.float32])
def test_a_mask_may_be_of_any_kind(kind):
    mask, ids = MASK.astype(kind), SEGMENTS
    found = token_weights(mask, ids, "sequence_mean_token_mean", 1)
    arrays = jnp.asarray(MASK), jnp.asarray(SEGMENTS)
    expected = token_weights(*arrays, "sequence_mean_token_mean", 1)
    np.testing.assert_array_equal(found, expected)
    logs = log_ratios(np.zeros((2, 6)), np.ones((2, 6)), mask, ids, "sequence_mean")
    np.testing.assert_array_equal(logs, -(SEGMENTS > 0).astype(np.float32))


def test_a_choice_that_is_not_known_is_refused_by_name():
    with pytest.raises(ValueError, match=r"aggregation of token_mean, .* found batch_mean"):
        token_weights(MASK, SEGMENTS, "batch_mean", 1)
    with pytest.raises(ValueError, match=r"estimator of k1, .* found k4"):
        kl_estimate(MASK, MASK, "k4")


# Two rows: a sequence of two trained tokens; two packed ones of one and three, after a prompt.
MASK = np.array([[0, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 1]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 2, 2]], np.int32)


def test_nothing_to_train_on_weighs_nothing():
    for aggregation in set(AGGREGATIONS.values()):
        weights = token_weights(jnp.zeros((2, 6)), SEGMENTS, aggregation, 10)
        np.testing.assert_array_equal(weights, 0)


def test_a_segment_is_summed_by_itself():
    values = jnp.array([[1.0, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32]])
    expected = [[7, 7, 7, 56, 56, 56], [3, 3, 60, 60, 60, 60]]
    np.testing.assert_array_equal(segment_sums(values, SEGMENTS), expected)


@pytest.mark.parametrize("bounds", [(0.0, 0.2), (0.2, 0.0), (0.0, 0.0)])
def test_a_bound_of_zero_leaves_what_is_on_policy_its_gradient(bounds):
    advantages = jnp.array([[1.0, -2.0]])
    gradient = jax.jit(jax.grad(lambda logs: jnp.sum(ppo_clip(logs, advantages, *bounds))))
    np.testing.assert_array_equal(gradient(jnp.zeros((1, 2))), -advantages)


SURROGATES = get_args(ObjectiveConfig.model_fields["surrogate"].annotation)
FAR = [("ppo_clip", "token"), ("ppo_clip", "sequence"), ("gspo", "sequence_mean"),
       ("gmpo", "sequence_mean"), ("cispo", "token"), ("sapo", "token"), ("dppo", "token"),
       ("dppo_kl", "token"), ("dro", "token"), ("dro", "sequence")]  # fmt: skip


def objective_of(surrogate, level, **others):
    beta = 0.3 if surrogate == "dro" else None
    return ObjectiveConfig(surrogate=surrogate, ratio_level=level, dro_beta=beta, **others)


@partial(jax.jit, static_argnums=0)
def far_loss(objective, logprobs, old):
    """A loss with KL, and its gradient by the log-probabilities."""
    mask, ids = np.ones((2, 3), np.float32), np.ones((2, 3), np.int32)
    advantages = np.array([[1.0] * 3, [-1.0] * 3], np.float32)

    def loss(logprobs):
        losses = policy_losses(objective, logprobs, old, advantages, mask, ids)
        return jnp.sum(losses + kl_estimate(logprobs, old, "k3"))

    return jax.value_and_grad(loss)(logprobs)


@pytest.mark.parametrize(("surrogate", "level"), FAR)
@pytest.mark.parametrize("apart", [-500.0, 500.0])
def test_a_ratio_that_float32_cannot_hold_gives_finite_losses_and_gradients(
    surrogate, level, apart
):
    old = np.full((2, 3), -600.0, np.float32)
    value, gradient = far_loss(objective_of(surrogate, level), old + np.float32(apart), old)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@partial(jax.jit, static_argnums=0)
def gradient_on_policy(objective, logprobs, advantages):
    """The gradient of the losses' sum by log-probabilities that are those of the sampler."""

    def loss(values):
        return jnp.sum(policy_losses(objective, values, logprobs, advantages, MASK, SEGMENTS))

    return jax.grad(loss)(logprobs)


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**31),
    surrogate=st.sampled_from(SURROGATES),
    level=st.sampled_from(["token", "sequence", "sequence_mean"]),
)
def test_on_policy_every_choice_has_the_policy_gradient(seed, surrogate, level):
    level = RATIO_LEVELS.get(surrogate, level)
    rng = np.random.default_rng(seed)
    logprobs = rng.normal(-1, 1, (2, 6)).astype(np.float32) * MASK
    advantages = np.array([[0.7] * 6, [-1.3, -1.3, 0.4, 0.4, 0.4, 0.4]], np.float32)
    gradient = gradient_on_policy(objective_of(surrogate, level), logprobs, advantages)
    np.testing.assert_allclose(gradient, -advantages * MASK, rtol=1e-5, atol=1e-6)


# Five sequences, of which the numbers of tokens are these, in four packed rows of six.
SIZES, ROWS = (3, 2, 4, 2, 2), (4, 6)
PERMUTED = {
    "grpo": ObjectiveConfig(ratio_level="token", aggregation="sequence_mean_token_mean"),
    "dapo": ObjectiveConfig(ratio_level="token", clip_high=0.28, aggregation="token_mean"),
    "rloo": ObjectiveConfig(ratio_level="sequence", importance_correction="truncated"),
    "gspo": ObjectiveConfig(
        surrogate="gspo",
        ratio_level="sequence_mean",
        aggregation="sequence_mean_token_sum_norm",
        importance_correction="masked",
        correction_level="sequence",
    ),
}


@partial(jax.jit, static_argnums=0)
def loss_and_gradient(objective, segments, mask, logprobs, old, sampler, advantages):
    """The weighted loss of whole rows, and its gradient by each token's log-probability."""

    def loss(values):
        losses = policy_losses(objective, values, old, advantages, mask, segments)
        corrections = correction_weights(objective, old, sampler, mask, segments)
        weights = token_weights(mask, segments, objective.aggregation, 10)
        return jnp.sum(weights * losses * corrections)

    return jax.value_and_grad(loss)(logprobs)


def places_of(rng):
    """Sequences in any order into rows, the tokens of each in any order: places and segments."""
    places, segments = [np.zeros(0, int)] * len(SIZES), np.zeros(ROWS, np.int32)
    row = column = number = 0
    for sequence in rng.permutation(len(SIZES)):
        size = SIZES[sequence]
        if column + size > ROWS[1]:
            row, column, number = row + 1, 0, 0
        number += 1
        segments[row, column : column + size] = number
        places[sequence] = row * ROWS[1] + column + rng.permutation(size)
        column += size
    return np.concatenate(places), segments


@given(seed=st.integers(0, 2**31), name=st.sampled_from([*PERMUTED]))
def test_tokens_permuted_across_rows_change_nothing(seed, name):
    rng = np.random.default_rng(seed)
    tokens = sum(SIZES)
    values = rng.normal(-1, 0.4, (3, tokens))
    mask = rng.random(tokens) < 0.8
    advantages = np.repeat(rng.standard_normal(len(SIZES)), SIZES)
    losses, gradients = [], []
    for _ in range(2):
        places, segments = places_of(rng)
        rows = np.zeros((5, segments.size), np.float32)
        rows[:, places] = [mask, *values, advantages]
        loss, gradient = loss_and_gradient(PERMUTED[name], segments, *rows.reshape(5, *ROWS))
        losses.append(loss)
        gradients.append(np.asarray(gradient).reshape(-1)[places])
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-6)


# Values beyond, at and within every bound, from -1e4 to 1e4 nats.
NATS = np.array(
    [-1e4, -1e3, -90, -21, -20.5, -19.5, -5, -1, -0.3, -0.05, 0.05, 0.3, 1, 5, 19.5, 20.5, 21, 90,
     1e3, 1e4]
)  # fmt: skip


def ratios_of(level):
    return lambda d: jnp.exp(log_ratios(d[:, None], np.zeros((20, 1)), *ROWS_OF_ONE, level)[:, 0])


ROWS_OF_ONE = (np.ones((20, 1), bool), np.ones((20, 1), int))
OF_DISTANCE = {
    **{name: partial(kl_estimate, reference_logprobs_BT=np.zeros(20), estimator=name)
       for name in ("k1", "k2", "k3")},
    **{level: ratios_of(level) for level in ("token", "sequence", "sequence_mean")},
    **{f"ppo_clip {sign:+}": lambda d, sign=sign: ppo_clip(
        jnp.clip(d, -20.0, 20.0), np.full(20, sign), 0.2, 0.3, 3.0) for sign in (1.0, -1.0)},
    **{f"gmpo {sign:+}": lambda d, sign=sign: gmpo_log_ratios(d, np.full(20, sign), 0.2, 0.4)
       for sign in (1.0, -1.0)},
    **{f"sapo {sign:+}": lambda d, sign=sign: sapo(
        jnp.clip(d, -20.0, 20.0), np.full(20, sign), 1.0, 2.0) for sign in (1.0, -1.0)},
    "dro": lambda d: dro_penalty(d, 0.3),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_DISTANCE)
def test_value_and_gradient_agree_at_any_distance(name):
    """In float64, by central differences; a distance is of log-probabilities, in nats."""
    with jax.enable_x64(True):
        function = OF_DISTANCE[name]
        step = 1e-6 * np.maximum(1.0, np.abs(NATS))

        @jax.jit  # as one program, which compiles sooner than each operation by itself
        def near(at, above, below):
            by_distance = jax.grad(lambda d: jnp.sum(function(d)))(at)
            return by_distance, function(above), function(below)

        gradient, above, below = map(np.asarray, near(NATS, NATS + step, NATS - step))
    assert np.isfinite(gradient).all()
    scale = np.maximum(1e-6, np.abs(above) / np.abs(NATS))  # rounding of what is subtracted
    assert (
        np.abs(gradient - (above - below) / (2 * step)) <= 1e-4 * np.abs(gradient) + scale
    ).all()


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_k3_drives_the_policy_to_its_reference_from_anywhere(precision):
    """Value 0 and gradient 0 at the reference, else above 0 and away from it; and no jumps."""

    def k3(d):
        return kl_estimate(d, jnp.zeros_like(d), "k3")

    with jax.enable_x64(precision is np.float64):
        d = jnp.asarray(np.concatenate([NATS, [0.0]]), precision)
        value, gradient = jax.jit(jax.vmap(jax.value_and_grad(k3)))(d)
        near = jnp.asarray([-20 - 1e-5, -20.0, -20 + 1e-5], precision)
        around = np.asarray(jax.jit(k3)(near), np.float64)
    assert np.isfinite(value).all()
    assert (np.asarray(value)[:-1] > 0).all()
    assert np.array_equal(np.sign(gradient), np.sign(np.asarray(d)))
    assert np.ptp(around) < 1e-4 * around[1]
    # Beyond the bound the tangent: e^20 for every nat.
    np.testing.assert_allclose(gradient[0], 1 - np.exp(20.0), rtol=1e-6)


@partial(jax.jit, static_argnums=0)
def corrected_loss(objective, logprobs, old, sampler, advantages):
    """A corrected loss, and its gradient by the log-probabilities."""

    def loss(logprobs):
        losses = policy_losses(objective, logprobs, old, advantages, MASK, SEGMENTS)
        losses *= correction_weights(objective, old, sampler, MASK, SEGMENTS)
        return weighted_sum(token_weights(MASK, SEGMENTS, "token_mean", 1), losses)

    return jax.value_and_grad(loss)(logprobs)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_off_the_mask_gets_through(surrogate, bad):
    level = RATIO_LEVELS.get(surrogate, "token")
    objective = objective_of(
        surrogate, level, aggregation="token_mean", importance_correction="masked"
    )
    rng = np.random.default_rng(5)
    clean = [rng.normal(-1, 0.1, (2, 6)).astype(np.float32) for _ in range(4)]
    dirty = [np.where(MASK > 0, values, np.float32(bad)) for values in clean]
    expected, found = (corrected_loss(objective, *arrays) for arrays in (clean, dirty))
    assert np.isfinite(expected[0])
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert (np.asarray(found[1])[np.asarray(MASK) == 0] == 0).all()


def test_a_weight_of_0_leaves_a_loss_of_nan_out():
    losses, weights = jnp.array([1.0, np.nan, np.inf]), jnp.array([2.0, 0.0, 0.0])
    value, gradient = jax.jit(jax.value_and_grad(partial(weighted_sum, weights)))(losses)
    assert value == 2.0
    np.testing.assert_array_equal(gradient, weights)


def test_binary_kl_by_hand_and_at_its_ends():
    # 0.5 -> 0.9: 0.5 ln(0.5 / 0.9) + 0.5 ln(0.5 / 0.1)
    old, new = np.log(np.array([0.5, 0.3, 1.0, 1.0])), np.log(np.array([0.9, 0.3, 1.0, 0.5]))
    found = binary_kl(new, new - old)
    np.testing.assert_allclose(found[:2], [0.5108256, 0.0], atol=1e-6)
    np.testing.assert_allclose(found[2:], [0.0, np.log(2)], atol=1e-6)  # certain, and no longer


def test_dppo_kl_stops_what_is_driven_too_far_and_no_other():
    old = np.log(np.array([0.5, 0.5, 0.5, 1e-4], np.float32))
    new = np.log(np.array([0.9, 0.1, 0.6, 1e-2], np.float32))  # KL 0.51, 0.51, 0.020, 0.0095

    def loss(logprobs, sign):
        return jnp.sum(dppo_kl(logprobs, logprobs - old, jnp.full(4, sign), 0.05, 0.05))

    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(gradient(new, 1.0), [0.0, -0.2, -1.2, -100.0], rtol=1e-5)
    np.testing.assert_allclose(gradient(new, -1.0), [1.8, 0.0, 1.2, 100.0], rtol=1e-5)
