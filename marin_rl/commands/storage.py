"""The commands that look after what lies on disk: `fsck`, `gc`, `fork`."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

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
from marin_rl.config import override, parse_config

if TYPE_CHECKING:
    from marin_rl.storage.upkeep.gc import Collection


def fsck(
    run_name: RunName,
    *,
    workers: Annotated[
        int | None, typer.Option(min=1, help="threads; default: one per core, 16 on object stores")
    ] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Check every object of a run: there, unchanged, readable, linked. Exit code 1 if not."""
    from marin_rl.display import size
    from marin_rl.storage.upkeep.fsck import check_run

    checked = check_run(root, run_name, workers=workers)
    if as_json:
        tell_json({"whole": checked.whole, **asdict(checked)})
    else:
        complain(f"{f.kind}: {f.place}: {f.detail}" for f in checked.faults if not f.harmless)
        for fault in (fault for fault in checked.faults if fault.harmless):
            tell(f"{fault.kind}: {fault.place}: {fault.detail}")
        rate = checked.bytes / max(checked.seconds, 1e-9)
        gone = f", {checked.pruned} given up by retention" if checked.pruned else ""
        tell(
            f"{checked.objects} objects, {size(checked.bytes)} in {checked.seconds:.2f} s "
            f"({size(rate)}/s){gone}: {'whole' if checked.whole else 'NOT WHOLE'}"
        )
    if not checked.whole:
        raise typer.Exit(1)


def gc(
    run_name: RunName,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="name it, delete nothing")] = False,
    checkpoints_last: Annotated[
        int | None, typer.Option("--keep-last", min=2, help="checkpoints that keep their arrays")
    ] = None,
    checkpoints_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="and those of every n-th round")
    ] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Delete what nothing can reach, and arrays of checkpoints that retention prunes.

    The rule of retention is the run's own, as its latest checkpoint recorded it (`retention.*`);
    --keep-last and --keep-every each take the place of what it says. Exit code 1 where a neighbour
    cannot be read, which may be a fork: checkpoints stay then.
    """
    from marin_rl.storage.runs import Run
    from marin_rl.storage.upkeep.gc import collect, rule_of

    run = Run.open(root, run_name)
    found = collect(run, rule_of(run, checkpoints_last, checkpoints_every), dry_run=dry_run)
    if as_json:
        tell_json({**asdict(found), "bytes": found.bytes})
    else:
        _tell_garbage(found, dry_run=dry_run)
    if found.unread:
        complain([f"no checkpoint was given up, for a run beside it may be a fork: {found.unread}"])
        raise typer.Exit(1)


def _tell_garbage(found: "Collection", *, dry_run: bool) -> None:
    from marin_rl.display import frame_table, size

    if found.garbage:
        rows = [(item.reason, item.bytes, item.key) for item in found.garbage]
        out.print(frame_table(("reason", "bytes", "object"), rows))
    complain(
        f"{slot}: its manifest is damaged or gone, so nothing in it is touched; run fsck"
        for slot in found.skipped
    )
    if found.live:
        tell("another process works on this run: what it may be writing was let alone")
    verb = "would be deleted" if dry_run else "deleted"
    tell(f"{len(found.garbage)} objects, {size(found.bytes)} {verb}")


def fork(
    run_name: RunName,
    *,
    from_round: Annotated[
        int, typer.Option("--from-round", min=0, help="the first one of its own")
    ],
    run_id: Annotated[str, typer.Option("--run-id", help="name of the fork")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Make a run that shares the rounds before --from-round with another, without a copy."""
    from marin_rl.storage.own_runs import remembered, try_to_remember
    from marin_rl.storage.runs import Run
    from marin_rl.storage.upkeep.forks import fork_run

    parent = Run.open(root, run_name)
    free = remembered(parent)
    changes = [*(free or ()), *(overrides or ())]
    made = fork_run(parent, from_round, run_id, changes)
    if free is not None:  # a fork of one's own run is one's own, with the same settings
        tree = override(made.config.model_dump(mode="json"), changes)
        try_to_remember(replace(made, config=parse_config(tree, "fork")))
    if as_json:
        ancestors = [asdict(ancestor) for ancestor in made.ancestors]
        tell_json({"run_id": run_id, "url": made.folder.url, "ancestors": ancestors})
        return
    tell(f"{made.folder.url} begins at round {from_round} of {run_name}")
    if made.folder.local_path("run.json") is not None:
        tell(f"go on with: marin-rl run {made.folder.url}")
