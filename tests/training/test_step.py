"""The optimizer step: splitting, padding and order change nothing; NaN is refused whole."""

import dataclasses
import math
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_factories import commit_round, configuration, group_of, rollout
from training.batches import LENGTH, VOCAB, compilations, random_batch, tiny_policy
from training.steps import make_step

from marin_rl.batching.build import build_round
from marin_rl.config import ObjectiveConfig, PolicyConfig
from marin_rl.metrics import LARGEST
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_batches
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.losses import token_weights
from marin_rl.training.model import build_model, named_parameters
from marin_rl.training.state import fresh_state
from marin_rl.training.step import make_score
from marin_rl.training.step_types import (
    Reference,
    StepSettings,
    TrainableParams,
    as_array,
    step_arrays,
)

ROWS_MAX = 8
MODEL = tiny_policy(layers=1)
OBJECTIVE = ObjectiveConfig(aggregation="sequence_mean_token_mean", kl_coefficient=0.1)


@dataclasses.dataclass
class Stage:
    """A step that moves parameters by minus the gradient, so that a change is the gradient."""

    objective: ObjectiveConfig | None = OBJECTIVE
    temperature: float = 1.0
    policy: PolicyConfig = MODEL
    lanes: int = 1
    length_norm: int = 1

    def __post_init__(self):
        self.model = build_model(self.policy, VOCAB, 0)
        self.reference = named_parameters(build_model(self.policy, VOCAB, 1))
        self.optimizer = optax.with_extra_args_support(optax.sgd(1.0, momentum=0.5))
        setting = StepSettings(
            objective=self.objective, temperature=self.temperature, length_norm=self.length_norm
        )
        self.step = make_step(
            self.model, self.optimizer, lambda step: 0.5 + step, setting, lanes=self.lanes
        )

    def fresh(self):
        return fresh_state(named_parameters(self.model), self.optimizer, 7)

    def take(self, batch, rows, microbatches, state=None, old_logprobs=None):
        arrays, used = step_arrays(batch, rows, microbatches)
        if old_logprobs is not None:
            arrays = arrays._replace(old_logprobs=old_logprobs.reshape(arrays.mask.shape))
        state = self.fresh() if state is None else state
        reference = None
        if self.objective and self.objective.kl_coefficient:
            reference = Reference(self.reference, np.float32(self.objective.kl_coefficient))
        return self.step(state, reference, arrays, used)

    def gradient(self, batch, rows, microbatches):
        state, metrics, _ = self.take(batch, rows, microbatches)
        old = named_parameters(self.model)
        change = {name: np.asarray(old[name] - new) for name, new in state.parameters.items()}
        return change, {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def stage():
    return Stage()


def assert_same(found, expected, tolerance=2e-5):
    for name in expected:
        scale = np.abs(expected[name]).max() + 1e-8
        np.testing.assert_allclose(found[name] / scale, expected[name] / scale, atol=tolerance)


@settings(max_examples=2)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, ROWS_MAX))
def test_splitting_padding_and_order_change_no_gradient(stage, seed, rows):
    batch = random_batch(rows, seed=seed)
    whole, metrics = stage.gradient(batch, ROWS_MAX, 1)  # one microbatch, filled up with padding
    split, of_split = stage.gradient(batch, 2, ROWS_MAX // 2)
    assert_same(split, whole, 5e-5)
    order = np.random.default_rng(seed).permutation(rows)
    shuffled = dataclasses.replace(
        batch,
        **{
            field.name: getattr(batch, field.name)[order]
            for field in dataclasses.fields(batch)
            if field.name != "rollout_ids" and isinstance(getattr(batch, field.name), np.ndarray)
        },
    )
    assert_same(stage.gradient(shuffled, 2, ROWS_MAX // 2)[0], whole, 5e-5)
    assert of_split == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_lanes_find_what_one_loop_finds_and_the_same_bits_on_any_number_of_cores(stage):
    lanes, cores = Stage(lanes=2), os.sched_getaffinity(0)
    for rows in (1, 5, ROWS_MAX):  # 1, 3 and 4 microbatches hold anything: one lane may have none
        batch = random_batch(rows)
        one, of_one = stage.gradient(batch, 2, ROWS_MAX // 2)
        state, metrics, measured = lanes.take(batch, 2, ROWS_MAX // 2)
        change, of_lanes = lanes.gradient(batch, 2, ROWS_MAX // 2)
        assert_same(change, one)
        assert of_lanes == pytest.approx(of_one, rel=1e-4, abs=1e-5)
        try:
            os.sched_setaffinity(0, {min(cores)})
            alone = lanes.take(batch, 2, ROWS_MAX // 2)
        finally:
            os.sched_setaffinity(0, cores)
        for found, again in zip(
            jax.tree.leaves((state, metrics, measured)), jax.tree.leaves(alone), strict=True
        ):
            np.testing.assert_array_equal(found, again)


OBJECTIVES = {
    "dapo with entropy": {
        "ratio_level": "token",
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "entropy_coefficient": 0.1,
    },
    "gspo": {"surrogate": "gspo", "ratio_level": "sequence_mean", "clip_dual": 3.0},
    "masked cispo": {
        "surrogate": "cispo",
        "importance_correction": "masked",
        "correction_level": "sequence",
        "kl_coefficient": 0.1,
        "kl_estimator": "k3_k2_gradient",
    },
    "truncated sapo": {
        "surrogate": "sapo",
        "ratio_level": "token",
        "importance_correction": "truncated",
        "correction_high": 1.05,
        "aggregation": "sequence_mean_token_sum_norm",
    },
    "dppo": {"surrogate": "dppo", "ratio_level": "token", "clip_low": 0.01, "clip_high": 0.01},
    "reinforce": {"surrogate": "reinforce", "aggregation": "sequence_mean_token_mean"},
    "gmpo with rejection": {
        "surrogate": "gmpo",
        "ratio_level": "sequence_mean",
        "importance_correction": "rejected",
        "rejection": "k2",
        "rejection_level": "sequence_max",
        "rejection_high": 2.0,  # two thirds of the tokens are rejected
    },
    "dppo_kl": {"surrogate": "dppo_kl", "ratio_level": "token", "aggregation": "token_sum"},
    "dro": {"surrogate": "dro", "dro_beta": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_microbatches_change_no_gradient_of_any_objective(name):
    objective, batch = ObjectiveConfig(**OBJECTIVES[name]), random_batch(7)
    stage = Stage(objective=objective, length_norm=LENGTH)
    whole, metrics = stage.gradient(batch, ROWS_MAX, 1)
    split, of_split = stage.gradient(batch, 2, ROWS_MAX // 2)
    assert_same(split, whole)
    assert of_split == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert max(np.abs(change).max() for change in whole.values()) > 1e-6


@pytest.mark.slow
def test_correction_compares_the_trainer_before_its_updates_with_the_sampler():
    choices = {"importance_correction": "truncated", "correction_high": 1.01}
    stage, batch = Stage(objective=ObjectiveConfig(**choices)), random_batch(4)
    first, metrics = stage.gradient(batch, 4, 1)
    assert (metrics["val/ratio"], metrics["val/ratio_var"]) == (1.0, 0.0)  # the first update
    assert metrics["sampling/correction_weight/mean"] < 1.01
    arrays, used = step_arrays(batch, 4, 1)
    score = make_score(stage.model, StepSettings(objective=stage.objective))
    parameters = TrainableParams(named_parameters(stage.model))
    old = np.asarray(score(parameters, {}, arrays, as_array(used)))
    state, again, measured = stage.take(batch, 4, 1, old_logprobs=old)
    np.testing.assert_allclose(old, measured.trainer_logprobs, atol=1e-5)
    np.testing.assert_array_equal(old, measured.old_logprobs)
    assert {name: float(value) for name, value in again.items()} == pytest.approx(metrics, rel=1e-4)
    _, later, _ = stage.take(batch, 4, 1, state, old_logprobs=old)
    assert abs(float(later["val/ratio"]) - 1.0) > 1e-4
    assert later["sampling/correction_weight/mean"] == pytest.approx(
        metrics["sampling/correction_weight/mean"], rel=1e-4
    )
    assert max(np.abs(change).max() for change in first.values()) > 1e-6


@given(
    seed=st.integers(0, 2**31),
    aggregation=st.sampled_from(
        [
            "token_mean",
            "sequence_mean_token_mean",
            "sequence_mean_token_sum",
            "sequence_mean_token_sum_norm",
            "token_sum",
        ]
    ),
)
def test_no_aggregation_depends_on_padding_or_on_the_order_of_rows(seed, aggregation):
    batch = random_batch(6, seed=seed)
    mask, segments = batch.loss_mask.astype(np.float32), batch.segment_ids
    weights = weighed(mask, segments, aggregation)
    padded = weighed(
        np.pad(mask, ((0, 2), (0, 8))), np.pad(segments, ((0, 2), (0, 8))), aggregation
    )
    np.testing.assert_allclose(padded[:6, :16], weights, rtol=1e-6)
    backwards = weighed(mask[::-1], segments[::-1], aggregation)
    np.testing.assert_allclose(backwards[::-1], weights, rtol=1e-6)


@partial(jax.jit, static_argnames="aggregation")
def weighed(mask, segments, aggregation):
    return token_weights(mask, segments, aggregation, 16)


def test_nothing_is_compiled_after_the_first_step(stage):
    state, _, _ = stage.take(random_batch(8), 2, 4)
    compiled = compilations()
    for rows in (1, 3, 8):
        state, _, _ = stage.take(random_batch(rows, seed=rows), 2, 4, state)
    assert compilations() == compiled > 0


def test_served_parameters_survive_a_step_and_the_optimizer_state_is_given_away(stage):
    state = stage.fresh()
    before = {name: np.array(array) for name, array in state.parameters.items()}
    stage.take(random_batch(4), 2, 4, state)
    for name, array in state.parameters.items():
        np.testing.assert_array_equal(array, before[name])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.optimizer))


def test_an_update_that_is_not_finite_is_refused_whole(stage):
    batch = random_batch(4)
    poisoned = dataclasses.replace(batch, advantages=batch.advantages * np.float32(np.nan))
    state, first, _ = stage.take(poisoned, 2, 4)
    assert first["updates/skipped"] == 1
    assert int(state.step) == 0
    assert int(state.refused) == 1
    for name, array in named_parameters(stage.model).items():
        np.testing.assert_array_equal(state.parameters[name], array)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.optimizer))
    state, _, _ = stage.take(poisoned, 2, 4, state)
    assert int(state.refused) == 2
    state, good, _ = stage.take(batch, 2, 4, state)
    assert (int(state.refused), int(state.step), float(good["updates/skipped"])) == (0, 1, 0)


@pytest.mark.slow
def test_a_refused_update_leaves_the_average_where_it_is():
    objective = OBJECTIVE.model_copy(update={"reference": "average", "reference_decay": 0.5})
    stage, batch = Stage(objective=objective), random_batch(4)
    state = stage.fresh()._replace(average=stage.reference)
    poisoned = dataclasses.replace(batch, advantages=batch.advantages * np.float32(np.nan))
    state, _, _ = stage.take(poisoned, 4, 1, state)
    for name, array in stage.reference.items():
        np.testing.assert_array_equal(state.average[name], array)
    state, _, _ = stage.take(batch, 4, 1, state)
    for name, array in stage.reference.items():
        halfway = 0.5 * array + 0.5 * state.parameters[name]
        np.testing.assert_allclose(state.average[name], halfway, atol=1e-6)


@pytest.mark.slow
def test_rows_of_two_policies_are_each_compared_with_their_own(tmp_path):
    now, before = (named_parameters(build_model(MODEL, VOCAB, seed)) for seed in (0, 1))
    objective = ObjectiveConfig(ratio_level="token", aggregation="token_mean")
    stage, sections = Stage(objective=objective), {"batching": {"staleness_rounds_max": 1}}
    run = Run.create_or_open(configuration(str(tmp_path), **sections))
    members = [
        rollout(f"g/{i}", index=i, reward=float(i), completion=(8, 9, 10 + i), version=version)
        for i, version in enumerate((4, 3, 4, 3, 2))
    ]
    built = build_round(run, 4, commit_round(run, 4, [[group_of("g", members)]]))
    stale = "rollouts/consumed", "rollouts/stale", "staleness/mean", "staleness/max"
    assert [built.summary[name] for name in stale] == [4, 1, 0.5, 1]
    (batch,) = read_batches(run, built)
    old = np.array([False, True, False, True])
    arrays, used = step_arrays(batch, 4, 1)
    score = make_score(stage.model, StepSettings(objective=objective))
    fresh, aged = (
        np.asarray(score(TrainableParams(p), {}, arrays, as_array(used)))[0] for p in (now, before)
    )
    sampled = np.where(old[:, None], aged, fresh)  # logprobs from the server of each policy
    batch = dataclasses.replace(batch, policy_logprobs=sampled)
    _, metrics, measured = stage.take(batch, 4, 1)
    mask, ratio = arrays.mask[0], np.asarray(measured.ratios)[0]
    expected = np.where(old[:, None], np.exp(fresh - aged), 1.0)
    np.testing.assert_allclose(ratio[mask], expected[mask], rtol=1e-4)
    assert np.abs(ratio[mask & old[:, None]] - 1).min() > 1e-3
    assert float(metrics["val/ratio"]) == pytest.approx(expected[mask].mean(), rel=1e-4)


def test_metrics_by_hand(stage):
    batch = random_batch(4)
    arrays, _ = step_arrays(batch, 4, 1)
    mask, rows = arrays.mask[0], (arrays.token_ids[0], arrays.segment_ids[0], arrays.positions[0])
    score = jax.jit(token_logprobs)
    logprobs, entropies = (
        np.asarray(scores)[mask] for scores in score(stage.model, *rows, jnp.asarray(mask))[:2]
    )
    advantages = arrays.advantages[0][mask]
    other = build_model(MODEL, VOCAB, 1)
    referred = np.asarray(score(other, *rows, jnp.asarray(mask)).logprobs)[mask]
    _, found = stage.gradient(batch, 2, 4)
    difference = logprobs - arrays.policy_logprobs[0][mask]
    ratio = np.exp(difference)
    sequences = np.flatnonzero(mask.any(axis=1))
    own = [np.exp(np.sum(difference_of := difference[np.nonzero(mask)[0] == s])) for s in sequences]
    assert difference_of.size
    per_token = np.concatenate(
        [np.full((np.nonzero(mask)[0] == s).sum(), r) for s, r in zip(sequences, own, strict=True)]
    )
    rows_N = np.nonzero(mask)[0]
    trainer, sampler = (
        [x[rows_N == row].astype(np.float64) for row in sequences]
        for x in (logprobs, arrays.policy_logprobs[0][mask])
    )
    completions = list(zip(trainer, sampler, strict=True))
    expected = {
        "sampling/perplexity/trainer": np.mean([math.exp(-t.sum() / len(t)) for t in trainer]),
        "sampling/perplexity/sampler": np.mean([math.exp(-s.sum() / len(s)) for s in sampler]),
        "sampling/perplexity/ratio": np.mean(
            [math.exp(-t.sum() / len(t)) / math.exp(-s.sum() / len(s)) for t, s in completions]
        ),
        "sampling/chi2/token": np.mean(
            [math.exp(a - b) ** 2 - 1 for t, s in completions for a, b in zip(t, s, strict=True)]
        ),
        "sampling/chi2/sequence": np.mean(
            [
                math.prod(math.exp(a - b) for a, b in zip(t, s, strict=True)) ** 2 - 1
                for t, s in completions
            ]
        ),
        "entropy": entropies.mean(),
        "sampling/logp_difference/mean": np.abs(difference).mean(),
        "sampling/logp_difference/max": np.abs(difference).max(),
        "sampling/importance_ratio/min": ratio.min(),
        "sampling/importance_ratio/mean": ratio.mean(),
        "sampling/importance_ratio/max": ratio.max(),
        "mismatch_kl": (ratio - 1 - difference).mean(),
        "policy/approxkl_avg": (difference**2 / 2).mean(),
        "val/ratio": per_token.mean(),
        "val/ratio_var": per_token.var(),
        "policy/clipfrac_avg": (
            ((per_token < 0.8) & (advantages < 0)) | ((per_token > 1.2) & (advantages > 0))
        ).mean(),
        "kl": (np.exp(referred - logprobs) - (referred - logprobs) - 1).mean(),
        "objective/kl": (logprobs - referred).sum() / len(sequences),
        "lr": 0.5,
        "updates/steps": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_mismatch_beyond_float32_is_shown_as_its_largest_number(stage):
    """A token that the sampler gave -200 nats: e^200, of which no manifest holds the infinity."""
    batch = random_batch(4)
    apart = np.where(batch.loss_mask == 1, np.float32(-200), batch.policy_logprobs)
    batch = dataclasses.replace(batch, policy_logprobs=apart)
    _, found = stage.gradient(batch, 2, ROWS_MAX // 2)
    overflow = ["importance_ratio/max", "importance_ratio/mean", "chi2/token", "chi2/sequence"]
    names = ["mismatch_kl", *(f"sampling/{name}" for name in overflow)]
    assert {name: found[name] for name in names} == dict.fromkeys(names, LARGEST)
    assert 190 < found["sampling/logp_difference/max"] < 200


@pytest.fixture(scope="module")
def supervised():
    return Stage(objective=None)


def test_rows_are_dealt_in_order_and_first_tokens_are_never_trained_on():
    batch = random_batch(3)
    everything = dataclasses.replace(batch, loss_mask=np.ones_like(batch.loss_mask))
    arrays, used = step_arrays(everything, 2, 4)
    assert used == 2
    np.testing.assert_array_equal(arrays.token_ids.reshape(8, -1)[:3], batch.token_ids)
    assert not arrays.mask[..., 0].any()
    assert not arrays.mask.reshape(8, -1)[3:].any()
    assert not arrays.segment_ids.reshape(8, -1)[3:].any()


@pytest.mark.slow
def test_bfloat16_computes_near_and_keeps_float32_weights(supervised):
    batch = random_batch(4)
    exact, metrics = supervised.gradient(batch, 4, 1)
    stage = Stage(objective=None)
    setting = StepSettings(objective=None, compute_dtype="bfloat16")
    stage.step = make_step(stage.model, stage.optimizer, lambda step: 0.5 + step, setting)
    near, of_near = stage.gradient(batch, 4, 1)
    assert of_near["loss"] == pytest.approx(metrics["loss"], rel=2e-2)
    assert_same(near, exact, 0.1)
    assert all(
        array.dtype == np.float32 for array in stage.take(batch, 4, 1)[0].parameters.values()
    )
