"""Reference policy: adaptive coefficients, moving references, KL as part of the reward."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from training.batches import commit_round, random_batch
from training.trained_runs import begin

from marin_rl.config import Config, DistillationConfig, ObjectiveConfig
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import checkpoint_slot, committed
from marin_rl.storage.upkeep.forks import reference_checkpoints
from marin_rl.training.loop import Trainer
from marin_rl.training.precompute import RowPrecompute
from marin_rl.training.reference_policy import (
    KlPenalty,
    adapt_kl_coefficient,
    kl_coefficient,
    reference_round,
)
from marin_rl.training.state import restore_parameters
from marin_rl.training.step_types import step_arrays

LENGTH = 32
SETTINGS = (
    "policy.model.layers=1",
    "training.microbatch_sequences=4",
    "training.learning_rate=1e-2",
)


@pytest.mark.parametrize(
    ("kl", "expected"), [(6.0, 0.1), (6.6, 0.101), (60.0, 0.102), (0.0, 0.098), (5.4, 0.099)]
)
def test_the_coefficient_follows_a_bounded_error(kl, expected):
    assert adapt_kl_coefficient(0.1, kl, 6.0, 0.1) == pytest.approx(expected)


def test_a_refreshed_reference_is_the_last_of_every_n_rounds():
    objective = ObjectiveConfig(reference="refreshed", reference_every_rounds=3)
    assert [reference_round(objective, round) for round in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert reference_round(ObjectiveConfig(), 7) == 0


@pytest.mark.parametrize("reference", ["first", "refreshed", "average"])
def test_storage_keeps_the_reference_checkpoint(reference):
    objective = ObjectiveConfig(kl_coefficient=0.1, reference=reference, reference_every_rounds=3)
    config = Config(objective=objective)
    expected = [
        set() if reference == "average" else {reference_round(objective, r)} for r in range(8)
    ]
    assert [reference_checkpoints(config, round) for round in range(8)] == expected
    if reference != "average":  # which no one keeps for free
        assert (
            reference_checkpoints(Config(objective=ObjectiveConfig(reference=reference)), 5)
            == set()
        )
    taught = Config(objective={"ratio_level": "token"}, distillation=DistillationConfig())
    assert reference_checkpoints(taught, 5) == {0}


def test_kl_in_the_reward_is_the_advantage_of_the_penalised_reward():
    batch = random_batch(4, LENGTH)
    names = tuple((f"r{row}",) for row in range(4))
    batch = dataclasses.replace(batch, rollout_ids=names)
    groups = {"r0": "a", "r1": "a", "r2": "b", "r3": "b"}
    arrays, _ = step_arrays(batch, 2, 2)
    referred = (arrays.policy_logprobs - 0.25 * arrays.mask).astype(np.float32)
    referred[0, 1] -= 0.5 * arrays.mask[0, 1]  # r1 has moved further
    objective = ObjectiveConfig(advantage="rloo", kl_estimator="k1")
    penalty = KlPenalty(objective, [batch], [arrays], [referred], 2.0)
    (added,) = penalty.of_completions(groups)
    tokens = arrays.mask.reshape(4, -1).sum(axis=1)
    kl = tokens * np.array([0.25, 0.75, 0.25, 0.25])
    # leave-one-out in groups of two: the difference to the other
    expected = -2.0 * (kl - kl[[1, 0, 3, 2]])
    found = added.reshape(4, -1)
    assert_allclose(found, expected[:, None] * arrays.mask.reshape(4, -1), rtol=1e-4, atol=1e-5)
    assert penalty.metrics["objective/kl"] == pytest.approx(kl.mean(), rel=1e-5)
    assert penalty.metrics["kl"] == pytest.approx(kl.sum() / tokens.sum(), rel=1e-5)


def test_kl_by_token_is_what_is_to_come_of_it_and_whitened():
    batch = random_batch(3, LENGTH)
    batch = dataclasses.replace(batch, rollout_ids=tuple((f"r{row}",) for row in range(3)))
    rows = step_arrays(batch, 2, 2)
    arrays = rows.arrays
    rng = np.random.default_rng(3)
    apart = rng.normal(0, 0.5, arrays.mask.shape).astype(np.float32) * arrays.mask
    objective = ObjectiveConfig(
        advantage="reinforce",
        advantage_scale="token_whitening",
        ratio_level="token",
        kl_coefficient=0.3,
        kl_placement="reward",
        kl_estimator="k1",
    )
    precompute = RowPrecompute(objective, [batch], [rows])
    precompute.penalise(lambda rows: rows.arrays.policy_logprobs - apart, 0.3, {})
    (extra,) = precompute.extras
    found = extra(rows).arrays.advantages

    mask = arrays.mask.reshape(4, -1)
    raw = arrays.advantages.reshape(4, -1).astype(np.float64)
    expected = np.zeros(mask.shape)
    for row, at in enumerate(mask):
        kl = (apart.reshape(4, -1)[row] * at).astype(np.float64)
        for token in np.flatnonzero(at):
            expected[row, token] = raw[row, token] - 0.3 * kl[token:].sum()
    tokens = expected[mask]
    expected = (expected - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) * mask
    assert_allclose(found.reshape(4, -1), expected, rtol=1e-4, atol=1e-5)
    kl_sum = (apart * arrays.mask).sum()
    assert precompute.metrics["objective/kl"] == pytest.approx(kl_sum / 3, rel=1e-4)
    assert precompute.metrics["kl"] == pytest.approx(kl_sum / mask.sum(), rel=1e-4)


def play(run, trainer, checkpoint, rounds):
    for round in rounds:
        batches = commit_round(run, round, [random_batch(5, LENGTH, seed=round)], LENGTH)
        checkpoint = trainer.train_round(round, batches, checkpoint)
    return checkpoint


@pytest.mark.slow
def test_an_adaptive_coefficient_is_read_off_the_checkpoint_before(debug, tokenizer):
    config = debug(
        *SETTINGS, "objective.kl_coefficient=0.5", "objective.kl_target=1e-3", "objective.kl_rate=1"
    )
    run, trainer, checkpoint = begin(config, tokenizer)
    used = []
    for round in range(3):
        used.append(kl_coefficient(run, checkpoint))
        checkpoint = play(run, trainer, checkpoint, [round])
        totals = manifest_of(run.store, checkpoint).totals
        assert totals["objective/kl_coefficient"] == pytest.approx(used[-1])
        assert used[-1] != 0
    # round 0 is on the reference itself, so its KL is 0 and the coefficient falls by a fifth
    assert used[:2] == pytest.approx([0.5, 0.4])
    assert used[2] != pytest.approx(used[1])


@pytest.mark.slow
def test_a_round_without_batches_keeps_the_adaptive_coefficient(debug, tokenizer):
    config = debug(
        *SETTINGS, "objective.kl_coefficient=0.5", "objective.kl_target=1e-3", "objective.kl_rate=1"
    )
    run, trainer, first = begin(config, tokenizer)
    for round in range(2):  # before anything was trained on, it is the configured one
        first = trainer.train_round(round, commit_round(run, round, [], LENGTH), first)
    assert kl_coefficient(run, first) == 0.5
    trained = play(run, trainer, first, [2])
    steered = kl_coefficient(run, trained)
    assert steered == pytest.approx(0.4)
    empty = trainer.train_round(3, commit_round(run, 3, [], LENGTH), trained)
    assert kl_coefficient(run, empty) == steered
    play(run, trainer, empty, [4])
    found = committed(run, checkpoint_slot(5))
    assert found is not None
    totals = manifest_of(run.store, found).totals
    assert totals["objective/kl_coefficient"] == pytest.approx(steered)


@pytest.mark.slow
def test_an_averaged_reference_lives_in_the_checkpoint_and_resumes_to_the_bit(debug, tokenizer):
    config = debug(
        *SETTINGS,
        "objective.kl_coefficient=0.1",
        "objective.reference=average",
        "objective.reference_decay=0.5",
    )
    run, trainer, first = begin(config, tokenizer)
    names, program = trainer._names, trainer._program
    start = restore_parameters(run, first, program.like, names)
    one = play(run, trainer, first, [0])
    moved = restore_parameters(run, one, program.like, names)
    state = trainer.state
    assert state is not None
    assert state.average is not None
    for name, average in state.average.items():
        assert_allclose(average, 0.5 * start[name] + 0.5 * moved[name], atol=1e-6)
    two = play(run, trainer, one, [1])
    again = Trainer(run, tokenizer)
    again.load(one)
    kept = again.state
    assert kept is not None
    assert kept.average is not None
    for name, average in state.average.items():
        assert_array_equal(kept.average[name], average)
    assert committed(run, checkpoint_slot(2)) == two
