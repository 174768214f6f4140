"""The commands `init`, `recipes` and `config …`: write, show, validate, document configurations."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from marin_rl.commands import options as opt
from marin_rl.errors import ConfigError

if TYPE_CHECKING:
    from marin_rl.config import Config

PACKAGE = Path(__file__).parents[1]
TEMPLATES = PACKAGE / "templates"
CONFIGS = (PACKAGE / "configs", PACKAGE.parent / "configs")  # of a wheel, of a checkout


def init(
    template: Annotated[
        str | None, typer.Argument(help="arithmetic, tools, or a configuration: demo, …")
    ] = None,
    folder: Annotated[Path, typer.Argument(help="folder to write to")] = Path(),
    *,
    only_list: Annotated[bool, typer.Option("--list", help="list the templates and stop")] = False,
    as_json: opt.AsJsonLines = False,
) -> None:
    """Write a first configuration, prompts and a reward.

    Also a test of your code and a README. No file is overwritten. Without a template it lists them.
    """
    if only_list or template is None:
        folders, single = _templates()
        heads = {name: path / "README.md" for name, path in folders.items()} | single
        for name, path in heads.items():
            about = path.read_text().partition("\n")[0].lstrip("# ")
            facts = {"template": name, "about": about}
            opt.print_result(facts, f"{name:<12} {about}", as_json=as_json)
        return
    files = _files_of(template)
    existing = [name for name in files if os.path.lexists(folder / name)]
    if existing:
        raise ConfigError(
            f"{folder.absolute()} has {', '.join(existing)} already, and nothing was written: "
            f"choose another folder, as in\n  marin-rl init {template} my-first-run"
        )
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    written = [folder / name for name in files]
    facts = {"template": template, "files": written}
    opt.print_result(facts, *(f"wrote {path}" for path in written), as_json=as_json)
    if as_json:
        return
    if folder != Path():
        opt.print_info(f"\nGo there first:\n  cd {shlex.quote(str(folder))}")
    opt.try_next(f"doctor {template}.yaml", f"run {template}.yaml")


def _templates() -> tuple[dict[str, Path], dict[str, Path]]:
    folders = {path.name: path for path in sorted(TEMPLATES.iterdir()) if path.is_dir()}
    single = {path.stem: path for folder in CONFIGS for path in sorted(folder.glob("*.yaml"))}
    return folders, single


def demo_configuration() -> Path:
    return _templates()[1]["demo"]


def _files_of(template: str) -> dict[str, bytes]:
    """Return the files of a template by name. Raises ConfigError for an unknown one."""
    folders, single = _templates()
    if template in folders:
        top = folders[template]
        files = sorted(path for path in top.rglob("*") if path.is_file() and path.suffix != ".pyc")
        return {path.relative_to(top).as_posix(): path.read_bytes() for path in files}
    if template in single:
        return {single[template].name: single[template].read_bytes()}
    known = ", ".join([*folders, *single])
    raise ConfigError(f"no template {template!r}: expected one of {known}")


def config_show(
    config_file: opt.ConfigFile,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    as_json: opt.AsJson = False,
) -> None:
    """Print the resolved configuration, defaults included."""
    config = opt.load(config_file, overrides, only_shown=True, run_id=run_id, root=root)
    tree = config.model_dump(mode="json")
    if as_json:
        opt.print_json(tree)
        return
    opt.print_info(*(f"# {line}" for line in _unused(config)))
    opt.print_text(yaml.safe_dump(tree, sort_keys=False))


def _unused(config: "Config") -> Iterator[str]:
    from marin_rl.tokenizer_files import tokenizer_folder

    policy = config.policy
    if policy.hf_path is not None:
        yield f"policy.model is not used: the sizes are those of {policy.hf_path}/config.json"
    if (folder := tokenizer_folder(policy)) is not None and folder != policy.tokenizer:
        yield f"policy.tokenizer is not used: the tokenizer is that of {folder}"


def config_validate(
    config_file: opt.ConfigFile,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    as_json: opt.AsJson = False,
) -> None:
    """Check a configuration; exit code 2 and the wrong keys if it is not valid."""
    config = opt.load(config_file, overrides, only_shown=True, run_id=run_id, root=root)
    facts = {"run_id": config.run_id, "root": config.root, "rounds": config.rounds}
    line = f"{config_file} is valid: run {config.run_id}, {config.rounds} rounds"
    opt.print_result(facts, line, as_json=as_json)


def recipes(*, as_json: opt.AsJsonLines = False) -> None:
    """List the shipped recipes and what they set.

    One is used by `recipe: NAME` in a file, or by `--set recipe=NAME`.
    """
    from marin_rl.config import shipped_recipes

    for recipe in shipped_recipes():
        if as_json:
            opt.print_json(recipe)
            continue
        opt.out.print(f"[bold]{recipe.name}[/bold]: ", end="")
        opt.print_info(recipe.description)
        settings = yaml.safe_dump(dict(recipe.settings), sort_keys=False)
        opt.print_info(*(f"    {line}" for line in settings.splitlines()))


def config_reference(*, as_json: opt.AsJsonLines = False) -> None:
    """Print every key as Markdown: docs/configuration.md."""
    from marin_rl.analysis.reference import configuration_keys, configuration_markdown

    if as_json:
        opt.print_json(*configuration_keys())
        return
    opt.print_text(configuration_markdown())


def config_metrics(*, as_json: opt.AsJsonLines = False) -> None:
    """Print every metric with its formula as Markdown: docs/metrics.md."""
    from marin_rl.analysis.reference import metrics_markdown
    from marin_rl.metrics import DEFINITIONS

    if as_json:
        opt.print_json(*DEFINITIONS)
        return
    opt.print_text(metrics_markdown())


app = typer.Typer(help="Show, validate and document configurations.", no_args_is_help=True)
app.command("show")(config_show)
app.command("validate")(config_validate)
app.command("reference")(config_reference)
app.command("metrics")(config_metrics)
