"""Charts of a run from metric rows and mean rewards, with bands where an interval is known.

charts.yaml says which metrics make which chart; `marin_rl.metrics` defines them. A chart whose
metrics a run does not have is named instead of drawn empty.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from marin_rl.display.tables import evenly
from marin_rl.pages.records import Chart, Line
from marin_rl.rollouts.estimates import Estimate, held_out_accuracies

Rows = Sequence[Mapping[str, Any]]
Estimates = Mapping[int, Estimate]  # by round, ascending

CURVE_POINTS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartPlan:
    """An entry of charts.yaml."""

    key: str
    title: str
    unit: str
    about: str
    metrics: Mapping[str, str]
    kind: Literal["lines", "stack"] = "lines"
    logarithmic: bool = False
    without: Sequence[str] = ()
    noise: float = 0.0


@cache
def plans() -> tuple[ChartPlan, ...]:
    text = Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8")
    return tuple(ChartPlan(**item) for item in yaml.safe_load(text))


def make_charts(
    rows: Rows, training: Estimates, held_out: Estimates
) -> tuple[list[Chart], list[str]]:
    """The charts that have data, and the titles of those that have none.

    `rows` are metric rows by round, ascending; the estimates are mean rewards of training and of
    evaluation. Of more than CURVE_POINTS_MAX rounds, an even selection is drawn.
    """
    rows = evenly(rows, CURVE_POINTS_MAX)
    kept = {row["round"] for row in rows} | held_out.keys()
    charts = [_rewards(rows, {n: item for n, item in training.items() if n in kept}, held_out)]
    charts += [_chart(plan, rows) for plan in plans()]
    return (
        [chart for chart in charts if chart.lines],
        [chart.title for chart in charts if not chart.lines],
    )


def _rewards(rows: Rows, training: Estimates, held_out: Estimates) -> Chart:
    bands = {
        "training reward": training,
        "held-out reward": held_out,
        "held-out accuracy": held_out_accuracies(rows),
    }
    lines = [
        Line(
            name=name,
            x=list(estimates),
            y=[estimate.value for estimate in estimates.values()],
            low=[estimate.low for estimate in estimates.values()],
            high=[estimate.high for estimate in estimates.values()],
        )
        for name, estimates in bands.items()
        if estimates
    ]
    return Chart(
        key="reward",
        title="Reward",
        unit="reward, accuracy",
        about="Mean reward of training and held-out rollouts and held-out accuracy, each with its "
        "95 % interval.",
        lines=lines,
    )


def _chart(plan: ChartPlan, rows: Rows) -> Chart:
    present = sorted({name for row in rows for name, value in row.items() if value is not None})
    lines = []
    for pattern, label in plan.metrics.items():
        # The `*` of a pattern stands for one character at least.
        head, star, tail = map(re.escape, pattern.partition("*"))
        form = re.compile(f"{head}(.+){tail}" if star else f"{head}()")
        for match in filter(None, map(form.fullmatch, present)):
            values = [(row["round"], row.get(match[0])) for row in rows]
            points = [(x, float(y)) for x, y in values if y is not None and math.isfinite(y)]
            if match[0] in plan.without or not points:
                continue
            x, y = zip(*points, strict=True)
            if max(map(abs, y)) >= plan.noise:
                lines.append(Line(name=label.format(match[1]), x=list(x), y=list(y)))
    return Chart(
        key=plan.key,
        title=plan.title,
        unit=plan.unit,
        about=plan.about,
        lines=lines,
        kind=plan.kind,
        logarithmic=plan.logarithmic,
    )
