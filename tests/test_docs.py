"""Documentation that is generated, or that lists files, matches the code."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from marin_rl.analysis.reference import configuration_markdown, metrics_markdown
from marin_rl.environments.registry import USER_CLASS, described_environments
from marin_rl.serving.http.prometheus import METRICS

TOP = Path(__file__).parent.parent
ROOMS = ("marin_rl", "flows", "tasks", "schemas")
ARCHITECTURE = (TOP / "docs/architecture.md").read_text(encoding="utf-8")
README = (TOP / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "made"),
    [("configuration.md", configuration_markdown), ("metrics.md", metrics_markdown)],
    ids=["configuration", "metrics"],
)
def test_a_generated_page_is_what_the_code_says(page, made):
    assert (TOP / "docs" / page).read_text(encoding="utf-8") == made(), "run `make docs`"


def test_the_reference_has_the_options_of_every_environment():
    """But for those of a class of the user's own, which no page can know."""
    page = (TOP / "docs/configuration.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^## environment\.options of (\w+)$", page, re.MULTILINE))
    assert named == {entry.name for entry in described_environments()} - {USER_CLASS}


def test_the_servers_metrics_that_the_page_names_exist():
    page = (TOP / "docs/serving.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(marin_rl_[a-z_]+)`", page.partition("## Metrics")[2]))
    assert named
    assert named <= {spec.name for spec in METRICS}


def test_the_tree_of_contributing_names_every_room():
    page = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = page.partition("\n```text\n")[2].partition("\n```\n")[0]
    named = set(re.findall(r"^ *([a-z_]+)/ ", tree, re.MULTILINE))
    library = {path.parent.name for path in (TOP / "marin_rl").glob("*/__init__.py")}
    assert named >= library | set(ROOMS)
    assert not {name for name in named if not (TOP / name).is_dir()} - library
    assert len(tree.splitlines()) <= 40


def test_links_between_pages_lead_somewhere():
    for page in [TOP / "README.md", TOP / "CONTRIBUTING.md", *(TOP / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_is_documented_and_every_documented_one_exists():
    makefile = (TOP / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)", makefile, re.MULTILINE))
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert phony == explained
    texts = README + (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", texts, re.MULTILINE):
        assert target in phony


def test_the_page_of_the_command_line_has_every_command_and_no_option_that_is_none():
    from marin_rl.cli import COMMANDS, GROUPS, WITHDRAWN_OPTIONS, command_named

    page = (TOP / "docs/command-line.md").read_text(encoding="utf-8")
    for group, commands in GROUPS.items():
        rows = [f"| `{name}` | {line} |" for name, (_, line) in commands.items()]
        table = "\n".join(["| command | what it does |", "|---|---|", *rows])
        assert re.search(rf"^### {group}\n\n.+\n\n{re.escape(table)}\n", page, re.MULTILINE), group
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


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definitions(path: Path) -> set[str]:
    """Names of the classes, functions and methods (`Class.method`) that a file defines."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.ClassDef, *functions)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, functions)}
    return names


def imported(path: Path) -> set[str]:
    """Modules that a file imports, at its head or inside a function, with the packages above."""
    modules = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    parts = [module.split(".") for module in modules]
    return {".".join(each[: n + 1]) for each in parts for n in range(len(each))}


def test_architecture_names_functions_that_exist():
    pairs = re.findall(r"`([\w.]+)`(?:,\s+|\s+\()`([\w/]+\.py)`", ARCHITECTURE)
    assert len(pairs) > 40
    assert not [f"{name}: {path}" for name, path in pairs if name not in definitions(TOP / path)]


def test_architecture_names_files_and_folders_that_exist():
    paths = re.findall(r"`((?:marin_rl|flows|tasks|schemas)/[\w/.]*)`", ARCHITECTURE)
    assert not [path for path in paths if not (TOP / path).exists()]


def test_architecture_lists_the_layers_of_the_contract():
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each.get("containers") == ["marin_rl"])
    rows = [" · ".join(f"`{name.strip()}`" for name in layer.split("|")) for layer in layers]
    expected = "\n".join(f"{number}. {row}" for number, row in enumerate(rows, 1))
    assert expected in ARCHITECTURE, f"docs/architecture.md lists other layers than\n{expected}"


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
