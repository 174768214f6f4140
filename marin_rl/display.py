"""Terminal display: live progress of a run, and tables at its end.

Everything shown comes from progress events (live) or committed metrics (tables): no truth is owned
here and no file is written. Without a terminal, one plain line is printed per round.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from marin_rl.config import Config
from marin_rl.planning import Plan
from marin_rl.progress import ProgressEvent, listening

if TYPE_CHECKING:
    from marin_rl.storage.upkeep.audit import RoundAudit

COUNTED = ("generated", "consumed", "filtered", "stale", "failed")
TEXT_MAX = 4000  # characters of a cell or a line that a terminal is given
TITLE = "table.title"  # Rich's style of titles, which it gives to markup alone
SPARKS = "▁▂▃▄▅▆▇█"
STAGES = {
    "start": "starting",
    "sft": "warm start",
    "reward_model": "reward model",
    "serve": "loading weights",
    "generate": "generating",
    "process": "processing",
    "train": "training",
    "evaluate": "evaluating",
    "round": "round done",
    "done": "done",
}


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0, width: int = 40) -> str:
    """The last `width` values as block characters between `low` and `high`."""
    span = (high - low) or 1.0
    scaled = [min(max((value - low) / span, 0.0), 1.0) for value in values[-width:]]
    return "".join(SPARKS[round(value * (len(SPARKS) - 1))] for value in scaled)


class RunDisplay:
    """Folds progress events into one picture; `render()` draws it."""

    def __init__(self, run_id: str, rounds: int) -> None:
        self.run_id = run_id
        self.rounds = rounds
        self.round = 0
        self.stage = "start"
        self.done = 0
        self.total = 0
        self.metrics: dict[str, float] = {}
        self.rewards: list[float] = []
        self.accuracies: list[float] = []
        self.round_seconds: list[float] = []
        self._round_ended: float | None = None

    def update(self, event: ProgressEvent) -> None:
        """Take in one event; events of other runs are ignored."""
        if event.run_id != self.run_id:
            return
        self.stage, self.done, self.total = event.stage, event.done, event.total
        if event.round is not None:
            self.round = event.round
        self.metrics.update(event.metrics)
        if event.stage == "evaluate" and "eval/accuracy" in event.metrics:
            self.accuracies.append(event.metrics["eval/accuracy"])
        if event.stage == "round":
            self._end_round(event)

    def seconds_left(self) -> float | None:
        """Rounds to go times the mean of the latest rounds' seconds; None before two rounds."""
        latest = self.round_seconds[-10:]
        if not latest:
            return None
        return (self.rounds - self.round - 1) * sum(latest) / len(latest)

    def render(self) -> RenderableType:
        """A panel: rounds, stage, the numbers that matter, two curves."""
        return Panel(
            Group(self._rounds_line(), self._stage_line(), self._numbers(), *self._curves()),
            title=plain(self.run_id, "bold"),
            border_style="cyan",
        )

    def _end_round(self, event: ProgressEvent) -> None:
        now = time.monotonic()
        if self._round_ended is not None:
            self.round_seconds.append(now - self._round_ended)
        self._round_ended = now
        if "reward" in event.metrics:
            self.rewards.append(event.metrics["reward"])

    def _rounds_line(self) -> Table:
        finished = self.round + 1 if self.stage in ("round", "done") else self.round
        left = self.seconds_left()
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            f"round {min(finished, self.rounds):>4}/{self.rounds}",
            ProgressBar(total=max(self.rounds, 1), completed=min(finished, self.rounds), width=36),
            f"about {duration(left)} left" if left is not None else "",
        )
        return grid

    def _stage_line(self) -> Text:
        amount = f" {self.done}/{self.total}" if self.total else ""
        return Text(f"{STAGES.get(self.stage, self.stage)}{amount}", style="dim")

    def _numbers(self) -> Table:
        grid = Table.grid(padding=(0, 3))
        cells = [
            ("reward", self._number("reward", "{:.3f}")),
            ("held-out accuracy", self._number("eval/accuracy", "{:.1%}")),
            ("tokens/s", self._number("perf/tokens_per_second", "{:,.0f}")),
            ("entropy", self._number("entropy", "{:.3f}")),
            ("warm-start loss", self._number("sft/loss", "{:.3f}")),
            ("preference loss", self._number("reward_model/loss", "{:.3f}")),
            ("pairs in order", self._number("reward_model/accuracy", "{:.1%}")),
        ]
        shown = [(name, text) for name, text in cells if text]
        grid.add_row(*[f"[dim]{name}[/dim] [bold]{text}[/bold]" for name, text in shown])
        return grid

    def _number(self, name: str, form: str) -> str:
        return form.format(self.metrics[name]) if name in self.metrics else ""

    def _curves(self) -> list[Text]:
        curves = (("reward   ", self.rewards), ("held-out ", self.accuracies))
        return [Text(f"{name} {sparkline(values)}") for name, values in curves if values]


@contextmanager
def showing(display: RunDisplay, console: Console) -> Iterator[None]:
    """Draw `display` live while the block runs; plain lines where the console is no terminal."""
    if not console.is_terminal:
        with listening(lambda event: _print_event(display, console, event)):
            yield
        return
    with (
        Live(get_renderable=display.render, console=console, refresh_per_second=4, transient=False),
        listening(display.update),
    ):
        yield


def duration(seconds: float | int) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(n_bytes: float | int) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000 or unit == "TB":
            return f"{n_bytes:,.0f} {unit}" if unit == "B" else f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1000
    raise AssertionError("unreachable")


def printable(text: str) -> str:
    """The text without what a terminal would obey: models write escape sequences too."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def plain(value: Any, style: str = "") -> Text:
    """Text of a cell, a heading or a title for any value: no markup is interpreted."""
    return Text(printable(str(value)), style)


def shortened(text: str) -> str:
    """The printable text, of which what is long is cut: a completion may be a megabyte."""
    left = len(text) - TEXT_MAX
    if left <= 0:
        return printable(text)
    return f"{printable(text[:TEXT_MAX])}… ({left:,} characters more: --json has them)"


def key_values(title: str, rows: Mapping[str, Any]) -> Table:
    """A two-column table."""
    table = Table(title=plain(title, TITLE), show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")  # a path that is cut is none
    for name, value in rows.items():
        table.add_row(plain(name), plain(value))
    return table


def rounds_table(rows: Sequence[Mapping[str, Any]], title: str, limit: int = 12) -> Table:
    """Rounds with their main metrics; of many rounds, an even selection with the last one."""
    columns = {
        "reward": ("reward", "{:.3f}"),
        "eval/accuracy": ("held-out accuracy", "{:.1%}"),
        "completions/mean_length": ("tokens each", "{:.1f}"),
        "entropy": ("entropy", "{:.3f}"),
        "mismatch_kl": ("mismatch KL", "{:.1e}"),
        "perf/tokens_per_second": ("tokens/s", "{:,.0f}"),
        "timing_s/round": ("seconds", "{:.2f}"),
    }
    table = Table(title=plain(title, TITLE), title_justify="left")
    table.add_column("round", justify="right")
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", overflow="fold")
    for row in _selection(rows, limit):
        cells = [
            form.format(row[name]) if row.get(name) is not None else ""
            for name, (_, form) in columns.items()
        ]
        table.add_row(str(row["round"]), *cells)
    return table


def rollouts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rollouts as people read them: what was asked, what was answered, what it earned."""
    table = Table(title="Rollouts", title_justify="left", show_lines=True)
    for heading in ("prompt", "completion", "answer", "reward", "status"):
        table.add_column(heading, justify="right" if heading == "reward" else "left")
    for row in rows:
        reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
        cells = (row["prompt"], row["completion"], row["answer"], reward, row["status"])
        table.add_row(*(Text(shortened(str(cell))) for cell in cells))
    return table


def frame_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Any rectangular result, numbers to the right."""
    table = Table()
    for index, name in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows)
        heading = Text(shortened(str(name)))
        table.add_column(heading, justify="right" if numeric else "left")
    for row in rows:
        shown = (f"{v:.6g}" if isinstance(v, float) else shortened(str(v)) for v in row)
        table.add_row(*(Text(cell) for cell in shown))
    return table


def audit_table(reports: "Sequence[RoundAudit]") -> Table:
    """A row per round, environment and policy version; cells are rollouts / tokens."""
    table = Table(title="Rollouts / tokens", title_justify="left")
    for name in ("round", "environment", "policy", *COUNTED, "length bias", "balanced"):
        table.add_column(name, justify="left" if name in ("environment", "balanced") else "right")
    for report in reports:
        verdict = "yes" if report.balanced else "NO"
        if not report.balances:
            table.add_row(str(report.round), *[""] * (len(COUNTED) + 3), verdict)
        for item in report.balances:
            cells = [f"{item.rollouts[kind]} / {item.tokens[kind]}" for kind in COUNTED]
            bias = "" if item.length_bias is None else f"{item.length_bias:+.1f}"
            name = plain(item.environment)
            table.add_row(str(report.round), name, str(item.policy_version), *cells, bias, verdict)
    return table


def dropped_table(reports: "Sequence[RoundAudit]") -> Table:
    """A row per reason for which anything was dropped, with lengths against what was kept."""
    table = Table(title="Dropped", title_justify="left")
    for name in (
        "round",
        "environment",
        "policy",
        "why",
        "rollouts",
        "tokens",
        "mean length",
        "kept",
    ):
        table.add_column(name, justify="left" if name in ("environment", "why") else "right")
    for report in reports:
        for item in report.balances:
            kept = "" if item.mean_length is None else f"{item.mean_length:.1f}"
            for lost in item.dropped:
                table.add_row(
                    str(report.round),
                    plain(item.environment),
                    str(item.policy_version),
                    plain(f"{lost.disposition}: {lost.reason}"),
                    str(lost.rollouts),
                    str(lost.tokens),
                    f"{lost.mean_length:.1f}",
                    kept,
                )
    return table


def estimates_table(title: str, metrics: Mapping[str, float]) -> Table:
    """Metrics of an evaluation with their 95 % intervals where they have one."""
    table = Table(title=plain(title, TITLE), title_justify="left")
    for heading in ("metric", "value", "95 % low", "high"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for name, value in metrics.items():
        if not name.endswith(("/low", "/high")):
            bounds = (metrics.get(f"{name}/{side}") for side in ("low", "high"))
            shown = ("" if bound is None else f"{bound:.4f}" for bound in bounds)
            table.add_row(plain(name), f"{value:.4f}", *shown)
    return table


def findings_table(findings: Sequence[Any]) -> Table:
    """Metrics that were computed again: in how many rounds, and how far off they were at most.

    `findings` are those of `marin_rl.analysis.verify`.
    """
    table = Table(title="Metrics, computed again", title_justify="left")
    for heading in ("metric", "rounds", "largest difference", "wrong"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    names = dict.fromkeys(found.metric for found in findings)
    for name in names:
        own = [found for found in findings if found.metric == name]
        apart = [abs(f.found - f.expected) for f in own if None not in (f.found, f.expected)]
        largest = f"{max(apart):.1e}" if apart else ""
        wrong = sum(bool(found.problem) for found in own)
        table.add_row(plain(name), str(len(own)), largest, str(wrong) if wrong else "")
    return table


def plan_rows(config: Config, plan: Plan) -> dict[str, str]:
    """A plan in words; what cannot be known without the model says so."""

    def or_unknown(n_bytes: int | None) -> str:
        return "unknown: the model folder is not here" if n_bytes is None else size(n_bytes)

    parameters = "unknown" if plan.parameters is None else f"{plan.parameters / 1e6:,.2f}M"
    embedded = not config.inference.endpoints
    return {
        "rounds": f"{plan.rounds:,}",
        "shards": f"{plan.shards:,} ({config.rollouts.shards_per_round} a round)",
        "rollouts": f"{plan.rollouts:,}",
        "tokens sampled": f"at most {plan.tokens_sampled_max:,}",
        "tokens trained on": f"at most {plan.tokens_trained_max:,}",
        "parameters": parameters,
        "training memory": f"{or_unknown(plan.training_bytes)} (weights, gradients, Adam)",
        "engine cache": or_unknown(plan.engine_cache_bytes) if embedded else "remote endpoints",
        "disk, rollouts": f"at most {size(plan.rollout_disk_bytes)}",
        "disk, batches": f"at most {size(plan.batch_disk_bytes)}",
        "disk, scores": f"at most {size(plan.score_disk_bytes)}",
        "disk, checkpoints": or_unknown(plan.checkpoint_disk_bytes),
        "root": config.root,
    }


def _selection(rows: Sequence[Mapping[str, Any]], limit: int) -> list[Mapping[str, Any]]:
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    chosen = evaluated if len(evaluated) >= 2 else list(rows)
    if len(chosen) <= limit:
        return list(chosen)
    step = (len(chosen) - 1) / (limit - 1)
    return [chosen[round(index * step)] for index in range(limit)]


def _print_event(display: RunDisplay, console: Console, event: ProgressEvent) -> None:
    display.update(event)
    if event.run_id != display.run_id:
        return
    if event.message and event.stage in ("start", "done"):
        console.print(plain(event.message))
    elif event.stage == "round":
        parts = [f"round {event.round}"]
        if "reward" in event.metrics:
            parts.append(f"reward {event.metrics['reward']:.3f}")
        if "eval/accuracy" in display.metrics:
            parts.append(f"held-out {display.metrics['eval/accuracy']:.1%}")
        left = display.seconds_left()
        if left is not None:
            parts.append(f"{duration(left)} left")
        console.print("  ".join(parts), highlight=False)
    elif event.stage in ("sft", "reward_model") and event.total and event.done % 50 == 0:
        loss = event.metrics.get(f"{event.stage}/loss")
        tail = f"  loss {loss:.3f}" if loss is not None else ""
        console.print(f"{STAGES[event.stage]} {event.done}/{event.total}{tail}", highlight=False)
