"""Evaluation of several samples: by hand, per environment, with intervals."""

from dataclasses import replace

import numpy as np
import pytest
from support.run_factories import group_of, rollout

from marin_rl.config import EnvironmentConfig, EvaluationConfig
from marin_rl.environments.base import answer_in
from marin_rl.environments.mixture import Part
from marin_rl.environments.registry import construct
from marin_rl.metrics import is_defined
from marin_rl.rollouts.estimates import estimate
from marin_rl.rollouts.evaluate import Judges, evaluation_metrics

CONFIG = EnvironmentConfig(name="echo")
ECHO = construct(CONFIG)
JUDGES: Judges = {None: Part(label="", config=CONFIG, environment=ECHO)}


def samples(name, rewards, words):
    """A group whose sample i says `words[i]` and earns `rewards[i]`; None failed."""
    rollouts = [
        rollout(
            f"{name}/{index}",
            index=index,
            reward=reward,
            status="complete" if reward is not None else "error",
            completion=[ord(letter) - 64 for letter in word],
        )
        for index, (reward, word) in enumerate(zip(rewards, words, strict=True))
    ]
    return group_of(name, rollouts)


GROUPS = [
    samples("one", [1.0, 0.0, 0.0, 1.0], ["A", "B", "B", "A"]),
    samples("two", [0.0, 0.0, 0.5, None], ["A", "B", "C", "D"]),
]
EVALUATION = EvaluationConfig(samples=4, k=(1, 2, 4))


def test_several_samples_by_hand():
    found = evaluation_metrics(GROUPS, EVALUATION, JUDGES)
    assert all(is_defined(name) for name in found)
    assert found["eval/accuracy"] == 2 / 8
    assert found["eval/errors"] == 1 / 8
    assert found["eval/examples"] == 2
    assert found["eval/reward_mean"] == pytest.approx(2.5 / 7)
    assert found["eval/pass@1"] == pytest.approx(0.5 / 2)
    assert found["eval/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert found["eval/pass@4"] == 0.5
    assert found["eval/mean@4"] == found["eval/mean@2"] == pytest.approx(0.25)
    assert found["eval/majority@1"] == pytest.approx(0.25)
    # AB is a tie that A, the first, wins; BA one that B wins; ABBA is A's.
    assert found["eval/majority@2"] == pytest.approx((1 + 0) / 2 / 2)
    assert found["eval/majority@4"] == 0.5
    of = estimate(np.array([1.0, 0.0]))
    assert (found["eval/pass@4/low"], found["eval/pass@4/high"]) == (of.low, of.high)
    assert found["eval/echo/pass@4"] == found["eval/pass@4"]


def test_sampled_turns_are_counted_where_there_are_several():
    of_two = GROUPS[0].rollouts[0]
    assert "eval/mean_turns" not in evaluation_metrics(GROUPS, EVALUATION, JUDGES)
    said = next(turn for turn in of_two.turns if turn.inference_metadata is not None)
    answer = replace(
        of_two, turns=(*of_two.turns, replace(said, role="user", inference_metadata=None), said)
    )
    groups = [replace(GROUPS[0], rollouts=(answer, *GROUPS[0].rollouts[1:]))]
    found = evaluation_metrics(groups, EVALUATION, JUDGES)
    assert is_defined("eval/mean_turns")
    # of four rollouts, one has two turns; the user's turn between them is not counted
    assert found["eval/mean_turns"] == 5 / 4


def test_a_k_beyond_the_samples_is_refused():
    with pytest.raises(ValueError, match="k reaches 8, but samples is 4"):
        EvaluationConfig(samples=4, k=(1, 8))


def test_an_environment_says_what_the_answer_is():
    options = {"dataset": "spell_backward", "answer_tag": "answer"}
    tagged = construct(EnvironmentConfig(name="reasoning_gym", options=options))
    assert answer_in(tagged, "<answer>x</answer> so <answer> dog </answer>") == "dog"
    assert answer_in(tagged, "no tag") is None
    assert answer_in(ECHO, " dog ") == "dog"
    assert answer_in(ECHO, "  ") is None
