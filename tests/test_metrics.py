"""Metrics with answers computed by hand."""

import math

import numpy as np
import pytest

from marin_rl.metrics import DEFINITIONS, is_defined, rollout_metrics


def row(**changes):
    values = {
        "rewards": np.array([1.0, 0.0, 1.0, 1.0]),
        "groups": np.array([0, 0, 1, 1]),
        "lengths": np.array([2, 4, 6, 8]),
        "statuses": ["complete", "truncated", "complete", "complete"],
        "components": {"exact": np.array([1.0, 0.0, 1.0, 1.0])},
    } | changes
    return rollout_metrics(**values)


def test_means_over_a_round_of_two_groups():
    metrics = row()
    assert metrics["reward"] == 0.75
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5) / 2)  # groups: sqrt(1/2) and 0
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/mean_length"] == 5.0
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["rewards/exact/std"] == pytest.approx(0.5)


def test_a_failed_rollout_leaves_the_means_alone():
    metrics = row(
        rewards=np.array([1.0, np.nan, 1.0, 0.0]),
        statuses=["complete", "error", "complete", "complete"],
    )
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert metrics["rollouts/errors"] == 0.25
    assert metrics["completions/mean_length"] == pytest.approx((2 + 6 + 8) / 3)


def test_a_round_of_failures_reports_no_reward_instead_of_zero():
    metrics = row(rewards=np.full(4, np.nan), statuses=["error"] * 4, components={})
    assert "reward" not in metrics
    assert "completions/mean_length" not in metrics
    assert metrics["rollouts/errors"] == 1.0


def test_every_reported_name_is_defined_once():
    assert all(is_defined(name) for name in row())
    names = [definition.name for definition in DEFINITIONS]
    assert len(names) == len(set(names))
    assert not is_defined("reward_mean_of_something")
