"""Each shipped recipe learns the demo's task made small, from one warm start."""

import statistics

import pytest

from bench.recipes import RECIPES, SMALLER, learn, warm_start

ROUNDS = 6
RISE_MIN = 0.15  # of the reward, which the second round has already raised
HELD_OUT_RISE_MIN = 0.3
FEWER = ("evaluation.examples=64",)  # a request each: two thirds of what a recipe samples


@pytest.fixture(scope="module")
def begun(tmp_path_factory, long_runs):
    root = tmp_path_factory.mktemp("recipes")
    return root, warm_start(root, SMALLER)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns(begun, recipe):
    root, checkpoint = begun
    curve = learn(root, checkpoint, recipe, seed=0, rounds=ROUNDS, overrides=FEWER)
    first, last = statistics.mean(curve.rewards[:2]), statistics.mean(curve.rewards[-2:])
    assert last - first > RISE_MIN, curve
    assert curve.after - curve.before > HELD_OUT_RISE_MIN, curve
