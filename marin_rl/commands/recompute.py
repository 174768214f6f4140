"""Commands that compute a recorded round again: `replay-step`, `rescore`, `reprocess`.

None of them changes the round; `rescore` adds a table of rewards next to it.
"""

from dataclasses import asdict
from typing import Annotated

import typer

from marin_rl.commands.options import AsJson, Overrides, Root, RunName, out, tell, tell_json

Round = Annotated[int, typer.Option("--round", min=0)]


def replay_step(
    run_name: RunName,
    round_number: Annotated[int, typer.Argument(min=0, help="round to train again")],
    *,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Train a round again and compare with its checkpoint. Exit code 1 if they differ."""
    from marin_rl.display import frame_table
    from marin_rl.storage.runs import Run
    from marin_rl.training.replay import replay_round

    replay = replay_round(Run.open(root, run_name), round_number)
    if as_json:
        tell_json({"equal": replay.equal, **asdict(replay)})
    else:
        if replay.differing:
            rows = [(d.name, d.largest, d.recorded_largest) for d in replay.differing]
            columns = ("array", "largest difference", "largest value recorded")
            out.print(frame_table(columns, rows))
        for name, (then, now) in {**replay.metrics, **replay.changed}.items():
            tell(f"{name}: {then} then, {now} now")
        scope = f"{replay.compared} arrays" if replay.compared else "the parameters' digest alone"
        tell(f"parameters recorded {replay.recorded_digest}")
        tell(f"parameters now      {replay.digest}")
        tell(f"round {round_number}: {'EQUAL' if replay.equal else 'APART'}, by {scope}")
    if not replay.equal:
        raise typer.Exit(1)


def rescore(
    run_name: RunName,
    *,
    round_number: Round,
    reward: Annotated[str, typer.Option("--reward", help="module:function(example, completion)")],
    name: Annotated[str, typer.Option("--name", help="of the table; versions count up under it")],
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Score a round by another reward function, into a table next to its unchanged shards."""
    from marin_rl.rollouts.rescore import rescore_round
    from marin_rl.storage.runs import Run

    scored = rescore_round(Run.open(root, run_name), round_number, reward, name)
    if as_json:
        tell_json(asdict(scored))
        return
    verb = "found" if scored.table.reused else "wrote"
    tell(f"{verb} {scored.table.key}")
    tell(
        f"{scored.rollouts} rollouts, {scored.changed} with another reward, {scored.failed} "
        f"failed; mean {_number(scored.mean_before)} -> {_number(scored.mean_after)}"
    )


def reprocess(
    run_name: RunName,
    *,
    round_number: Round,
    overrides: Overrides = None,
    rewards: Annotated[str | None, typer.Option("--rewards", help="a table of `rescore`")] = None,
    gradient: Annotated[bool, typer.Option(help="compare gradients too, which takes JAX")] = True,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Process a round under other objectives, filters or rewards, and compare. Changes nothing."""
    from marin_rl.display import key_values
    from marin_rl.storage.runs import Run
    from marin_rl.training.reprocess import reprocess_round

    run = Run.open(root, run_name)
    outcome = reprocess_round(run, round_number, overrides or (), rewards, gradient=gradient)
    if as_json:
        tell_json(asdict(outcome))
        return
    for line in outcome.settings:
        tell(line)
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
    if outcome.gradient is not None:
        rows["gradient norm"] = (
            f"{outcome.gradient.norm_before:.6g} -> {outcome.gradient.norm_after:.6g}"
        )
        rows["gradient cosine"] = _number(outcome.gradient.cosine)
    out.print(key_values(f"Round {outcome.round}", rows))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
