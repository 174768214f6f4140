"""Terminal display: live progress of a run, and tables of results.

Live progress comes from progress events, tables from committed metrics; no file is written. Without
a terminal, one plain line is printed per round.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from marin_rl.config import Config
from marin_rl.planning import Plan
from marin_rl.progress import ProgressEvent, listening

if TYPE_CHECKING:
    from marin_rl.storage.upkeep.audit import RoundAudit

Item = TypeVar("Item")

COUNTED = ("generated", "consumed", "filtered", "stale", "failed")
TEXT_MAX = 4000  # characters of a cell or of a line
TITLE = "table.title"  # Rich's own style of titles, which a Text does not take by itself
SPARKS = "▁▂▃▄▅▆▇█"
METRICS = {  # title and format of the metrics that terminals and reports show
    "reward": ("reward", "{:.3f}"),
    "eval/accuracy": ("held-out accuracy", "{:.1%}"),
    "entropy": ("entropy", "{:.3f}"),
    "kl": ("KL to reference", "{:.2e}"),
    "mismatch_kl": ("mismatch KL", "{:.1e}"),
    "completions/mean_length": ("tokens each", "{:.1f}"),
    "staleness/mean": ("staleness", "{:.2f}"),
    "eval/mean_turns": ("held-out turns", "{:.2f}"),
    "loss": ("loss", "{:.3g}"),
    "grad_norm": ("gradient norm", "{:.3g}"),
    "perf/tokens_per_second": ("tokens/s", "{:,.0f}"),
    "timing_s/round": ("seconds", "{:.2f}"),
    "sft/loss": ("warm-start loss", "{:.3f}"),
    "reward_model/loss": ("preference loss", "{:.3f}"),
    "reward_model/accuracy": ("pairs in order", "{:.1%}"),
}
LIVE = (
    "reward", "eval/accuracy", "perf/tokens_per_second", "entropy", "sft/loss",
    "reward_model/loss", "reward_model/accuracy",
)  # fmt: skip
COLUMNS = (
    "reward", "eval/accuracy", "completions/mean_length", "entropy", "mismatch_kl",
    "perf/tokens_per_second", "timing_s/round",
)  # fmt: skip
_HEADINGS = {  # of the table of rounds, which fits 80 columns
    "eval/accuracy": "held-out accuracy (95 %)",
    "completions/mean_length": "tokens each",
}
_TURNS_FOR = {"completions/mean_length": "eval/mean_turns"}  # in runs of several turns
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
    """The state of a run by its progress events; `render()` draws it."""

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
        """Apply one event; events of other runs are ignored."""
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
        """Rounds to come times the mean seconds of the latest ten; None before two rounds."""
        latest = self.round_seconds[-10:]
        if not latest:
            return None
        return (self.rounds - self.round - 1) * sum(latest) / len(latest)

    def render(self) -> RenderableType:
        """A panel: rounds, stage, main metrics, two curves."""
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
        finished = min(self.round + (self.stage in ("round", "done")), self.rounds)
        bar = ProgressBar(total=max(self.rounds, 1), completed=finished, width=36)
        left = self.seconds_left()
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            f"round {finished:>4}/{self.rounds}",
            bar,
            "" if left is None else f"about {duration(left)} left",
        )
        return grid

    def _stage_line(self) -> Text:
        amount = f" {self.done}/{self.total}" if self.total else ""
        return Text(f"{STAGES.get(self.stage, self.stage)}{amount}", style="dim")

    def _numbers(self) -> Table:
        grid = Table.grid(padding=(0, 3))
        grid.add_row(
            *(
                f"[dim]{METRICS[name][0]}[/dim] [bold]{formatted(name, self.metrics)}[/bold]"
                for name in LIVE
                if name in self.metrics
            )
        )
        return grid

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
    """Format seconds: 42 s, 3 min 05 s, 2 h 10 min."""
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest_s} s"
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    step = (len(items) - 1) / (count - 1)
    return [items[round(index * step)] for index in range(count)]


def size(n_bytes: float | int) -> str:
    """Format bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000 or unit == "TB":
            return f"{n_bytes:,.0f} {unit}" if unit == "B" else f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1000
    raise AssertionError("unreachable")


def printable(text: str) -> str:
    """Replace control characters: models write escape sequences too, and terminals obey them."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def formatted(name: str, metrics: Mapping[str, Any]) -> str:
    """Return one of METRICS as text; empty where there is none."""
    return "" if metrics.get(name) is None else METRICS[name][1].format(metrics[name])


def plain(value: Any, style: str = "") -> Text:
    """The printable text of any value, of which no markup is interpreted."""
    return Text(printable(str(value)), style)


def shortened(text: str) -> str:
    """The printable text, cut after TEXT_MAX characters: a completion may be a megabyte."""
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
    """Rounds with their main metrics; of many, an even selection of the evaluated ones."""
    several = any(row.get("eval/mean_turns") is not None for row in rows)
    columns = [_TURNS_FOR.get(name, name) if several else name for name in COLUMNS]
    headings = (_HEADINGS.get(name, METRICS[name][0]) for name in columns)
    table = _table(title, ("round", *headings))
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    chosen = evaluated if len(rows) > limit and len(evaluated) >= 2 else rows
    for row in evenly(chosen, limit):
        table.add_row(str(row["round"]), *(_round_cell(name, row) for name in columns))
    return table


def fleet_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Servers that announce themselves, with what their last heartbeats say."""
    headings = ("server", "labels", "serves", "queued", "busy", "slots", "tokens/s", "heartbeat")
    table = _table("Fleet", headings, left=("server", "labels", "serves"))
    for row in rows:
        if "error" in row:
            table.add_row(plain(row["server"]), "", plain(row["error"]), *[""] * 5)
            continue
        labels = " ".join(f"{name}={value}" for name, value in sorted(row["labels"].items()))
        numbers = (f"{row[name]:,}" for name in ("queued", "busy", "slots"))
        rate, ago = f"{row['tokens_per_second']:,.0f}", f"{row['beat_ago_s']:,.0f} s ago"
        table.add_row(plain(row["url"]), plain(labels), plain(row["model"]), *numbers, rate, ago)
    return table


def _round_cell(name: str, row: Mapping[str, Any]) -> str:
    """A metric of a round; the held-out accuracy with its 95 % interval, where the row has it."""
    low, high = (row.get(f"{name}/{side}") for side in ("low", "high"))
    interval = "" if low is None or high is None else f" {100 * low:.0f}-{100 * high:.0f}"
    return formatted(name, row) + interval


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """A held-out episode: its turns as (sampled by the model, text), and its reward."""

    turns: tuple[tuple[bool, str], ...]
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePair:
    """The same example, played by the first and by the last evaluated checkpoint."""

    example_id: str
    answer: str
    before: PlayedEpisode
    after: PlayedEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Episodes of two rounds."""

    rounds: tuple[int, int]
    pairs: Sequence[EpisodePair]


def episodes_table(compared: BeforeAfter) -> Table:
    """Held-out episodes of two rounds side by side: the model's turns in bold, and the reward."""
    first, last = compared.rounds
    names = ("answer", f"round {first}", f"round {last}")
    table = _table("The same held-out episodes before and after", names, left=names)
    for pair in compared.pairs:
        table.add_row(plain(pair.answer), _episode_cell(pair.before), _episode_cell(pair.after))
    return table


def _episode_cell(episode: PlayedEpisode) -> Text:
    cell = Text()
    for sampled, text in episode.turns:
        cell.append(shortened(text), "bold" if sampled else "dim").append(" ")
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:.2f}"
    return cell.append(f" {reward}")


def rollouts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rollouts: prompt, last completion, answer, reward, turns, status and stop reason."""
    texts = ("prompt", "completion", "answer", "status", "stop")
    table = _table(
        "Rollouts", (*texts[:3], "reward", "turns", "status", "stop"), left=texts, show_lines=True
    )
    for row in rows:
        reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
        ends = (row["status"], row["finish_reason"])
        cells = (row["prompt"], row["completion"], row["answer"], reward, row["n_turns"], *ends)
        table.add_row(*(Text(shortened(str(cell))) for cell in cells))
    return table


def frame_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Any rectangular result, columns of numbers aligned right."""
    table = Table()
    for index, name in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | Decimal) for row in rows)
        justify = "right" if numeric else "left"
        table.add_column(Text(shortened(str(name))), justify=justify, overflow="fold")
    for row in rows:
        cells = (f"{v:.6g}" if isinstance(v, float) else shortened(str(v)) for v in row)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def audit_table(reports: "Sequence[RoundAudit]") -> Table:
    """A row per round, environment and policy version; cells are rollouts / tokens."""
    names = _environments(reports)
    left = ("env", "whole")
    headings = ("round", *_env(names), "policy", *COUNTED, "length bias", "whole")
    table = _table(f"Rollouts / tokens{_of_only(names)}", headings, left=left)
    for report in reports:
        verdict = "yes" if report.balanced else "NO"
        if not report.balances:
            table.add_row(str(report.round), *[""] * (len(headings) - 2), verdict)
        for item in report.balances:
            cells = [f"{item.rollouts[kind]} / {item.tokens[kind]}" for kind in COUNTED]
            bias = "" if item.length_bias is None else f"{item.length_bias:+.1f}"
            name = _env(names, item.environment)
            table.add_row(str(report.round), *name, str(item.policy_version), *cells, bias, verdict)
    return table


def balance_line(reports: "Sequence[RoundAudit]", waiting: int) -> str:
    """The rollouts of a run in one line; `waiting` are finished and have no disposition yet."""
    kinds = {kind: sum(getattr(report, kind) for report in reports) for kind in COUNTED}
    generated = kinds.pop("generated") + waiting
    parts = " + ".join(f"{kind} {count:,}" for kind, count in {**kinds, "waiting": waiting}.items())
    reused = sum(report.reused for report in reports)
    again = f"; trained on again: {reused:,}" if reused else ""
    return f"generated {generated:,} = {parts}{again}"


def dropped_table(reports: "Sequence[RoundAudit]") -> Table:
    """A row per reason to drop rollouts, with their mean length and that of consumed ones."""
    names = _environments(reports)
    headings = ("policy", "why", "rollouts", "tokens", "mean length", "kept")
    table = _table(
        f"Dropped{_of_only(names)}", ("round", *_env(names), *headings), left=("env", "why")
    )
    for report in reports:
        for item in report.balances:
            kept = "" if item.mean_length is None else f"{item.mean_length:.1f}"
            for dropped in item.dropped:
                table.add_row(
                    str(report.round),
                    *_env(names, item.environment),
                    str(item.policy_version),
                    plain(f"{dropped.disposition}: {dropped.reason}"),
                    str(dropped.rollouts),
                    str(dropped.tokens),
                    f"{dropped.mean_length:.1f}",
                    kept,
                )
    return table


def _environments(reports: "Sequence[RoundAudit]") -> list[str]:
    return sorted({item.environment for report in reports for item in report.balances})


def _of_only(names: Sequence[str]) -> str:
    return f" of {names[0]}" if len(names) == 1 else ""


def _env(names: Sequence[str], cell: str = "env") -> list[str]:
    """The cell, or by default the heading, of the environment's column where there are several."""
    return [escape(printable(cell))] if len(names) > 1 else []


def estimates_table(title: str, metrics: Mapping[str, float]) -> Table:
    """Metrics of an evaluation with their 95 % intervals where they have one."""
    table = _table(title, ("metric", "value", "95 % low", "high"), left=("metric",))
    for name, value in metrics.items():
        if not name.endswith(("/low", "/high")):
            bounds = (metrics.get(f"{name}/{side}") for side in ("low", "high"))
            shown = ("" if bound is None else f"{bound:.4f}" for bound in bounds)
            table.add_row(plain(name), f"{value:.4f}", *shown)
    return table


def findings_table(findings: Sequence[Any]) -> Table:
    """Recomputed metrics (`analysis.verify.Finding`): rounds, largest difference, wrong rounds."""
    headings = ("metric", "rounds", "largest difference", "wrong")
    table = _table("Metrics, computed again", headings, left=("metric",))
    by_metric: dict[str, list[Any]] = {}
    for finding in findings:
        by_metric.setdefault(finding.metric, []).append(finding)
    for name, own in by_metric.items():
        apart = [
            abs(finding.found - finding.expected)
            for finding in own
            if finding.found is not None and finding.expected is not None
        ]
        largest = f"{max(apart):.1e}" if apart else ""
        wrong = sum(bool(finding.problem) for finding in own)
        table.add_row(plain(name), str(len(own)), largest, str(wrong) if wrong else "")
    return table


def _table(
    title: str, headings: Sequence[str], left: Sequence[str] = (), *, show_lines: bool = False
) -> Table:
    """An empty table; columns that are not in `left` are aligned right, as numbers are.

    It has no vertical lines, so that more columns fit, and cuts no cell: it goes on in a new line.
    """
    table = Table(
        title=plain(title, TITLE),
        title_justify="left",
        show_lines=show_lines,
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in headings:
        table.add_column(
            heading,
            justify="left" if heading in left else "right",
            overflow="fold",
            min_width=max(map(len, heading.split())),
        )
    return table


def plan_rows(config: Config, plan: Plan) -> dict[str, str]:
    """A plan as text; sizes are unknown without the model's folder."""

    def or_unknown(n_bytes: int | None) -> str:
        return "unknown: the model folder is not here" if n_bytes is None else size(n_bytes)

    parameters = "unknown" if plan.parameters is None else f"{plan.parameters / 1e6:,.2f}M"
    kinds = "weights, gradients, Adam"
    if config.policy.lora is not None:
        kinds = "frozen base; the adapter's weights, gradients, Adam"
        if config.policy.quantize_base is not None:
            kinds = f"base in {config.policy.quantize_base}" + kinds.removeprefix("frozen base")
        if plan.trained_parameters is not None:
            parameters += f"; an adapter of {plan.trained_parameters / 1e6:,.2f}M is trained"
    embedded = not config.inference.endpoints
    return {
        "rounds": f"{plan.rounds:,}",
        "shards": f"{plan.shards:,} ({config.rollouts.shards_per_round} a round)",
        "rollouts": f"{plan.rollouts:,}"
        + (f" to {plan.rollouts_max:,}" if plan.rollouts_max > plan.rollouts else ""),
        "tokens sampled": f"at most {plan.tokens_sampled_max:,}",
        "tokens trained on": f"at most {plan.tokens_trained_max:,}",
        "parameters": parameters,
        "training memory": f"{or_unknown(plan.training_bytes)} ({kinds})",
        "activations": f"about {or_unknown(plan.activation_bytes)} a microbatch",
        "engine cache": or_unknown(plan.engine_cache_bytes) if embedded else "remote endpoints",
        "overlap": _overlap(config, plan),
        "engine weights": or_unknown(plan.engine_weight_bytes) if embedded else "remote endpoints",
        "memory together": f"about {or_unknown(plan.memory_bytes)}",
        "disk, rollouts": f"at most {size(plan.rollout_disk_bytes)}",
        "disk, batches": f"at most {size(plan.batch_disk_bytes)}",
        "disk, scores": f"at most {size(plan.score_disk_bytes)}",
        "disk, checkpoints": or_unknown(plan.checkpoint_disk_bytes),
        "root": config.root,
    }


def _overlap(config: Config, plan: Plan) -> str:
    """Gain of sampling during training, which a run has or would have."""
    saves = f"up to {plan.overlap_saves:.0%} of a round, by operations"
    if not config.inference.endpoints:
        ahead = "they take one device in turn" if config.max_staleness else "they alternate"
        return f"{ahead}; with endpoints on other devices max_staleness 1 would save {saves}"
    if config.max_staleness:
        return f"sampling during training saves {saves}"
    return f"they alternate; asynchrony.max_staleness 1 would save {saves}"


def _print_event(display: RunDisplay, console: Console, event: ProgressEvent) -> None:
    display.update(event)
    if event.run_id != display.run_id:
        return
    if event.message and event.stage in ("start", "done"):
        console.print(plain(event.message))
    elif event.stage == "round":
        line = f"round {event.round}"
        if "reward" in event.metrics:
            line += f"  reward {event.metrics['reward']:.3f}"
        if "eval/accuracy" in display.metrics:
            line += f"  held-out {display.metrics['eval/accuracy']:.1%}"
        if (left := display.seconds_left()) is not None:
            line += f"  {duration(left)} left"
        console.print(line, highlight=False)
    elif event.stage in ("sft", "reward_model") and event.total and event.done % 50 == 0:
        loss = event.metrics.get(f"{event.stage}/loss")
        tail = f"  loss {loss:.3f}" if loss is not None else ""
        console.print(f"{STAGES[event.stage]} {event.done}/{event.total}{tail}", highlight=False)
