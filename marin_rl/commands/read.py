"""The commands that read runs: `status`, `rollouts`, `sql`, `audit`, `plot`. None changes one."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from marin_rl.commands.options import (
    AnyRunName,
    AsJson,
    AsJsonLines,
    LatestRound,
    Root,
    RunName,
    complain,
    out,
    tell,
    tell_json,
)


def status(
    run_name: AnyRunName = None,
    *,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Show what is committed, and the latest numbers, of one run or of all.

    With several runs, exit code 1 if one cannot be read; the others are shown all the same.
    """
    from marin_rl.analysis.status import run_status
    from marin_rl.display import key_values, rounds_table

    if run_name is None:
        _status_of_all(root, as_json=as_json)
        return
    found = run_status(root, run_name)
    if as_json:
        tell_json(asdict(found))
        return
    out.print(key_values(f"Run {run_name}", found.facts))
    if found.rounds:
        out.print(rounds_table(found.rounds, "Rounds"))


def _status_of_all(root: str, *, as_json: bool) -> None:
    """A line for each run; those that cannot be read are named on standard error, and exit 1."""
    from marin_rl.analysis.status import RunStatus, each_run, run_status
    from marin_rl.display import plain

    seen = each_run(root, lambda name: run_status(root, name))
    broken = [item for item in seen if not isinstance(item, RunStatus)]
    for item in seen:
        if as_json:
            tell_json(asdict(item))
        elif isinstance(item, RunStatus):
            out.print(plain(item.run_id, "bold"), end=": ", soft_wrap=True)
            tell(f"{item.trained} of {item.planned} rounds. {item.headline}".rstrip())
    if not seen and not as_json:
        tell(f"no runs under {root}")
    complain(f"{item.run_id}: {item.error}" for item in broken)
    if broken:
        raise typer.Exit(1)


def rollouts(
    run_name: RunName,
    *,
    round_number: LatestRound = None,
    limit: Annotated[int, typer.Option(min=1, help="how many rollouts")] = 8,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    as_json: AsJsonLines = False,
    root: Root = "runs",
) -> None:
    """Read rollouts of a round: prompt, completion, reward."""
    from marin_rl.analysis.status import sample_rollouts
    from marin_rl.display import rollouts_table
    from marin_rl.storage.runs import Run

    rows = sample_rollouts(Run.open(root, run_name), round_number, limit, worst_first=worst)
    if as_json:
        for row in rows:
            tell_json(row)
        return
    out.print(rollouts_table(rows))


def sql(
    run_name: RunName,
    query: Annotated[str, typer.Argument(help="DuckDB's SQL over the tables below")],
    *,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="let the query reach other files, and write")
    ] = False,
    as_json: AsJsonLines = False,
    root: Root = "runs",
) -> None:
    """Query a run with DuckDB: rollouts, batches, dispositions, metrics, evals, scores.

    A query reads the run's own files and writes none, unless --unsafe is given.
    """
    from marin_rl.analysis.scan import sql as run_sql
    from marin_rl.display import frame_table

    frame = run_sql(root, run_name, query, unsafe=unsafe)
    if as_json:
        for row in frame.iter_rows(named=True):
            tell_json(row)
        return
    out.print(frame_table(frame.columns, frame.rows()))


def audit(run_name: RunName, *, as_json: AsJsonLines = False, root: Root = "runs") -> None:
    """Check from the files alone that every rollout is accounted for. Exit code 1 if not.

    Cells are rollouts / tokens. Length bias is how many tokens longer what was dropped is, on
    average, than what was trained on.
    """
    from marin_rl.display import audit_table, dropped_table
    from marin_rl.storage.runs import Run
    from marin_rl.storage.upkeep.audit import audit_run

    reports = list(audit_run(Run.open(root, run_name)))
    if as_json:
        for report in reports:
            tell_json({"balanced": report.balanced, **asdict(report)})
    else:
        out.print(audit_table(reports))
        if any(balance.dropped for report in reports for balance in report.balances):
            out.print(dropped_table(reports))
        complain(f"round {report.round}: {line}" for report in reports for line in report.problems)
    if any(report.problems for report in reports):
        raise typer.Exit(1)


def plot(
    run_name: RunName,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="PNG file")] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Draw the learning curve of a run."""
    from marin_rl.analysis.report import learning_curve
    from marin_rl.analysis.status import metric_rows
    from marin_rl.storage.runs import Run

    target = output or Path(f"{run_name}.png")
    target.write_bytes(learning_curve(metric_rows(Run.open(root, run_name)), run_name))
    if as_json:
        tell_json({"path": target})
        return
    tell(f"wrote {target}")
