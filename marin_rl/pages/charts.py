"""Charts of a run from metric rows and mean rewards, with bands where an interval is known.

charts.yaml says which metrics make which chart; `marin_rl.metrics` defines them. A chart whose
metrics a run does not have is named instead of drawn empty. The learning curve as a PNG is never a
slot: it can be drawn again at any time.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from marin_rl.display.tables import evenly
from marin_rl.pages.records import Chart, Line
from marin_rl.rollouts.estimates import Estimate, held_out_accuracies
from marin_rl.storage.layout import LEARNING_CURVE
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.local import replace_file

Rows = Sequence[Mapping[str, Any]]
Estimates = Mapping[int, Estimate]  # by round, ascending

CURVE_POINTS_MAX = 1000


@cache
def plans() -> list[dict[str, Any]]:
    """Entries of charts.yaml: fields of a chart, and its `metrics`, `without` and `noise`."""
    return yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))


def make_charts(
    rows: Rows, training: Estimates, held_out: Estimates, phases: Mapping[str, Rows]
) -> tuple[list[Chart], list[str]]:
    """The charts that have data, and the titles of those of rounds that have none.

    `rows` are metric rows by round, ascending; the estimates are mean rewards of training and of
    evaluation. `phases` have the metrics of checkpoints before, or beside, rounds, each with its
    `step`. Of more than CURVE_POINTS_MAX rounds, an even selection is drawn.
    """
    rows = evenly(rows, CURVE_POINTS_MAX)
    kept = {row["round"] for row in rows} | held_out.keys()
    charts = [_rewards(rows, {n: item for n, item in training.items() if n in kept}, held_out)]
    steps = [{"round": row["step"], **row} for own in phases.values() for row in own]
    charts += [_chart(plan, steps if plan.get("axis") == "step" else rows) for plan in plans()]
    absent = [chart.title for chart in charts if not chart.lines and chart.axis == "round"]
    return [chart for chart in charts if chart.lines], absent


def _rewards(rows: Rows, training: Estimates, held_out: Estimates) -> Chart:
    bands = {
        "training reward": training,
        "held-out reward": held_out,
        "held-out accuracy": held_out_accuracies(rows),
    }
    return Chart(
        key="reward",
        title="Reward",
        unit="reward, accuracy",
        about="Mean reward of training and held-out rollouts and held-out accuracy, each with its "
        "95 % interval.",
        lines=[_band(name, estimates) for name, estimates in bands.items() if estimates],
    )


def _band(name: str, estimates: Estimates) -> Line:
    items = estimates.values()
    return Line(
        name=name,
        x=list(estimates),
        y=[each.value for each in items],
        low=[each.low for each in items],
        high=[each.high for each in items],
    )


def _chart(plan: Mapping[str, Any], rows: Rows) -> Chart:
    present = sorted({name for row in rows for name, value in row.items() if value is not None})
    lines = []
    for pattern, label in plan["metrics"].items():
        # The `*` of a pattern stands for one character at least.
        head, star, tail = map(re.escape, pattern.partition("*"))
        form = re.compile(f"{head}(.+){tail}" if star else f"{head}()")
        for match in filter(None, map(form.fullmatch, present)):
            values = [(row["round"], row.get(match[0])) for row in rows]
            points = [(x, float(y)) for x, y in values if y is not None and math.isfinite(y)]
            if match[0] in plan.get("without", ()) or not points:
                continue
            x, y = zip(*points, strict=True)
            if max(map(abs, y)) >= plan.get("noise", 0.0):
                lines.append(Line(name=label.format(match[1]), x=list(x), y=list(y)))
    shown = {name: plan[name] for name in plan if name not in ("metrics", "without", "noise")}
    return Chart(**shown, lines=lines)


def learning_curve(rows: Rows, title: str) -> bytes:
    """Held-out accuracy with its 95 % interval, and training reward, by round, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes: Any = figure.add_subplot()
    if points := _points(rows, "reward"):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color="#9aa5b1", linewidth=1.2, label="training reward")
    if accuracies := held_out_accuracies(rows):
        band = _band("held-out accuracy", accuracies)
        shade = {"color": "#2563eb", "alpha": 0.15, "linewidth": 0, "label": "95 % interval"}
        axes.fill_between(band.x, band.low, band.high, **shade)
        axes.plot(band.x, band.y, color="#2563eb", linewidth=2, marker="o", label=band.name)
    if points := _points(rows, "eval/mean_turns"):  # on a second axis, of episodes with several
        x, y = zip(*points, strict=True)
        right = axes.twinx()
        right.plot(x, y, color="#c2410c", linewidth=1.6, linestyle="--", marker=".")
        right.set_ylabel("held-out turns (dashed)", color="#c2410c")
        right.set_ylim(bottom=0)
        right.spines["top"].set_visible(False)
    axes.set(xlabel="round", ylabel="reward and accuracy", title=title)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=max(1.02, axes.get_ylim()[1]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    axes.set_zorder(1)  # the legend above the curve of the other axis
    axes.patch.set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def write_learning_curve(run: Run, rows: Rows) -> Path:
    """Write a run's curve into its folder on a local root, else into the working directory."""
    target = run.store.local_path(LEARNING_CURVE) or Path(f"{run.run_id}-{LEARNING_CURVE}")
    replace_file(target, learning_curve(rows, run.run_id))
    return target


def _points(rows: Rows, name: str) -> list[tuple[int, float]]:
    return [(row["round"], row[name]) for row in rows if row.get(name) is not None]
