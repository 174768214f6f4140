"""Metrics over rollouts with answers computed by hand."""

import math

import numpy as np

from marin_rl.metrics import is_defined
from marin_rl.rollouts.summary import (
    consumed_metrics,
    environment_metrics,
    replay_metrics,
    rollout_metrics,
    staleness_metrics,
    staleness_parts,
)

NAN = math.nan


def test_metrics_of_consumed_rollouts():
    found = consumed_metrics(
        rewards=np.array([1.0, 0.0, 0.5]),
        lengths=np.array([2, 4, 9]),
        formats=np.array([1.0, NAN, 0.0]),
        corrects=np.array([NAN, NAN, NAN]),
    )
    assert found == {
        "objective/scores": 0.5, "train/rewards": 0.5, "train/output_length": 5.0,
        "train/format_rewards": 0.5,
    }  # fmt: skip
    none, empty = np.zeros(0), np.zeros(0, np.int64)
    assert consumed_metrics(rewards=none, lengths=empty, formats=none, corrects=none) == {}


def test_each_environment_by_itself():
    found = environment_metrics(
        environments=["a", "b", "a", "b"],
        rewards=np.array([1.0, NAN, 0.0, NAN]),
        statuses=["complete", "error", "truncated", "aborted"],
        formats=np.array([0.5, NAN, -1.0, NAN]),
        groups=np.array([0, 1, 0, 1]),
        lengths=np.array([2, 4, 6, 8]),
    )
    assert found == {
        "env/a/rollouts": 2.0, "env/a/errors": 0.0, "env/a/reward": 0.5, "env/a/format_rate": 0.5,
        "env/a/mean_length": 4.0, "env/a/clipped_ratio": 0.5, "env/a/frac_reward_zero_std": 0.0,
        "env/b/rollouts": 2.0, "env/b/errors": 1.0,
    }  # fmt: skip
    assert not is_defined("env/a/rollouts")


def test_lengths_of_those_that_ended_and_of_those_that_were_sampled():
    found = rollout_metrics(
        rewards=np.array([1.0, 0.0, 1.0, NAN]),
        groups=np.array([0, 0, 0, 0]),
        lengths=np.array([2, 8, 5, 0]),
        statuses=["complete", "truncated", "complete", "error"],
        components={},
    )
    assert found["completions/mean_length"] == 5.0
    assert found["completions/clipped_ratio"] == 1 / 3  # the failed one was not sampled
    terminated = [found[f"completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")]
    assert terminated == [3.5, 2.0, 5.0]


def test_none_that_ended_reports_no_length():
    found = rollout_metrics(
        rewards=np.array([0.0]),
        groups=np.array([0]),
        lengths=np.array([8]),
        statuses=["truncated"],
        components={},
    )
    assert "completions/mean_terminated_length" not in found
    assert found["completions/clipped_ratio"] == 1.0


def test_every_batch_put_into_the_replay_comes_out_of_it():
    found = replay_metrics({"consumed": 5, "filtered": 2, "stale": 1, "failed": 3})
    assert found == {"replay/enqueue": 11.0, "replay/dequeue": 5.0, "replay/drops": 6.0}
    assert found["replay/enqueue"] == found["replay/dequeue"] + found["replay/drops"]


def test_the_age_of_rollouts_is_what_passed_while_they_were_sampled_and_since():
    """Sampled by policies 1 to 3, and by 4 alone; trained in round 5."""
    assert staleness_parts(np.array([1, 4]), np.array([3, 4]), 5) == {
        "staleness/in_flight/mean": 1.0,
        "staleness/in_flight/max": 2.0,
        "staleness/in_queue/mean": 1.5,
        "staleness/in_queue/max": 2.0,
    }
    assert staleness_parts(np.zeros(0, np.int64), np.zeros(0, np.int64), 5) == {}


def test_staleness():
    assert staleness_metrics(np.array([0, 2, 1])) == {"staleness/mean": 1.0, "staleness/max": 2.0}
    assert staleness_metrics(np.zeros(0, np.int64)) == {}
