"""pass@k, mean@k and majority@k by hand and against every subset; intervals, by simulation too."""

import math
from itertools import combinations, product

import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import others_slow

from marin_rl.rollouts.estimates import (
    effective_draws,
    estimate,
    estimate_of_groups,
    majority_at_k,
    mean_at_k,
    pass_at_k,
    wilson,
)

RIGHT = np.array([True, False, False, True, False])


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


def test_groups_of_one_have_wilsons_interval():
    values = [1.0] * 8 + [0.0] * 32
    found, alone = estimate_of_groups([[v] for v in values]), estimate(np.array(values))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx(
        (alone.value, alone.low, alone.high), rel=1e-12
    )


def test_groups_that_agree_within_count_as_one_draw_each():
    groups = [[1.0] * 4] * 10 + [[0.0] * 4] * 30
    found = estimate_of_groups(groups)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(wilson(0.25, 40), rel=1e-12)


def test_effective_draws_by_hand():
    # Two groups of two, 1 1 and 1 0: p 3/4; squares between 1/4 and within 1/2, mean squares 1/4
    # each, so the correlation is 0. Both groups have a 1, one has a 0: i = 1, which gives
    # 27 / 28; M = 2, so D = 55 / 28.
    found = effective_draws(np.array([1.0, 1.0, 1.0, 0.0]), np.array([2, 2]))
    assert found == pytest.approx(4 / (55 / 28), rel=1e-12)


def test_an_interval_has_a_width_where_all_rewards_are_equal_and_none_without_rewards():
    assert estimate_of_groups([[], []]) is None
    for value in (0.0, 1.0, 0.5, 5.0, -3.0):
        found = estimate_of_groups([[value] * 8] * 16)
        assert found is not None
        assert found.low <= found.value == value <= found.high
        assert found.high - found.low > 1e-3
    # All failed: as one draw a group, for nothing tells how alike members are.
    failed = estimate_of_groups([[0.0] * 8] * 16)
    assert failed is not None
    assert (failed.low, failed.high) == pytest.approx(wilson(0.0, 16))


@given(
    groups=st.lists(st.lists(st.floats(-4, 4), max_size=5), min_size=1, max_size=8),
    scale=st.sampled_from([2.0, 8.0]),
)
def test_the_interval_of_groups_holds_the_mean_and_moves_with_the_rewards(groups, scale):
    found = estimate_of_groups(groups)
    values = [value for group in groups for value in group]
    assert (found is None) == (not values)
    if found is None:
        return
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(np.mean(values), abs=1e-12)
    assert min(0.0, *values) - 1e-9 <= found.low
    assert found.high <= max(1.0, *values) + 1e-9
    # Repeating every group says more of the mean.
    more = estimate_of_groups(groups * 4)
    assert more is not None
    assert more.high - more.low < found.high - found.low + 1e-12


def coverage(mean, size, correlation, groups, samples, seed):
    """Share of simulated rounds whose interval covers; groups' chances are beta distributed."""
    rng = np.random.default_rng([seed, groups, size, int(100 * mean), int(100 * correlation)])
    chance = np.full((samples, groups), mean)
    if correlation > 0:
        both = (1 - correlation) / correlation
        chance = rng.beta(mean * both, (1 - mean) * both, (samples, groups))
    rewards = (rng.random((samples, groups, size)) < chance[..., None]).astype(np.float64)
    hits = 0
    for sample in rewards:
        found = estimate_of_groups(list(sample))
        assert found is not None
        hits += found.low <= mean <= found.high
    return hits / samples


CORRELATIONS = (0.0, 0.1, 0.3, 0.6, 0.9)


@pytest.mark.parametrize(
    ("mean", "size", "correlation"),
    others_slow([
        (0.02, 8, 0.3), (0.05, 64, 0.9), (0.5, 2, 0.0), (0.1, 8, 0.6), (0.9, 2, 0.3),
        (0.02, 64, 0.0), (0.98, 64, 0.3), (0.5, 64, 0.1),
    ], first=5, several=True),
)  # fmt: skip
def test_the_interval_covers_as_often_as_it_says(mean, size, correlation):
    found = coverage(mean, size, correlation, 128, 400, seed=1)
    assert 0.91 <= found <= 0.99, found  # 93 to 97 %, and two standard errors of 400 samples


@pytest.mark.parametrize(("mean", "size"), [(0.02, 64), (0.3, 2), (0.9, 8)])
def test_the_interval_of_the_other_outcome_is_its_mirror_image(mean, size):
    rng = np.random.default_rng(7)
    rewards = (rng.random((16, size)) < rng.beta(mean, 1 - mean, (16, 1))).astype(np.float64)
    found, mirrored = estimate_of_groups(list(rewards)), estimate_of_groups(list(1 - rewards))
    assert found is not None
    assert mirrored is not None
    assert mirrored.value == pytest.approx(1 - found.value, abs=1e-12)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [16, 64, 128])
def test_the_interval_covers_over_the_whole_grid(groups, monkeypatch):
    """93 to 97 %, give or take chance, where ten groups or more may have the rarer outcome.

    In the other cells what can be counted is coarse: there it is at least 93 %, and may be more.
    One standard error of 600 samples is 0.01, and of 100 cells a few lie more than two away. Means
    above a half are mirror images.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks double the time
    samples, outside = 600, {}
    for mean, size, correlation in product(
        (0.02, 0.05, 0.1, 0.3, 0.5), (2, 4, 16, 64), CORRELATIONS
    ):
        found = coverage(mean, size, correlation, groups, samples, seed=2)
        few = groups * min(mean, 1 - mean) < 10
        if not 0.905 <= found <= (1.0 if few else 0.99):
            outside[mean, size, correlation] = found
    assert not outside, outside


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, size: rng.normal(5, 2, size),
        lambda rng, size: rng.uniform(0, 1, size),
        lambda rng, size: rng.choice([0.0, 0.1, 1.1], size, p=[0.6, 0.35, 0.05]),
    ],
)
def test_rewards_of_any_scale_are_covered(draw):
    rng = np.random.default_rng(3)
    mean = draw(np.random.default_rng(4), 4_000_000).mean()
    hits = 0
    for _ in range(400):
        found = estimate_of_groups(list(draw(rng, (64, 8))))
        assert found is not None
        hits += found.low <= mean <= found.high
    assert 0.91 <= hits / 400 <= 0.99, hits / 400
