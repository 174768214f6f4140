"""Commands that trace results back, and compute recorded rounds again. None changes a round.

`lineage`, `diff`, `replay-step`, `replay-episode`, `rescore`, which adds a table of rewards next to
the round, and `reprocess`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marin_rl.commands import options as opt
from marin_rl.errors import ConfigError, ObjectMissing

if TYPE_CHECKING:
    pass


def lineage(  # noqa: PLR0913 - each is an option of the command
    run_name: opt.RunName,
    *,
    round_number: opt.LatestRound = None,
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
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Trace an update back to text and code, or forward.

    Back: to rollouts, shards, checkpoint and code. Forward, with --reverse: what a rollout
    influenced.
    """
    from marin_rl.analysis.lineage import as_text, as_tree, trace, trace_forward, write_graph
    from marin_rl.display.tables import shortened
    from marin_rl.storage.run_progress import progress

    _check_start(rollout, reverse=reverse, others=(round_number, step, row))
    run = opt.open_run(root, run_name)
    if rollout is not None:
        lineage = trace_forward(run, rollout)
    else:
        if round_number is None:
            processed = [number for number, slots in progress(run).items() if slots.batches]
            if not processed:
                raise ObjectMissing(f"run {run.run_id!r} has no processed round yet")
            round_number = processed[-1]
        lineage = trace(run, round_number, step, row)
    if graph is not None:
        write_graph(lineage, graph)
    if as_json:
        opt.print_json(as_tree(lineage))
        return
    opt.print_info("\n".join(shortened(line) for line in as_text(lineage, rows=rows)))
    if not rows:
        opt.print_info("every batch row and rollout: --rows; as a flowchart: --graph FILE.mmd")
    if graph is not None:
        opt.print_info(f"wrote {graph}")


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


def diff(
    first: opt.RunName, second: opt.RunName, *, as_json: opt.AsJson = False, root: opt.Root = "runs"
) -> None:
    """Compare the settings and curves of two runs.

    Also names the first round that differs. Exit code 1 where they differ.
    """
    from marin_rl.analysis.diff import compare_runs
    from marin_rl.display.tables import frame_table

    difference = compare_runs(opt.open_run(root, first), opt.open_run(root, second))
    if as_json:
        opt.print_json(difference)
    else:
        changed = difference.changed.items()
        opt.print_info(*difference.settings, *(f"{name}: {a} -> {b}" for name, (a, b) in changed))
        if difference.curves:
            rows = [(c.metric, c.round, c.first, c.second, c.largest) for c in difference.curves]
            columns = ("metric", "last round", first, second, "largest difference")
            opt.out.print(frame_table(columns, rows))
        opt.print_info(difference.message)
    if difference.parts_at is not None:
        raise typer.Exit(1)


def replay_step(
    run_name: opt.RunName,
    *,
    round_number: opt.Round,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Train a round again, and compare every bit.

    Exit code 1 where its checkpoint is another.
    """
    from marin_rl.display.tables import frame_table
    from marin_rl.training.replay import replay_round

    replay = replay_round(opt.open_run(root, run_name), round_number, trust=trust)
    if as_json:
        opt.print_json({"equal": replay.equal, **asdict(replay)})
    else:
        if replay.differing:
            rows = [(d.name, d.largest, d.recorded_largest) for d in replay.differing]
            columns = ("array", "largest difference", "largest value recorded")
            opt.out.print(frame_table(columns, rows))
        for name, (then, now) in {**replay.metrics, **replay.changed}.items():
            opt.print_info(f"{name}: {then} then, {now} now")
        scope = f"{replay.compared} arrays" if replay.compared else "the parameters' digest alone"
        opt.print_info(
            f"parameters recorded {replay.recorded_digest}",
            f"parameters now      {replay.digest}",
            f"round {round_number}: {'EQUAL' if replay.equal else 'APART'}, by {scope}",
        )
    if not replay.equal:
        raise typer.Exit(1)


def replay_episode(
    run_name: opt.RunName,
    rollout_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="such as round-00003/group-00002/001")
    ] = None,
    *,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="all rollouts of this round")
    ] = None,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Step an environment again, and compare each answer.

    Every message, reward and end is compared. Exit code 1 where something differs.
    """
    from marin_rl.display.tables import frame_table
    from marin_rl.rollouts.replay import replay_rollouts, round_of_rollout
    from marin_rl.trust import Consent, check_named

    if (rollout_id is None) == (round_number is None):
        raise ConfigError("expected the id of a rollout, or --round N for all of a round")
    run = opt.open_run(root, run_name)
    number = round_number if rollout_id is None else round_of_rollout(rollout_id)
    assert number is not None, "one of the two was given"
    player = run.at_round(number)
    check_named(player, player.config, Consent(trust=trust), ("environment",))
    replays = replay_rollouts(run, number, rollout_id)
    if as_json:
        episodes = [{"equal": e.equal, **asdict(e)} for e in replays.episodes]
        opt.print_json({"equal": replays.equal, **asdict(replays), "episodes": episodes})
    else:
        rows = [
            (e.rollout_id, t.turn, "differs" if t.difference else "equal", t.difference or "")
            for e in replays.episodes
            if rollout_id is not None or not e.equal
            for t in e.turns
        ]
        if rows:
            columns = ("rollout", "turn", "replayed", "first difference")
            opt.out.print(frame_table(columns, rows))
        for name, (then, now) in replays.changed.items():
            opt.print_info(f"{name}: {then} then, {now} now")
        equal = sum(episode.equal for episode in replays.episodes)
        opt.print_info(f"round {number}: {equal} of {len(replays.episodes)} episodes are equal")
    if not replays.equal:
        raise typer.Exit(1)


def rescore(
    run_name: opt.RunName,
    *,
    round_number: opt.Round,
    reward: Annotated[str, typer.Option("--reward", help="FILE.py:function or module:function")],
    name: Annotated[str, typer.Option("--name", help="of the table; versions count up under it")],
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Score a round with another reward function.

    The rewards are a table next to the unchanged shards: `rewards` of `marin-rl sql`. A file that
    is not in the current folder is taken from the copy next to the run.
    """
    from marin_rl.rollouts.replay import rescore_round
    from marin_rl.trust import pin_function

    run = opt.open_run(root, run_name)
    function = pin_function(run, reward, "--reward", trust=trust)
    scored = rescore_round(run, round_number, function, name)
    opt.print_result(
        scored,
        f"{'found' if scored.table.reused else 'wrote'} {scored.table.key}",
        f"{scored.rollouts} rollouts, {scored.changed} with another reward, {scored.failed} "
        f"failed; mean {_number(scored.mean_before)} -> {_number(scored.mean_after)}",
        as_json=as_json,
    )


def reprocess(
    run_name: opt.RunName,
    *,
    round_number: opt.Round,
    overrides: opt.Overrides = None,
    rewards: Annotated[str | None, typer.Option("--rewards", help="a table of `rescore`")] = None,
    gradient: Annotated[bool, typer.Option(help="compare gradients too, which takes JAX")] = True,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Process a round with other settings, and compare.

    Such as another objective, filters or rewards. Changes nothing.
    """
    from marin_rl.display.tables import key_values
    from marin_rl.training.reprocess import reprocess_round

    run, changes = opt.open_run(root, run_name), overrides or ()
    outcome = reprocess_round(run, round_number, changes, rewards, gradient=gradient, trust=trust)
    if as_json:
        opt.print_json(outcome)
        return
    opt.print_info(*outcome.settings)
    before, after = outcome.before, outcome.after
    pairs = {"steps": (before.steps, after.steps), "rows": (before.rows, after.rows)}
    pairs |= {"padded length": (before.length, after.length)}
    pairs |= {kind: (before.rollouts[kind], after.rollouts[kind]) for kind in before.rollouts}
    rows = {name: f"{a} -> {b}" for name, (a, b) in pairs.items()} | dict(outcome.moved)
    if (kept := outcome.advantages) is None:
        rows["advantages compared"] = "none: the training stage makes them, by token"
    else:
        rows["advantages compared"] = f"{kept.rollouts} rollouts that both keep"
        rows["correlation"] = _number(kept.correlation)
        rows["difference"] = f"mean {kept.mean:.6g}, largest {kept.largest:.6g}"
        rows["signs that differ"] = str(kept.signs)
    if (moved := outcome.gradient) is not None:
        rows["gradient norm"] = f"{moved.norm_before:.6g} -> {moved.norm_after:.6g}"
        rows["gradient cosine"] = _number(moved.cosine)
    opt.out.print(key_values(f"Round {outcome.round}", rows))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
