"""`marin-rl sample`: a worker for a run that is trained elsewhere, by the root alone."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marin_rl.commands.options import (
    INTERRUPTED,
    ApiKeyVariable,
    AsJsonLines,
    Overrides,
    OwnConfig,
    Root,
    RunName,
    Trust,
    complain,
    key_named,
    tell_json,
)
from marin_rl.errors import ConfigError
from marin_rl.machine import share_one_heap

if TYPE_CHECKING:
    from marin_rl.storage.runs import Run


def sample(  # noqa: PLR0913 - each is an option of the command
    run_name: RunName,
    *,
    root: Root = "runs",
    follow: Annotated[
        bool, typer.Option("--follow", help="wait for the trainer, and go on until the run ends")
    ] = False,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="chunks sampled at once")] = 1,
    config_file: OwnConfig = None,
    overrides: Overrides = None,
    api_key_variable: ApiKeyVariable = None,
    trust: Trust = False,
    as_json: AsJsonLines = False,
) -> None:
    """Sample for a run that is trained elsewhere.

    For runs with asynchrony.sampler windowed and a fleet of endpoints. Start any number of them on
    any machine that reaches the root; each may be killed. Without --follow it ends once there is
    nothing to sample. With --json, a line of standard output for each state: proven, sampled, ended
    (with groups).
    """
    share_one_heap()
    changes = [*(overrides or ()), *key_named(api_key_variable)]
    run = _opened(root, run_name, config_file, changes, trust=trust)
    from marin_rl.rollouts.root_worker import RootWorker

    def report(line: str, record: dict[str, Any]) -> None:
        complain([line], style="")
        if as_json:
            tell_json(record)

    worker = RootWorker(run, follow=follow, chunks_max=chunks, report=report)
    complain([f"{worker.name} samples for run {run_name} (Ctrl-C ends)"], style="")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        groups = asyncio.run(worker.work())
    except KeyboardInterrupt:
        complain(["interrupted: groups that are committed stay; others sample the rest"], style="")
        raise typer.Exit(INTERRUPTED) from None
    report(f"sampled {groups} groups", {"state": "ended", "groups": groups})


def _opened(
    root: str, run_name: str, file: Path | None, changes: list[str], *, trust: bool
) -> "Run":
    """The run, with the free keys of its user. Raises ConfigError as `settings_of` does."""
    from marin_rl.storage.runs import Run
    from marin_rl.trust import Consent, check_named, settings_of

    run = Run.open(root, run_name)
    consent = Consent(file=file, overrides=tuple(changes), trust=trust)
    config = settings_of(run, consent)
    check_named(run, config, consent)
    if reason := config.without_root_workers:
        raise ConfigError(f"run {run_name!r}: {reason}")
    return replace(run, config=config)
