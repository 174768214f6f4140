"""Shared parts of commands: options that mean the same everywhere, and the two consoles.

Also `load`, by which every command that takes CONFIG|RUN reads its configuration.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.progress import phase

if TYPE_CHECKING:
    from marin_rl.analysis.status import RunStatus
    from marin_rl.config import Config
    from marin_rl.storage.runs import Run

ROOT_VARIABLE = "MARIN_RL_ROOT"

out = Console(emoji=False)  # `:x:` in a text of a run is no emoji
err = Console(stderr=True, emoji=False)

ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG|RUN", help="YAML file such as configs/demo.yaml; a run's id or folder"
    ),
]


def _folder_name(text: str | None) -> str | None:
    return text and text.rstrip("/")


RunName = Annotated[str, typer.Argument(metavar="RUN", help="run id", callback=_folder_name)]
AnyRunName = Annotated[
    str | None, typer.Argument(metavar="RUN", help="run id; none: all runs", callback=_folder_name)
]
Root = Annotated[
    str, typer.Option("--root", envvar=ROOT_VARIABLE, help="folder or URL that holds runs")
]
ConfigRoot = Annotated[
    str | None,
    typer.Option(
        "--root", help=f"folder or URL for runs; default: {ROOT_VARIABLE}, else that of the file"
    ),
]
RunId = Annotated[str | None, typer.Option("--run-id", help="name of the run")]
Round = Annotated[int, typer.Option("--round", min=0, help="number of the round")]
LatestRound = Annotated[int | None, typer.Option("--round", min=0, help="default: the latest")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="dotted override; repeatable")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else")]
AsJsonLines = Annotated[
    bool, typer.Option("--json", help="a JSON object per line on standard output, nothing else")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="accept the code, places and settings that another user's run names"
    ),
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option("--api-key-variable", help="environment variable with the key of endpoints"),
]


def print_json(*values: Any) -> None:
    """Print a line of JSON for each value; numbers that are not finite are null, as JSON has none.

    Durations are in seconds, dates are ISO 8601, paths and other types that JSON lacks are text.
    """
    for value in values:
        typer.echo(json.dumps(_plain(value), default=str))


def print_result(value: Any, *lines: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        print_info(*lines)


def _plain(value: Any) -> Any:
    """Convert to types of JSON: SQL's sums and products of integers are decimals, for instance."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Decimal):
        return float(value) if value.as_tuple().exponent else int(value)  # as DuckDB's type says
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def print_info(*lines: str, style: str = "", console: Console = out) -> None:
    """Print lines without markup and control characters, by default on standard output."""
    from marin_rl.display.tables import printable

    for line in lines:
        console.print(printable(line), style=style, markup=False, highlight=False, soft_wrap=True)


def print_error(*lines: str, style: str = "red") -> None:
    print_info(*lines, style=style, console=err)


def print_verdict(*, passed: bool | None) -> None:
    verdicts = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "    "}
    out.print(verdicts[passed], end=" ")


def report(error: BaseException) -> int:
    """Print an error that ends a command, and return the exit code."""
    err.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
    print_error(str(error), style="")
    return 2 if isinstance(error, ConfigError) else 1


def print_text(text: str) -> None:
    out.print(text, markup=False, highlight=False, end="", soft_wrap=True)


def print_summary(status: "RunStatus") -> None:
    """Print what a run learned, in a sentence, and its warnings, a line each."""
    if status.headline:
        print_info(status.headline, style="bold")
    print_info(*(f"! {line}" for line in status.warnings), style="yellow")


def try_next(*commands: str) -> None:
    """Print command lines, without the program's name, as lines that can be pasted."""
    program = "marin-rl" if shutil.which("marin-rl") else f"{Path(sys.executable).parent}/marin-rl"
    out.print("\n[bold]Try next[/bold]")
    print_info(*(f"  {program} {command}" for command in commands))


def open_run(root: str, run_name: str) -> "Run":
    from marin_rl.storage.runs import Run

    return Run.open(root, run_name)


@phase("reading the configuration")
def load(
    file: Path,
    overrides: list[str] | None,
    *,
    root: str | None = None,
    trust: bool = False,
    only_shown: bool = False,
    **options: Any,
) -> "Config":
    """Load the configuration that CONFIG|RUN names, with overrides and values of `options`.

    `file` is a YAML file, the folder of a run (also `.`), or the id of a run under the root; of a
    run it is the configuration in its run.json. The root of a new run is `root`, else a `root=` of
    the overrides, else that of the environment, else that of the file.
    Raises ConfigError where a run is another user's and names code, places or settings that are
    the user's to choose, unless `trust` or `only_shown`, and where nothing has this name.
    """
    from marin_rl.config import load_config
    from marin_rl.storage.runs import Run

    items = [f"{key}={value}" for key, value in options.items() if value is not None]
    changes = [*(overrides or ()), *items]
    usual = os.environ.get(ROOT_VARIABLE) or None
    own = {"trust": trust, "only_shown": only_shown}
    if (file / "run.json").is_file():
        folder = file.resolve() if file.name in ("", "..") else file
        changes += [] if root is None else [f"root={root}"]
        return _of_run(Run.open(str(folder.parent), folder.name), changes, **own)
    if not file.exists() and len(file.parts) == 1 and file.suffix not in (".yaml", ".yml"):
        try:
            run = Run.open(root or usual or "runs", str(file))
        except ObjectMissing as error:
            raise ConfigError(
                f"no configuration file at {file}: expected a YAML file, or the id or folder of a "
                f"run ({error})"
            ) from None
        return _of_run(run, changes, **own)
    before = [] if usual is None else [f"root={json.dumps(usual)}"]
    after = [] if root is None else [f"root={json.dumps(root)}"]
    return load_config(file, [*before, *changes, *after])


def _of_run(run: "Run", changes: list[str], *, trust: bool, only_shown: bool) -> "Config":
    from marin_rl.trust import Consent, settings_of, trusted_config

    consent = Consent(overrides=tuple(changes), trust=trust)
    return settings_of(run, consent, ()) if only_shown else trusted_config(run, consent)


def key_named(variable: str | None, *, admin: bool = False) -> list[str]:
    """Return the override by which a configuration uses the key in an environment variable.

    Configurations may name only MARIN_RL_* variables, so the value is copied into one of them.
    Raises ConfigError where the variable is not set.
    """
    if variable is None:
        return []
    if (value := os.environ.get(variable)) is None:
        raise ConfigError(f"the environment variable {variable} is not set: expected a key in it")
    own = "MARIN_RL_ADMIN_KEY" if admin else "MARIN_RL_API_KEY"
    os.environ[own] = value
    return [f"inference.{'server.admin' if admin else 'api'}_key_variable={own}"]
