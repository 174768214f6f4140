"""Metrics with answers computed by hand."""

import math

import numpy as np
import pytest

from marin_rl.batching.round_metrics import rollout_metrics
from marin_rl.metrics import DEFINITIONS, is_defined, over_steps, parse_definition


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


def test_a_refused_step_takes_no_mean_away_from_its_round():
    steps = [
        {"loss": 1.0, "kl": math.nan, "updates/skipped": 0.0, "lr": 0.1},
        {"loss": math.nan, "kl": math.nan, "updates/skipped": 1.0, "lr": 0.2},
        {"loss": math.inf, "kl": math.inf, "updates/skipped": 1.0, "lr": 0.2},
        {"loss": 2.0, "kl": math.nan, "updates/skipped": 0.0, "lr": 0.3},
    ]
    found = over_steps(steps)
    assert math.isnan(found.pop("kl"))
    assert found == {"loss": 1.5, "updates/skipped": 2.0, "lr": 0.3}


# What people lay over the curves of other trainers; a name that leaves is missed.
PROMISED = """
eps episode lr grad_norm entropy kl reward reward_std frac_reward_zero_std mismatch_kl
objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg
val/clipfrac_avg val/ratio val/ratio_var val/num_eos_tokens
train/rewards train/format_rewards train/correct_rewards train/output_length
rewards/format/mean rewards/format/std
completions/mean_length completions/min_length completions/max_length completions/clipped_ratio
completions/mean_terminated_length completions/min_terminated_length
completions/max_terminated_length clip_ratio/low clip_ratio/high clip_ratio/region
sampling/logp_difference/mean sampling/logp_difference/max sampling/importance_ratio/min
sampling/importance_ratio/mean sampling/importance_ratio/max
sampling/perplexity/trainer sampling/perplexity/sampler sampling/perplexity/ratio
sampling/chi2/token sampling/chi2/sequence sampling/rejected staleness/mean staleness/max
env/echo/eps env/echo/errors env/echo/format_rate env/echo/reward
replay/occupancy replay/enqueue replay/dequeue replay/drops
weights/bytes weights/seconds weights/transfers_per_step weights/failures
timing_s/train perf/tokens_per_second perf/mfu storage/bytes storage/objects
eval/pass@8 eval/mean@8 eval/majority@8 eval/pass@8/low eval/pass@8/high eval/echo/pass@1
"""


def test_every_reported_name_is_defined_once():
    assert [name for name in (*row(), *PROMISED.split()) if not is_defined(name)] == []
    names = [definition.name for definition in DEFINITIONS]
    assert len(names) == len(set(names))
    assert not is_defined("reward_mean_of_something")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "guessed"}, "guessed"),
        ({"recomputable": "perhaps"}, "found 'perhaps' and 'mean'"),
        ({"over_steps": "median"}, "found 'yes' and 'median'"),
        ({"relative": "small"}, "could not convert"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_a_row_of_the_table_that_defines_nothing_is_refused(changes, expected):
    row = {"name": "reward", "kind": "counted", "unit": "reward", "formula": "mean", "late": ""}
    assert parse_definition(row.copy()).recomputable == "yes"
    with pytest.raises((KeyError, TypeError, ValueError), match=expected):
        parse_definition(row | changes)
