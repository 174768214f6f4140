"""The commands that carry a run elsewhere or ask what else it could be.

They are `export`, `verify`, `rescore` and `reprocess`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from marin_rl.commands.options import (
    AsJson,
    Overrides,
    Root,
    RunName,
    complain,
    out,
    tell,
    tell_json,
)
from marin_rl.errors import ConfigError


def export(
    run_name: RunName,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="default: RUN.tar")] = None,
    everything: Annotated[bool, typer.Option("--all", help="every committed object")] = False,
    hf: Annotated[
        Path | None, typer.Option("--hf", help="instead: a checkpoint as a Hugging Face folder")
    ] = None,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="with --hf; the latest")
    ] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Write a run into one file whose root hash `verify` checks, or a checkpoint for others."""
    from marin_rl.display import size
    from marin_rl.storage.runs import Run

    run = Run.open(root, run_name)
    if hf is not None:
        from marin_rl.serving.weights.checkpoint_loader import export_hf

        exported = export_hf(run, round_number, hf)
        told = {
            "folder": str(hf),
            "round": exported.round,
            "parameters": exported.parameters_digest,
        }
        if as_json:
            tell_json(told)
            return
        tell(f"{hf}: checkpoint {exported.round}, parameters {exported.parameters_digest}")
        return
    if round_number is not None:
        raise ConfigError("--round chooses a checkpoint: expected --hf FOLDER with it")
    from marin_rl.storage.upkeep.archive import write_archive

    made = write_archive(run, output or Path(f"{run_name}.tar"), everything=everything)
    if as_json:
        tell_json(asdict(made) | {"path": str(made.path)})
        return
    tell(f"{made.path}: {made.objects} objects, {size(made.bytes)}")
    tell(f"root hash {made.root_hash}")


def verify(
    archive: Annotated[Path, typer.Argument(help="what `export` wrote")],
    *,
    root_hash: Annotated[str | None, typer.Option("--root-hash", help="what it must be")] = None,
    as_json: AsJson = False,
) -> None:
    """Check an exported run offline: every digest, part and parent. Exit code 1 if one is wrong."""
    from marin_rl.display import size
    from marin_rl.storage.upkeep.archive import verify_archive

    found = verify_archive(archive, root_hash)
    if as_json:
        tell_json({"whole": not found.faults, **asdict(found)})
    else:
        complain(f"{fault.kind}: {fault.place}: {fault.detail}" for fault in found.faults)
        verdict = "NOT WHOLE" if found.faults else "whole"
        tell(
            f"run {found.run_id}: {found.objects} objects, {size(found.bytes)}, {found.left_out} "
            f"parts left out: {verdict}"
        )
        tell(f"root hash {found.root_hash}")
    if found.faults:
        raise typer.Exit(1)


def rescore(
    run_name: RunName,
    *,
    round_number: Annotated[int, typer.Option("--round", min=0)],
    reward: Annotated[str, typer.Option("--reward", help="module:function(example, completion)")],
    name: Annotated[str, typer.Option("--name", help="of the table; versions count up under it")],
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Score a round by another reward function, into a table of its own; the shards stay as they
    are.
    """
    from marin_rl.rollouts.rescore import rescore_round
    from marin_rl.storage.runs import Run

    found = rescore_round(Run.open(root, run_name), round_number, reward, name)
    if as_json:
        tell_json(asdict(found))
        return
    verb = "found" if found.table.reused else "wrote"
    tell(f"{verb} {found.table.key}")
    tell(
        f"{found.rollouts} rollouts, {found.changed} with another reward, {found.failed} failed; "
        f"mean {_number(found.mean_before)} -> {_number(found.mean_after)}"
    )


def reprocess(
    run_name: RunName,
    *,
    round_number: Annotated[int, typer.Option("--round", min=0)],
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
    found = reprocess_round(run, round_number, overrides or (), rewards, gradient=gradient)
    if as_json:
        tell_json(asdict(found))
        return
    for line in found.settings:
        tell(line)
    before, after = found.before, found.after
    pairs = {"steps": (before.steps, after.steps), "rows": (before.rows, after.rows)}
    pairs |= {"padded length": (before.length, after.length)}
    pairs |= {kind: (before.rollouts[kind], after.rollouts[kind]) for kind in before.rollouts}
    rows = {name: f"{a} -> {b}" for name, (a, b) in pairs.items()} | dict(found.moved)
    if (kept := found.advantages) is None:
        rows["advantages compared"] = "none: the training stage makes them, by token"
    else:
        rows["advantages compared"] = f"{kept.rollouts} rollouts that both keep"
        rows["correlation"] = _number(kept.correlation)
        rows["difference"] = f"mean {kept.mean:.6g}, largest {kept.largest:.6g}"
        rows["signs that differ"] = str(kept.signs)
    if found.gradient is not None:
        rows["gradient norm"] = (
            f"{found.gradient.norm_before:.6g} -> {found.gradient.norm_after:.6g}"
        )
        rows["gradient cosine"] = _number(found.gradient.cosine)
    out.print(key_values(f"Round {found.round}", rows))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
