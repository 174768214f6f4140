"""`marin-rl …`: the names of all commands; what they do is in `marin_rl.commands`.

Errors of our tree, and of the file system, end a command with one clear message; exit code 2 for
configuration and usage, else 1.
"""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from marin_rl.commands import (
    check,
    config,
    evaluate,
    export,
    inspect,
    provenance,
    recompute,
    run,
    serve,
    storage,
)
from marin_rl.commands.options import complain, err
from marin_rl.errors import ConfigError, MarinRLError

# Commands of earlier versions, and what does the same now.
RENAMED = {"watch": "status --watch", "plot": "report RUN --curve FILE.png", "eval": "evaluate"}


class Commands(TyperGroup):
    """The commands; a name of an earlier version is answered with the present one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Typer's own copy of click's
        """Look a command up. Raises a usage error (exit code 2) for an unknown one."""
        if args[0] in RENAMED:
            ctx.fail(f"No such command '{args[0]}': it is `marin-rl {RENAMED[args[0]]}` now.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="marin-rl",
    cls=Commands,
    help="Reinforcement learning for language models as durable, file-based stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show, validate and document configurations.", no_args_is_help=True)
metrics_app = typer.Typer(help="Check the metrics of a run.", no_args_is_help=True)

app.command()(run.run)
app.command()(run.sft)
app.command()(run.reward_model)
app.command()(evaluate.evaluate)
app.command()(serve.serve)

app.command()(inspect.status)
app.command()(inspect.rollouts)
app.command()(inspect.sql)
app.command()(inspect.report)
app.command()(inspect.view)

app.command()(provenance.lineage)
app.command()(provenance.diff)
app.command()(recompute.replay_step)
app.command()(recompute.rescore)
app.command()(recompute.reprocess)

app.command()(check.doctor)
app.command()(check.audit)
app.command()(check.fsck)
app.command()(check.verify)
app.add_typer(metrics_app, name="metrics")
metrics_app.command("verify")(check.verify_metrics)

app.command()(export.export)
app.command()(export.pairs)
app.command()(storage.fork)
app.command()(storage.gc)

app.add_typer(config_app, name="config")
config_app.command("show")(config.config_show)
config_app.command("validate")(config.config_validate)
config_app.command("reference")(config.config_reference)
config_app.command("metrics")(config.config_metrics)


def main() -> None:
    """Run a command. Our errors become one message and an exit code."""
    try:
        app()
    except (MarinRLError, OSError) as error:  # OSError: such as a disk that is full
        err.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
        complain([str(error)], style="")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
