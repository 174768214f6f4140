"""Commands that show a run: `status`, `rollouts`, `sql`, `report`, `view`. None changes one."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marin_rl.commands import options as opt
from marin_rl.errors import ConfigError

if TYPE_CHECKING:
    from marin_rl.storage.runs import Run

Groups = Annotated[int, typer.Option("--groups", min=1, max=256, help="groups shown of a round")]
Members = Annotated[int, typer.Option("--members", min=1, max=256, help="rollouts of a group")]
RolloutsMax = Annotated[
    int, typer.Option("--rollouts-max", min=1, help="rollouts of a page; rounds are left out first")
]


def status(
    run_name: opt.AnyRunName = None, *, as_json: opt.AsJsonLines = False, root: opt.Root = "runs"
) -> None:
    """Show rounds and latest metrics of one run or of all.

    With several runs, exit code 1 if one cannot be read; the others are shown all the same.
    """
    if run_name is None:
        _status_of_all(root, as_json=as_json)
        return
    from marin_rl.analysis.status import run_status
    from marin_rl.display.tables import fleet_table, key_values, rounds_table

    current = run_status(root, run_name)
    if as_json:
        opt.print_json(current)
        return
    opt.out.print(key_values(f"Run {run_name}", current.facts))
    if current.rounds:
        opt.out.print(rounds_table(current.rounds, "Rounds"))
    if current.fleet:
        opt.out.print(fleet_table(current.fleet))
    opt.print_summary(current)


def _status_of_all(root: str, *, as_json: bool) -> None:
    """Print a line for each run. Exit code 1, and a line on standard error, for unreadable ones."""
    from marin_rl.analysis.status import RunStatus, each_run, run_status
    from marin_rl.display.tables import plain

    runs = each_run(root, lambda name: run_status(root, name))
    broken = [item for item in runs if not isinstance(item, RunStatus)]
    for item in runs:
        if as_json:
            opt.print_json(item)
        elif isinstance(item, RunStatus):
            opt.out.print(plain(item.run_id, "bold"), end=": ", soft_wrap=True)
            opt.print_info(f"{item.trained} of {item.planned} rounds. {item.headline}".rstrip())
    if not runs and not as_json:
        opt.print_info(f"no runs under {root}")
    opt.print_error(*(f"{item.run_id}: {item.error}" for item in broken))
    if broken:
        raise typer.Exit(1)


def rollouts(  # noqa: PLR0913 - each is an option of the command
    run_name: opt.RunName,
    *,
    round_number: opt.LatestRound = None,
    rollout: Annotated[
        str | None,
        typer.Option("--id", help="one rollout with all its turns: its id, or the end of it"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="number of rollouts; default: 8")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    tool: Annotated[
        str | None, typer.Option("--tool", metavar="NAME", help="only those that used this tool")
    ] = None,
    finish_reason: Annotated[
        str | None,
        typer.Option("--finish-reason", metavar="REASON", help="only those that ended like this"),
    ] = None,
    min_turns: Annotated[
        int, typer.Option("--min-turns", min=0, help="only those with as many turns of the model")
    ] = 0,
    max_turns: Annotated[
        int | None, typer.Option("--max-turns", min=0, help="only those with no more turns")
    ] = None,
    as_json: opt.AsJsonLines = False,
    root: opt.Root = "runs",
) -> None:
    """Show rollouts of a round: prompt, completion, reward.

    --id shows one of them as a dialogue: every turn in order, with its reward.
    """
    from marin_rl.analysis.dialogues import RolloutFilter, dialogue, rollout_named, sample_rollouts

    where = RolloutFilter(
        tool=tool, finish_reason=finish_reason, min_turns=min_turns, max_turns=max_turns
    )
    run = opt.open_run(root, run_name)
    if rollout is not None:
        if where.asks or worst or limit is not None:
            raise ConfigError("--id shows one rollout: leave out what chooses among several")
        rows = [rollout_named(run, rollout, round_number)]
    else:
        rows = sample_rollouts(run, round_number, limit or 8, worst_first=worst, where=where)
    if as_json:
        opt.print_json(*rows)
    elif rollout is not None:
        opt.out.print(dialogue(rows[0]))
    else:
        _print_rollouts(run, rows)


def _print_rollouts(run: "Run", rows: Sequence[Mapping[str, Any]]) -> None:
    from marin_rl.analysis.dialogues import count_rollouts
    from marin_rl.display.tables import rollouts_table

    opt.out.print(rollouts_table(rows))
    if rows and (count := count_rollouts(run, rows[0]["rollout_id"])) > len(rows):
        opt.print_info(f"{len(rows)} of {count:,} rollouts of the round: --limit N shows more")
    if any(row["n_turns"] > 1 for row in rows):
        longest = max(rows, key=lambda row: row["n_turns"])
        opt.print_info(
            f"all turns of one: marin-rl rollouts {run.run_id} --id {longest['rollout_id']}"
        )
    elif not rows:
        opt.print_info("no rollout of this round fulfils these conditions")


def sql(
    run_name: opt.RunName,
    query: Annotated[
        str | None, typer.Argument(help="DuckDB's SQL; none: the tables and their columns")
    ] = None,
    *,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="let the query reach other files, and write")
    ] = False,
    as_json: opt.AsJsonLines = False,
    root: opt.Root = "runs",
) -> None:
    """Query the tables of a run with DuckDB.

    They are rollouts, batches, dispositions, scores, metrics, evals and rewards (of `rescore`). A
    query reads the run's own files and writes none, unless --unsafe is given.
    """
    from marin_rl.analysis.query import answer_rows, tables
    from marin_rl.display.tables import query_result

    if query is None:
        for table, columns in tables(root, run_name).items():
            lines = (f"    {column}  {kind}" for column, kind in columns.items())
            opt.print_result({"table": table, "columns": columns}, table, *lines, as_json=as_json)
        return
    answer = answer_rows(root, run_name, query, unsafe=unsafe)
    if as_json:
        opt.print_json(*(dict(zip(answer.columns, row, strict=True)) for row in answer.rows))
        return
    opt.out.print(query_result(answer.columns, answer.rows, opt.out.width))


def report(
    run_name: opt.RunName,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file; default: report.html in the run's folder"),
    ] = None,
    curve: Annotated[
        Path | None, typer.Option("--curve", help="instead: the learning curve as a PNG file")
    ] = None,
    groups: Groups = 4,
    members: Members = 4,
    rollouts_max: RolloutsMax = 1600,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Write a run as one HTML page.

    It has curves, rollouts and lineage, and needs no network. Of a run on a bucket it is RUN.html
    in the current folder.
    """
    from marin_rl.storage.layout import REPORT
    from marin_rl.storage.stores.local import replace_file

    run = opt.open_run(root, run_name)
    if curve is not None:
        if output is not None:
            raise ConfigError("--curve writes a picture instead of the page: leave out --output")
        from marin_rl.analysis.status import metric_rows
        from marin_rl.pages.charts import learning_curve

        curve.parent.mkdir(parents=True, exist_ok=True)
        curve.write_bytes(learning_curve(metric_rows(run), run.run_id))
        opt.print_result({"path": curve}, f"wrote {curve}", as_json=as_json)
        return
    from marin_rl.display.tables import size
    from marin_rl.pages.document import Choice, RunPage, report_html

    choice = Choice(groups_per_round=groups, members_per_group=members, rollouts_max=rollouts_max)
    page = RunPage(run, choice).page()
    data = report_html(page).encode()
    if output is not None:
        target = output
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    else:
        target = run.store.local_path(REPORT) or Path(f"{run.run_id}.html")
        replace_file(target, data)
    facts = {"path": target, "bytes": len(data), "stage": page.stage, "ended": page.ended}
    opt.print_result(facts, f"wrote {target} ({size(len(data))})", as_json=as_json)


def view(
    run_name: opt.RunName,
    *,
    host: Annotated[str, typer.Option(help="a loopback address; others are refused")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8765,
    groups: Groups = 4,
    members: Members = 4,
    rollouts_max: RolloutsMax = 1600,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Serve the page of a run on this machine, following it.

    Ctrl-C ends it.
    """
    from marin_rl.pages.document import Choice, RunPage
    from marin_rl.pages.live import serve_view

    choice = Choice(groups_per_round=groups, members_per_group=members, rollouts_max=rollouts_max)
    page = RunPage(opt.open_run(root, run_name), choice)

    def announce(address: str) -> None:
        facts = {"run_id": run_name, "address": address}
        opt.print_result(facts, f"{run_name} at {address} (Ctrl-C ends)", as_json=as_json)

    with suppress(KeyboardInterrupt):
        serve_view(page, run_name, host, port, announce)
