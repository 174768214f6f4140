"""Commands that work on a run, or serve it: `run`, `sft`, `reward-model`, `evaluate`, `serve`.

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
    LatestRound,
    Overrides,
    OwnConfig,
    Root,
    RunName,
    Trust,
    err,
    key_named,
    load,
    out,
    tell,
)
from marin_rl.config import Config, load_config, override, parse_config
from marin_rl.errors import ConfigError
from marin_rl.machine import share_one_heap

INTERRUPTED = 130  # what shells report of a process that Ctrl-C ended


def run(
    config_file: ConfigFile,
    *,
    run_id: Annotated[str | None, typer.Option("--run-id", help="name of the run")] = None,
    root: Annotated[str | None, typer.Option("--root", help="folder or URL for runs")] = None,
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
    _played("rl-loop", config)
    _print_result(config, config_file)


def sft(
    config_file: ConfigFile,
    *,
    run_id: Annotated[str | None, typer.Option("--run-id")] = None,
    root: Annotated[str | None, typer.Option("--root")] = None,
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Run only the supervised warm start of a run."""
    _played("sft", load(config_file, overrides, trust=trust, run_id=run_id, root=root))


def reward_model(
    config_file: ConfigFile,
    *,
    run_id: Annotated[str | None, typer.Option("--run-id")] = None,
    root: Annotated[str | None, typer.Option("--root")] = None,
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Train a reward model from preference pairs, or continue where it stopped."""
    config = load(config_file, overrides, trust=trust, run_id=run_id, root=root)
    from marin_rl.display import key_values

    trained = _played("reward-model", config)
    facts = {name: f"{value:.4g}" for name, value in trained.summary.items()}
    slot = f"{config.root.rstrip('/')}/{config.run_id}/{trained.slot}"
    out.print(key_values(f"Reward model {config.run_id}", facts))
    tell(f"use it: --set environment.reward_model.checkpoint={slot}")


def evaluate(
    run_name: RunName,
    *,
    round_number: LatestRound = None,
    config_file: OwnConfig = None,
    overrides: Overrides = None,
    api_key_variable: ApiKeyVariable = None,
    trust: Trust = False,
    root: Root = "runs",
) -> None:
    """Evaluate a committed checkpoint as its run is configured, and commit the rows with it.

    `marin-rl eval` evaluates anything in any environment, and leaves runs as they are.
    """
    from marin_rl.storage.runs import Run
    from marin_rl.trust import Consent, check_named, settings_of

    opened = Run.open(root, run_name)
    changes = (*(overrides or ()), *key_named(api_key_variable))
    consent = Consent(file=config_file, overrides=changes, trust=trust)
    config = settings_of(opened, consent, ("inference", "trackers", "flow"))
    check_named(opened, config, consent, ("environment", "evaluation", "policy"))
    _flow("evaluate")(config, round_number)


def serve(  # noqa: PLR0913 - each is an option that people type
    *,
    run_name: Annotated[str | None, typer.Option("--run", help="serve a run's checkpoint")] = None,
    round_number: LatestRound = None,
    model: Annotated[Path | None, typer.Option("--model", help="Hugging Face folder")] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", envvar="MARIN_RL_CONFIG", help="YAML file; inference.* counts"),
    ] = None,
    overrides: Overrides = None,
    api_key_variable: Annotated[
        str | None, typer.Option("--api-key-variable", help="variable with the bearer token")
    ] = None,
    admin_key_variable: Annotated[
        str | None, typer.Option("--admin-key-variable", help="variable with the admin token")
    ] = None,
    trust: Trust = False,
    host: Annotated[
        str, typer.Option(envvar="MARIN_RL_HOST", help="address; others than loopback need a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="MARIN_RL_PORT", help="0 takes a free one")] = 8000,
    root: Root = "runs",
    follow: Annotated[
        bool, typer.Option("--follow", help="take the run's later checkpoints as they come")
    ] = False,
    poll_s: Annotated[float, typer.Option("--poll-s", min=0.1, help="between two looks")] = 2.0,
) -> None:
    """Serve a model through the OpenAI protocol until interrupted."""
    share_one_heap()
    if (run_name is None) == (model is None):
        raise ConfigError("serve needs exactly one of --run RUN_ID and --model FOLDER")
    for flag, given in (("--follow", follow), ("--round", round_number is not None)):
        if given and run_name is None:
            raise ConfigError(f"{flag} needs a run: --run RUN_ID")
    keys = [*key_named(api_key_variable), *key_named(admin_key_variable, admin=True)]
    config = serving_config(config_file, [*(overrides or ()), *keys], root, run_name, trust=trust)
    from marin_rl.serving.http.auth import check_address

    check_address(config.inference, host, port)
    from marin_rl.serving.launch import serve_checkpoint, serve_folder

    if run_name is not None:
        code = serve_checkpoint(
            root, run_name, round_number, host, port, config=config, follow=follow, poll_s=poll_s
        )
        raise typer.Exit(code)
    if model is not None:
        raise typer.Exit(serve_folder(model, config, host, port))


def serving_config(
    file: Path | None,
    overrides: list[str] | None,
    root: str,
    run_name: str | None,
    *,
    trust: bool = False,
) -> Config:
    """Return a server's configuration: the file's or the defaults; for a run, the run's.

    With a run, only the file's section `inference` is used: the rest is the run's content.
    Raises ConfigError for a run of somebody else as `settings_of` and `check_named` do.
    """
    given = load_config(file) if file else None
    if run_name is None:
        base = given or Config()
    else:
        from marin_rl.storage.runs import Run
        from marin_rl.trust import Consent, check_named, settings_of

        run = Run.open(root, run_name)
        consent = Consent(file=file, overrides=tuple(overrides or ()), trust=trust)
        base = settings_of(run, consent, ("inference",))
        check_named(run, base, consent, ("policy",))
        if given is not None:
            base = base.model_copy(update={"inference": given.inference})
    said = base.model_dump(mode="json", exclude_unset=True)  # a server sees which keys were not set
    return parse_config(override(said, overrides or ()))


def _played(flow: str, config: Config) -> Any:
    """Run a flow on a configuration with live progress, and return its result.

    Raises ConfigError where the run's name has another content.
    """
    from marin_rl.display import RunDisplay, showing
    from marin_rl.storage.runs import refuse_other_content

    refuse_other_content(config)
    start = _flow(flow)
    with showing(RunDisplay(config.run_id, config.rounds), out), _interruptible():
        return start(config)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a run with a word on how to go on, not with a trace."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted: what is committed stays; the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None


def _flow(name: str) -> Any:
    share_one_heap()  # before what a flow imports starts its threads
    found = entry_points(group="marin_rl.flows", name=name)
    for point in found:
        return point.load()
    raise ConfigError(f"the flow {name!r} is not installed: reinstall marin-rl (`make install`)")


def _print_plan(config: Config) -> None:
    from marin_rl.display import key_values, plan_rows
    from marin_rl.planning import plan

    out.print(key_values(f"Plan of {config.run_id}", plan_rows(config, plan(config))))


def _print_result(config: Config, file: Path) -> None:
    from marin_rl.analysis.report import write_learning_curve
    from marin_rl.analysis.status import run_status
    from marin_rl.display import rounds_table
    from marin_rl.storage.runs import Run

    opened = Run.open(config.root, config.run_id, config.storage_options)
    found = run_status(config.root, config.run_id, config.storage_options)
    out.print(rounds_table(found.rounds, f"Run {config.run_id}"))
    if found.headline:
        out.print(f"[bold]{found.headline}[/bold]")
    tell(f"learning curve: {write_learning_curve(opened, found.rounds)}")
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
    """Name that this program was called by, so that a printed command can be pasted."""
    return "marin-rl" if shutil.which("marin-rl") else f"{Path(sys.executable).parent}/marin-rl"
