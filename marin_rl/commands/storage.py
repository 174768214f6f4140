"""Commands that change what is stored, without computing: `fork`, `gc`."""

import shlex
from dataclasses import asdict, replace
from typing import Annotated

import typer

from marin_rl.commands.options import (
    AsJson,
    Overrides,
    Root,
    RunName,
    out,
    print_error,
    print_info,
    print_json,
    try_next,
)


def fork(
    run_name: RunName,
    *,
    from_round: Annotated[
        int, typer.Option("--round", min=0, help="first round of the fork's own")
    ],
    run_id: Annotated[str, typer.Option("--run-id", help="name of the fork")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Make a run that shares its first rounds with another.

    They are the rounds before --round, and are read where they are, without a copy.
    """
    from marin_rl.config import override, parse_config
    from marin_rl.storage.runs import Run
    from marin_rl.storage.upkeep.forks import fork_run
    from marin_rl.trust import remembered, try_to_remember

    parent = Run.open(root, run_name)
    own_settings = remembered(parent)
    changes = [*(own_settings or ()), *(overrides or ())]
    forked = fork_run(parent, from_round, run_id, changes)
    if own_settings is not None:  # a fork of one's own run is one's own, with the same settings
        tree = override(forked.config.model_dump(mode="json"), changes)
        try_to_remember(replace(forked, config=parse_config(tree, "fork")))
    if as_json:
        ancestors = [asdict(ancestor) for ancestor in forked.ancestors]
        print_json({"run_id": run_id, "url": forked.folder.url, "ancestors": ancestors})
        return
    print_info(
        f"{forked.folder.url} begins at round {from_round} of {run_name}",
        f"it evaluates with samples of its own: for the same checkpoint, numbers may differ from "
        f"{run_name}'s within their intervals",
    )
    if forked.folder.local_path("run.json") is not None:
        try_next(f"run {shlex.quote(forked.folder.url)}")


def gc(
    run_name: RunName,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list objects, delete nothing")
    ] = False,
    checkpoints_last: Annotated[
        int | None, typer.Option("--keep-last", min=2, help="checkpoints that keep their arrays")
    ] = None,
    checkpoints_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="and those of every n-th round")
    ] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Delete unreferenced files and old checkpoints.

    Of old checkpoints the arrays are deleted. Retention is the run's own, as its latest checkpoint
    recorded it (`retention.*`); --keep-last and --keep-every override it. Exit code 1 where another
    run under the root cannot be read: it may be a fork, so no checkpoint is pruned.
    """
    from marin_rl.display.tables import frame_table, size
    from marin_rl.storage.runs import Run
    from marin_rl.storage.upkeep.gc import collect, rule_of

    run = Run.open(root, run_name)
    collection = collect(run, rule_of(run, checkpoints_last, checkpoints_every), dry_run=dry_run)
    if as_json:
        print_json({**asdict(collection), "bytes": collection.bytes})
    else:
        if collection.garbage:
            rows = [(item.reason, item.bytes, item.key) for item in collection.garbage]
            out.print(frame_table(("reason", "bytes", "object"), rows))
        damaged = "its manifest is damaged or gone, so nothing in it is touched; run fsck"
        print_error(*(f"{slot}: {damaged}" for slot in collection.skipped))
        if collection.live:
            print_info("another process works on this run: what it may be writing was left")
        verb = "would be deleted" if dry_run else "deleted"
        print_info(f"{len(collection.garbage)} objects, {size(collection.bytes)} {verb}")
    if collection.unread:
        print_error(f"no checkpoint was pruned, for another run may be a fork: {collection.unread}")
        raise typer.Exit(1)
