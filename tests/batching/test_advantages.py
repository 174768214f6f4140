"""Advantages: numbers by hand, TRL's own numbers, and the laws that every baseline obeys."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from marin_rl.batching.advantages import (
    ESTIMATORS,
    dr_grpo,
    group_statistics,
    grpo,
    rewards_array,
    rloo,
    round_advantages,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trl-advantages.json").read_text())

REWARDS = st.one_of(
    st.none(), st.integers(-3, 3).map(float), st.floats(-1e3, 1e3, allow_subnormal=False)
)


def test_rloo_by_hand() -> None:
    # others' means: 3, 2, 1
    assert_array_equal(rloo(np.array([0.0, 2.0, 4.0])), [-3.0, 0.0, 3.0])


def test_grpo_by_hand() -> None:
    # mean 1, std (ddof 1) 1
    assert_allclose(grpo(np.array([0.0, 1.0, 2.0]), epsilon=0.0), [-1.0, 0.0, 1.0], rtol=1e-15)


def test_dr_grpo_by_hand() -> None:
    assert_array_equal(dr_grpo(np.array([0.0, 1.0, 5.0])), [-2.0, -1.0, 3.0])


def test_missing_rewards_stay_out_of_the_baseline() -> None:
    assert_array_equal(rloo(np.array([np.nan, 1.0, 3.0])), [0.0, -2.0, 2.0])
    assert_array_equal(rloo(rewards_array([None, 1.0, float("inf"), 3.0])), [0.0, -2.0, 0.0, 2.0])


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [np.nan], [5.0], [5.0, np.nan], [0.1] * 7])
def test_no_signal_is_exactly_zero(estimator, rewards: list[float]) -> None:
    assert_array_equal(estimator(np.array(rewards)), np.zeros(len(rewards)))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_agrees_with_trl(case: dict) -> None:
    components = np.array([rewards_array(_numbers(row)) for row in case["rewards"]])
    present = np.isfinite(components).any(axis=1)
    reward = np.where(present, np.nansum(components * case["weights"], axis=1), np.nan)
    if "beta" in case:
        reward = reward - case["beta"] * np.array(case["kl"])
    if "clip" in case:
        reward = np.clip(reward, *case["clip"])
    groups = np.arange(len(reward)) // case["group_size"]
    ours = np.concatenate(
        [ESTIMATORS[case["estimator"]](reward[groups == g]) for g in range(groups.max() + 1)]
    )
    assert_allclose(ours, case["advantages"], rtol=1e-4, atol=1e-4)
    whole = round_advantages(reward, groups, int(groups.max()) + 1, case["estimator"])
    assert_allclose(whole, case["advantages"], rtol=1e-4, atol=1e-4)


@given(st.lists(REWARDS, max_size=9))
def test_rloo_is_the_leave_one_out_difference(rewards: list[float | None]) -> None:
    reward = rewards_array(rewards)
    valid = np.flatnonzero(np.isfinite(reward))
    expected = np.zeros(len(reward))
    if len(valid) > 1:
        for i in valid:
            expected[i] = reward[i] - np.mean([reward[j] for j in valid if j != i])
    assert_allclose(rloo(reward), expected, rtol=1e-9, atol=1e-9)


@given(st.lists(REWARDS, min_size=1, max_size=9), st.sampled_from(sorted(ESTIMATORS)))
def test_advantages_sum_to_zero_and_ignore_a_constant(
    rewards: list[float | None], name: str
) -> None:
    reward = rewards_array(rewards)
    advantage = ESTIMATORS[name](reward)
    assert_allclose(advantage.sum(), 0.0, atol=1e-8)
    # A power of two keeps the shift exact for the small integers and close for the rest.
    assert_allclose(ESTIMATORS[name](reward + 4.0), advantage, rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=6),
    st.sampled_from(sorted(ESTIMATORS)),
    st.randoms(use_true_random=False),
)
def test_a_round_equals_its_groups(groups: list[list[float | None]], name: str, random) -> None:
    rewards = np.concatenate([rewards_array(group) for group in groups])
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    expected = np.concatenate([ESTIMATORS[name](rewards_array(group)) for group in groups])
    assert_allclose(
        round_advantages(rewards, numbers, len(groups), name), expected, rtol=1e-9, atol=1e-9
    )
    # Order carries nothing: a shuffled round gives the same numbers to the same rollouts.
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = round_advantages(rewards[order], numbers[order], len(groups), name)
    assert_allclose(shuffled, expected[order], rtol=1e-9, atol=1e-9)


def test_statistics_by_hand() -> None:
    found = group_statistics(np.array([1.0, np.nan, 4.0, np.nan]), np.array([0, 0, 0, 1]), 2)
    assert_array_equal(found.count, [2, 0])
    assert_array_equal(found.mean, [2.5, 0.0])
    assert_array_equal(found.spread, [3.0, 0.0])
    assert_allclose(found.std, [np.sqrt(4.5), 0.0])


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="rloo, grpo, dr_grpo, found 'gae'"):
        round_advantages(np.zeros(2), np.zeros(2, np.int64), 1, "gae")


def _numbers(row: list[float | str]) -> list[float]:
    return [float(value) for value in row]
