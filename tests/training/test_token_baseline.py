"""The optimal token baseline: by loops and by hand, and its norms against whole softmaxes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.policy_runs import play_two_rounds
from training.batches import LENGTH, VOCAB, random_batch, tiny_policy

from marin_rl.config import MeshConfig, ObjectiveConfig
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, committed
from marin_rl.storage.tables.scores import iter_scores
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.compiled_step import CompiledStep, to_fixed_shape
from marin_rl.training.logprobs import final_states, packing_of
from marin_rl.training.loop import Trainer
from marin_rl.training.model import build_model, named_parameters
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.precompute import RowPrecompute
from marin_rl.training.reprocess import reprocess_round
from marin_rl.training.state import Identity, first_parameters, identity_of
from marin_rl.training.step import make_score_norms
from marin_rl.training.step_types import StepSettings, TrainableParams, as_array, step_arrays
from marin_rl.training.token_advantages import token_advantages

OBJECTIVE = ObjectiveConfig(advantage="optimal_token_baseline", ratio_level="token")


def by_loops(
    returns: list[list[float]], weights: list[list[float]], groups: list[int]
) -> list[list[float]]:
    """One token after the other, in Python's floats."""
    result = []
    for i, own in enumerate(returns):
        row = []
        for t in range(len(own)):
            total = weighed = plain = 0.0
            members = 0
            for j, other in enumerate(returns):
                if groups[j] == groups[i] and t < len(other):
                    weight = 0.0
                    for s in range(t + 1):
                        weight += weights[j][s]
                    total += weight
                    weighed += weight * other[t]
                    plain += other[t]
                    members += 1
            row.append(own[t] - (weighed / total if total > 0 else plain / members))
        result.append(row)
    return result


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row])


def test_advantages_by_hand() -> None:
    """Weights 1, 1 + 2 against 3: baselines (1 * 1 + 3 * 0) / 4, then 1 alone."""
    found = token_advantages(
        np.array([1.0, 1.0, 0.0]), np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1]), np.zeros(2, int)
    )
    assert_array_equal(found, [0.75, 0.0, -0.25])


def test_advantages_by_loops() -> None:
    rng = np.random.default_rng(21)
    lengths = [5, 1, 8, 3, 7, 7, 2, 0]
    groups = [0, 1, 0, 1, 0, 2, 1, 0]
    returns = [rng.normal(0, 1, n).tolist() for n in lengths]
    weights = [rng.uniform(0, 2, n).tolist() for n in lengths]
    weights[1], weights[3], weights[6] = [0.0], [0.0, 0.5, 0.0], [0.0, 0.0]  # a place of no weight
    expected = by_loops(returns, weights, groups)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    found = token_advantages(flat(returns), flat(weights), sequences, np.array(groups))
    assert_allclose(found, flat(expected), rtol=1e-12, atol=1e-12)


def test_equal_returns_and_lone_tokens_are_worth_exactly_nothing() -> None:
    rng = np.random.default_rng(22)
    lengths = [4, 6, 9]
    sequences = np.repeat(np.arange(3), lengths)
    weights = rng.uniform(0, 2, sum(lengths))
    equal = token_advantages(np.full(19, 0.1), weights, sequences, np.zeros(3, int))
    assert_array_equal(equal, np.zeros(19))
    found = token_advantages(rng.normal(0, 1, 19), weights, sequences, np.zeros(3, int))
    assert_array_equal(found[-3:], np.zeros(3))
    assert (found[:-3] != 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_norms_are_those_of_the_gradient_by_the_logits(temperature: float) -> None:
    model, batch = build_model(tiny_policy(layers=1), VOCAB, 0), random_batch(5)
    settings = StepSettings(objective=OBJECTIVE, temperature=temperature)
    arrays, used = step_arrays(batch, 2, 3)
    policy = TrainableParams(named_parameters(model))
    norms = make_score_norms(model, settings)(policy, {}, arrays, as_array(used))
    found = np.asarray(norms).reshape(6, LENGTH)
    rows = (jnp.asarray(getattr(batch, n)) for n in ("token_ids", "segment_ids", "positions"))
    states = np.asarray(jax.jit(final_states)(model, *rows), np.float64)
    logits = states @ np.asarray(model.head, np.float64).T / temperature
    expected = np.zeros((6, LENGTH))
    for row, position in np.argwhere(batch.loss_mask):
        exponentials = np.exp(logits[row, position - 1] - logits[row, position - 1].max())
        gradient = -exponentials / exponentials.sum()
        gradient[batch.token_ids[row, position]] += 1.0
        expected[row, position] = gradient @ gradient
    assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert_array_equal(found[expected == 0], 0.0)
    assert expected.max() > 0.5


@pytest.mark.slow
def test_shared_prompts_change_no_norm() -> None:
    """Two completions of one prompt, in rows of their own and in one row."""
    model = build_model(tiny_policy(layers=1), VOCAB, 0)
    prompt, completions = [5, 6, 7, 8], ([9, 10, 11], [12, 13])
    alone = np.zeros((2, LENGTH), np.int32), np.zeros((2, LENGTH), np.int32)
    for row, tokens in enumerate(completions):
        alone[0][row, : 4 + len(tokens)], alone[1][row, : 4 + len(tokens)] = [*prompt, *tokens], 1
    positions = np.arange(LENGTH, dtype=np.int32) * alone[1]
    ids = np.zeros((1, LENGTH), np.int32)
    ids[0, :9] = [*prompt, *completions[0], *completions[1]]
    segments, places = np.zeros_like(ids), np.zeros_like(ids)
    segments[0, :9], places[0, :9] = [3] * 4 + [1] * 3 + [2] * 2, [*range(7), 4, 5]

    def norms(token_ids, segment_ids, positions, packing):
        mask = (positions >= 4).astype(np.int32)
        zero = np.zeros(token_ids.shape, np.float32)
        batch = dataclasses.replace(
            random_batch(1), token_ids=token_ids, segment_ids=segment_ids, positions=positions,
            loss_mask=mask, policy_logprobs=zero, advantages=zero, returns=zero,
        )  # fmt: skip
        arrays, used = step_arrays(batch, len(token_ids), 1)
        settings = StepSettings(objective=OBJECTIVE, packing=packing_of(packing))
        policy = TrainableParams(named_parameters(model))
        found = make_score_norms(model, settings)(policy, {}, arrays, as_array(used))
        return np.asarray(found)[0][mask != 0]

    assert_allclose(
        norms(ids, segments, places, "shared_prompt"),
        norms(*alone, positions, "none"),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("correction", ["none", "truncated"])
def test_a_round_is_compared_within_its_groups_across_steps(correction: str) -> None:
    """Two steps, three groups; with a correction, weights are times its square."""
    rng = np.random.default_rng(23)
    objective = OBJECTIVE.model_copy(
        update={"importance_correction": correction, "correction_high": 1.2}
    )
    batches, steps = [], []
    for step, rows in enumerate((3, 4)):
        batch = random_batch(rows, seed=step)
        returns = (batch.loss_mask * rng.normal(0, 1, batch.loss_mask.shape)).astype(np.float32)
        names = tuple((f"{step}/{row}",) for row in range(rows))
        batches.append(dataclasses.replace(batch, returns=returns, rollout_ids=names))
        steps.append(step_arrays(batches[-1], 2, 3))
    groups = dict(zip([n for b in batches for (n,) in b.rollout_ids], "abacbcc", strict=True))
    apart = rng.normal(0, 0.4, (3, 2, LENGTH)).astype(np.float32)
    norm = rng.uniform(0, 2, (3, 2, LENGTH)).astype(np.float32)
    precompute = RowPrecompute(objective, batches, steps)
    if correction != "none":
        precompute.correct(lambda rows: rows.arrays.policy_logprobs + apart)
    precompute.weigh(lambda rows: norm * rows.arrays.mask, groups)
    returns, weights = [], []
    for batch in batches:
        for row, mask in enumerate(batch.loss_mask != 0):
            ratio = np.exp(apart.reshape(6, LENGTH)[row, mask].astype(np.float64))
            squared = np.minimum(ratio, 1.2) ** 2 if correction != "none" else 1.0
            returns.append(batch.returns[row, mask].tolist())
            weights.append((norm.reshape(6, LENGTH)[row, mask] * squared).tolist())
    expected = by_loops(returns, weights, [ord(groups[name]) for name in groups])
    computed = [
        extra.advantages.reshape(6, LENGTH)[row, mask]
        for extra, batch in zip(precompute.extras, batches, strict=True)
        for row, mask in enumerate(batch.loss_mask != 0)
    ]
    assert_allclose(np.concatenate(computed), flat(expected), rtol=1e-5, atol=1e-6)
    for extra, rows in zip(precompute.extras, steps, strict=True):
        assert extra.norms is not None
        assert_array_equal(extra.advantages[~rows.arrays.mask], 0.0)
        expected_advantages = rows.arrays.advantages + extra.advantages
        assert_array_equal(extra(rows).arrays.advantages, expected_advantages)


SETTINGS = (
    "policy.model.layers=1", "training.microbatch_sequences=4", "training.epochs=2",
    "objective.advantage=optimal_token_baseline", "objective.ratio_level=token",
    "objective.importance_correction=truncated", "batching.sequences_per_step=8",
    "policy.model.initializer_range=0.3", "rollouts.group_size=8",
    "objective.overlong=soft_penalty", "objective.overlong_buffer=1.0",
)  # fmt: skip


@pytest.mark.bits
@pytest.mark.slow
def test_a_round_that_is_done_again_ends_in_the_same_bits(debug, tokenizer) -> None:
    """Two epochs of four steps: norms are those before the first of eight updates."""
    run = Run.create_or_open(debug(*SETTINGS))
    play_two_rounds(run)
    checkpoint, batches, trained = (
        committed(run, slot) for slot in (checkpoint_slot(1), batches_slot(1), checkpoint_slot(2))
    )
    assert None not in (checkpoint, batches, trained)
    state, _ = Trainer(run, tokenizer).replay_round(1, batches, checkpoint)
    assert Identity.of(state, TokenizerIdentity.of(tokenizer)) == identity_of(run, trained)
    norms = [
        scores.floats["squared_score_norms"]
        for scores in iter_scores(run, manifest_of(run.store, trained))
    ]
    assert len(norms) == 4
    assert all(norm is not None for norm in norms)
    other = ("objective.advantage=rloo", "objective.aggregation=token_mean")
    compared = reprocess_round(run, 1, other)
    assert compared.advantages is None
    assert compared.gradient is not None
    assert compared.gradient.norm_before > 0


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_on_a_mesh_norms_are_those_of_one_device(debug, tokenizer, axis) -> None:
    config = debug(*SETTINGS)
    batch = random_batch(6)
    found = []
    for mesh in (MeshConfig(), MeshConfig(**{axis: 2})):
        chosen = config.model_copy(update={"mesh": mesh})
        settings = StepSettings(objective=config.objective)
        program = CompiledStep(chosen, tokenizer, policy_adamw(config.training), settings)
        parameters = first_parameters(chosen, tokenizer)
        placed = program.layout.place_parameters(parameters, program.template)
        rows = to_fixed_shape(batch, 4, 8)
        found.append(program.rows(program.score_norms, TrainableParams(placed), {}, rows))
    assert found[0].max() > 0
    assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
