"""Curves: which metrics make which chart, and intervals that are known by hand."""

import pytest

from marin_rl.pages.charts import CURVE_POINTS_MAX, make_charts, plans
from marin_rl.pages.records import Chart
from marin_rl.rollouts.estimates import Estimate, estimate_of_groups


def charts_of(rows: list[dict[str, float | None]]) -> dict[str, Chart]:
    return {chart.key: chart for chart in make_charts(rows, {}, {}, {})[0]}


def test_groups_of_different_sizes_weigh_by_their_size() -> None:
    spread = estimate_of_groups([[1.0] * 3, [0.0]])
    assert spread is not None
    assert spread.value == 0.75
    assert 0 < spread.low < 0.75 < spread.high < 1


def test_charts_without_data_are_named_and_gaps_are_left_out() -> None:
    rows = [
        {"round": 0, "entropy": 1.0, "rewards/format/mean": 0.5, "timing_s/round": 3.0},
        {"round": 1, "entropy": None, "timing_s/train": 1.0, "timing_s/generate": 2.0},
        {"round": 2, "entropy": float("nan"), "kl": 0.25},
    ]
    made, absent = make_charts(rows, {}, {}, {})
    charts = {chart.key: chart for chart in made}
    assert set(charts) == {"entropy", "components", "times", "kl"}
    assert [(line.x, line.y) for line in charts["entropy"].lines] == [([0], [1.0])]
    assert [line.name for line in charts["times"].lines] == ["generate", "train"]
    assert [line.name for line in charts["components"].lines] == ["format"]
    of_rounds = [plan for plan in plans() if plan.get("axis") != "step"]
    assert len(absent) == len(of_rounds) + 1 - len(charts)
    assert "Reward" in absent


def test_rewards_have_a_band_by_round() -> None:
    training = {n: Estimate(value=n / 10, low=0.0, high=1.0) for n in range(3)}
    held_out = {2: Estimate(value=0.5, low=0.25, high=0.75)}
    (chart,) = make_charts([{"round": 0}, {"round": 1}], training, held_out, {})[0]
    assert [line.name for line in chart.lines] == ["training reward", "held-out reward"]
    assert (chart.lines[0].x, chart.lines[0].y) == ([0, 1, 2], [0.0, 0.1, 0.2])
    line = chart.lines[1]
    assert (line.x, line.y, line.low, line.high) == ([2], [0.5], [0.25], [0.75])


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


def test_a_line_of_rounding_alone_is_not_drawn() -> None:
    """Of a run without a reference, `policy/approxkl_avg` of a first update is 1e-14."""
    rows = [{"round": 0, "policy/approxkl_avg": 1e-14}]
    charts, absent = make_charts(rows, {}, {}, {})
    assert "KL" in absent
    charts, absent = make_charts([*rows, {"round": 1, "policy/approxkl_avg": 1e-5}], {}, {}, {})
    assert [chart.key for chart in charts] == ["kl"]


def test_checkpoints_of_steps_have_curves_of_their_own():
    pairs = [
        {"step": 4, "preference/loss": 0.6, "preference/held_out_loss": 0.5, "lr": 1.0},
        {"step": 8, "preference/loss": 0.3, "preference/held_out_loss": 0.4, "lr": 1.0},
    ]
    warm = [{"step": 20, "sft/loss": 1.5}]
    made, absent = make_charts([], {}, {}, {"sft": warm, "preference": pairs})
    assert {chart.title: [(li.name, li.x, li.y) for li in chart.lines] for chart in made} == {
        "Warm start": [("loss", [20], [1.5])],
        "Pairs: loss": [
            ("preference", [4, 8], [0.6, 0.3]),
            ("preference, held out", [4, 8], [0.5, 0.4]),
        ],
    }
    assert {chart.axis for chart in made} == {"step"}
    assert "Reward" in absent
    assert "Warm start" not in make_charts([], {}, {}, {})[1]
