"""Curves: which metrics make which chart, and intervals that are known by hand."""

import math

import pytest

from marin_rl.pages.charts import CURVE_POINTS_MAX, PLANS, make_charts, spread_of
from marin_rl.pages.records import Chart


def charts_of(rows: list[dict[str, float | None]]) -> dict[str, Chart]:
    return {chart.key: chart for chart in make_charts(rows, [], [])[0]}


def test_an_interval_is_by_groups_not_by_rollouts() -> None:
    spread = spread_of(3, [[1.0, 1.0], [0.0, 0.0], [], [1.0, 0.0]])
    assert spread is not None
    # Means of groups 1, 0, 1/2: their standard error is sqrt(1/4 / 3).
    assert (spread.round, spread.mean) == (3, 0.5)
    half = 1.96 * math.sqrt(0.25 / 3)
    assert (spread.low, spread.high) == pytest.approx((0.5 - half, 0.5 + half))


def test_groups_of_different_sizes_weigh_by_their_size() -> None:
    spread = spread_of(0, [[1.0] * 3, [0.0]])
    assert spread is not None
    # Mean 3/4; residuals 3 - 9/4 and 0 - 3/4; sqrt(2/1 * (9/16 + 9/16)) / 4 = 3/8.
    assert spread.mean == 0.75
    assert spread.high - spread.mean == pytest.approx(1.96 * 0.375)


def test_no_reward_no_spread_and_one_group_no_interval() -> None:
    assert spread_of(0, [[], []]) is None
    spread = spread_of(0, [[0.0, 1.0]])
    assert spread is not None
    assert (spread.low, spread.mean, spread.high) == (0.5, 0.5, 0.5)


def test_charts_without_data_are_named_and_gaps_are_left_out() -> None:
    rows = [
        {"round": 0, "entropy": 1.0, "rewards/format/mean": 0.5, "timing_s/round": 3.0},
        {"round": 1, "entropy": None, "timing_s/train": 1.0, "timing_s/generate": 2.0},
        {"round": 2, "entropy": float("nan"), "kl": 0.25},
    ]
    made, absent = make_charts(rows, [], [])
    charts = {chart.key: chart for chart in made}
    assert set(charts) == {"entropy", "components", "times", "kl"}
    assert [(line.x, line.y) for line in charts["entropy"].lines] == [([0], [1.0])]
    assert [line.name for line in charts["times"].lines] == ["generate", "train"]
    assert [line.name for line in charts["components"].lines] == ["format"]
    assert len(absent) == len(PLANS) + 1 - len(charts)
    assert "Reward" in absent


def test_held_out_accuracy_has_wilsons_interval() -> None:
    line = charts_of([{"round": 4, "eval/accuracy": 0.5, "eval/examples": 10.0}])["reward"].lines[0]
    assert line.name == "held-out accuracy"
    assert line.low is not None
    assert line.high is not None
    assert (line.low[0], line.high[0]) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_of_very_many_rounds_an_even_selection_is_drawn() -> None:
    rows = [{"round": index, "loss": 1.0} for index in range(5 * CURVE_POINTS_MAX)]
    (line,) = charts_of(rows)["loss"].lines
    assert len(line.x) == CURVE_POINTS_MAX
    assert (line.x[0], line.x[-1]) == (0, len(rows) - 1)
