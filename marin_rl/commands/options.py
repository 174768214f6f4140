"""Shared parts of commands: options that mean the same everywhere, and the two consoles."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from marin_rl.config import Config, load_config
from marin_rl.errors import ConfigError

out = Console(emoji=False)  # what runs say is shown as it is, `:x:` included
err = Console(stderr=True, emoji=False)

ConfigFile = Annotated[
    Path, typer.Argument(help="YAML file such as configs/demo.yaml, or a run's folder")
]


def _folder_name(text: str | None) -> str | None:
    """Without the slash that shells add where they complete the name of a folder."""
    return text and text.rstrip("/")


RunName = Annotated[str, typer.Argument(help="run id", callback=_folder_name)]
AnyRunName = Annotated[
    str | None, typer.Argument(help="run id; none: all runs", callback=_folder_name)
]
Root = Annotated[
    str, typer.Option("--root", envvar="MARIN_RL_ROOT", help="folder or URL that holds runs")
]
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
        "--trust", help="take the code, places and settings that a run of somebody else names"
    ),
]
OwnConfig = Annotated[
    Path | None, typer.Option("--config", help="your own YAML file; its free keys count")
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option("--api-key-variable", help="environment variable with the key of endpoints"),
]


def tell_json(value: Any) -> None:
    """One line of JSON on standard output; numbers that are not finite are null, as JSON has none.

    Durations are in seconds, dates are ISO 8601, paths and other things that JSON lacks are text.
    """
    typer.echo(json.dumps(_plain(value), default=_as_text))


def _plain(value: Any) -> Any:
    """The same with numbers that JSON has: SQL's sums and products of integers are decimals."""
    if isinstance(value, Decimal):
        return float(value) if value.as_tuple().exponent else int(value)  # as DuckDB's type says
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _as_text(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def tell(text: str) -> None:
    """Text on standard output: its brackets are no markup, and a terminal obeys no sign of it."""
    from marin_rl.display import printable

    out.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def complain(lines: Iterable[str], style: str = "red") -> None:
    """Each line in red on standard error, as `tell` does it."""
    from marin_rl.display import printable

    for line in lines:
        err.print(printable(line), style=style, markup=False, highlight=False, soft_wrap=True)


def load(
    file: Path,
    overrides: list[str] | None,
    *,
    trust: bool = False,
    only_shown: bool = False,
    **given: Any,
) -> Config:
    """The configuration in `file`, with overrides and what was `given` by options of their own.

    `file` may be the folder of a run, also `.`: it stands for the configuration in its run.json.
    Raises ConfigError where that run is somebody else's and names code, places or settings that
    are the user's to choose, unless with `trust` or where the configuration is `only_shown`.
    """
    items = [f"{key}={value}" for key, value in given.items() if value is not None]
    changes = [*(overrides or ()), *items]
    if not (file / "run.json").is_file():
        return load_config(file, changes)
    from marin_rl.storage.runs import Run
    from marin_rl.trust import Consent, check_named, settings_of

    folder = file.resolve() if file.name in ("", "..") else file
    run = Run.open(str(folder.parent), folder.name)
    consent = Consent(overrides=tuple(changes), trust=trust)
    if only_shown:
        return settings_of(run, consent, ())
    config = settings_of(run, consent)
    check_named(run, config, consent)
    return config


def key_named(variable: str | None, *, admin: bool = False) -> list[str]:
    """The override by which a configuration takes the key that a variable of any name holds.

    Only the command line may name such a variable: its value goes into one that configurations may
    name. Raises ConfigError where it is not set.
    """
    if variable is None:
        return []
    if (value := os.environ.get(variable)) is None:
        raise ConfigError(f"the environment variable {variable} is not set: expected a key in it")
    own = "MARIN_RL_ADMIN_KEY" if admin else "MARIN_RL_API_KEY"
    os.environ[own] = value
    return [f"inference.{'server.admin' if admin else 'api'}_key_variable={own}"]
