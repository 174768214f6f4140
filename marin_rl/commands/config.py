"""The commands `recipes` and `config …`: show, validate and document configurations."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
import yaml

from marin_rl.commands.options import (
    AsJson,
    AsJsonLines,
    ConfigFile,
    ConfigRoot,
    Overrides,
    RunId,
    load,
    out,
    print_info,
    print_json,
    print_result,
    print_text,
)

if TYPE_CHECKING:
    from marin_rl.config import Config


def config_show(
    config_file: ConfigFile,
    *,
    run_id: RunId = None,
    root: ConfigRoot = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration, defaults included."""
    config = load(config_file, overrides, only_shown=True, run_id=run_id, root=root)
    tree = config.model_dump(mode="json")
    if as_json:
        print_json(tree)
        return
    print_info(*(f"# {line}" for line in _unused(config)))
    print_text(yaml.safe_dump(tree, sort_keys=False))


def _unused(config: "Config") -> Iterator[str]:
    """Sentences about settings of the policy that its model folder decides instead."""
    from marin_rl.tokenizer_files import tokenizer_folder

    policy = config.policy
    if policy.hf_path is not None:
        yield f"policy.model is not used: the sizes are those of {policy.hf_path}/config.json"
    if (folder := tokenizer_folder(policy)) is not None and folder != policy.tokenizer:
        yield f"policy.tokenizer is not used: the tokenizer is that of {folder}"


def config_validate(
    config_file: ConfigFile,
    *,
    run_id: RunId = None,
    root: ConfigRoot = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check a configuration; exit code 2 and the wrong keys if it is not valid."""
    config = load(config_file, overrides, only_shown=True, run_id=run_id, root=root)
    facts = {"run_id": config.run_id, "root": config.root, "rounds": config.rounds}
    line = f"{config_file} is valid: run {config.run_id}, {config.rounds} rounds"
    print_result(facts, line, as_json=as_json)


def recipes(*, as_json: AsJsonLines = False) -> None:
    """List the shipped recipes and what they set.

    One is used by `recipe: NAME` in a file, or by `--set recipe=NAME`.
    """
    from marin_rl.config import shipped_recipes

    for recipe in shipped_recipes():
        if as_json:
            print_json(recipe)
            continue
        out.print(f"[bold]{recipe.name}[/bold]: ", end="")
        print_info(recipe.description)
        settings = yaml.safe_dump(dict(recipe.settings), sort_keys=False)
        print_info(*(f"    {line}" for line in settings.splitlines()))


def config_reference(*, as_json: AsJsonLines = False) -> None:
    """Print every key as Markdown: docs/configuration.md."""
    from marin_rl.analysis.reference import configuration_keys, configuration_markdown

    if as_json:
        print_json(*configuration_keys())
        return
    print_text(configuration_markdown())


def config_metrics(*, as_json: AsJsonLines = False) -> None:
    """Print every metric with its formula as Markdown: docs/metrics.md."""
    from marin_rl.analysis.reference import metrics_markdown
    from marin_rl.metrics import DEFINITIONS

    if as_json:
        print_json(*DEFINITIONS)
        return
    print_text(metrics_markdown())


app = typer.Typer(help="Show, validate and document configurations.", no_args_is_help=True)
app.command("show")(config_show)
app.command("validate")(config_validate)
app.command("reference")(config_reference)
app.command("metrics")(config_metrics)
