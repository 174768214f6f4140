"""Tables of an audit: what became of the rollouts of each round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from marin_rl.display.tables import empty_table, plain
from marin_rl.display.text import printable

if TYPE_CHECKING:
    from marin_rl.storage.upkeep.audit import RoundAudit

COUNTED = ("generated", "consumed", "filtered", "stale", "failed")


def audit_table(reports: "Sequence[RoundAudit]") -> Table:
    """A row per round, environment and policy version; cells are rollouts / tokens."""
    names = _environments(reports)
    left = ("env", "whole")
    headings = ("round", *_env(names), "policy", *COUNTED, "length bias", "whole")
    table = empty_table(f"Rollouts / tokens{_of_only(names)}", headings, left=left)
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
    table = empty_table(
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
