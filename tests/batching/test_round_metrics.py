"""Metrics over rollouts with answers computed by hand."""

import math

import numpy as np
import pyarrow as pa

from marin_rl.batching.round_metrics import environment_metrics, rollout_metrics, round_metrics
from marin_rl.config import parse_config
from marin_rl.metrics import is_defined

NAN = math.nan


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


FORMAT = {"name": "format", "value": 1.0, "weight": 1.0}
OTHER = {"name": "other", "value": 2.0, "weight": 1.0}


def trained_metrics(dispositions, reasons, **asynchrony):
    """Metrics of round 5, of rollouts by policies 1 to 3, by 4 and by 4."""
    scalars = pa.table(
        {
            "group_id": ["a", "a", "b"],
            "environment": ["echo"] * 3,
            "round": [5] * 3,
            "policy_version_min": [1, 4, 4],
            "policy_version_max": [3, 4, 4],
            "reward": [1.0, 0.0, None],
            "reward_components": [[FORMAT], [OTHER], [OTHER]],
            "status": ["complete", "complete", "error"],
            "n_completion_tokens": [2, 4, 9],
        }
    )
    config = parse_config({"asynchrony": asynchrony} if asynchrony else {})
    kinds, why = np.array(dispositions, object), np.array(reasons, object)
    return round_metrics(scalars, kinds, why, config, 5)


def test_metrics_of_trained_rollouts_by_hand():
    metrics = trained_metrics(
        ["consumed", "consumed", "failed"], ["", "", "error"], sampler="windowed", max_staleness=4
    )
    expected = {
        "objective/scores": 0.5, "train/rewards": 0.5, "train/output_length": 3.0,
        "train/format_rewards": 1.0, "staleness/mean": 2.5, "staleness/max": 4.0,
        "staleness/in_flight/mean": 1.0, "staleness/in_flight/max": 2.0,
        "staleness/in_queue/mean": 1.5, "staleness/in_queue/max": 2.0,
        "rollouts/consumed": 2.0, "rollouts/failed": 1.0, "tokens/wasted/error": 9.0,
        "replay/enqueue": 3.0, "replay/dequeue": 2.0, "replay/drops": 1.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    assert "train/correct_rewards" not in metrics


def test_a_round_that_trains_on_nothing_has_no_means_of_it():
    metrics = trained_metrics(
        ["filtered", "stale", "failed"], ["a", "b", "c"], sampler="windowed", max_staleness=4
    )
    assert not [name for name in metrics if name.startswith(("train/", "objective/", "staleness/"))]
    assert metrics["replay/drops"] == metrics["replay/enqueue"] == 3.0
    assert metrics["replay/dequeue"] == 0.0
