"""The optimizer step: splitting, padding and order change nothing; NaN is refused whole."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hand_made import VOCAB, compilations, random_batch, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.config import ObjectiveConfig
from marin_rl.training.losses import token_weights
from marin_rl.training.model import build_model, named_parameters
from marin_rl.training.scoring import token_logprobs
from marin_rl.training.state import fresh_state
from marin_rl.training.step import StepSettings, as_array, make_step, step_arrays

ROWS_MAX = 8
MODEL = tiny_policy(layers=1)
OBJECTIVE = ObjectiveConfig(aggregation="sequence_mean_token_mean", kl_coefficient=0.1)


@dataclasses.dataclass
class Stage:
    """A step that moves parameters by minus the gradient, so that a change is the gradient."""

    objective: ObjectiveConfig | None = OBJECTIVE
    temperature: float = 1.0

    def __post_init__(self):
        self.model = build_model(MODEL, VOCAB, 0)
        self.reference = named_parameters(build_model(MODEL, VOCAB, 1))
        self.optimizer = optax.with_extra_args_support(optax.sgd(1.0, momentum=0.5))
        setting = StepSettings(objective=self.objective, temperature=self.temperature)
        self.step = make_step(self.model, self.optimizer, lambda step: 0.5 + step, setting)

    def fresh(self):
        return fresh_state(named_parameters(self.model), self.optimizer, 7)

    def take(self, batch, rows, microbatches, state=None):
        arrays, used = step_arrays(batch, rows, microbatches)
        state = self.fresh() if state is None else state
        reference = self.reference if self.objective and self.objective.kl_coefficient else None
        return self.step(state, reference, arrays, as_array(used))

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


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, ROWS_MAX))
def test_splitting_padding_and_order_change_no_gradient(stage, seed, rows):
    batch = random_batch(rows, seed=seed)
    whole, metrics = stage.gradient(batch, ROWS_MAX, 1)  # one microbatch, filled up with padding
    split, of_split = stage.gradient(batch, 2, ROWS_MAX // 2)
    assert_same(split, whole)
    order = np.random.default_rng(seed).permutation(rows)
    shuffled = dataclasses.replace(
        batch,
        **{
            field.name: getattr(batch, field.name)[order]
            for field in dataclasses.fields(batch)
            if field.name != "rollout_ids"
        },
    )
    assert_same(stage.gradient(shuffled, 2, ROWS_MAX // 2)[0], whole)
    assert of_split == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def test_a_longer_bucket_changes_no_gradient(stage):
    batch = random_batch(5)
    wider = dataclasses.replace(
        batch,
        **{
            field.name: np.pad(getattr(batch, field.name), ((0, 0), (0, 8)))
            for field in dataclasses.fields(batch)
            if field.name != "rollout_ids"
        },
    )
    assert_same(stage.gradient(wider, 2, 4)[0], stage.gradient(batch, 2, 4)[0])


@given(
    seed=st.integers(0, 2**31),
    aggregation=st.sampled_from(
        [
            "token_mean",
            "sequence_mean_token_mean",
            "sequence_mean_token_sum",
            "sequence_mean_token_sum_norm",
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


def test_metrics_by_hand(stage):
    batch = random_batch(4)
    arrays, _ = step_arrays(batch, 4, 1)
    mask, rows = arrays.mask[0], (arrays.token_ids[0], arrays.segment_ids[0], arrays.positions[0])
    score = jax.jit(token_logprobs)
    logprobs, entropies = (
        np.asarray(scores)[mask] for scores in score(stage.model, *rows, jnp.asarray(mask))
    )
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
    expected = {
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
        "policy/clipfrac_avg": ((per_token < 0.8) | (per_token > 1.2)).mean(),
        "kl": (np.exp(referred - logprobs) - (referred - logprobs) - 1).mean(),
        "objective/kl": (logprobs - referred).sum() / len(sequences),
        "lr": 0.5,
        "updates/steps": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.fixture(scope="module")
def supervised():
    return Stage(objective=None)


def test_supervised_loss_is_the_mean_negative_log_likelihood(supervised):
    stage, batch = supervised, random_batch(4)
    _, found = stage.gradient(batch, 4, 1)
    arrays, _ = step_arrays(batch, 4, 1)
    rows = (arrays.token_ids[0], arrays.segment_ids[0], arrays.positions[0])
    logprobs = jax.jit(token_logprobs)(stage.model, *rows, jnp.asarray(arrays.mask[0])).logprobs
    assert found["loss"] == pytest.approx(-np.asarray(logprobs)[arrays.mask[0]].mean(), rel=1e-5)


def test_rows_are_dealt_in_order_and_first_tokens_are_never_trained_on():
    batch = random_batch(3)
    everything = dataclasses.replace(batch, loss_mask=np.ones_like(batch.loss_mask))
    arrays, used = step_arrays(everything, 2, 4)
    assert used == 2
    np.testing.assert_array_equal(arrays.token_ids.reshape(8, -1)[:3], batch.token_ids)
    assert not arrays.mask[..., 0].any()
    assert not arrays.mask.reshape(8, -1)[3:].any()
    assert not arrays.segment_ids.reshape(8, -1)[3:].any()


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
