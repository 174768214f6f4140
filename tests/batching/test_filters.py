"""Filters by hand: each mask says what is dropped."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from marin_rl.batching import filters


def test_failed_has_nothing_to_train_on() -> None:
    status = np.array(["complete", "truncated", "error", "aborted", "complete", "complete"], object)
    reward = np.array([1.0, 1.0, np.nan, 1.0, np.inf, 1.0])
    sampled = np.array([3, 3, 0, 3, 3, 0])
    found = filters.failed(status, reward, sampled)
    assert_array_equal(found, [False, False, True, True, True, True])


def test_staleness_counts_rounds_between_policy_and_training() -> None:
    versions = np.array([5, 4, 3, 6])
    assert_array_equal(filters.stale(versions, 5, 0), [False, True, True, False])
    assert_array_equal(filters.stale(versions, 5, 1), [False, False, True, False])


def test_truncated_is_what_hit_the_limit() -> None:
    status = np.array(["complete", "truncated"], object)
    assert_array_equal(filters.truncated(status), [False, True])


def test_a_group_is_short_of_members_below_the_fewest() -> None:
    assert_array_equal(filters.short(np.array([0, 1, 2, 3]), 1), [True, False, False, False])
    assert_array_equal(filters.short(np.array([0, 1, 2, 3]), 3), [True, True, True, False])


def test_zero_signal_is_exactly_no_spread() -> None:
    assert_array_equal(filters.zero_signal(np.array([0.0, 1e-300, 1.0])), [True, False, False])


def test_overlong_completions_lose_linearly_over_the_last_share() -> None:
    found = filters.overlong_penalty(np.array([0, 15, 16, 18, 20]), 20, 0.25, 2.0)
    assert_allclose(found, [0.0, 0.0, 0.4, 1.2, 2.0])
