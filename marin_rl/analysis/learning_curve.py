"""The learning curve of a run as a PNG, drawn from its committed metrics.

A picture is never a slot: it can be drawn again at any time.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.rollouts.estimates import wilson
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.local import replace_file

Rows = Sequence[Mapping[str, Any]]

DPI = 120


def learning_curve(rows: Rows, title: str) -> bytes:
    """Held-out accuracy with its 95 % interval, and training reward, by round, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    _draw_reward(axes, rows)
    _draw_accuracy(axes, rows)
    axes.set(xlabel="round", ylabel="reward and accuracy", title=title)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=max(1.02, axes.get_ylim()[1]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def write_learning_curve(run: Run, rows: Rows) -> Path:
    """Write a run's curve into its folder on a local root, else into the working directory."""
    target = run.store.local_path("learning-curve.png") or Path(f"{run.run_id}-learning-curve.png")
    replace_file(target, learning_curve(rows, run.run_id))
    return target


def _draw_reward(axes: Any, rows: Rows) -> None:
    points = [(row["round"], row["reward"]) for row in rows if row.get("reward") is not None]
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color="#9aa5b1", linewidth=1.2, label="training reward")


def _draw_accuracy(axes: Any, rows: Rows) -> None:
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    if not evaluated:
        return
    x = [row["round"] for row in evaluated]
    y = [row["eval/accuracy"] for row in evaluated]
    trials = [row.get("eval/examples") or 0.0 for row in evaluated]
    bounds = [wilson(share, n) for share, n in zip(y, trials, strict=True)]
    low, high = zip(*bounds, strict=True)
    axes.fill_between(x, low, high, color="#2563eb", alpha=0.15, linewidth=0, label="95 % interval")
    axes.plot(x, y, color="#2563eb", linewidth=2, marker="o", label="held-out accuracy")
