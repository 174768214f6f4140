"""The numbers of the round benchmark: medians by side, ratios to the peers, a table, a JSON file.

A side is one program in one setting. Only rounds after the first few of each program count; what
others used of the machine meanwhile is reported next to every wall time.
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

from machine import machine
from rich.console import Console
from rich.table import Table
from standard_work import Work

OURS = "marin-rl"
PEERS = ("TRL", "tunix")

# The bars: seconds and bytes of the standard work on two quiet cores, and ratios to the best TRL.
ROUND_S_MAX = 2.6
PEAK_BYTES_MAX = 1.2e9
RATIO_MAX = 0.6
TRAINING_RATIO_MAX = 1 / 1.5
SHORT_RATIO_MAX = 1.0

# What of a round is not training, by either side's own names.
SAMPLING = ("generate",)
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
    tokens_mean: float

    @property
    def training_s(self) -> float:
        """From the batch to the new parameters: ours with its commit, peers' all but sampling."""
        if self.side.startswith(OURS):
            return self.phases_s["train"]
        return sum(s for name, s in self.phases_s.items() if name not in SAMPLING)


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
    """By side, over all rounds but the first `skip` of each program; and ours to each peer's best.

    Ratios to tunix end in its name; the others are to TRL.
    """
    names = dict.fromkeys(row.side for row in measured.rounds)
    sides = {side: side_summary(measured, side, skip) for side in names}
    summary: dict[str, Any] = {"sides": sides}
    for peer in PEERS if OURS in sides else ():
        settings = [values for side, values in sides.items() if side.startswith(peer)]
        for name in ("wall", "cpu", "training") if settings else ():
            best = min(values[f"{name}_s"] for values in settings)
            ending = "" if peer == PEERS[0] else f"_{peer}"
            summary[f"ratio_{name}{ending}"] = sides[OURS][f"{name}_s"] / best
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
        "training_s": median(row.training_s for row in steady),
        "tokens_mean": mean(row.tokens_mean for row in steady),
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
    name: str = "round",
) -> Path:
    """Keep every round and the summary as a new JSON file in `folder`; returns its path."""
    document = {
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "nice": os.nice(0),
            **machine(),
        },
        "options": {key: str(value) for key, value in options.items()},
        "work": asdict(work),
        "summary": summary,
        "rounds": [asdict(row) for row in measured.rounds],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1))
    return path


def print_summary(summary: Mapping[str, Any], work: Work) -> None:
    """The table, where the time went, and the ratio."""
    console = Console(width=120)
    console.print(_table(summary, work))
    for side, row in summary["sides"].items():
        phases = "  ".join(f"{name} {value:.2f}" for name, value in row["phases_s"].items())
        console.print(f"{side}: {phases}", highlight=False)
    for peer, ending in zip(PEERS, ("", f"_{PEERS[1]}"), strict=True):
        if f"ratio_wall{ending}" in summary:
            names = (f"ratio_{name}{ending}" for name in ("wall", "cpu", "training"))
            wall, cpu, training = (summary[name] for name in names)
            console.print(
                f"ours / best {peer}: [bold]{wall:.2f}[/bold] by wall time, {cpu:.2f} by CPU "
                f"seconds, {training:.2f} of the training part by wall time"
            )
    if max(row["other_cores"] for row in summary["sides"].values()) > QUIET_CORES:
        console.print("[yellow]other programs were busy: wall times are not of a quiet machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A required number, and the measured one.

    Ratios and memory hold on a busy machine too; seconds need a quiet one.
    """

    name: str
    found: float
    at_most: float
    on_busy_too: bool = True

    @property
    def met(self) -> bool:
        """True if the measured number is within the bar."""
        return self.found <= self.at_most


def bars(summaries: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Every bar that the measured works and sides say something about."""
    found = []

    def add(name: str, value: float | None, at_most: float, *, on_busy_too: bool = True) -> None:
        if value is not None:
            bar = Bar(name=name, found=value, at_most=at_most, on_busy_too=on_busy_too)
            found.append(bar)

    standard, short = summaries.get("standard", {}), summaries.get("short", {})
    ours = standard.get("sides", {}).get(OURS, {})
    add("round, wall s", ours.get("wall_s"), ROUND_S_MAX, on_busy_too=False)
    add("peak of the main process, bytes", ours.get("peak_bytes"), PEAK_BYTES_MAX)
    add("round, ours / TRL", standard.get("ratio_wall"), RATIO_MAX)
    training = standard.get("ratio_training")
    add("training part, ours / TRL", training, TRAINING_RATIO_MAX)
    training = standard.get("ratio_training_tunix")
    add("training part, ours / tunix", training, TRAINING_RATIO_MAX)
    add("short round, ours / TRL", short.get("ratio_wall"), SHORT_RATIO_MAX)
    return found


def missed(summaries: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Bars that are missed on any machine: ratios and memory."""
    return [bar for bar in bars(summaries) if bar.on_busy_too and not bar.met]


def print_bars(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the required numbers next to the measured ones."""
    console = Console()
    for bar in bars(summaries):
        word = "[green]met[/green]" if bar.met else "[red]missed[/red]"
        console.print(f"{word} {bar.name}: {bar.found:.4g}, at most {bar.at_most:.4g}")


def _table(summary: Mapping[str, Any], work: Work) -> Table:
    table = Table(
        title=f"Rounds of {work.prompts} prompts of {work.prompt_tokens} tokens "
        f"x {work.completions} completions of "
        + ("about 3" if work.ends_early else str(work.new_tokens)),
        caption="GB: peak resident memory of the main process, and of all together",
    )
    table.add_column("side", no_wrap=True)
    names = ("n", "s/round", "min", "CPU-s", "train s", "GB", "all", "tokens", "first s", "others")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for side, row in summary["sides"].items():
        numbers = [row["wall_s"], row["wall_s_min"], row["cpu_s"], row["training_s"]]
        memory = [row["peak_bytes"] / 1e9, row["peak_tree_bytes"] / 1e9]
        rest = [row["tokens_mean"], row["first_round_s"], row["other_cores"]]
        cells = (f"{value:.2f}" for value in [*numbers, *memory, *rest])
        table.add_row(side, str(row["rounds"]), *cells)
    return table
