"""Commands that check, `doctor`, `audit`, `fsck`, `metrics verify`, `verify`, and `fork`, `gc`.

docs/tools.md has a table that says which of them answers what. Each check ends with exit code 1
where something is wrong.
"""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from marin_rl.commands import options as opt
from marin_rl.commands.config import demo_configuration
from marin_rl.commands.hosts import on_all_processes


def doctor(
    config_file: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG|RUN", help="as of `run`; default: the demo's configuration"),
    ] = None,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    api_key_variable: opt.ApiKeyVariable = None,
    trust: opt.Trust = False,
    as_json: opt.AsJsonLines = False,
) -> None:
    """Check storage, model, devices and endpoints.

    Also the tokenizer, the environment and Prefect; a line says what to fix.
    """
    from marin_rl.doctor.engines import STAGES
    from marin_rl.doctor.stages import examine

    changes = [*(overrides or ()), *opt.key_named(api_key_variable)]
    file = config_file or demo_configuration()
    config, failed = opt.load(file, changes, trust=trust, run_id=run_id, root=root), False
    with on_all_processes(config):
        for finding in examine(config, STAGES):
            failed = failed or not finding.passed
            if as_json:
                opt.print_json(finding)
                continue
            opt.print_verdict(passed=finding.passed)
            opt.out.print(f"[bold]{finding.name:<13}[/bold] ", end="")
            opt.print_info(finding.detail)
        if failed:
            raise typer.Exit(1)


def audit(
    run_name: opt.RunName, *, as_json: opt.AsJsonLines = False, root: opt.Root = "runs"
) -> None:
    """Check that every rollout is accounted for.

    Exit code 1 if not. Reads nothing but files. Cells are rollouts / tokens. Length bias is the
    mean length of dropped rollouts less that of trained ones, in tokens.
    """
    from marin_rl.display.tables import audit_table, balance_line, dropped_table
    from marin_rl.storage.upkeep.audit import audit_run
    from marin_rl.storage.upkeep.streams import unfinished_groups, waiting_rollouts

    run = opt.open_run(root, run_name)
    reports, waiting = list(audit_run(run)), waiting_rollouts(run)
    begun = unfinished_groups(run)
    if as_json:
        opt.print_json(*({"balanced": report.balanced, **asdict(report)} for report in reports))
        if waiting:
            opt.print_json({"waiting": waiting})
        if begun.groups:
            opt.print_json({"unfinished": begun})
    else:
        opt.out.print(audit_table(reports))
        if any(balance.dropped for report in reports for balance in report.balances):
            opt.out.print(dropped_table(reports))
        opt.print_info(balance_line(reports, waiting))
        if begun.groups:
            again = f", {begun.begun_again:,} members began again" if begun.begun_again else ""
            opt.print_info(
                f"unfinished and kept: {begun.groups:,} groups, {begun.tokens:,} tokens{again}"
            )
        for report in reports:
            opt.print_error(*(f"round {report.round}: {line}" for line in report.problems))
    if any(report.problems for report in reports):
        raise typer.Exit(1)


def fsck(
    run_name: opt.RunName,
    *,
    workers: Annotated[
        int | None, typer.Option(min=1, help="threads; default: one per core, 16 on object stores")
    ] = None,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Check that all objects of a run are there, unchanged.

    Exit code 1 if one is not.
    """
    from marin_rl.display.tables import size
    from marin_rl.storage.upkeep.fsck import check_run

    checked = check_run(root, run_name, workers=workers)
    if as_json:
        opt.print_json({"whole": checked.whole, **asdict(checked)})
    else:
        for fault in sorted(checked.faults, key=lambda fault: fault.harmless):
            show = opt.print_info if fault.harmless else opt.print_error
            show(f"{fault.kind}: {fault.place}: {fault.detail}")
        rate = checked.bytes / max(checked.seconds, 1e-9)
        pruned = f", {checked.pruned} pruned by retention" if checked.pruned else ""
        opt.print_info(
            f"{checked.objects} objects, {size(checked.bytes)} in {checked.seconds:.2f} s "
            f"({size(rate)}/s){pruned}: {'whole' if checked.whole else 'NOT WHOLE'}"
        )
    if not checked.whole:
        raise typer.Exit(1)


def verify_metrics(
    run_name: opt.RunName,
    *,
    round_number: Annotated[int | None, typer.Option("--round", min=0, help="default: all")] = None,
    trust: opt.Trust = False,
    as_json: opt.AsJsonLines = False,
    root: opt.Root = "runs",
) -> None:
    """Recompute metrics from the other files.

    Exit code 1 if one differs.
    """
    from marin_rl.analysis.verify import not_checked, verify_run
    from marin_rl.display.tables import findings_table

    findings = list(verify_run(opt.open_run(root, run_name), round_number, trust=trust))
    wrong = [finding for finding in findings if finding.problem]
    if as_json:
        opt.print_json(*findings)
    else:
        opt.out.print(findings_table([finding for finding in findings if not finding.unchecked]))
        opt.print_info(*not_checked(findings))
        opt.print_error(*(finding.message for finding in wrong))
    if wrong:
        raise typer.Exit(1)


def verify(
    archive: Annotated[Path, typer.Argument(help="a file that `export` wrote")],
    *,
    root_hash: Annotated[str | None, typer.Option("--root-hash", help="expected root hash")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Check an exported run offline.

    Every digest, part and parent; exit code 1 if one is wrong.
    """
    from marin_rl.display.tables import size
    from marin_rl.storage.upkeep.archive import verify_archive

    archived = verify_archive(archive, root_hash)
    if as_json:
        opt.print_json({"whole": not archived.faults, **asdict(archived)})
    else:
        opt.print_error(
            *(f"{fault.kind}: {fault.place}: {fault.detail}" for fault in archived.faults)
        )
        verdict = "NOT WHOLE" if archived.faults else "whole"
        opt.print_info(
            f"run {archived.run_id}: {archived.objects} objects, {size(archived.bytes)}, "
            f"{archived.left_out} parts left out: {verdict}",
            f"root hash {archived.root_hash}",
        )
    if archived.faults:
        raise typer.Exit(1)


metrics = typer.Typer(help="Recompute the metrics of a run, and compare.", no_args_is_help=True)
metrics.callback()(lambda: None)  # so that `verify` has a name of its own
metrics.command("verify")(verify_metrics)


def fork(
    run_name: opt.RunName,
    *,
    from_round: Annotated[
        int, typer.Option("--round", min=0, help="first round of the fork's own")
    ],
    run_id: Annotated[str, typer.Option("--run-id", help="name of the fork")],
    overrides: opt.Overrides = None,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Make a run that shares its first rounds with another.

    They are the rounds before --round, and are read where they are, without a copy.
    """
    from marin_rl.config import override, parse_config
    from marin_rl.storage.upkeep.forks import fork_run
    from marin_rl.trust import remembered, try_to_remember

    parent = opt.open_run(root, run_name)
    own_settings = remembered(parent)
    changes = [*(own_settings or ()), *(overrides or ())]
    forked = fork_run(parent, from_round, run_id, changes)
    if own_settings is not None:  # a fork of one's own run is one's own, with the same settings
        tree = override(forked.config.model_dump(mode="json"), changes)
        try_to_remember(replace(forked, config=parse_config(tree, "fork")))
    if as_json:
        ancestors = [asdict(ancestor) for ancestor in forked.ancestors]
        opt.print_json({"run_id": run_id, "url": forked.folder.url, "ancestors": ancestors})
        return
    opt.print_info(
        f"{forked.folder.url} begins at round {from_round} of {run_name}",
        f"it evaluates with samples of its own: for the same checkpoint, numbers may differ from "
        f"{run_name}'s within their intervals",
    )
    if forked.folder.local_path("run.json") is not None:
        opt.try_next(f"run {shlex.quote(forked.folder.url)}")


def gc(
    run_name: opt.RunName,
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
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Delete unreferenced files and old checkpoints.

    Of old checkpoints the arrays are deleted. Retention is the run's own, as its latest checkpoint
    recorded it (`retention.*`); --keep-last and --keep-every override it. Exit code 1 where another
    run under the root cannot be read: it may be a fork, so no checkpoint is pruned.
    """
    from marin_rl.display.tables import frame_table, size
    from marin_rl.storage.upkeep.gc import collect, rule_of

    run = opt.open_run(root, run_name)
    collection = collect(run, rule_of(run, checkpoints_last, checkpoints_every), dry_run=dry_run)
    if as_json:
        opt.print_json({**asdict(collection), "bytes": collection.bytes})
    else:
        if collection.garbage:
            rows = [(item.reason, item.bytes, item.key) for item in collection.garbage]
            opt.out.print(frame_table(("reason", "bytes", "object"), rows))
        damaged = "its manifest is damaged or gone, so nothing in it is touched; run fsck"
        opt.print_error(*(f"{slot}: {damaged}" for slot in collection.skipped))
        if collection.live:
            opt.print_info("another process works on this run: what it may be writing was left")
        verb = "would be deleted" if dry_run else "deleted"
        opt.print_info(f"{len(collection.garbage)} objects, {size(collection.bytes)} {verb}")
    if collection.unread:
        opt.print_error(
            f"no checkpoint was pruned, for another run may be a fork: {collection.unread}"
        )
        raise typer.Exit(1)
