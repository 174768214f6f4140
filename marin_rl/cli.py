"""`marin-rl …`: every command a person types. Each is a few lines over the library.

Flows are found through the entry-point group `marin_rl.flows`: the library knows no orchestrator.
Errors of our tree end a command with one clear message; exit code 2 for configuration, else 1.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from marin_rl.config import Config, load_config
from marin_rl.errors import ConfigError, MarinRLError

app = typer.Typer(
    name="marin-rl",
    help="Reinforcement learning for language models as durable, file-based stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show, validate and document configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")

INTERRUPTED = 130  # what shells report of a process that Ctrl-C ended

out = Console()
err = Console(stderr=True)

ConfigFile = Annotated[Path, typer.Argument(help="YAML file, for example configs/demo.yaml")]
RunName = Annotated[str, typer.Argument(help="run id")]
Root = Annotated[
    str, typer.Option("--root", envvar="MARIN_RL_ROOT", help="folder or URL that holds runs")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="dotted override; repeatable")
]


@app.command()
def run(
    config_file: ConfigFile,
    *,
    run_id: Annotated[str | None, typer.Option("--run-id", help="name of the run")] = None,
    root: Annotated[str | None, typer.Option("--root", help="folder or URL for runs")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="rounds to reach")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and stop")] = False,
) -> None:
    """Start a run, or continue it where it stopped; the same command does both."""
    config = _load(config_file, overrides, run_id=run_id, root=root, rounds=rounds)
    if dry_run:
        _print_plan(config)
        return
    from marin_rl.display import RunDisplay, showing
    from marin_rl.storage.runs import refuse_other_content

    refuse_other_content(config)
    start = _flow("rl-loop")
    with showing(RunDisplay(config.run_id, config.rounds), out), _interruptible():
        start(config)
    _print_result(config, config_file)


@app.command()
def sft(
    config_file: ConfigFile,
    *,
    run_id: Annotated[str | None, typer.Option("--run-id")] = None,
    root: Annotated[str | None, typer.Option("--root")] = None,
    overrides: Overrides = None,
) -> None:
    """Run only the supervised warm start of a run."""
    config = _load(config_file, overrides, run_id=run_id, root=root)
    from marin_rl.display import RunDisplay, showing
    from marin_rl.storage.runs import refuse_other_content

    refuse_other_content(config)
    start = _flow("sft")
    with showing(RunDisplay(config.run_id, config.rounds), out), _interruptible():
        start(config)


@app.command()
def evaluate(
    run_name: RunName,
    *,
    round_number: Annotated[int | None, typer.Option("--round", help="default: the latest")] = None,
    root: Root = "runs",
) -> None:
    """Evaluate a committed checkpoint of a run on held-out examples."""
    from marin_rl.storage.runs import Run

    opened = Run.open(root, run_name)
    _flow("evaluate")(opened.config, round_number)


@app.command()
def status(
    run_name: Annotated[str | None, typer.Argument(help="run id; none: all runs")] = None,
    *,
    root: Root = "runs",
) -> None:
    """What is committed, and the latest numbers, of one run or of all."""
    from marin_rl.analysis.status import all_statuses, run_status
    from marin_rl.display import key_values, rounds_table

    if run_name is None:
        for item in all_statuses(root):
            trained = item.facts["rounds trained"]
            out.print(f"[bold]{item.run_id}[/bold]: {trained} rounds. {item.headline}")
        return
    found = run_status(root, run_name)
    out.print(key_values(f"Run {run_name}", found.facts))
    if found.rounds:
        out.print(rounds_table(found.rounds, "Rounds"))


@app.command()
def rollouts(
    run_name: RunName,
    *,
    round_number: Annotated[int | None, typer.Option("--round", help="default: the latest")] = None,
    limit: Annotated[int, typer.Option(help="how many rollouts")] = 8,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    root: Root = "runs",
) -> None:
    """Read rollouts of a round: prompt, completion, reward."""
    from marin_rl.analysis.status import sample_rollouts
    from marin_rl.display import rollouts_table

    rows = sample_rollouts(root, run_name, round_number, limit, worst_first=worst)
    out.print(rollouts_table(rows))


@app.command()
def sql(run_name: RunName, query: str, *, root: Root = "runs") -> None:
    """Query a run with DuckDB: rollouts, batches, dispositions, metrics, evals."""
    from marin_rl.analysis.scan import sql as run_sql
    from marin_rl.display import frame_table

    frame = run_sql(root, run_name, query)
    out.print(frame_table(frame.columns, frame.rows()))


@app.command()
def audit(run_name: RunName, *, root: Root = "runs") -> None:
    """Check from the files alone that every rollout is accounted for. Exit code 1 if not."""
    from marin_rl.analysis.status import audit_summary
    from marin_rl.display import frame_table

    report = audit_summary(root, run_name)
    out.print(frame_table(report.columns, report.rows))
    for line in report.problems:
        err.print(f"[red]{line}[/red]")
    if report.problems:
        raise typer.Exit(1)


@app.command()
def plot(
    run_name: RunName,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="PNG file")] = None,
    root: Root = "runs",
) -> None:
    """Draw the learning curve of a run."""
    from marin_rl.analysis.report import learning_curve
    from marin_rl.analysis.status import metric_rows
    from marin_rl.storage.runs import Run

    target = output or Path(f"{run_name}.png")
    target.write_bytes(learning_curve(metric_rows(Run.open(root, run_name)), run_name))
    out.print(f"wrote {target}")


@app.command()
def serve(
    *,
    run_name: Annotated[str | None, typer.Option("--run", help="serve a run's checkpoint")] = None,
    round_number: Annotated[int | None, typer.Option("--round", help="default: the latest")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Hugging Face folder")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="engine settings")] = None,
    host: Annotated[str, typer.Option(help="address; others than loopback need a token")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    root: Root = "runs",
) -> None:
    """Serve a model through the OpenAI protocol until interrupted."""
    if (run_name is None) == (model is None):
        raise ConfigError("serve needs exactly one of --run RUN_ID and --model FOLDER")
    from marin_rl.inference.standalone import serve_checkpoint, serve_folder

    if run_name is not None:
        raise typer.Exit(serve_checkpoint(root, run_name, round_number, host, port))
    if model is not None:
        config = load_config(config_file) if config_file else Config()
        raise typer.Exit(serve_folder(model, config, host, port))


@app.command()
def doctor(
    config_file: Annotated[Path, typer.Argument(help="YAML file")] = Path("configs/demo.yaml"),
    *,
    overrides: Overrides = None,
) -> None:
    """Check storage, model, tokenizer, devices, endpoints and Prefect; say what to fix."""
    from marin_rl.doctor import examine

    failed = False
    for finding in examine(_load(config_file, overrides)):
        mark = "[green]ok  [/green]" if finding.passed else "[red]FAIL[/red]"
        out.print(f"{mark} [bold]{finding.name:<13}[/bold] ", end="")
        out.print(finding.detail, markup=False, highlight=False)
        failed = failed or not finding.passed
    if failed:
        raise typer.Exit(1)


@config_app.command("show")
def config_show(config_file: ConfigFile, *, overrides: Overrides = None) -> None:
    """Print the resolved configuration, defaults included."""
    tree = _load(config_file, overrides).model_dump(mode="json")
    out.print(yaml.safe_dump(tree, sort_keys=False), markup=False, highlight=False, end="")


@config_app.command("validate")
def config_validate(config_file: ConfigFile, *, overrides: Overrides = None) -> None:
    """Check a configuration; exit code 2 and the wrong keys if it is not valid."""
    config = _load(config_file, overrides)
    out.print(f"{config_file} is valid: run {config.run_id}, {config.rounds} rounds")


@config_app.command("reference")
def config_reference() -> None:
    """Print every key as Markdown: docs/configuration.md."""
    from marin_rl.analysis.reference import configuration_markdown

    out.print(configuration_markdown(), markup=False, highlight=False, end="", soft_wrap=True)


@config_app.command("metrics")
def config_metrics() -> None:
    """Print every metric with its formula as Markdown: docs/metrics.md."""
    from marin_rl.analysis.reference import metrics_markdown

    out.print(metrics_markdown(), markup=False, highlight=False, end="", soft_wrap=True)


def main() -> None:
    """Entry point of `marin-rl`: runs a command, turns our errors into messages and exit codes."""
    try:
        app()
    except MarinRLError as error:
        err.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
        err.print(str(error), markup=False, highlight=False)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def train() -> None:
    """Entry point of `marin-rl-train`, the same as `marin-rl run`."""
    sys.argv.insert(1, "run")
    main()


def serve_alias() -> None:
    """Entry point of `marin-oai-serve`, the same as `marin-rl serve`."""
    sys.argv.insert(1, "serve")
    main()


def _load(file: Path, overrides: list[str] | None, **given: Any) -> Config:
    items = [f"{key}={value}" for key, value in given.items() if value is not None]
    return load_config(file, [*(overrides or ()), *items])


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a run with a word on how to go on, not with a trace."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted: what is committed stays; the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None


def _flow(name: str) -> Any:
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
    out.print(f"learning curve: {write_learning_curve(opened, found.rounds)}", soft_wrap=True)
    root = "" if config.root == "runs" else f" --root {config.root}"
    average = "select round, avg(reward) as reward from rollouts group by round order by round"
    out.print("\n[bold]Try next[/bold]")
    for command in (
        f'sql {config.run_id} "{average}"{root}',
        f"rollouts {config.run_id} --round 3{root}",
        f"run {file} --run-id {config.run_id} --rounds {config.rounds + 20}{root}",
    ):
        out.print(f"  {_program()} {command}", highlight=False, markup=False, soft_wrap=True)


def _program() -> str:
    """How this program was called, so that a printed command can be pasted."""
    return "marin-rl" if shutil.which("marin-rl") else f"{Path(sys.executable).parent}/marin-rl"
