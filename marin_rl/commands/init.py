"""The command `init`: the files of a first run, copied from the templates of this package."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from marin_rl.commands.options import AsJsonLines, print_info, print_result, try_next
from marin_rl.errors import ConfigError

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
    as_json: AsJsonLines = False,
) -> None:
    """Write a first configuration, prompts and a reward.

    Also a test of your code and a README. No file is overwritten. Without a template it lists them.
    """
    if only_list or template is None:
        _print_templates(as_json=as_json)
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
    print_result(facts, *(f"wrote {path}" for path in written), as_json=as_json)
    if as_json:
        return
    if folder != Path():
        print_info(f"\nGo there first:\n  cd {shlex.quote(str(folder))}")
    try_next(f"doctor {template}.yaml", f"run {template}.yaml")


def _print_templates(*, as_json: bool) -> None:
    """Print each template with the first line of its README, or of its configuration."""
    folders, single = _templates()
    heads = {name: path / "README.md" for name, path in folders.items()} | single
    for name, path in heads.items():
        about = path.read_text().partition("\n")[0].lstrip("# ")
        facts = {"template": name, "about": about}
        print_result(facts, f"{name:<12} {about}", as_json=as_json)


def _templates() -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the folders of templates, and single configurations, by name."""
    folders = {path.name: path for path in sorted(TEMPLATES.iterdir()) if path.is_dir()}
    single = {path.stem: path for folder in CONFIGS for path in sorted(folder.glob("*.yaml"))}
    return folders, single


def demo_configuration() -> Path:
    """Return the file of the demo's configuration, as the wheel or the checkout has it."""
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
