"""The commands that say why: `lineage`, `replay-step`, `diff`. None of them changes a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marin_rl.commands.options import AsJson, LatestRound, Root, RunName, out, tell, tell_json
from marin_rl.errors import ConfigError, ObjectMissing

if TYPE_CHECKING:
    from marin_rl.storage.runs import Run


def replay_step(
    run_name: RunName,
    round_number: Annotated[
        int, typer.Argument(min=0, help="the round whose update is done again")
    ],
    *,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Train a recorded round again, and compare with the checkpoint it made. Exit code 1: apart."""
    from marin_rl.display import frame_table
    from marin_rl.storage.runs import Run
    from marin_rl.training.replay import replay_round

    found = replay_round(Run.open(root, run_name), round_number)
    if as_json:
        tell_json({"equal": found.equal, **asdict(found)})
    else:
        if found.differing:
            rows = [(d.name, d.largest, d.recorded_largest) for d in found.differing]
            columns = ("array", "largest difference", "largest value recorded")
            out.print(frame_table(columns, rows))
        for name, (then, now) in {**found.metrics, **found.changed}.items():
            tell(f"{name}: {then} then, {now} now")
        scope = f"{found.compared} arrays" if found.compared else "the parameters' digest alone"
        tell(f"parameters recorded {found.recorded_digest}")
        tell(f"parameters now      {found.digest}")
        tell(f"round {round_number}: {'EQUAL' if found.equal else 'APART'}, by {scope}")
    if not found.equal:
        raise typer.Exit(1)


def diff(
    first: RunName,
    second: RunName,
    *,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Compare two runs: configuration, curves, and the first round that differs.

    Exit code 1 when they part.
    """
    from marin_rl.analysis.diff import compare_runs
    from marin_rl.display import frame_table
    from marin_rl.storage.runs import Run

    found = compare_runs(Run.open(root, first), Run.open(root, second))
    if as_json:
        tell_json(asdict(found))
    else:
        for line in found.settings:
            tell(line)
        for name, (one, other) in found.changed.items():
            tell(f"{name}: {one} -> {other}")
        if found.curves:
            rows = [(c.metric, c.round, c.first, c.second, c.largest) for c in found.curves]
            columns = ("metric", "last round", first, second, "largest difference")
            out.print(frame_table(columns, rows))
        tell(found.told)
    if found.parts_at is not None:
        raise typer.Exit(1)


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
    graph: Annotated[
        Path | None, typer.Option("--graph", help="also draw it: FILE.svg, .png or .mmd (Mermaid)")
    ] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """From an update back to rollouts, shards, checkpoint, code and text; or from a rollout on."""
    from marin_rl.analysis.graph import write_graph
    from marin_rl.analysis.lineage import as_text, as_tree, trace, trace_forward
    from marin_rl.display import shortened
    from marin_rl.storage.runs import Run

    _check_start(rollout, reverse=reverse, others=(round_number, step, row))
    run = Run.open(root, run_name)
    if rollout is not None:
        found = trace_forward(run, rollout)
    else:
        found = trace(run, _round_of(run, round_number), step, row)
    if graph is not None:
        write_graph(found, graph)
    if as_json:
        tell_json(as_tree(found))
        return
    for line in as_text(found):
        tell(shortened(line))
    if graph is not None:
        tell(f"wrote {graph}")


def _check_start(
    rollout: str | None, *, reverse: bool, others: tuple[int | None, int | None, int | None]
) -> None:
    """Raise ConfigError where the options name no start, or two."""
    if reverse and rollout is None:
        raise ConfigError("lineage --reverse starts from a rollout: give --rollout ROLLOUT_ID too")
    if rollout is not None and not reverse:
        raise ConfigError(
            "lineage starts from an update (--round, --step, --row), or from a rollout with "
            "--reverse: add --reverse to follow --rollout on"
        )
    if reverse and any(value is not None for value in others):
        raise ConfigError("lineage --reverse finds the update itself: leave out --round and others")


def _round_of(run: "Run", given: int | None) -> int:
    """The round that was asked for, or the last one that has batches."""
    from marin_rl.storage.runs import progress

    if given is not None:
        return given
    processed = [number for number, found in progress(run).items() if found.batches]
    if not processed:
        raise ObjectMissing(f"run {run.run_id!r} has no processed round yet")
    return processed[-1]
