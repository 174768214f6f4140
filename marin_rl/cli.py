"""`marin-rl …`: the names of all commands, by group; what they do is in `marin_rl.commands`.

A command's module is imported when that command is asked for, and none for `--help`. Errors of our
tree, and of the file system, end a command with one clear message; exit code 2 for configuration
and usage, else 1.
"""

import gc
import importlib
import os
import sys
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from marin_rl.errors import INTERRUPTED, QUIET, ConfigError, MarinRLError
from marin_rl.machine import share_one_heap
from marin_rl.progress import saying

# Module and function in `marin_rl.commands`, and the first line of the function's docstring.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "init": ("config:init", "Write a first configuration, prompts and a reward."),
        "run": ("run:run", "Start a run, or continue it where it stopped."),
        "sft": ("run:sft", "Run only the supervised warm start of a run."),
        "reward-model": ("run:reward_model", "Train a reward model from preference pairs."),
        "preference": ("run:preference", "Train a policy on preference pairs: DPO and others."),
        "launch": ("launch:launch", "Start a command as several processes on this machine."),
        "recipes": ("config:recipes", "List the shipped recipes and what they set."),
    },
    "Look": {
        "status": ("inspect:status", "Show rounds and latest metrics of one run or of all."),
        "rollouts": ("inspect:rollouts", "Show rollouts of a round: prompt, completion, reward."),
        "sql": ("inspect:sql", "Query the tables of a run with DuckDB."),
        "report": ("inspect:report", "Write a run as one HTML page."),
        "view": ("inspect:view", "Serve the page of a run on this machine, following it."),
        "evaluate": ("evaluate:evaluate", "Evaluate a run, a model folder or an endpoint."),
        "diff": ("provenance:diff", "Compare the settings and curves of two runs."),
        "lineage": ("provenance:lineage", "Trace an update back to text and code, or forward."),
        "rescore": ("provenance:rescore", "Score a round with another reward function."),
        "reprocess": ("provenance:reprocess", "Process a round with other settings, and compare."),
    },
    "Check": {
        "doctor": ("upkeep:doctor", "Check storage, model, devices and endpoints."),
        "config": ("config:app", "Show, validate and document configurations."),
        "env": ("env:app", "List environments, try and check one."),
        "audit": ("upkeep:audit", "Check that every rollout is accounted for."),
        "fsck": ("upkeep:fsck", "Check that all objects of a run are there, unchanged."),
        "metrics": ("upkeep:metrics", "Recompute the metrics of a run, and compare."),
        "replay-step": ("provenance:replay_step", "Train a round again, and compare every bit."),
        "replay-episode": (
            "provenance:replay_episode",
            "Step an environment again, and compare each answer.",
        ),
        "verify": ("upkeep:verify", "Check an exported run offline."),
    },
    "Move": {
        "fork": ("upkeep:fork", "Make a run that shares its first rounds with another."),
        "export": ("export:export", "Write a run as one file, or what others read of it."),
        "import": ("export:import_", "Write the Hugging Face folder of a GGUF file."),
        "merge": ("export:merge", "Write the model that an adapter makes of its base."),
        "pairs": ("export:pairs", "Write preference pairs from the groups of a run."),
        "gc": ("upkeep:gc", "Delete unreferenced files and old checkpoints."),
    },
    "Serve": {
        "serve": ("serve:serve", "Serve a run or a model folder as an OpenAI server."),
        "serve-trajectories": (
            "serve:serve_trajectories",
            "Receive rollouts from environments of atropos.",
        ),
        "poll-trajectories": (
            "serve:poll_trajectories",
            "Take rollouts from an API server of atropos.",
        ),
        "sessions": ("serve:sessions", "Hand out rollouts of a run to agents elsewhere."),
    },
}
COMMANDS = {name: place for group in GROUPS.values() for name, (place, _) in group.items()}

# Typer's help imports both, and draws with neither: half of what `--help` would import.
UNUSED_BY_HELP = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}

IMPORTED_OBJECTS = 100_000  # new objects before the collector looks at them

# Spellings of earlier versions, and what does the same now.
WITHDRAWN_COMMANDS = {
    "watch": "view RUN",
    "sample": "serve RUN --register",
    "plot": "report RUN --curve FILE.png",
    "eval": "evaluate",
}
WITHDRAWN_OPTIONS = {
    ("fork", "--from-round"): "--round",
    ("pairs", "--out"): "--output",
    ("pairs", "--rounds"): "--round",
    ("try", "--url"): "--endpoint",
    ("serve", "--run"): "serve RUN",
    ("evaluate", "--option"): "--set environment.options.KEY=VALUE",
    ("status", "--watch"): "view RUN",
    ("status", "--every"): "view RUN",
    ("status", "--once"): "status RUN",
    ("replay-step", "N"): "--round N",  # a number by itself
}


class Commands(TyperGroup):
    """The commands by group; the module of one is imported when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        settings["commands"] = {
            name: TyperCommand(name, help=line, rich_help_panel=group)
            for group, commands in GROUPS.items()
            for name, (_, line) in commands.items()
        }
        super().__init__(**settings)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Typer's own copy of click's
        """Import a command. Raises a usage error (exit code 2) for an unknown or withdrawn one."""
        if args[0] in WITHDRAWN_COMMANDS:
            present = WITHDRAWN_COMMANDS[args[0]]
            ctx.fail(f"No such command '{args[0]}': it is `marin-rl {present}` now.")
        name, _, others = super().resolve_command(ctx, args)
        return name, command_named(args[0]), others

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C ends it with a line and exit code 130 in each of its phases."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise  # a command has told the end already
        except BaseException as error:
            if not _is_interrupt(error):
                raise
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _import_help()
        super().format_help(ctx, formatter)


class Command(TyperCommand):
    """A command; an option of an earlier version is answered with the present one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does. Raises a usage error (exit code 2) for a withdrawn option."""
        for item, before in zip(args, ["", *args], strict=False):
            alone = item.isdigit() and not before.startswith("--")
            option = "N" if alone else item.partition("=")[0]
            if present := WITHDRAWN_OPTIONS.get((self.name or "", option)):
                ctx.fail(f"{item} is no longer understood: it is `{present}` now.")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _import_help()
        super().format_help(ctx, formatter)


def _is_interrupt(error: BaseException | None) -> bool:
    """Return True for Ctrl-C, also where a library made another error of it, as Pydantic does."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def command_named(name: str) -> Any:
    """Import one of COMMANDS. Raises KeyError for another name."""
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(importlib.import_module(f"marin_rl.commands.{module}"), attribute)
    if isinstance(found, typer.Typer):  # a group of commands
        for one in found.registered_commands:
            one.cls = Command
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    settings = {"allow_interspersed_args": name != "launch"}  # whose options end at its command
    alone.command(name, cls=Command, context_settings=settings)(found)
    return typer.main.get_command(alone)


def _print_version(asked: bool) -> bool:  # noqa: FBT001 - as Typer calls it
    if not asked:
        return asked
    from importlib.metadata import version

    python = sys.version.partition(" ")[0]
    typer.echo(f"marin-rl {version('marin-rl')}, Python {python}, JAX {version('jax')}")
    raise typer.Exit


app = typer.Typer(
    name="marin-rl",
    cls=Commands,
    help="Reinforcement learning for language models as durable, file-based stages.",
    epilog="marin-rl COMMAND --help shows the options of a command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def marin_rl(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print versions and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def _import_help() -> None:
    """Import Typer's help with empty modules in place of imports that it does not use here."""
    absent = {name: item for name, item in UNUSED_BY_HELP.items() if name not in sys.modules}
    for name, item in absent.items():
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], item, object)
    try:
        importlib.import_module("typer.rich_utils")
    finally:
        for name in absent:
            del sys.modules[name]


def main() -> None:
    """Run a command. Our errors become one message and an exit code."""
    # Paths are texts of YAML: begin again in UTF-8 mode where the locale has another encoding.
    if sys.getfilesystemencoding() != "utf-8":
        os.environ.update(PYTHONUTF8="1")
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    # An eighth of a short command's time is Python's collector, called 150 times while modules are
    # imported. Runs and servers choose their own number once they work.
    gc.set_threshold(IMPORTED_OBJECTS, *gc.get_threshold()[1:])
    share_one_heap()  # before any library starts threads
    try:
        with saying():
            app()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            # A thread that compiles would meet the interpreter's end, and abort the process.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
    except (MarinRLError, OSError) as error:  # OSError: such as a disk that is full
        from marin_rl.commands.options import report

        quiet = isinstance(error, ConfigError) and QUIET in sys._xoptions
        sys.exit(2 if quiet else report(error))
