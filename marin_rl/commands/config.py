"""The commands about configurations: `doctor` and `config …`."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from marin_rl.commands.options import (
    ApiKeyVariable,
    ConfigFile,
    Overrides,
    Trust,
    key_named,
    load,
    out,
    tell,
)


def doctor(
    config_file: Annotated[Path, typer.Argument(help="YAML file")] = Path("configs/demo.yaml"),
    *,
    overrides: Overrides = None,
    api_key_variable: ApiKeyVariable = None,
    trust: Trust = False,
) -> None:
    """Check storage, model, tokenizer, devices, endpoints and Prefect; say what to fix."""
    from marin_rl.doctor import examine

    failed = False
    changes = [*(overrides or ()), *key_named(api_key_variable)]
    for finding in examine(load(config_file, changes, trust=trust)):
        mark = "[green]ok  [/green]" if finding.passed else "[red]FAIL[/red]"
        out.print(f"{mark} [bold]{finding.name:<13}[/bold] ", end="")
        tell(finding.detail)
        failed = failed or not finding.passed
    if failed:
        raise typer.Exit(1)


def config_show(config_file: ConfigFile, *, overrides: Overrides = None) -> None:
    """Print the resolved configuration, defaults included."""
    tree = load(config_file, overrides, only_shown=True).model_dump(mode="json")
    out.print(
        yaml.safe_dump(tree, sort_keys=False), markup=False, highlight=False, end="", soft_wrap=True
    )


def config_validate(config_file: ConfigFile, *, overrides: Overrides = None) -> None:
    """Check a configuration; exit code 2 and the wrong keys if it is not valid."""
    config = load(config_file, overrides, only_shown=True)
    tell(f"{config_file} is valid: run {config.run_id}, {config.rounds} rounds")


def config_reference() -> None:
    """Print every key as Markdown: docs/configuration.md."""
    from marin_rl.analysis.reference import configuration_markdown

    out.print(configuration_markdown(), markup=False, highlight=False, end="", soft_wrap=True)


def config_metrics() -> None:
    """Print every metric with its formula as Markdown: docs/metrics.md."""
    from marin_rl.analysis.reference import metrics_markdown

    out.print(metrics_markdown(), markup=False, highlight=False, end="", soft_wrap=True)
