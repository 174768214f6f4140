"""Where a run stands and what it sampled, for people: from committed slots only.

Returns plain rows; drawing them is the display's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from marin_rl.analysis.scan import scan_rollouts
from marin_rl.errors import ObjectMissing
from marin_rl.rounds import evaluations
from marin_rl.storage.audit import audit_run
from marin_rl.storage.metrics import read_metrics
from marin_rl.storage.runs import Run, progress, runs_under

Options = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Facts of a run in reading order, its metric rows, and one sentence on what it learned."""

    run_id: str
    facts: Mapping[str, str]
    rounds: Sequence[Mapping[str, Any]]
    headline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSummary:
    """One row per audited round, and a line per thing that does not balance."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    problems: Sequence[str]


def run_status(root: str, run_id: str, options: Options = None) -> RunStatus:
    """Committed slots and metrics of one run. Raises ObjectMissing naming the runs there are."""
    run = Run.open(root, run_id, options)
    found = progress(run)
    rows = metric_rows(run)
    checkpoints = [number for number, item in found.items() if item.checkpoint]
    return RunStatus(
        run_id=run_id,
        facts={
            "root": run.store.url,
            "rounds trained": f"{max(checkpoints, default=0)} of {run.config.rounds}",
            "checkpoints": str(len(checkpoints)),
            "shards": str(sum(item.shards for item in found.values())),
            "environment": run.config.environment.name,
            "policy": f"init {run.config.policy.init}, tokenizer {run.config.policy.tokenizer}",
            "in progress": _open_round(run, found),
        },
        rounds=rows,
        headline=headline(rows),
    )


def all_statuses(root: str, options: Options = None) -> list[RunStatus]:
    """The status of every run under a root."""
    return [run_status(root, run_id, options) for run_id in runs_under(root, options)]


def metric_rows(run: Run) -> list[dict[str, Any]]:
    """The committed metrics of a run, one row per round, ascending.

    Row r has the evaluation of checkpoint r; a last row may hold nothing else.
    """
    rows = {row["round"]: row for row in read_metrics(run).to_pylist()}
    for round, metrics in evaluations(run).items():
        rows.setdefault(round, {"round": round}).update(metrics)
    return [rows[round] for round in sorted(rows)]


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """How held-out accuracy went, in one sentence; empty before there are two evaluations."""
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    if len(evaluated) < 2:
        return ""
    first, last = evaluated[0], evaluated[-1]
    change = 100 * (last["eval/accuracy"] - first["eval/accuracy"])
    return (
        f"Held-out accuracy went from {first['eval/accuracy']:.1%} (round {first['round']}) to "
        f"{last['eval/accuracy']:.1%} (round {last['round']}): {change:+.1f} points."
    )


def sample_rollouts(
    root: str,
    run_id: str,
    round_number: int | None,
    limit: int,
    *,
    worst_first: bool = False,
    options: Options = None,
) -> list[dict[str, Any]]:
    """Rollouts of one round (default: the newest) by reward: question, completion, reward.

    Raises ObjectMissing when the round has no committed rollouts.
    """
    frame = scan_rollouts(root, run_id, options or {})
    if round_number is None:
        newest = frame.select(pl.col("round").max()).collect().item()
        round_number = int(newest) if newest is not None else 0
    rows = (
        frame.filter(pl.col("round") == round_number)
        .select("round", "example_id", "index_in_group", "turns", "answer", "reward", "status")
        .sort("reward", descending=not worst_first, nulls_last=True)
        .head(limit)
        .collect()
        .to_dicts()
    )
    if not rows:
        raise ObjectMissing(
            f"run {run_id!r} has no committed rollouts of round {round_number} under {root}: "
            f"`marin-rl status {run_id}` shows which rounds there are"
        )
    return [_sample(row) for row in rows]


def audit_summary(root: str, run_id: str, options: Options = None) -> AuditSummary:
    """Audit every round whose batches are committed, and no rollout twice across them."""
    counted = ("generated", "consumed", "filtered", "stale", "failed")
    rows: list[Sequence[Any]] = []
    problems: list[str] = []
    for report in audit_run(Run.open(root, run_id, options)):
        counts = (getattr(report, name) for name in counted)
        rows.append((report.round, *counts, "yes" if report.balanced else "NO"))
        problems += [f"round {report.round}: {line}" for line in report.problems]
    return AuditSummary(columns=("round", *counted, "balanced"), rows=rows, problems=problems)


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = row["turns"] or []
    said = {turn["role"]: turn["content"] for turn in turns}
    return {
        "example": row["example_id"],
        "prompt": said.get("user", ""),
        "completion": said.get("assistant", ""),
        "answer": row["answer"] or "",
        "reward": row["reward"],
        "status": row["status"],
    }


def _open_round(run: Run, found: Mapping[int, Any]) -> str:
    unfinished = [
        number
        for number, item in found.items()
        if item.shards and number + 1 not in {n for n, i in found.items() if i.checkpoint}
    ]
    if not unfinished:
        return "nothing"
    number = unfinished[-1]
    item = found[number]
    done = [name for name in ("rollouts", "batches") if getattr(item, name)]
    shards = f"{item.shards}/{run.config.rollouts.shards_per_round} shards"
    return f"round {number}: {shards}" + (f", {', '.join(done)} committed" if done else "")
