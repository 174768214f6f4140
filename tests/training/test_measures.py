"""Metrics of an objective by token: against TRL's numbers, and by hand."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.config import ModelConfig, ObjectiveConfig, PolicyConfig
from marin_rl.training.model import model_template
from marin_rl.training.round_stats import peak_flops, training_flops
from marin_rl.training.segments import trained_sequences
from marin_rl.training.step_metrics import (
    beyond_bounds,
    clip_fractions,
    clipped_tokens,
    sequence_entropy,
)
from marin_rl.training.step_types import StepArrays

# One row, two packed sequences of two trained tokens each, after a prompt token.
MASK = np.array([[0, 1, 1, 0, 1, 1]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2]], np.int32)
OLD = np.zeros((1, 6), np.float32)


def logs(*ratios):
    return jnp.log(jnp.array([ratios], jnp.float32))


def rows_of(advantages, mask, segments):
    blank = np.zeros(mask.shape, np.float32)
    return StepArrays(
        token_ids=blank.astype(np.int32),
        mask=mask > 0,
        segment_ids=segments,
        positions=blank.astype(np.int32),
        policy_logprobs=blank,
        advantages=advantages,
    )


def of(advantages, weights=(1.0,) * 6, **choice):
    objective = ObjectiveConfig(**choice)
    logprobs = np.log(np.array([[1, 1.5, 0.5, 1, 1.1, 1.5]], np.float32))
    corrections, advantages = np.array([weights], np.float32), np.array([advantages], np.float32)
    rows = rows_of(advantages, MASK, SEGMENTS)
    found = jax.jit(partial(clipped_tokens, objective))(logprobs, OLD, corrections, rows)
    return np.asarray(found)[0]


@pytest.mark.slow
def test_a_token_is_clipped_where_its_gradient_is_taken_away():
    up, down = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0.0, -1.0, -1.0, 0.0, -1.0, -1.0]
    assert of(up, ratio_level="token").tolist() == [False, True, False, False, False, True]
    assert of(down, ratio_level="token").tolist() == [False, False, True, False, False, False]
    # Of the whole completions: 0.75 is below the range, 1.65 above it.
    assert of(up, ratio_level="sequence").tolist() == [False] * 4 + [True, True]
    assert of(down, ratio_level="sequence").tolist() == [False, True, True] + [False] * 3


def test_nothing_is_clipped_without_an_advantage_or_a_clip():
    assert not of([0.0] * 6, ratio_level="token").any()
    for surrogate in ("reinforce", "sapo", "cispo"):
        for sign in (1.0, -1.0):
            advantages = [0.0, sign, sign, 0.0, sign, sign]
            assert not of(advantages, surrogate=surrogate, ratio_level="token").any()


def test_a_correction_weight_of_0_and_a_dual_clip_take_the_gradient_too():
    up, down = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0.0, -1.0, -1.0, 0.0, -1.0, -1.0]
    weights = (1.0, 1.0, 0.0, 1.0, 0.5, 1.0)
    found = of(up, weights, surrogate="reinforce", ratio_level="token")
    assert found.tolist() == [False, False, True, False, False, False]
    found = of(down, ratio_level="token", clip_dual=1.2)
    assert found.tolist() == [False, True, True, False, False, True]


@pytest.mark.slow
def test_tokens_beyond_the_bounds_of_each_surrogate():
    """Ratios 1.5 and 0.5, then probabilities 0.4 against 0.3 and 0.1 against 0.3."""
    old = jnp.log(jnp.array([[0.2, 0.2, 0.3, 0.3]], jnp.float32))
    new = jnp.log(jnp.array([[0.3, 0.1, 0.4, 0.1]], jnp.float32))
    nothing, ratios = [False] * 4, jnp.exp(new - old)
    expected: dict[Any, Any] = {
        ("ppo_clip", "token"): ([False, True, False, True], [True, False, False, False]),
        ("gspo", "sequence_mean"): ([False, True, False, True], [True, False, False, False]),
        ("cispo", "token"): (nothing, [True, False, False, False]),
        ("reinforce", "token"): (nothing, nothing),
        ("sapo", "token"): (nothing, nothing),
    }
    for (surrogate, level), (below, above) in expected.items():
        objective = ObjectiveConfig(
            surrogate=surrogate, ratio_level=level, clip_low=0.4, clip_high=0.4
        )
        found = beyond_bounds(objective, new, old, ratios)
        assert (found.below[0].tolist(), found.above[0].tolist()) == (below, above), surrogate
    # dppo bounds how far a probability moves: by 0.1, -0.1, 0.1 and -0.2.
    objective = ObjectiveConfig(
        surrogate="dppo", ratio_level="token", clip_low=0.15, clip_high=0.05
    )
    found = beyond_bounds(objective, new, old, ratios)
    assert found.below[0].tolist() == [False, False, False, True]
    assert found.above[0].tolist() == [True, False, True, False]
    mask, segments = jnp.ones((1, 4)), jnp.ones((1, 4), jnp.int32)
    for sign, beyond in ((1.0, found.above), (-1.0, found.below)):
        advantages = jnp.full((1, 4), sign)
        taken = clipped_tokens(objective, new, old, mask, rows_of(advantages, mask, segments))
        assert taken[0].tolist() == beyond[0].tolist()  # and it gets no gradient there
        told = clip_fractions(objective, found, advantages, mask, segments)
        assert float(told["clip_ratio/region"]) == pytest.approx(float(beyond.mean()))


def test_entropy_of_sequences_is_minus_their_log_probability():
    logprobs = jnp.array([[9.0, -1.0, -2.0, 9.0, -3.0, -4.0]])
    mask, segments = jnp.asarray(MASK), jnp.asarray(SEGMENTS)
    found = sequence_entropy(logprobs, mask, trained_sequences(mask, segments))
    assert float(found) == pytest.approx((3 + 7) / 2)


def test_flops_by_hand():
    config = ModelConfig(
        hidden_size=8, layers=2, heads=2, kv_heads=1, intermediate_size=12, tie_embeddings=False
    )
    model = model_template(PolicyConfig(model=config, context_length=64), 10)
    attention = 8 * 4 * (2 + 2 * 1) + 8 * 8  # q, k and v of width 4 each; o
    weights = 2 * (attention + 3 * 8 * 12 + 2 * 8) + 8 + 10 * 8  # two norms a layer, one at the end
    expected = 6 * weights * (3 + 5) + 6 * 2 * 2 * 4 * (9 + 25)
    assert training_flops(model, np.array([3, 5]), np.zeros(2, int)) == expected
    behind = 6 * weights * (3 + 5) + 6 * 2 * 2 * 4 * (9 + (3 + 5) ** 2 - 3**2)
    assert training_flops(model, np.array([3, 5]), np.array([0, 3])) == behind
    tied = model_template(
        PolicyConfig(model=config.model_copy(update={"tie_embeddings": True}), context_length=64),
        10,
    )
    assert training_flops(tied, np.array([3, 5]), np.zeros(2, int)) == expected


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("TPU v5 lite", 197e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA L400", None),
        ("cpu", None),
    ],
)
def test_a_peak_is_known_or_absent(kind, peak):
    assert peak_flops(kind) == peak
