"""The critic: GAE against rlax and NumPy, the value loss by hand, and what a step does with it."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from training.batches import LENGTH, VOCAB, commit_round, random_batch, tiny_policy
from training.steps import make_step, take_step

from marin_rl.batching.advantages import discounted_returns
from marin_rl.config import CriticConfig, MeshConfig, ObjectiveConfig, TrainingConfig
from marin_rl.errors import NonFiniteUpdate
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.scores import iter_scores
from marin_rl.training.compiled_step import CompiledStep, to_fixed_shape
from marin_rl.training.critic import (
    ScalarHead,
    ScalarModel,
    make_critic,
    value_losses,
    value_metrics,
)
from marin_rl.training.logprobs import final_states, token_values
from marin_rl.training.loop import Trainer
from marin_rl.training.model import build_model, matrix_mask, model_template, named_parameters
from marin_rl.training.optimizer import make_optimizer, policy_adamw
from marin_rl.training.precompute import RowPrecompute, token_rewards
from marin_rl.training.state import first_parameters, fresh_state, identity_of, state_of, tree_of
from marin_rl.training.step_types import StepSettings, step_arrays
from marin_rl.training.token_advantages import token_gae, whitened

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rlax-returns.json").read_text())
GAE = [
    pytest.param(case, id=case["name"])
    for case in GOLDEN["cases"]
    if case["fn"] == "truncated_generalized_advantage_estimation"
    and len(set(case["inputs"]["discount_t"]) - {0.0}) == 1
]


@pytest.mark.parametrize("case", GAE)
def test_gae_of_rows_is_that_of_rlax(case: dict) -> None:
    """An episode's end is a segment's, and a bootstrap is a part of the last reward."""
    given = {name: np.array(data, np.float32) for name, data in case["inputs"].items()}
    discounts, values = given["discount_t"], given["values"]
    rewards = given["r_t"].copy()
    rewards[-1] += discounts[-1] * values[-1]
    segments = 1 + np.concatenate([[0], np.cumsum(discounts == 0)[:-1]]).astype(np.int32)
    found = token_gae(
        rewards[None],
        values[None, :-1],
        np.ones((1, len(rewards)), np.bool_),
        segments[None],
        gamma=float(discounts.max()),
        lambda_=case["args"]["lambda_"],
    )
    assert_allclose(found[0], case["outputs"]["advantages"], rtol=5e-5, atol=5e-5)


def test_gae_of_rows_equals_that_of_each_trajectory() -> None:
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 5 + [2] * 6 + [0], [1] * 12], np.int32)
    mask = (rng.random((2, 12)) < 0.6) & (segments > 0)
    rewards, values = rng.standard_normal((2, 2, 12)).astype(np.float32)
    found = token_gae(rewards, values, mask, segments, gamma=0.9, lambda_=0.7)
    assert_array_equal(np.asarray(found)[~mask], 0.0)
    for row in range(2):
        for segment in (1, 2):
            here = mask[row] & (segments[row] == segment)
            value = np.append(values[row, here].astype(np.float64), 0.0)
            delta = rewards[row, here] + 0.9 * value[1:] - value[:-1]
            expected = discounted_returns(delta, np.full(len(delta), 0.9 * 0.7))
            assert_allclose(np.asarray(found)[row, here], expected, rtol=1e-5, atol=1e-6)


def test_the_value_loss_by_hand() -> None:
    """Values 1, 1, 3 and -1 were 0 before, may move by 0.5, and are to be 2, 0.25, 1 and 0."""
    critic = CriticConfig(value_clip=0.5)
    values, returns = np.array([[1, 1, 3, -1]], np.float32), np.array([[2, 0.25, 1, 0]], np.float32)
    old, mask = np.zeros((1, 4), np.float32), np.array([[True, True, True, False]])

    def loss(values, old, returns):
        losses = value_losses(values, old, returns, critic.value_clip)
        return jnp.sum(losses), losses

    gradient, found = jax.jit(jax.grad(loss, has_aux=True))(values, old, returns)
    told = jax.jit(partial(value_metrics, critic))(values, old, returns, mask)
    assert_allclose(found, [[1.5**2 / 2, 0.75**2 / 2, 2.0, 0.5]])
    assert_allclose(gradient, [[0.0, 0.75, 2.0, -1.0]])  # beyond the bound on the way: none
    free = jax.jit(lambda v, o, r: value_losses(v, o, r, None))(values, old, returns)
    assert_allclose(free, [[0.5, 0.75**2 / 2, 2.0, 0.5]])
    assert float(told["loss/value_avg"]) == pytest.approx((1.125 + 0.28125 + 2.0) / 3)
    assert float(told["val/clipfrac_avg"]) == pytest.approx(1 / 3)
    spread = np.var([1.0, -0.75, -2.0]) / (np.var([2.0, 0.25, 1.0]) + 1e-5)
    assert float(told["critic/explained_variance"]) == pytest.approx(1 - spread, rel=1e-5)
    assert float(told["critic/values_mean"]) == pytest.approx(5 / 3)


def test_whitening_is_over_all_trained_tokens_of_a_round() -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((1, 2, 5)).astype(np.float32) * 3 + 1 for _ in range(2)]
    masks = [rng.random((1, 2, 5)) < 0.7 for _ in range(2)]
    found = whitened(arrays, masks)
    tokens = np.concatenate([f[m] for f, m in zip(found, masks, strict=True)])
    assert (tokens.mean(), tokens.std(ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert all((f[~m] == 0).all() for f, m in zip(found, masks, strict=True))


def valued(batch, seed: int = 5):
    """The batch with a reward at the end of each row, by its returns."""
    rewards = np.random.default_rng(seed).random((len(batch.token_ids), 1))
    returns = (batch.loss_mask * rewards).astype(np.float32)
    return dataclasses.replace(batch, returns=returns, advantages=np.zeros_like(returns))


def test_the_reward_of_a_row_is_received_at_its_last_token() -> None:
    batch = valued(random_batch(3))
    arrays, _ = step_arrays(batch, 2, 2)
    rewards = token_rewards(batch, arrays).reshape(4, LENGTH)
    for row in range(3):
        last = int(np.flatnonzero(batch.loss_mask[row])[-1])
        assert rewards[row, last] == batch.returns[row, last] > 0
    assert np.count_nonzero(rewards) == 3


@pytest.mark.parametrize("scale", ["default", "none", "batch_whitening", "token_whitening"])
def test_kl_in_the_reward_reaches_a_critics_advantages_at_every_scale(scale: str) -> None:
    """Without values and with gae_lambda 1 an advantage is what is to come, less what KL is."""
    batch = valued(random_batch(3))
    batch = dataclasses.replace(batch, rollout_ids=tuple((f"r{row}",) for row in range(3)))
    rows = step_arrays(batch, 2, 2)
    arrays = rows.arrays
    objective = ObjectiveConfig(
        advantage="gae",
        advantage_scale=scale,
        ratio_level="token",
        kl_coefficient=0.5,
        kl_estimator="k1",
        kl_placement="reward",
    )
    apart = (0.25 * arrays.mask).astype(np.float32)
    precompute = RowPrecompute(objective, [batch], [rows])
    precompute.penalise(lambda rows: rows.arrays.policy_logprobs - apart, 0.5, {})
    nothing = np.zeros(arrays.mask.shape, np.float32)
    critic = CriticConfig(gae_lambda=1.0)
    precompute.estimate(critic, lambda _: nothing)
    mask = arrays.mask.reshape(4, -1)
    left = np.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # trained tokens from each one on
    rewards = token_rewards(batch, arrays).reshape(4, -1).sum(axis=1, keepdims=True)
    expected = (rewards - 0.5 * 0.25 * left)[mask]
    if scale != "none":
        expected = (expected - expected.mean()) / expected.std(ddof=1)
    found = precompute.extras[0].advantages
    assert found is not None
    assert_allclose(found.reshape(4, -1)[mask], expected, rtol=1e-4, atol=1e-5)


def test_a_value_is_the_heads_word_on_the_state_before_the_token() -> None:
    model, batch = build_model(tiny_policy(layers=1), VOCAB, 0), random_batch(3)
    head = ScalarHead.init(model.spec.width, jax.random.PRNGKey(2), std=1.0)
    names = ("token_ids", "segment_ids", "positions")
    rows = tuple(jnp.asarray(getattr(batch, name)) for name in names)
    mask = jnp.asarray(batch.loss_mask != 0)
    found = jax.jit(token_values)(model, head, *rows, mask)
    words = head(jax.jit(final_states)(model, *rows))
    expected = np.where(batch.loss_mask[:, 1:] != 0, np.asarray(words)[:, :-1], 0)
    assert_allclose(found[:, 1:], expected, rtol=1e-4, atol=1e-5)


OBJECTIVE = ObjectiveConfig(
    advantage="gae", ratio_level="token", aggregation="token_mean", entropy_coefficient=0.1
)


class Stage:
    """A step with a critic whose head and values are not 0."""

    def __init__(self, trunk: str, **settings) -> None:
        config = CriticConfig(trunk=trunk, value_coefficient=0.7)
        # SGD-like: a clip norm and an epsilon so large that an update is the gradient, scaled
        self.training = TrainingConfig(
            critic=config, epsilon=0.5, warmup_steps=0, gradient_clip_norm=1e6, learning_rate=0.1
        )
        self.model = build_model(tiny_policy(layers=1), VOCAB, 0)
        critic = make_critic(self.training, self.model)
        assert critic is not None
        self.critic = critic
        self.settings = StepSettings(objective=OBJECTIVE, critic=config)
        self.optimizer = make_optimizer(policy_adamw(self.training), matrix_mask(self.model))
        self.step = make_step(
            self.model, self.optimizer, lambda t: 0.1 + 0 * t, self.settings, critic=critic,
            **settings,
        )  # fmt: skip

    def fresh(self):
        first = self.critic.first_state(named_parameters(self.model), self.model)
        (head,) = (name for name in first.parameters if name in ("weight", "head/weight"))
        words = np.random.default_rng(4).standard_normal(self.model.spec.width, np.float32)
        parameters = first.parameters | {head: jnp.asarray(words)}
        return fresh_state(
            named_parameters(self.model),
            self.optimizer,
            7,
            critic=first._replace(parameters=parameters),
        )

    def take(self, batch, rows, microbatches, *, spoil=False):
        arrays, used = step_arrays(batch, rows, microbatches)
        rng = np.random.default_rng(8)

        def noise():
            values = np.zeros((rows * microbatches, LENGTH), np.float32)
            drawn = rng.standard_normal(batch.token_ids.shape).astype(np.float32)
            values[: len(drawn)] = drawn
            return np.where(arrays.mask, values.reshape(arrays.mask.shape), 0)

        old_values, returns = noise(), noise()
        if spoil:
            returns[0, 0, np.flatnonzero(arrays.mask[0, 0])[0]] = np.nan
        arrays = arrays._replace(old_values=old_values, returns=returns)
        return self.step(self.fresh(), None, arrays, used)


def assert_moved(found, start) -> None:
    for name, array in start.items():
        assert np.abs(np.asarray(found[name]) - np.asarray(array)).max() > 0, name


def test_a_step_moves_policy_and_critic_and_nan_moves_neither() -> None:
    stage, batch = Stage("shared"), random_batch(7)
    fresh = stage.fresh()
    moved, metrics, measured = stage.take(batch, 2, 4)
    assert measured is not None
    assert measured.values is not None
    assert_moved(moved.parameters, fresh.parameters)
    assert_moved(moved.critic.parameters, fresh.critic.parameters)
    share = stage.settings.critic.value_coefficient * metrics["loss/value_avg"]
    rest = metrics["loss/policy_avg"] - 0.1 * metrics["entropy"]
    assert float(metrics["loss"]) == pytest.approx(float(share + rest), rel=1e-5)
    spoiled, told, _ = stage.take(batch, 2, 4, spoil=True)
    assert float(told["updates/skipped"]) == 1
    for name, array in fresh.critic.parameters.items():
        assert_array_equal(spoiled.critic.parameters[name], array)
    for name, array in fresh.parameters.items():
        assert_array_equal(spoiled.parameters[name], array)
    assert (int(spoiled.step), int(spoiled.critic.step), int(spoiled.refused)) == (0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["shared", "own"])
def test_microbatches_change_no_update(trunk: str) -> None:
    stage, batch = Stage(trunk), random_batch(7)
    fresh = stage.fresh()
    whole, metrics, _ = stage.take(batch, 8, 1)
    split, of_split, _ = stage.take(batch, 2, 4)
    assert_moved(whole.critic.parameters, fresh.critic.parameters)
    for found, expected in (
        (split.parameters, whole.parameters),
        (split.critic.parameters, whole.critic.parameters),
    ):
        for name in expected:
            assert_allclose(found[name], expected[name], atol=2e-6)
    for name, value in metrics.items():
        assert float(of_split[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


def test_a_trunk_of_its_own_begins_as_the_policy_and_says_nothing_yet() -> None:
    policy = tiny_policy(tie_embeddings=False)
    model = build_model(policy, VOCAB, 0)
    training = TrainingConfig(critic=CriticConfig(trunk="own"))
    critic = make_critic(training, model_template(policy, VOCAB))
    assert critic is not None
    state = critic.first_state(named_parameters(model), model_template(policy, VOCAB))
    like = critic.state_like()
    assert {n: a.shape for n, a in like.parameters.items()} == {
        n: a.shape for n, a in state.parameters.items()
    }
    assert_array_equal(state.parameters["head/weight"], 0)
    assert "trunk/lm_head/weight" not in state.parameters
    for name, array in named_parameters(ScalarModel.of(model).trunk).items():
        assert_array_equal(state.parameters[f"trunk/{name}"], array)
    optimizer = make_optimizer(policy_adamw(training), matrix_mask(model))
    whole = fresh_state(named_parameters(model), optimizer, 0, critic=state)
    again = state_of(tree_of(whole), whole)
    assert jax.tree.structure(again) == jax.tree.structure(whole)


SETTINGS = (
    "policy.model.layers=1", "training.microbatch_sequences=4", "objective.advantage=gae",
    "objective.ratio_level=token", "objective.aggregation=token_mean", "training.epochs=2",
    "objective.kl_coefficient=0.1", "objective.kl_placement=reward", "objective.kl_estimator=k1",
    "training.critic.warmup_rounds=1",
)  # fmt: skip


def batches_of(run, round):
    made = [valued(random_batch(5, 32, seed=10 * round + step), step) for step in range(2)]
    return commit_round(run, round, made, 32)


def play(run, trainer, checkpoint, rounds):
    for round in rounds:
        checkpoint = trainer.train_round(round, batches_of(run, round), checkpoint)
    return checkpoint


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_warm_up_leaves_the_policy_alone_and_resuming_ends_in_the_same_bits(
    debug, tokenizer, tmp_path, trunk
) -> None:
    settings = (*SETTINGS, f"training.critic.trunk={trunk}")
    run = Run.create_or_open(debug(*settings))
    trainer = Trainer(run, tokenizer)
    first = trainer.init_policy()
    warm = play(run, trainer, first, [0])
    before, after = identity_of(run, first), identity_of(run, warm)
    assert after.parameters_digest == before.parameters_digest
    assert (before.step, after.step) == (0, 0)
    assert None not in (before.critic_digest, after.critic_digest)
    assert after.critic_digest != before.critic_digest
    assert (warm.summary["lr"], warm.summary["grad_norm"]) == (0, 0)
    last = play(run, trainer, warm, [1, 2])
    expected = identity_of(run, last)
    assert expected.step == 8
    assert expected.parameters_digest != after.parameters_digest
    assert {"loss/value_avg", "val/clipfrac_avg", "critic/explained_variance"} <= set(last.summary)
    scored = list(iter_scores(run, manifest_of(run.store, last)))
    for name in ("values", "old_values", "returns"):
        assert scored[0].floats[name] is not None
    # A new one after every round, from the files alone.
    other = Run.create_or_open(debug(*settings, f"root={tmp_path / 'other'}"))
    checkpoint = Trainer(other, tokenizer).init_policy()
    for round in range(3):
        checkpoint = play(other, Trainer(other, tokenizer), checkpoint, [round])
    assert identity_of(other, checkpoint) == expected
    # A fork takes the policy and begins with a critic of its own, or without any.
    source = f"{run.config.root}/debug/{last.slot}"
    start = ("run_id=fork", "policy.init=checkpoint", f"policy.checkpoint={source}")
    fork = Run.create_or_open(debug("policy.model.layers=1", *start))
    forked = identity_of(fork, Trainer(fork, tokenizer).init_policy())
    assert (forked.parameters_digest, forked.critic_digest) == (expected.parameters_digest, None)


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.parametrize("axis", ["data", "fsdp", "context"])
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_on_a_mesh_the_critic_learns_as_on_one_device(debug, tokenizer, axis, trunk) -> None:
    config = debug(*SETTINGS, f"training.critic.trunk={trunk}")

    def after_two_steps(config):
        settings = StepSettings(objective=config.objective, critic=config.training.critic)
        program = CompiledStep(config, tokenizer, policy_adamw(config.training), settings)
        assert program.critic is not None
        parameters = first_parameters(config, tokenizer)
        critic = program.critic.first_state(parameters, program.template)
        state = fresh_state(parameters, program.optimizer, 0, critic=critic)
        state = program.place(state)
        for step in range(2):
            rows = to_fixed_shape(valued(random_batch(6, LENGTH, seed=step)), 4, 8)
            arrays = rows.arrays
            nothing = np.zeros(arrays.mask.shape, np.float32)
            returns = np.where(arrays.mask, np.float32(0.5 + step), 0).astype(np.float32)
            arrays = arrays._replace(old_values=nothing, returns=returns)
            state, metrics, _ = take_step(program, state, rows._replace(arrays=arrays))
        return state, metrics

    expected, metrics = after_two_steps(config)
    meshed = config.model_copy(update={"mesh": MeshConfig(**{axis: 2})})
    found, of_mesh = after_two_steps(meshed)
    for name, array in expected.critic.parameters.items():
        assert found.critic.parameters[name].sharding.num_devices == 2
        assert_allclose(found.critic.parameters[name], array, atol=1e-5)
    for name, array in expected.parameters.items():
        assert_allclose(found.parameters[name], array, atol=1e-5)
    assert of_mesh == pytest.approx(metrics, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_critic_that_is_not_finite_ends_the_round(debug, tokenizer) -> None:
    run = Run.create_or_open(debug(*SETTINGS, "training.nonfinite_updates_max=1"))
    trainer = Trainer(run, tokenizer)
    first = trainer.init_policy()
    batch = valued(random_batch(5, 32))
    batch.returns[:] = 1e38  # its square is no float32
    with pytest.raises(NonFiniteUpdate):
        trainer.train_round(0, commit_round(run, 0, [batch], 32), first)
