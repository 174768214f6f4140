"""`marin-rl …`: the names of all commands; what they do is in `marin_rl.commands`.

Errors of our tree, and of the file system, end a command with one clear message; exit code 2 for
configuration, else 1.
"""

import sys

import typer

from marin_rl.commands import config as configuring
from marin_rl.commands import evaluate as measuring
from marin_rl.commands import export as exporting
from marin_rl.commands import inspect as looking
from marin_rl.commands import pairs as pairing
from marin_rl.commands import provenance as explaining
from marin_rl.commands import read as reading
from marin_rl.commands import run as playing
from marin_rl.commands import storage as keeping
from marin_rl.commands.options import complain, err
from marin_rl.errors import ConfigError, MarinRLError

app = typer.Typer(
    name="marin-rl",
    help="Reinforcement learning for language models as durable, file-based stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show, validate and document configurations.", no_args_is_help=True)
metrics_app = typer.Typer(help="Check the metrics of a run.", no_args_is_help=True)

app.command("run")(playing.run)
app.command("sft")(playing.sft)
app.command("pairs")(pairing.pairs)
app.command("reward-model")(playing.reward_model)
app.command("status")(reading.status)
app.command("rollouts")(reading.rollouts)
app.command("sql")(reading.sql)
app.command("audit")(reading.audit)
app.command("plot")(reading.plot)
app.command("report")(looking.report)
app.command("view")(looking.view)
app.command("watch")(looking.watch)
app.command("fsck")(keeping.fsck)
app.command("gc")(keeping.gc)
app.command("fork")(keeping.fork)
app.command("lineage")(explaining.lineage)
app.command("replay-step")(explaining.replay_step)
app.command("diff")(explaining.diff)
app.command("reprocess")(exporting.reprocess)
app.command("rescore")(exporting.rescore)
app.command("export")(exporting.export)
app.command("verify")(exporting.verify)
app.command("evaluate")(playing.evaluate)
app.command("eval")(measuring.evaluate_anything)
app.command("serve")(playing.serve)
app.command("doctor")(configuring.doctor)
app.add_typer(config_app, name="config")
app.add_typer(metrics_app, name="metrics")
config_app.command("show")(configuring.config_show)
config_app.command("validate")(configuring.config_validate)
config_app.command("reference")(configuring.config_reference)
config_app.command("metrics")(configuring.config_metrics)
metrics_app.command("verify")(measuring.verify_metrics)


def main() -> None:
    """Entry point of `marin-rl`: runs a command, turns our errors into messages and exit codes."""
    try:
        app()
    except MarinRLError as error:
        _tell_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # a file that cannot be written, a disk that is full
        _tell_error(error)
        sys.exit(1)


def _tell_error(error: Exception) -> None:
    err.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
    complain([str(error)], style="")


def train() -> None:
    """Entry point of `marin-rl-train`, the same as `marin-rl run`."""
    sys.argv.insert(1, "run")
    main()


def serve_alias() -> None:
    """Entry point of `marin-oai-serve`, the same as `marin-rl serve`."""
    sys.argv.insert(1, "serve")
    main()
