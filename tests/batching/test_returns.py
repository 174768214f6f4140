"""Returns over time against rlax's numbers, and against sums written out."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from marin_rl.batching.advantages import discounted_returns, rewards_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rlax-returns.json").read_text())


def cases(name: str) -> list:
    return [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"] if case["fn"] == name]


def inputs_of(case: dict) -> dict[str, np.ndarray]:
    return {name: np.array(data, np.float64) for name, data in case["inputs"].items()}


@pytest.mark.parametrize("case", cases("discounted_returns"))
def test_discounted_returns_are_those_of_rlax(case: dict) -> None:
    given = inputs_of(case)
    # the value after the last step is what a further one receives
    rewards, discounts = (
        np.append(given["r_t"], given["v_t"][-1]),
        np.append(given["discount_t"], 0),
    )
    found = discounted_returns(rewards, discounts)[:-1]
    assert_allclose(found, case["outputs"]["returns"], rtol=5e-5, atol=5e-5)


def test_returns_by_hand() -> None:
    found = discounted_returns(np.array([1.0, 0.0, 4.0, 8.0]), np.array([0.5, 0.5, 0.5, 0.5]))
    assert_allclose(found, [3.0, 4.0, 8.0, 8.0])


def test_an_episode_ends_where_the_discount_is_zero() -> None:
    found = discounted_returns(np.array([1.0, 2.0, 4.0]), np.array([0.9, 0.0, 0.9]))
    assert_allclose(found, [2.8, 2.0, 4.0])


def test_undiscounted_returns_recover_the_rewards() -> None:
    returns, sequences = np.array([3.0, 3.0, 2.0, 0.5, 0.5, -1.0]), np.array([4, 4, 4, 7, 7, 9])
    assert_allclose(rewards_of(returns, sequences), [0.0, 1.0, 2.0, 0.0, 0.5, -1.0])
