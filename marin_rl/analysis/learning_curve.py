"""The learning curve of a run as a PNG, drawn from its committed metrics.

A picture is never a slot: it can be drawn again at any time.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.rollouts.estimates import held_out_accuracies
from marin_rl.storage.layout import LEARNING_CURVE
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.local import replace_file

Rows = Sequence[Mapping[str, Any]]

DPI = 120


def learning_curve(rows: Rows, title: str) -> bytes:
    """Held-out accuracy with its 95 % interval, and training reward, by round, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    if points := _points(rows, "reward"):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color="#9aa5b1", linewidth=1.2, label="training reward")
    _draw_accuracy(axes, rows)
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


def _draw_accuracy(axes: Any, rows: Rows) -> None:
    accuracies = held_out_accuracies(rows)
    if not accuracies:
        return
    x = list(accuracies)
    y = [estimate.value for estimate in accuracies.values()]
    low = [estimate.low for estimate in accuracies.values()]
    high = [estimate.high for estimate in accuracies.values()]
    axes.fill_between(x, low, high, color="#2563eb", alpha=0.15, linewidth=0, label="95 % interval")
    axes.plot(x, y, color="#2563eb", linewidth=2, marker="o", label="held-out accuracy")
