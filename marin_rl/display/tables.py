"""Tables of rounds, rollouts, audits, estimates and query results; numbers as people read them."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from marin_rl.storage.upkeep.audit import RoundAudit


Item = TypeVar("Item")

TEXT_MAX = 4000  # characters of a cell or of a line

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as block characters, from 0 to 1."""
    shown = [min(max(value, 0.0), 1.0) for value in values[-width:]]
    return "".join(SPARKS[round(value * (len(SPARKS) - 1))] for value in shown)


def duration(seconds: float | int) -> str:
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
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000 or unit == "TB":
            return f"{n_bytes:,.0f} {unit}" if unit == "B" else f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1000
    raise AssertionError("unreachable")


def printable(text: str) -> str:
    """Replace control characters: models write escape sequences too, and terminals obey them."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def shortened(text: str) -> str:
    """The printable text, cut after TEXT_MAX characters: a completion may be a megabyte."""
    left = len(text) - TEXT_MAX
    if left <= 0:
        return printable(text)
    return f"{printable(text[:TEXT_MAX])}… ({left:,} characters more: --json has them)"


WORD_MAX = 24  # characters of a column that are never broken
TITLE = "table.title"  # Rich's own style of titles, which a Text does not take by itself

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
    "preference/loss": ("preference loss", "{:.3f}"),
    "preference/accuracy": ("pairs in order", "{:.1%}"),
}

COLUMNS = (
    "reward", "eval/accuracy", "completions/mean_length", "entropy", "mismatch_kl",
    "perf/tokens_per_second", "timing_s/round",
)  # fmt: skip

_HEADINGS = {  # of the table of rounds, which fits 80 columns
    "eval/accuracy": "held-out accuracy (95 %)",
    "completions/mean_length": "tokens each",
}

_TURNS_FOR = {"completions/mean_length": "eval/mean_turns"}  # in runs of several turns


COUNTED = ("generated", "consumed", "filtered", "stale", "failed")  # kinds of an audit


def formatted(name: str, metrics: Mapping[str, Any]) -> str:
    return "" if metrics.get(name) is None else METRICS[name][1].format(metrics[name])


def plain(value: Any, style: str = "") -> Text:
    """The printable text of any value, of which no markup is interpreted."""
    return Text(printable(str(value)), style)


def key_values(title: str, rows: Mapping[str, Any]) -> Table:
    table = Table(title=plain(title, TITLE), show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")  # a path that is cut is none
    for name, value in rows.items():
        table.add_row(plain(name), plain(value))
    return table


def frame_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Any rectangular result, columns of numbers aligned right; no word is broken."""
    table = Table()
    cells = [[_cell(value) for value in row] for row in rows]
    for index, name in enumerate(map(_cell, columns)):
        numeric = all(isinstance(row[index], int | float | Decimal) for row in rows)
        words = [word for cell in (name, *(row[index] for row in cells)) for word in cell.split()]
        table.add_column(
            Text(name),
            justify="right" if numeric else "left",
            overflow="fold",
            min_width=min(max(map(len, words), default=1), WORD_MAX),
        )
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def query_result(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int
) -> RenderableType:
    """A result of SQL as a table, or row below row where `width` characters are too few for it."""
    table = frame_table(columns, rows)
    # Each column has a border and two blanks besides its longest word.
    least = 1 + sum(3 + (column.min_width or 1) for column in table.columns)
    if least <= width or not rows:
        return table
    return Group(
        *(
            key_values(f"row {number} of {len(rows)}", dict(zip(columns, cells, strict=True)))
            for number, cells in enumerate(([*map(_cell, row)] for row in rows), start=1)
        )
    )


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shortened(str(value))


def empty_table(
    title: str, headings: Sequence[str], left: Sequence[str] = (), *, show_lines: bool = False
) -> Table:
    """An empty table; columns that are not in `left` are aligned right, as numbers are.

    It has no vertical lines, so that more columns fit, and wraps long cells.
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


def rounds_table(rows: Sequence[Mapping[str, Any]], title: str, limit: int = 12) -> Table:
    """Rounds with their main metrics; of many, an even selection of the evaluated ones."""
    several = any(row.get("eval/mean_turns") is not None for row in rows)
    columns = [_TURNS_FOR.get(name, name) if several else name for name in COLUMNS]
    headings = (_HEADINGS.get(name, METRICS[name][0]) for name in columns)
    table = empty_table(title, ("round", *headings))
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    chosen = evaluated if len(rows) > limit and len(evaluated) >= 2 else rows
    for row in evenly(chosen, limit):
        cells = [formatted(name, row) for name in columns]
        low, high = (row.get(f"eval/accuracy/{side}") for side in ("low", "high"))
        if low is not None and high is not None:
            cells[columns.index("eval/accuracy")] += f" {100 * low:.0f}-{100 * high:.0f}"
        table.add_row(str(row["round"]), *cells)
    return table


def fleet_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    headings = (
        "server", "labels", "serves", "queued", "busy", "slots", "tokens/s", "idle", "heartbeat",
    )  # fmt: skip
    table = empty_table("Fleet", headings, left=("server", "labels", "serves"))
    for row in rows:
        if "error" in row:
            table.add_row(plain(row["server"]), "", plain(row["error"]), *[""] * 6)
            continue
        labels = " ".join(f"{name}={value}" for name, value in sorted(row["labels"].items()))
        numbers = (f"{row[name]:,}" for name in ("queued", "busy", "slots"))
        idle = "" if row.get("idle") is None else f"{row['idle']:.0%}"
        speed = (f"{row['tokens_per_second']:,.0f}", idle, f"{row['beat_ago_s']:,.0f} s ago")
        served = row["model"]
        if row.get("adapters") is not None:  # versions next to one base each
            names = dict.fromkeys((served, *row["adapters"]))
            served = f"{', '.join(names)} as adapters of {row['base_digest'][:8]}"
        table.add_row(plain(row["url"]), plain(labels), plain(served), *numbers, *speed)
    return table


def rollouts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    texts = ("prompt", "completion", "answer", "status", "stop")
    table = empty_table(
        "Rollouts", (*texts[:3], "reward", "turns", "status", "stop"), left=texts, show_lines=True
    )
    for row in rows:
        reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
        ends = (row["status"], row["finish_reason"])
        cells = (row["prompt"], row["completion"], row["answer"], reward, row["n_turns"], *ends)
        table.add_row(*(Text(shortened(str(cell))) for cell in cells))
    return table


def estimates_table(title: str, metrics: Mapping[str, float]) -> Table:
    table = empty_table(title, ("metric", "value", "95 % low", "high"), left=("metric",))
    for name, value in metrics.items():
        if not name.endswith(("/low", "/high")):
            bounds = (metrics.get(f"{name}/{side}") for side in ("low", "high"))
            shown = ("" if bound is None else f"{bound:.4f}" for bound in bounds)
            table.add_row(plain(name), f"{value:.4f}", *shown)
    return table


def findings_table(findings: Sequence[Any]) -> Table:
    """Recomputed metrics (`analysis.verify.Finding`): rounds, largest difference, wrong rounds."""
    headings = ("metric", "rounds", "largest difference", "wrong")
    table = empty_table("Metrics, computed again", headings, left=("metric",))
    by_metric: dict[str, list[Any]] = {}
    for finding in findings:
        by_metric.setdefault(finding.metric, []).append(finding)
    for name, own in by_metric.items():
        known = [each for each in own if None not in (each.found, each.expected)]
        apart = [abs(each.found - each.expected) for each in known]
        largest = f"{max(apart):.1e}" if apart else ""
        wrong = sum(bool(finding.problem) for finding in own)
        table.add_row(plain(name), str(len(own)), largest, str(wrong) if wrong else "")
    return table


def audit_table(reports: "Sequence[RoundAudit]") -> Table:
    """A row per round, environment and policy version; cells are rollouts / tokens."""
    names, of = _environments(reports)
    headings = ("round", *_env(names), "policy", *COUNTED, "length bias", "whole")
    table = empty_table(f"Rollouts / tokens{of}", headings, left=("env", "whole"))
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
    names, of = _environments(reports)
    headings = ("policy", "why", "rollouts", "tokens", "mean length", "kept")
    table = empty_table(f"Dropped{of}", ("round", *_env(names), *headings), left=("env", "why"))
    for report in reports:
        for item in report.balances:
            kept = "" if item.mean_length is None else f"{item.mean_length:.1f}"
            head = (str(report.round), *_env(names, item.environment), str(item.policy_version))
            for one in item.dropped:
                why, length = plain(f"{one.disposition}: {one.reason}"), f"{one.mean_length:.1f}"
                table.add_row(*head, why, str(one.rollouts), str(one.tokens), length, kept)
    return table


def _environments(reports: "Sequence[RoundAudit]") -> tuple[list[str], str]:
    """Names of the environments, and a suffix for titles that names a single one."""
    names = sorted({item.environment for report in reports for item in report.balances})
    return names, f" of {names[0]}" if len(names) == 1 else ""


def _env(names: Sequence[str], cell: str = "env") -> list[str]:
    """Cell, or by default heading, of the column `env`, which tables of one environment lack."""
    return [escape(printable(cell))] if len(names) > 1 else []
