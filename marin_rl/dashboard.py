"""`marin-rl status --watch` in the terminal: one run in full, or a line for each run under a root.

Draws the records of `analysis.watch`. Texts of rollouts are shown without markup, cut to a line and
without control characters: a model wrote them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from marin_rl.analysis.status import Unreadable
from marin_rl.analysis.watch import Look
from marin_rl.display.tables import METRICS, plain
from marin_rl.display.text import duration, sparkline
from marin_rl.errors import MarinRLError
from marin_rl.storage.stores.locks import Holder

CURVES = (
    "reward", "eval/accuracy", "entropy", "kl", "mismatch_kl", "completions/mean_length",
    "staleness/mean", "grad_norm", "perf/tokens_per_second", "timing_s/round",
)  # fmt: skip
FRACTIONS = ("reward", "eval/accuracy")
CURVE_WIDTH = 24
SHORT_CURVE_WIDTH = 16
TEXT_WIDTH = 60

Looks = Look | Sequence[Look | Unreadable]  # at one run, or at all


def watch(look: Callable[[], Looks], console: Console, every_s: float, *, once: bool) -> None:
    """Draw the result of `look` every `every_s` seconds until interrupted or all is complete.

    Where the console is no terminal, or with `once`, it is drawn once. A transient failure of the
    store is reported below the last result. Raises what `look` raises otherwise, and at first.
    """
    looks = look()
    if once or not console.is_terminal:
        console.print(drawn(looks))
        return
    with Live(drawn(looks), console=console, auto_refresh=False, screen=False) as live:
        while not complete(looks):
            time.sleep(every_s)
            trouble: list[RenderableType] = []
            try:
                looks = look()
            except MarinRLError as error:
                if not error.transient:
                    raise
                trouble = [plain(f"! not updated: {error}", "yellow")]
            live.update(Group(drawn(looks), *trouble), refresh=True)


def drawn(looks: Looks) -> RenderableType:
    """A panel for one run, a table for several."""
    return run_panel(looks) if isinstance(looks, Look) else runs_table(looks)


def complete(looks: Looks) -> bool:
    """True if no readable run is in progress."""
    runs = [looks] if isinstance(looks, Look) else looks
    return all(look.stage.ended for look in runs if isinstance(look, Look))


def run_panel(look: Look) -> Panel:
    """Progress, curves, samples and warnings of one run."""
    parts: list[RenderableType] = [_progress(look), _stages(look), _curves(look.rows)]
    if look.samples:
        parts.append(_samples(look.samples))
    parts += [plain(f"! {line}", "yellow") for line in look.warnings]
    if not look.warnings:
        parts.append(Text("no warnings", style="dim"))
    return Panel(Group(*parts), title=plain(look.run_id, "bold"), border_style="cyan")


def runs_table(looks: Sequence[Look | Unreadable]) -> RenderableType:
    """A line per run, and below the table, in full width, its warnings."""
    if not looks:
        return Text("no runs here yet", style="dim")
    table = Table(title="Runs", title_justify="left")
    for heading in ("run", "rounds", "now", "last commit", "reward", "held-out"):
        table.add_column(heading, overflow="fold")
    below: list[RenderableType] = []
    for look in looks:
        name = plain(look.run_id)
        if isinstance(look, Unreadable):
            table.add_row(name, "", Text("cannot be read", style="red"), "", "", "")
            below.append(plain(f"! {look.run_id}: {look.error}", "red"))
            continue
        table.add_row(
            name,
            f"{look.trained}/{look.rounds}",
            look.stage.text,
            "" if look.idle_s is None else f"{duration(look.idle_s)} ago",
            _short_curve(look.rows, "reward"),
            _short_curve(look.rows, "eval/accuracy"),
        )
        below += [plain(f"! {look.run_id}: {line}", "yellow") for line in look.warnings]
    return Group(table, *below)


def _progress(look: Look) -> Table:
    grid = Table.grid(padding=(0, 1))
    done = min(look.trained, look.rounds)
    ago = "" if look.idle_s is None else f"last commit {duration(look.idle_s)} ago"
    holder = plain("" if look.holder is None else Holder(look.holder, look.holder_host))
    bar = ProgressBar(total=max(look.rounds, 1), completed=done, width=30)
    grid.add_row(f"round {done}/{look.rounds}", bar, f"[bold]{look.stage.text}[/bold]", ago, holder)
    return grid


def _stages(look: Look) -> Text:
    """Seconds of the latest round by stage."""
    rows = [row for row in look.rows if row.get("timing_s/round") is not None]
    if not rows:
        return Text("no round is finished yet", style="dim")
    spent = {
        name.removeprefix("timing_s/"): seconds
        for name, seconds in rows[-1].items()
        if name.startswith("timing_s/") and name != "timing_s/round" and seconds is not None
    }
    total = sum(spent.values()) or 1.0
    longest_first = sorted(spent.items(), key=lambda item: -item[1])
    parts = (f"{name} {s:.2f} s ({s / total:.0%})" for name, s in longest_first)
    return Text(f"round {rows[-1]['round']}: " + ", ".join(parts), style="dim")


def _curves(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name in CURVES:
        title, form = METRICS[name]
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            low, high = form.format(min(values)), form.format(max(values))
            table.add_row(
                Text(title, style="dim"),
                _curve(name, values, CURVE_WIDTH),
                Text(form.format(values[-1]), style="bold"),
                Text(f"{low} to {high}", style="dim"),
            )
    return table


def _curve(name: str, values: Sequence[float], width: int) -> str:
    if name in FRACTIONS and min(values) >= 0 and max(values) <= 1:
        return sparkline(values, width=width)
    latest = values[-width:]
    return sparkline(latest, min(latest), max(latest), width)


def _short_curve(rows: Sequence[Mapping[str, Any]], name: str) -> RenderableType:
    values = [row[name] for row in rows if row.get(name) is not None]
    return _ShortCurve(name, values) if values else ""


@dataclass(frozen=True, slots=True)
class _ShortCurve:
    """A curve and its newest value on one line, of as many values as there is room for."""

    name: str
    values: Sequence[float]

    @property
    def newest(self) -> str:
        return METRICS[self.name][1].format(self.values[-1])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        number = 1 + len(self.newest)  # is never cut; the curve loses its oldest values first
        widest = min(SHORT_CURVE_WIDTH, len(self.values)) + number
        return Measurement(min(4 + number, widest), widest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(SHORT_CURVE_WIDTH, options.max_width - 1 - len(self.newest))
        curve = f"{_curve(self.name, self.values, width)} " if width > 0 else ""
        yield Text(curve + self.newest, no_wrap=True)


def _samples(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Latest rollouts", title_justify="left", box=None, padding=(0, 2))
    for heading in ("reward", "prompt", "completion"):
        table.add_column(heading, style=None if heading == "completion" else "dim")
    for row in rows:
        reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
        table.add_row(reward, Text(_line(row["prompt"])), Text(_line(row["completion"])))
    return table


def _line(text: str) -> str:
    """Return a printable line of at most TEXT_WIDTH characters."""
    line = "".join(sign if sign.isprintable() else " " for sign in text)
    return line if len(line) <= TEXT_WIDTH else line[: TEXT_WIDTH - 1] + "…"
