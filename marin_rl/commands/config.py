"""The commands `config …`: show, validate and document configurations."""

import yaml

from marin_rl.commands.options import ConfigFile, Overrides, load, out, tell


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
