"""Commands that show a run: `status`, `rollouts`, `sql`, `report`, `view`. None changes one."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from marin_rl.errors import ConfigError, MarinRLError

if TYPE_CHECKING:
    from marin_rl.dashboard import Looks
    from marin_rl.storage.runs import Run

EVERY_S = 2.0

Groups = Annotated[int, typer.Option("--groups", min=1, max=256, help="groups shown of a round")]
Members = Annotated[int, typer.Option("--members", min=1, max=256, help="rollouts of a group")]
RolloutsMax = Annotated[
    int, typer.Option("--rollouts-max", min=1, help="rollouts of a page; rounds are left out first")
]


def status(
    run_name: AnyRunName = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="draw stage, curves and warnings, until complete")
    ] = False,
    every_s: Annotated[
        float | None, typer.Option("--every", min=0.2, help="seconds between two looks; default: 2")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="with --watch: look once and stop")] = False,
    as_json: AsJsonLines = False,
    root: Root = "runs",
) -> None:
    """Show what is committed, and the latest numbers, of one run or of all.

    With several runs, exit code 1 if one cannot be read; the others are shown all the same.
    --watch follows them in the terminal, without Prefect; with --json a line per run and look.
    """
    if watch:
        _watch(run_name, every_s or EVERY_S, once=once, as_json=as_json, root=root)
        return
    if once or every_s is not None:
        raise ConfigError(f"{'--once' if once else '--every'} needs --watch")
    if run_name is None:
        _status_of_all(root, as_json=as_json)
        return
    from marin_rl.analysis.status import run_status
    from marin_rl.display import key_values, rounds_table

    current = run_status(root, run_name)
    if as_json:
        tell_json(asdict(current))
        return
    out.print(key_values(f"Run {run_name}", current.facts))
    if current.rounds:
        out.print(rounds_table(current.rounds, "Rounds"))


def _status_of_all(root: str, *, as_json: bool) -> None:
    """Print a line for each run. Exit code 1, and a line on standard error, for unreadable ones."""
    from marin_rl.analysis.status import RunStatus, each_run, run_status
    from marin_rl.display import plain

    runs = each_run(root, lambda name: run_status(root, name))
    broken = [item for item in runs if not isinstance(item, RunStatus)]
    for item in runs:
        if as_json:
            tell_json(asdict(item))
        elif isinstance(item, RunStatus):
            out.print(plain(item.run_id, "bold"), end=": ", soft_wrap=True)
            tell(f"{item.trained} of {item.planned} rounds. {item.headline}".rstrip())
    if not runs and not as_json:
        tell(f"no runs under {root}")
    complain(f"{item.run_id}: {item.error}" for item in broken)
    if broken:
        raise typer.Exit(1)


def _watch(run_name: str | None, every_s: float, *, once: bool, as_json: bool, root: str) -> None:
    """Follow one run or all. Exit code 1 if one cannot be read at the end."""
    from marin_rl import dashboard
    from marin_rl.analysis.watch import Look, Watched

    watched = Watched(root)
    latest: dashboard.Looks = ()

    def look() -> dashboard.Looks:
        nonlocal latest
        latest = watched.all() if run_name is None else watched.one(run_name)
        return latest

    with suppress(KeyboardInterrupt):
        if as_json:
            _print_looks(look, every_s, once=once)
        else:
            dashboard.watch(look, out, every_s, once=once)
    if not isinstance(latest, Look) and not all(isinstance(item, Look) for item in latest):
        raise typer.Exit(1)


def _print_looks(look: Callable[[], "Looks"], every_s: float, *, once: bool) -> None:
    """Print a line of JSON per run and look, with the latest row of the metrics.

    A transient failure of the store is reported on standard error, and the look repeated. Raises
    what `look` raises otherwise, and at first.
    """
    from marin_rl.analysis.watch import Look
    from marin_rl.dashboard import complete

    looks = look()
    while True:
        for item in [looks] if isinstance(looks, Look) else looks:
            record = asdict(item)
            if isinstance(item, Look):
                record |= {"latest": item.rows[-1] if item.rows else None}
                del record["rows"]
            tell_json(record)
        if once or complete(looks):
            return
        looks = _next_look(look, every_s)


def _next_look(look: Callable[[], "Looks"], every_s: float) -> "Looks":
    while True:
        time.sleep(every_s)
        try:
            return look()
        except MarinRLError as error:
            if not error.transient:
                raise
            complain([f"not updated: {error}"])


def rollouts(
    run_name: RunName,
    *,
    round_number: LatestRound = None,
    limit: Annotated[int, typer.Option(min=1, help="number of rollouts")] = 8,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    as_json: AsJsonLines = False,
    root: Root = "runs",
) -> None:
    """Show rollouts of a round: prompt, completion, reward."""
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


def report(
    run_name: RunName,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="HTML file")] = None,
    curve: Annotated[
        Path | None, typer.Option("--curve", help="instead: the learning curve as a PNG file")
    ] = None,
    groups: Groups = 4,
    members: Members = 4,
    rollouts_max: RolloutsMax = 1600,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Write a run as one HTML page that needs no network: curves, rollouts, lineage."""
    from marin_rl.storage.runs import Run

    run = Run.open(root, run_name)
    if curve is not None:
        if output is not None:
            raise ConfigError("--curve writes a picture instead of the page: leave out --output")
        _write_curve(run, curve, as_json=as_json)
        return
    from marin_rl.display import size
    from marin_rl.pages.document import Choice, RunPage
    from marin_rl.pages.html import report_html

    choice = Choice(groups_per_round=groups, members_per_group=members, rollouts_max=rollouts_max)
    page = RunPage(run, choice).page()
    target = output or Path(f"{run_name}.html")
    data = report_html(page).encode()
    target.write_bytes(data)
    if as_json:
        tell_json({"path": target, "bytes": len(data), "stage": page.stage, "ended": page.ended})
        return
    tell(f"wrote {target} ({size(len(data))})")


def _write_curve(run: "Run", target: Path, *, as_json: bool) -> None:
    from marin_rl.analysis.learning_curve import learning_curve
    from marin_rl.analysis.status import metric_rows

    target.write_bytes(learning_curve(metric_rows(run), run.run_id))
    if as_json:
        tell_json({"path": target})
        return
    tell(f"wrote {target}")


def view(
    run_name: RunName,
    *,
    host: Annotated[str, typer.Option(help="a loopback address; others are refused")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8765,
    groups: Groups = 4,
    members: Members = 4,
    rollouts_max: RolloutsMax = 1600,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Serve the page of a run on this machine; it follows the run until you press Ctrl-C."""
    from marin_rl.pages.document import Choice, RunPage
    from marin_rl.pages.live import serve_view
    from marin_rl.storage.runs import Run

    choice = Choice(groups_per_round=groups, members_per_group=members, rollouts_max=rollouts_max)
    page = RunPage(Run.open(root, run_name), choice)

    def announce(address: str) -> None:
        if as_json:
            tell_json({"run_id": run_name, "address": address})
            return
        tell(f"{run_name} at {address} (Ctrl-C ends)")

    with suppress(KeyboardInterrupt):
        serve_view(page, run_name, host, port, announce)
