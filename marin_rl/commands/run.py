"""Commands that train through the flows: `run`, `sft`, `reward-model`.

Flows are loaded through the entry-point group `marin_rl.flows`: the library knows no orchestrator.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from marin_rl.commands.options import (
    ApiKeyVariable,
    ConfigFile,
    Overrides,
    Trust,
    err,
    key_named,
    load,
    out,
    tell,
)
from marin_rl.config import Config
from marin_rl.errors import ConfigError
from marin_rl.machine import share_one_heap

INTERRUPTED = 130  # exit code that shells report of a process that Ctrl-C ended

RunId = Annotated[str | None, typer.Option("--run-id", help="name of the run")]
RootOf = Annotated[str | None, typer.Option("--root", help="folder or URL for runs")]


def run(
    config_file: ConfigFile,
    *,
    run_id: RunId = None,
    root: RootOf = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="rounds to reach")] = None,
    overrides: Overrides = None,
    api_key_variable: ApiKeyVariable = None,
    trust: Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and stop")] = False,
) -> None:
    """Start a run, or continue it where it stopped; the same command does both."""
    changes = [*(overrides or ()), *key_named(api_key_variable)]
    config = load(config_file, changes, trust=trust, run_id=run_id, root=root, rounds=rounds)
    if dry_run:
        _print_plan(config)
        return
    play("rl-loop", config)
    _print_result(config, config_file)


def sft(
    config_file: ConfigFile,
    *,
    run_id: RunId = None,
    root: RootOf = None,
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Run only the supervised warm start of a run."""
    play("sft", load(config_file, overrides, trust=trust, run_id=run_id, root=root))


def reward_model(
    config_file: ConfigFile,
    *,
    run_id: RunId = None,
    root: RootOf = None,
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Train a reward model from preference pairs, or continue where it stopped."""
    config = load(config_file, overrides, trust=trust, run_id=run_id, root=root)
    from marin_rl.display import key_values

    checkpoint = play("reward-model", config)
    metrics = {name: f"{value:.4g}" for name, value in checkpoint.summary.items()}
    slot = f"{config.root.rstrip('/')}/{config.run_id}/{checkpoint.slot}"
    out.print(key_values(f"Reward model {config.run_id}", metrics))
    tell(f"use it: --set environment.reward_model.checkpoint={slot}")


def play(flow: str, config: Config) -> Any:
    """Run a flow on a configuration with live progress, and return its result.

    Raises ConfigError where a run of this name exists with another content.
    """
    from marin_rl.display import RunDisplay, showing
    from marin_rl.storage.runs import refuse_other_content

    refuse_other_content(config)
    start = flow_named(flow)
    with showing(RunDisplay(config.run_id, config.rounds), out), _interruptible():
        return start(config)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Replace the trace of Ctrl-C by a line that says how to continue, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted: what is committed stays; the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None


def flow_named(name: str) -> Any:
    """Return the function that runs an installed flow. Raises ConfigError for another name."""
    share_one_heap()  # before what a flow imports starts its threads
    for point in entry_points(group="marin_rl.flows", name=name):
        return point.load()
    raise ConfigError(f"the flow {name!r} is not installed: reinstall marin-rl (`make install`)")


def _print_plan(config: Config) -> None:
    from marin_rl.display import key_values, plan_rows
    from marin_rl.planning import plan

    out.print(key_values(f"Plan of {config.run_id}", plan_rows(config, plan(config))))


def _print_result(config: Config, file: Path) -> None:
    from marin_rl.analysis.learning_curve import write_learning_curve
    from marin_rl.analysis.status import run_status
    from marin_rl.display import rounds_table
    from marin_rl.storage.runs import Run

    opened = Run.open(config.root, config.run_id, config.storage_options)
    status = run_status(config.root, config.run_id, config.storage_options)
    out.print(rounds_table(status.rounds, f"Run {config.run_id}"))
    if status.headline:
        out.print(f"[bold]{status.headline}[/bold]")
    tell(f"learning curve: {write_learning_curve(opened, status.rounds)}")
    root = "" if config.root == "runs" else f" --root {config.root}"
    average = "select round, avg(reward) as reward from rollouts group by round order by round"
    out.print("\n[bold]Try next[/bold]")
    for command in (
        f'sql {config.run_id} "{average}"{root}',
        f"rollouts {config.run_id} --round {min(3, config.rounds - 1)}{root}",
        f"run {file} --run-id {config.run_id} --rounds {config.rounds + 20}{root}",
    ):
        tell(f"  {_program()} {command}")


def _program() -> str:
    """Return the program's name in the user's shell, so that printed commands can be pasted."""
    return "marin-rl" if shutil.which("marin-rl") else f"{Path(sys.executable).parent}/marin-rl"
