"""Commands, code and keys in the docs: each exists, and what is quick runs.

Commands are lines of code blocks that begin with `marin-rl`, and inline code that does. Python and
YAML blocks are checked as far as no model is needed; other tests run those of single pages.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_commands import ForkedCommands
from support.imports import missing_imports
from support.quick_programs import quick_programs
from typer.main import get_command

from marin_rl.cli import app
from marin_rl.config import Config
from marin_rl.config.sections import known_keys

TOP = Path(__file__).parent.parent
PAGES = {
    path.relative_to(TOP).as_posix(): path.read_text(encoding="utf-8")
    for path in [TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted((TOP / "docs").glob("*.md"))]
}
BLOCK = re.compile(
    r"^( *)```(\w*)[^\n]*\n(.*?)^\1```|((?:^    [^\n]*\n)+)", re.DOTALL | re.MULTILINE
)
NOT_SHELL = {"python", "yaml", "json", "sql", "toml"}
COMMAND = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ +)*)marin-rl +(.*)$")
# Libraries of the reader's own, which are in no environment of this repository.
ELSEWHERE = {"verifiers", "datasets", "trl", "peft", "gymnasium", "rewards"}
KEYS = frozenset(known_keys())
SECTIONS = frozenset(key.partition(".")[0] for key in KEYS if "." in key)
# Sections whose keys belong to an environment, a store, or the user.
FREE_FORM = (
    "environment.chat_template_options.",
    "policy.chat_template_options.",
    "environment.options.",
    "objective.loss_options.",
    "sft.environment",
    "storage_options.",
    "evaluation.sets.",
)


def blocks(page: str, *languages: str) -> list[str]:
    """Code blocks of a page: fenced in one of the languages, or indented where "" is one."""
    found = []
    for indent, language, fenced, indented in BLOCK.findall(PAGES[page]):
        if language in languages and (fenced or indented):
            text = fenced or indented
            found.append(re.sub(f"^{indent}" if fenced else "^    ", "", text, flags=re.MULTILINE))
    return found


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page, without `marin-rl` and its comment; variables before it."""

    page: str
    words: tuple[str, ...]
    variables: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: marin-rl {shlex.join(self.words)}"


def commands() -> Iterator[Command]:
    """Yield the command lines of all blocks of all pages."""
    shells = {language for page in PAGES for _, language, *_ in BLOCK.findall(PAGES[page])}
    for page in PAGES:
        for block in blocks(page, *(shells - NOT_SHELL), ""):
            lines = block.replace("\\\n", " ").splitlines()
            for line, output in pairwise([*lines, ""]):
                refused = "no longer understood" in output  # an example of an error
                if not refused and (match := COMMAND.match(line)):
                    words = shlex.split(match[2], comments=True)
                    yield Command(page, tuple(words), tuple(match[1].split()))


ALL = list(dict.fromkeys(commands()))


def check_arguments(words: tuple[str, ...]) -> None:
    """Parse a command line with its own parser, without running it. Raises a usage error."""
    command = get_command(app)
    context = command.make_context("marin-rl", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)  # pyright: ignore
        context = command.make_context(name, rest, parent=context)


def settings(words: tuple[str, ...]) -> list[str]:
    """Return the values of `--set`."""
    return [word for option, word in pairwise(words) if option == "--set"]


@pytest.mark.parametrize("page", PAGES)
def test_a_command_in_a_block_is_one_that_the_command_line_takes(page: str):
    for command in (each for each in ALL if each.page == page):
        if not {"--help", "--version"} & {*command.words}:  # these print and exit while parsing
            check_arguments(command.words)
        names = [setting.partition("=")[0] for setting in settings(command.words)]
        assert not [name for name in names if not known(name) and name != "recipe"], command


@pytest.fixture(scope="module")
def forked(prefect_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    """Commands in processes of their own, compiled quickly, which report to one Prefect server."""
    log = tmp_path_factory.mktemp("forked") / "said"
    with quick_programs():
        forked = ForkedCommands(log, PREFECT_API_URL=prefect_url)
    with forked as commands:
        yield commands


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_tools_run_one_after_the_other(forked: ForkedCommands, tmp_path: Path):
    """The run of docs/tools.md and every command on it, in processes of their own."""
    shutil.copytree(TOP / "configs", tmp_path / "configs")
    words = [each.words for each in ALL if each.page == "docs/tools.md"]
    assert words[0][:2] == ("run", "configs/debug.yaml")
    words.insert(
        words.index(("diff", "spell", "spell-grpo")), ("run", "runs/spell-grpo", "--rounds", "4")
    )
    for each in words:
        expected = 1 if each[0] == "diff" else 0  # 1: the runs differ
        assert forked.run(tmp_path, *each) == expected, (each, forked.said())


@pytest.mark.slow
def test_the_commands_of_sft_run_one_after_the_other(forked: ForkedCommands, tmp_path: Path):
    """The configuration of docs/sft.md and the commands on it, over rows as those shown there."""
    page = "docs/sft.md"
    (config,) = [block for block in blocks(page, "yaml") if block.startswith("# add.yaml")]
    (tmp_path / "add.yaml").write_text(config, encoding="utf-8")
    (row,) = [json.loads(block) for block in blocks("docs/sft.md", "json")]
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(10)]
    assert row in sums
    lines = "".join(json.dumps(each) + "\n" for each in sums)
    (tmp_path / "add.jsonl").write_text(lines, encoding="utf-8")
    for each in [each.words for each in ALL if each.page == "docs/sft.md"]:
        words = (*each, "--rounds", "2") if each[0] == "run" else each
        assert forked.run(tmp_path, *words) == 0, (each, forked.said())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_compiles_and_its_imports_exist(page: str):
    for block in blocks(page, "python"):
        assert missing_imports(block, ELSEWHERE) == []


def known(name: str) -> bool:
    """Return True for a key of the configuration tree, or one below a free-form section."""
    return name in KEYS or name.startswith(FREE_FORM)


def flat(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a mapping's leaves."""
    for key, value in tree.items():
        if isinstance(value, dict) and not known_leaf(f"{prefix}{key}"):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def known_leaf(name: str) -> bool:
    """Return True for a key whose value is a mapping of the user's."""
    return f"{name}.".startswith(FREE_FORM)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_yaml_has_keys_of_the_tree(page: str):
    for block in blocks(page, "yaml"):
        tree = yaml.safe_load(block)
        assert isinstance(tree, dict)
        if set(tree) & (SECTIONS | set(Config.model_fields)):
            wrong = [name for name in flat(tree) if not known(name) and name != "recipe"]
            assert not wrong, f"{page}: {wrong}"
