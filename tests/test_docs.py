"""Documentation that is generated, or that lists files, matches the code."""

import re
from pathlib import Path

import pytest

from marin_rl.analysis.reference import configuration_markdown, metrics_markdown

TOP = Path(__file__).parent.parent
ROOMS = ("marin_rl", "flows", "tasks", "schemas")


@pytest.mark.parametrize(
    ("page", "made"),
    [("configuration.md", configuration_markdown), ("metrics.md", metrics_markdown)],
    ids=["configuration", "metrics"],
)
def test_a_generated_page_is_what_the_code_says(page, made):
    assert (TOP / "docs" / page).read_text(encoding="utf-8") == made(), "run `make docs`"


def test_links_between_pages_lead_somewhere():
    for page in [TOP / "README.md", TOP / "CONTRIBUTING.md", *(TOP / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_the_command_line_has_every_command_and_no_option_that_is_none():
    from marin_rl.cli import COMMANDS, GROUPS, WITHDRAWN_OPTIONS, command_named

    page = (TOP / "docs/command-line.md").read_text(encoding="utf-8")
    for group, commands in GROUPS.items():
        rows = "\n".join(f"| `{name}` | {line} |" for name, (_, line) in commands.items())
        head = rf"^\| \*\*{group}\*\* \| .+ \|\n"
        assert re.search(rf"{head}{re.escape(rows)}\n", page, re.MULTILINE), group
    commands = [command_named(name) for name in COMMANDS]
    commands += [each for command in commands for each in getattr(command, "commands", {}).values()]
    known = {option for command in commands for each in command.params for option in each.opts}
    withdrawn = {option for _, option in WITHDRAWN_OPTIONS}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) - {"--help", "--version"}
    assert named <= known | withdrawn, named - known - withdrawn


def test_every_variable_that_is_read_is_documented():
    page = (TOP / "docs/command-line.md").read_text(encoding="utf-8")
    files = [path for room in ROOMS for path in (TOP / room).rglob("*.py")]
    read = {
        name
        for path in files
        for name in re.findall(r"\bMARIN_RL_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    assert read == set(re.findall(r"\bMARIN_RL_[A-Z_]+", page))


IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\w*)|import ([\w.]+))", re.MULTILINE)


def imported(path: Path) -> set[str]:
    """Modules that a file imports, at its head or inside a function, with the packages above."""
    found = IMPORT.findall(path.read_text(encoding="utf-8"))
    parts = [(module or f"{package}.{name}").split(".") for package, name, module in found]
    return {".".join(each[: n + 1]) for each in parts for n in range(len(each))}


def test_libraries_are_imported_behind_their_doors_alone():
    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| its only door |") :].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \|$", table, re.MULTILINE)
    assert len(rows) >= 8
    modules = {
        path.relative_to(TOP).as_posix(): imported(path)
        for room in ROOMS
        for path in (TOP / room).rglob("*.py")
    }
    for libraries, doors in rows:
        names = {name.lower() for name in re.findall(r"[\w.]+", libraries)} - {"s", "client"}
        allowed = tuple(re.findall(r"`([^`]+)`", doors))
        users = {path for path, used in modules.items() if names & {u.lower() for u in used}}
        assert users, f"nothing imports {libraries}"
        assert not {path for path in users if not path.startswith(allowed)}, libraries
