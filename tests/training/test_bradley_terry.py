"""The Bradley-Terry loss by hand, its gradient, and rewards that do not know their neighbours."""

from dataclasses import replace
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from training.batches import VOCAB, tiny_policy

from marin_rl.batching.pairs import PairBatch, padded
from marin_rl.config import MeshConfig, TrainingConfig
from marin_rl.training.bradley_terry import (
    SequenceScorer,
    bradley_terry_losses,
    make_reward_passes,
    pair_arrays,
    pair_totals,
)
from marin_rl.training.critic import ScalarHead, ScalarModel
from marin_rl.training.mesh import SINGLE_DEVICE, Layout, layout_of
from marin_rl.training.model import build_model, digest_of, matrix_mask, named_parameters
from marin_rl.training.optimizer import learning_rate_schedule, make_optimizer, policy_adamw
from marin_rl.training.state import fresh_state, state_like
from marin_rl.training.step import make_update, trainable_of
from marin_rl.training.step_types import TrainState

# r_chosen - r_rejected - margin, and what -log sigmoid of it is, to ten digits.
KNOWN = ((0.0, 0.6931471806), (1.0, 0.3132616875), (-2.0, 2.1269280110), (40.0, 0.0))
POLICY = tiny_policy(layers=1)


def scalar_model(std: float = 1.0) -> ScalarModel:
    """The same model every time, but for the weights of its head."""
    model = build_model(POLICY, VOCAB, 0)
    head = ScalarHead.init(model.spec.width, jax.random.PRNGKey(1), std=std)
    return eqx.tree_at(lambda m: m.head, ScalarModel.of(model), head)


def random_pairs(count: int, length: int = 12, seed: int = 0) -> PairBatch:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, length + 1, 2 * count)
    rows = [rng.integers(7, VOCAB, size).astype(np.int32) for size in sizes]
    token_ids, inside = padded(rows, len(rows), length)
    margins = rng.uniform(0, 1, count).astype(np.float32)
    return PairBatch(token_ids=token_ids, inside=inside, margins=margins)


def test_the_loss_is_what_the_formula_says():
    for difference, expected in KNOWN:
        for margin in (0.0, 0.5):
            chosen = jnp.asarray([difference + margin + 3.0])
            found = bradley_terry_losses(chosen, jnp.asarray([3.0]), jnp.asarray([margin]))
            np.testing.assert_allclose(found, [expected], rtol=1e-6, atol=1e-12)


def test_totals_by_hand_where_a_tie_is_wrong():
    chosen, rejected = np.array([1.0, 0.0, 2.0, 5.0]), np.array([0.0, 2.0, 2.0, 4.5])
    totals = pair_totals(chosen, rejected, np.array([0, 0, 0, 0.5], np.float32))
    losses = (KNOWN[1][1], KNOWN[2][1], KNOWN[0][1], KNOWN[0][1])
    assert totals["loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert totals["accuracy"] == 0.5
    assert totals["margin"] == pytest.approx((1 - 2 + 0 + 0.5) / 4)


def test_the_gradient_raises_what_was_chosen_by_the_chance_of_being_wrong():
    def loss(chosen, rejected):
        return jnp.sum(bradley_terry_losses(chosen, rejected, jnp.asarray([0.5])))

    at = jnp.asarray([0.2]), jnp.asarray([1.0])
    by_chosen, by_rejected = jax.grad(loss, argnums=(0, 1))(*at)
    wrong = 1 / (1 + np.exp(0.2 - 1.0 - 0.5))  # sigmoid(-(difference - margin))
    np.testing.assert_allclose(by_chosen, [-wrong], rtol=1e-6)
    np.testing.assert_allclose(by_rejected, [wrong], rtol=1e-6)


@pytest.mark.bits
def test_a_reward_is_read_at_the_last_token_in_any_batch():
    model, policy = scalar_model(), POLICY
    rng = np.random.default_rng(3)
    sizes = (1, 5, 32, 33, 40, 2)
    sequences = [rng.integers(7, VOCAB, size).astype(np.int32) for size in sizes]
    parameters, scorer = named_parameters(model), SequenceScorer(model, policy)
    together = scorer.score(parameters, sequences)
    alone = [scorer.score(parameters, [ids])[0] for ids in sequences]
    np.testing.assert_array_equal(together, alone)
    token_ids, inside = padded(sequences, len(sizes), 64)
    positions = np.where(inside, np.arange(64), 0).astype(np.int32)
    every = eqx.filter_jit(model)(*map(jnp.asarray, (token_ids, inside.astype(int), positions)))
    for row, size in enumerate(sizes):
        np.testing.assert_allclose(together[row], every[row, size - 1], rtol=1e-5, atol=1e-6)
    assert len({round(float(reward), 4) for reward in together}) == len(sizes)


def test_no_sequences_have_no_rewards():
    model = scalar_model()
    assert SequenceScorer(model, POLICY).score(named_parameters(model), []).shape == (0,)


@cache
def compiled(layout: Layout) -> tuple[Any, Any, Any]:
    """One optimizer, passes and update for all tests: what differs is the shape of the arrays."""
    model = scalar_model()
    adamw = policy_adamw(TrainingConfig(learning_rate=1e-2, warmup_steps=0))
    optimizer = make_optimizer(adamw, matrix_mask(model))
    schedule = learning_rate_schedule(adamw)
    like = layout.state_like(state_like(model, optimizer), model, optimizer)
    update = make_update(optimizer, schedule, like=like)
    return optimizer, make_reward_passes(model, "float32", layout), update


def played(
    batch: PairBatch, microbatch: int = 4, layout: Layout = SINGLE_DEVICE, steps: int = 1
) -> tuple[TrainState, list[dict[str, float]]]:
    """Some steps on the same pairs, in arrays with room for 8; the state and their metrics."""
    model = scalar_model()
    optimizer, passes, update = compiled(layout)
    state = fresh_state(named_parameters(model), optimizer, 0)
    state = layout.place_state(state, model, optimizer)
    arrays, used = pair_arrays(batch, microbatch, 8)
    rows = []
    for _ in range(steps):
        with layout.active():
            placed = layout.place_rows(arrays)
            gradients, metrics, _ = passes(*trainable_of(state, {}), None, placed, used)
            state, updated = update(state, gradients, metrics["loss"])
        rows.append({name: float(value) for name, value in {**metrics, **updated}.items()})
    return state, rows


def rewards(model: ScalarModel, batch: PairBatch) -> np.ndarray:
    """Of every row, in float64."""
    rows = [ids[inside] for ids, inside in zip(batch.token_ids, batch.inside, strict=True)]
    return SequenceScorer(model, POLICY).score(named_parameters(model), rows)


@pytest.mark.slow
def test_a_step_measures_its_pairs_as_the_formulas_do():
    batch = random_pairs(5)
    _, (metrics,) = played(batch)
    found = rewards(scalar_model(), batch)
    expected = pair_totals(found[0::2], found[1::2], batch.margins)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert metrics["updates/skipped"] == 0.0


@pytest.mark.slow
def test_cutting_a_step_into_microbatches_changes_nothing():
    batch = random_pairs(5)
    whole, (expected,) = played(batch, 8)
    cut, (found,) = played(batch)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, array in whole.parameters.items():
        np.testing.assert_allclose(cut.parameters[name], array, atol=2e-5, err_msg=name)


def test_steps_bring_pairs_into_order_and_a_head_of_nothing_says_nothing():
    _, rows = played(random_pairs(8), steps=25)
    assert rows[-1]["loss"] < 0.1 < rows[0]["loss"]
    assert rows[-1]["accuracy"] == 1.0
    assert rows[-1]["margin"] > rows[0]["margin"]
    assert not rewards(scalar_model(std=0.0), random_pairs(3)).any()


def test_an_update_that_is_not_finite_is_refused():
    batch = random_pairs(2)
    bad = replace(batch, margins=np.array([np.inf, 0], np.float32))
    before = digest_of(named_parameters(scalar_model()))
    state, (metrics,) = played(bad)
    assert metrics["updates/skipped"] == 1.0
    assert digest_of(state.parameters) == before
    assert (int(state.step), int(state.refused)) == (0, 1)


@pytest.mark.parametrize(("data", "rows"), [(1, 6), (2, 6), (3, 6), (4, 8), (5, 10)])
def test_rows_of_pairs_are_filled_up_to_what_devices_share_out_evenly(data, rows):
    layout = Layout(Mesh(np.resize(jax.devices(), (data, 1)), ("data", "fsdp")))
    arrays, used = pair_arrays(random_pairs(5), 3, 5, layout)
    assert (used, arrays.token_ids.shape[:2]) == (-(-10 // rows), (-(-10 // rows), rows))
    assert np.count_nonzero(arrays.segment_ids[..., 0]) == 10


@pytest.mark.slow
@pytest.mark.skipif("len(jax.devices()) < 2", reason="needs two devices")
@pytest.mark.parametrize("axis", ["data", "fsdp", "context"])
def test_a_mesh_gives_the_same_parameters(axis):
    batch = random_pairs(5)
    single, (expected,) = played(batch)
    spread, (found,) = played(batch, layout=layout_of(MeshConfig(**{axis: 2})))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, array in single.parameters.items():
        np.testing.assert_allclose(spread.parameters[name], array, atol=2e-5, err_msg=name)
