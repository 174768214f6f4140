"""pass@k, mean@k and majority@k by hand and against every subset; Wilson's interval."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rollouts.estimates import estimate, majority_at_k, mean_at_k, pass_at_k

RIGHT = np.array([True, False, False, True, False])


def test_pass_at_k_by_hand():
    # Of the 10 pairs of 5 samples with 2 right ones, 3 have none: those of the 3 wrong ones.
    assert pass_at_k(RIGHT, 2) == pytest.approx(1 - 3 / 10)
    assert pass_at_k(RIGHT, 1) == pytest.approx(2 / 5)
    assert pass_at_k(RIGHT, 4) == 1.0
    assert pass_at_k(np.zeros(5, np.bool_), 5) == 0.0


@given(right=st.lists(st.booleans(), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(right, data):
    k = data.draw(st.integers(1, len(right)))
    subsets = list(combinations(right, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(np.array(right, np.bool_), k) == pytest.approx(expected)


def test_pass_at_k_does_not_overflow():
    right = np.arange(4096) < 3
    assert pass_at_k(right, 1024) == pytest.approx(
        1 - math.comb(4093, 1024) / math.comb(4096, 1024)
    )


def test_mean_at_k_takes_whole_runs_of_k():
    assert mean_at_k(RIGHT, 1) == pytest.approx(0.4)
    assert mean_at_k(RIGHT, 2) == pytest.approx(0.5)  # the fifth sample is left over
    assert mean_at_k(RIGHT, 3) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("answers", "right", "k", "expected"),
    [
        (["a", "b", "a"], [True, False, True], 3, 1.0),
        (["b", "a", "b"], [False, True, False], 3, 0.0),
        (["b", "a"], [False, True], 2, 0.0),  # a tie: b came first
        (["a", "b"], [True, False], 2, 1.0),
        (["a", "b", "b", "a"], [True, False, False, True], 2, 0.5),  # two runs, both ties
        ([None, None, "a"], [False, False, True], 3, 1.0),  # who gives no answer has no vote
        ([None, None], [False, False], 2, 0.0),
    ],
)
def test_majority_by_hand(answers, right, k, expected):
    assert majority_at_k(np.array(right), answers, k) == expected


@pytest.mark.parametrize("k", [0, 6])
def test_a_k_beyond_the_samples_is_refused(k):
    with pytest.raises(ValueError, match=f"from 1 to the 5 samples there are, found {k}"):
        pass_at_k(RIGHT, k)


def test_the_interval_is_wilsons():
    # Wilson's interval for 4 of 10, as tables give it: 0.1682 to 0.6873.
    found = estimate(np.array([1.0] * 4 + [0.0] * 6))
    assert found.value == pytest.approx(0.4)
    assert (found.low, found.high) == pytest.approx((0.16818, 0.68733), abs=1e-5)
    none = estimate(np.zeros(10))
    assert none.low == 0.0
    assert none.high == pytest.approx(0.27753, abs=1e-5)
    assert estimate(np.ones(10)).high == 1.0


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_interval_holds_the_value_and_narrows_with_more_examples(values):
    once, twice = estimate(np.array(values)), estimate(np.array(values * 4))
    assert 0 <= once.low <= once.value + 1e-12
    assert once.value - 1e-12 <= once.high <= 1
    assert twice.high - twice.low < once.high - once.low
