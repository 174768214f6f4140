"""Commands that trace where results came from: `lineage`, `diff`. None changes a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marin_rl.commands.options import (
    AsJson,
    LatestRound,
    Root,
    RunName,
    out,
    print_info,
    print_json,
)
from marin_rl.errors import ConfigError, ObjectMissing

if TYPE_CHECKING:
    from marin_rl.storage.runs import Run


def lineage(  # noqa: PLR0913 - each is an option of the command
    run_name: RunName,
    *,
    round_number: LatestRound = None,
    step: Annotated[int | None, typer.Option(min=0, help="one update of the round")] = None,
    row: Annotated[int | None, typer.Option(min=0, help="one row of its batch")] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", help="rollout_id, with --reverse")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="what a rollout influenced")] = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="each batch row and rollout, not only their number")
    ] = False,
    graph: Annotated[
        Path | None, typer.Option("--graph", help="write it as a Mermaid flowchart too: FILE.mmd")
    ] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Trace an update back to text and code, or forward.

    Back: to rollouts, shards, checkpoint and code. Forward, with --reverse: what a rollout
    influenced.
    """
    from marin_rl.analysis.lineage import as_text, as_tree, trace, trace_forward, write_graph
    from marin_rl.display.text import shortened
    from marin_rl.storage.runs import Run

    _check_start(rollout, reverse=reverse, others=(round_number, step, row))
    run = Run.open(root, run_name)
    if rollout is not None:
        lineage = trace_forward(run, rollout)
    else:
        lineage = trace(run, _round_of(run, round_number), step, row)
    if graph is not None:
        write_graph(lineage, graph)
    if as_json:
        print_json(as_tree(lineage))
        return
    print_info("\n".join(shortened(line) for line in as_text(lineage, rows=rows)))
    if not rows:
        print_info("every batch row and rollout: --rows; as a flowchart: --graph FILE.mmd")
    if graph is not None:
        print_info(f"wrote {graph}")


def _check_start(
    rollout: str | None, *, reverse: bool, others: tuple[int | None, int | None, int | None]
) -> None:
    """Raise ConfigError where the options name no start, or two."""
    if reverse and rollout is None:
        raise ConfigError("lineage --reverse starts from a rollout: give --rollout ROLLOUT_ID too")
    if rollout is not None and not reverse:
        raise ConfigError(
            "lineage starts from an update (--round, --step, --row), or from a rollout with "
            "--reverse: add --reverse to --rollout"
        )
    if reverse and any(value is not None for value in others):
        raise ConfigError(
            "lineage --reverse looks for the update itself: leave out --round, --step and --row"
        )


def _round_of(run: "Run", chosen: int | None) -> int:
    """Return the chosen round, else the last one that has batches. Raises ObjectMissing."""
    from marin_rl.storage.run_progress import progress

    if chosen is not None:
        return chosen
    processed = [number for number, slots in progress(run).items() if slots.batches]
    if not processed:
        raise ObjectMissing(f"run {run.run_id!r} has no processed round yet")
    return processed[-1]


def diff(
    first: RunName,
    second: RunName,
    *,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Compare the settings and curves of two runs.

    Also names the first round that differs. Exit code 1 where they differ.
    """
    from marin_rl.analysis.diff import compare_runs
    from marin_rl.display.tables import frame_table
    from marin_rl.storage.runs import Run

    difference = compare_runs(Run.open(root, first), Run.open(root, second))
    if as_json:
        print_json(difference)
    else:
        changed = difference.changed.items()
        print_info(*difference.settings, *(f"{name}: {a} -> {b}" for name, (a, b) in changed))
        if difference.curves:
            rows = [(c.metric, c.round, c.first, c.second, c.largest) for c in difference.curves]
            columns = ("metric", "last round", first, second, "largest difference")
            out.print(frame_table(columns, rows))
        print_info(difference.message)
    if difference.parts_at is not None:
        raise typer.Exit(1)
