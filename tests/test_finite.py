"""Numbers that are trained on are checked where they enter, as float32 and within bounds."""

import warnings
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from support.run_factories import group_of, rollout

from marin_rl.environments.base import checked_components
from marin_rl.environments.episode import (
    FinishedMessage,
    FinishedRollout,
    StepResult,
    check_numbers,
)
from marin_rl.environments.reward_functions import RewardFunction
from marin_rl.errors import Abstained, RewardFault
from marin_rl.finite import fit_logprobs, number, reward_number, usable_rewards
from marin_rl.rollouts.generate import refuse_if_mostly_errors
from marin_rl.types import Example, Message, RewardComponent, Rollout

BEYOND = (1e300, -1e300, 1e39, -3e38, 1.1e15, -np.finfo(float).max)
NO_NUMBER = (np.array("1"), "1", b"1", None, [1], 1j, np.complex64(1), np.array([1.0, 2.0]))


def test_numbers_of_every_library_are_plain_floats():
    values = (1, 0.5, True, np.float32(0.5), np.int64(3), np.array(2.0), np.array([4.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = [number(value) for value in (*values, Decimal("0.25"))]
    assert plain == [1.0, 0.5, 1.0, 0.5, 3.0, 2.0, 4.0, 0.25]
    assert {type(value) for value in plain} == {float}
    assert usable_rewards([1.0, None, np.inf, np.nan, 1e300, -1e15]).tolist()[0::5] == [1, -1e15]
    assert fit_logprobs([0.0, 1e-6, -1e5, 0.1, -1e39, np.nan]).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("value", NO_NUMBER, ids=repr)
def test_a_value_that_is_no_number_is_named(value: Any):
    with pytest.raises(ValueError, match="expected a number, found"):
        reward_number(value)


@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["positive", "negative"])
def test_an_integer_beyond_float64_is_refused(value: int):
    with pytest.raises(
        ValueError, match=r"between -1e\+15 and 1e\+15: scale .*; found (1|an integ)"
    ):
        reward_number(value)


@pytest.mark.parametrize("value", BEYOND, ids=str)
def test_a_number_beyond_the_bounds_is_refused_at_every_entrance(value: Any):
    bounds = r"between -1e\+15 and 1e\+15: scale or clip it"
    with pytest.raises(ValueError, match=bounds):
        reward_number(value)
    named = rf"numbers {bounds}; found bad = "
    for component in (
        RewardComponent(name="bad", value=value),
        RewardComponent(name="bad", value=1.0, weight=value),
    ):
        with pytest.raises(ValueError, match=named):
            checked_components((component,))
    with pytest.raises(ValueError, match=bounds):
        StepResult(reward=value)
    with pytest.raises(ValueError, match=f"^part: .*{bounds}"):
        StepResult(reward={"part": value, "none": None})
    message = FinishedMessage(role="assistant", content="x", token_ids=[1], logprobs=[-1.0])
    with pytest.raises(ValueError, match=bounds):
        check_numbers(FinishedRollout(messages=(message,), reward={"a": 1.0, "b": value}))


def test_sums_of_numbers_within_the_bounds_are_bounded_too():
    parts = tuple(RewardComponent(name=str(n), value=8e14) for n in range(2))
    with pytest.raises(ValueError, match="expected a weighted sum of the reward components betwe"):
        checked_components(parts)
    with pytest.raises(ValueError, match="the sum of its parts: "):
        StepResult(reward={"a": 8e14, "b": 8e14})


def test_a_logprob_that_no_policy_has_is_refused():
    message = FinishedMessage(role="assistant", content="x", token_ids=[1], logprobs=[-1e39])
    with pytest.raises(ValueError, match="message 0: expected logprobs of at most 0 and at least"):
        check_numbers(FinishedRollout(messages=(message,), reward=1.0))


def test_an_array_in_a_mapping_is_named_by_its_key():
    row = Example(
        environment="chat", environment_version="1", example_id="e", split="train", seed=0,
        messages=(Message(role="user", content="?"),),
    )  # fmt: skip
    several = np.array([1.0, 0.0])
    ours = RewardFunction(lambda example, completion: {"good": 1.0, "shape": several}, "r:ours")
    verl = RewardFunction(
        lambda solution_str, ground_truth: {"score": 1.0, "shape": several}, "r:verl"
    )
    for function in (ours, verl):
        with pytest.raises(ValueError, match="shape: expected a number, found array"):
            function.of_completion(row, "x")


def test_rollouts_without_a_reward_are_no_failures_of_a_round():
    """Three of four abstain: above the share of errors that is allowed, and none."""
    good = rollout("g/0")

    def failed(name: str, fault: RewardFault) -> Rollout:
        return replace(rollout(name, status="error"), error=f"{type(fault).__name__}: {fault}")

    abstained = [failed(f"g/{n}", Abstained("None")) for n in range(1, 4)]
    refuse_if_mostly_errors([group_of("g", [good, *abstained])], 0.5, "a shard")
    broken = [failed(f"g/{n}", RewardFault("None")) for n in range(1, 4)]
    with pytest.raises(RewardFault, match="3 of 4 rollouts failed"):
        refuse_if_mostly_errors([group_of("g", [good, *broken])], 0.5, "a shard")
