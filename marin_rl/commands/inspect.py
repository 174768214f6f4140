"""The commands that people look with: `marin-rl report`, `marin-rl view`, `marin-rl watch`.

What they show is made in `pages` and `analysis.watch`; here are their options. Heavy modules are
imported when a command runs.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from marin_rl.commands.options import (
    AnyRunName,
    AsJson,
    AsJsonLines,
    Root,
    RunName,
    complain,
    out,
    tell,
    tell_json,
)
from marin_rl.errors import MarinRLError

Groups = Annotated[int, typer.Option("--groups", min=1, max=256, help="groups shown of a round")]
Members = Annotated[int, typer.Option("--members", min=1, max=256, help="rollouts of a group")]
RolloutsMax = Annotated[
    int,
    typer.Option("--rollouts-max", min=1, help="rollouts of a page; rounds give way"),
]


def report(
    run_name: RunName,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="HTML file")] = None,
    groups: Groups = 4,
    members: Members = 4,
    rollouts_max: RolloutsMax = 1600,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Write a run as one HTML page that needs no network: curves, rollouts, lineage."""
    from marin_rl.display import size
    from marin_rl.pages.document import Choice, RunPage
    from marin_rl.pages.html import report_html
    from marin_rl.storage.runs import Run

    choice = Choice(groups_per_round=groups, members_per_group=members, rollouts_max=rollouts_max)
    page = RunPage(Run.open(root, run_name), choice).page()
    target = output or Path(f"{run_name}.html")
    data = report_html(page).encode()
    target.write_bytes(data)
    if as_json:
        tell_json({"path": target, "bytes": len(data), "stage": page.stage, "ended": page.ended})
        return
    tell(f"wrote {target} ({size(len(data))})")


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

    def told(address: str) -> None:
        if as_json:
            tell_json({"run_id": run_name, "address": address})
            return
        tell(f"{run_name} at {address} (Ctrl-C ends)")

    with suppress(KeyboardInterrupt):
        serve_view(page, run_name, host, port, told)


def watch(
    run_name: AnyRunName = None,
    *,
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="seconds between looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="look once and stop")] = False,
    as_json: AsJsonLines = False,
    root: Root = "runs",
) -> None:
    """Watch one run, or all under a root, in the terminal; needs no Prefect.

    With --json a line per run and look, until all are complete. Exit code 1 if one cannot be read.
    """
    from marin_rl import dashboard
    from marin_rl.analysis.watch import Look, Watched

    watched = Watched(root)

    def look() -> dashboard.Seen:
        nonlocal seen
        seen = watched.all() if run_name is None else watched.one(run_name)
        return seen

    seen: dashboard.Seen = ()
    with suppress(KeyboardInterrupt):
        if as_json:
            _tell_looks(look, every_s, once=once)
        else:
            dashboard.watch(look, out, every_s, once=once)
    if not isinstance(seen, Look) and not all(isinstance(item, Look) for item in seen):
        raise typer.Exit(1)


def _tell_looks(look: Callable[[], Any], every_s: float, *, once: bool) -> None:
    """Print a line of JSON per run and look, with the latest row of the metrics.

    A look at a store that does not answer for a while is reported on standard error and done again.
    Raises what `look` raises else, and at first.
    """
    from marin_rl.analysis.watch import Look
    from marin_rl.dashboard import complete

    seen = look()
    while True:
        for item in [seen] if isinstance(seen, Look) else seen:
            told = asdict(item)
            if isinstance(item, Look):
                told |= {"latest": item.rows[-1] if item.rows else None}
                del told["rows"]
            tell_json(told)
        if once or complete(seen):
            return
        seen = _next_look(look, every_s)


def _next_look(look: Callable[[], Any], every_s: float) -> Any:
    """Result of a look after `every_s` seconds, or as soon after as the store answers again."""
    while True:
        time.sleep(every_s)
        try:
            return look()
        except MarinRLError as error:
            if not error.transient:
                raise
            complain([f"not updated: {error}"])
