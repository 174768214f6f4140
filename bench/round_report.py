"""The numbers of the round benchmark: medians by side, our ratios to TRL, a table and a JSON file.

A side is one program in one setting. Only rounds after the first few of each program count; what
others used of the machine meanwhile is reported beside every wall time.
"""

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from standard_work import Work

OURS = "marin-rl"
RATIO_MAX = 0.75
QUIET_CORES = 0.1  # what others may use for wall times to count as those of a quiet machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One measured round of one side. Round 0 of a program counts from the program's start."""

    side: str
    repeat: int
    round: int
    wall_s: float
    cpu_s: float
    other_cores: float
    phases_s: Mapping[str, float]
    reward: float


@dataclass(slots=True, kw_only=True)
class Measured:
    """All rounds of all sides, and the peaks of memory in bytes by side."""

    rounds: list[Round] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_tree_bytes: dict[str, int] = field(default_factory=dict)

    def add_peaks(self, side: str, main: int, tree: int) -> None:
        """Keep the larger of what is known and what a program needed."""
        self.peak_bytes[side] = max(self.peak_bytes.get(side, 0), main)
        self.peak_tree_bytes[side] = max(self.peak_tree_bytes.get(side, 0), tree)


def summarise(measured: Measured, skip: int) -> dict[str, Any]:
    """By side, over all rounds but the first `skip` of each program; and ours to the best TRL."""
    names = dict.fromkeys(row.side for row in measured.rounds)
    sides = {side: side_summary(measured, side, skip) for side in names}
    summary: dict[str, Any] = {"sides": sides}
    peers = [values for side, values in sides.items() if side != OURS]
    if peers and OURS in sides:
        for name in ("wall", "cpu"):
            best = min(peer[f"{name}_s"] for peer in peers)
            summary[f"ratio_{name}"] = sides[OURS][f"{name}_s"] / best
    return summary


def side_summary(measured: Measured, side: str, skip: int) -> dict[str, Any]:
    """Medians of one side, seconds and bytes; `other_cores` is a mean."""
    rows = [row for row in measured.rounds if row.side == side]
    steady = [row for row in rows if row.round >= skip]
    phases = dict.fromkeys(name for row in steady for name in row.phases_s)
    return {
        "rounds": len(steady),
        "wall_s": median(row.wall_s for row in steady),
        "wall_s_min": min(row.wall_s for row in steady),
        "cpu_s": median(row.cpu_s for row in steady),
        "other_cores": mean(row.other_cores for row in steady),
        "first_round_s": median(row.wall_s for row in rows if row.round == 0),
        "peak_bytes": measured.peak_bytes[side],
        "peak_tree_bytes": measured.peak_tree_bytes[side],
        "phases_s": {
            name: median(row.phases_s.get(name, 0.0) for row in steady) for name in phases
        },
    }


def write_results(
    folder: Path,
    measured: Measured,
    summary: Mapping[str, Any],
    work: Work,
    options: Mapping[str, Any],
) -> Path:
    """Keep every round and the summary as a new JSON file in `folder`; returns its path."""
    document = {
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "nice": os.nice(0),
            "load_average": os.getloadavg(),
        },
        "options": {key: str(value) for key, value in options.items()},
        "work": asdict(work),
        "summary": summary,
        "rounds": [asdict(row) for row in measured.rounds],
    }
    path = folder / f"round-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1))
    return path


def print_summary(summary: Mapping[str, Any], work: Work) -> None:
    """The table, where the time went, and the ratio."""
    console = Console()
    console.print(_table(summary, work))
    for side, row in summary["sides"].items():
        phases = "  ".join(f"{name} {value:.2f}" for name, value in row["phases_s"].items())
        console.print(f"{side}: {phases}", highlight=False)
    if "ratio_wall" in summary:
        console.print(
            f"ours / best TRL: [bold]{summary['ratio_wall']:.2f}[/bold] by wall time "
            f"(at most {RATIO_MAX}), {summary['ratio_cpu']:.2f} by CPU seconds"
        )
    if max(row["other_cores"] for row in summary["sides"].values()) > QUIET_CORES:
        console.print("[yellow]other programs were busy: wall times are not of a quiet machine")


def _table(summary: Mapping[str, Any], work: Work) -> Table:
    table = Table(
        title=f"Rounds of {work.prompts} prompts of {work.prompt_tokens} tokens "
        f"x {work.completions} completions of {work.new_tokens}",
        caption="GB: peak resident memory of the main process, and of all together",
    )
    table.add_column("side", no_wrap=True)
    for name in ("n", "s/round", "min", "CPU-s", "GB", "all", "first s", "others"):
        table.add_column(name, justify="right", no_wrap=True)
    for side, row in summary["sides"].items():
        numbers = [row["wall_s"], row["wall_s_min"], row["cpu_s"]]
        memory = [row["peak_bytes"] / 1e9, row["peak_tree_bytes"] / 1e9]
        rest = [row["first_round_s"], row["other_cores"]]
        cells = (f"{value:.2f}" for value in [*numbers, *memory, *rest])
        table.add_row(side, str(row["rounds"]), *cells)
    return table
