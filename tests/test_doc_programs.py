"""Blocks of the docs name their language, and commands of programs other than `marin-rl` are right.

A block of `sh` has commands and comments alone, one of `console` commands after `$ ` and what they
print; other blocks have none. test_doc_stories.py runs the commands of `marin-rl`. Other programs
install packages, need a server, Docker or a GPU: each has a check of its words here, and a
command of a program without one fails.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from test_doc_commands import PAGES

from marin_rl.serving.api.adapter_routes import adapter_routes
from marin_rl.serving.api.admin import admin_routes
from marin_rl.serving.api.chat import chat_routes
from marin_rl.serving.api.service import Service
from marin_rl.serving.app import METRICS_ROUTE

TOP = Path(__file__).parent.parent
LANGUAGES = {"sh", "console", "text", "python", "yaml", "json", "jsonl", "sql", "toml"}
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
VARIABLE = re.compile(r"[A-Z_]+=.*", re.DOTALL)
START = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ +)*(?:marin-rl|make|pip|prefect|curl|docker) ")


@dataclass(frozen=True, slots=True)
class Line:
    """A command line of a page: variables, program, arguments."""

    page: str
    variables: tuple[str, ...]
    program: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.program} {' '.join(self.words)}"

    def after(self, option: str) -> str:
        """The word after an option."""
        return self.words[self.words.index(option) + 1]


def lines() -> Iterator[Line]:
    """Yield the command lines of all pages."""
    for page, text in PAGES.items():
        for _, language, block in FENCED.findall(text):
            for line in block.replace("\\\n", " ").splitlines():
                if language == "sh" or (language == "console" and line.startswith("$ ")):
                    yield from parsed(page, line.removeprefix("$ "))


def parsed(page: str, line: str) -> Iterator[Line]:
    """Yield the command of a line, if it has one next to its comment."""
    line = line.replace("$(openssl rand -hex 32)", "KEY").replace("$(openssl rand -hex 16)", "KEY")
    words = shlex.split(line, comments=True)
    count = next((at for at, word in enumerate(words) if not VARIABLE.fullmatch(word)), len(words))
    if words[count:]:
        yield Line(page, tuple(words[:count]), words[count], tuple(words[count + 1 :]))


def text_of(folder: str) -> str:
    """The Python files below a folder as one text."""
    return "\n".join(path.read_text("utf-8") for path in sorted((TOP / folder).rglob("*.py")))


def installs(line: Line) -> None:
    """Pip takes constraints and extras that there are, and versions that tests run with."""
    extras = tomllib.loads((TOP / "pyproject.toml").read_text("utf-8"))["project"]
    tests = text_of("tests")
    if "-c" in line.words:
        assert (TOP / line.after("-c")).is_file()
    for word in line.words:
        if "[" in word:
            assert Requirement(word).extras <= set(extras["optional-dependencies"])
        if "==" in word:
            assert f'"{word}"' in tests, "no test runs with this version"


def deploys(line: Line) -> None:
    """Prefect runs a deployment of prefect.yaml, with parameters of its flow, or its worker."""
    verb, _, target, *others = line.words
    text = (TOP / "prefect.yaml").read_text("utf-8")
    if verb == "worker":
        assert f"name: {line.after('--pool')}\n" in text
        return
    entries = yaml.safe_load(text)["deployments"]
    flow, _, name = target.partition("/")
    files = [each["entrypoint"].partition(":") for each in entries if each["name"] == name]
    functions = [function for file, _, function in files if has_flow(file, function, flow)]
    assert verb == "deployment"
    assert len(functions) == 1, target
    given = {word.partition("=")[0] for word in others if not word.startswith("-")}
    assert given <= parameters(f"flows/{flow.replace('-', '_')}.py", functions[0])


def has_flow(file: str, function: str, name: str) -> bool:
    """Return True if a function of a file is the flow of this name."""
    text = (TOP / file).read_text("utf-8")
    return bool(re.search(rf'^@flow\(name="{name}"[^\n]*\n(?:async )?def {function}\(', text, re.M))


def parameters(file: str, function: str) -> set[str]:
    """Names of the parameters of a function."""
    tree = ast.parse((TOP / file).read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    (node,) = [each for each in ast.walk(tree) if isinstance(each, kinds) and each.name == function]
    return {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}


def requests(line: Line) -> None:
    """Curl asks for a route of the server, by its method, and sends JSON."""
    (url,) = [word for word in line.words if word.startswith("http://127.0.0.1:8000/")]
    place = url.removeprefix("http://127.0.0.1:8000")
    method = "POST" if {"-X", "-d"} & {*line.words} else "GET"
    assert (method, place) in routes(), place
    if "-d" in line.words:
        assert isinstance(json.loads(line.after("-d")), dict)
        assert "Content-Type: application/json" in line.words


@cache
def routes() -> set[tuple[str, str]]:
    """Methods and paths of the server."""
    nothing = object.__new__(Service)  # it is used only when a route is asked for
    makers = (chat_routes, admin_routes, adapter_routes)
    made = [route for maker in makers for route in maker(nothing)]
    return {("GET", METRICS_ROUTE), *((m, each.path) for each in made for m in each.methods or ())}


def runs_tests(line: Line) -> None:
    """A file of tests that there is, with variables that tests read."""
    (file,) = [word for word in line.words if word.startswith("tests/")]
    assert (TOP / file).is_file()
    for variable in line.variables:
        assert f'"{variable.partition("=")[0]}"' in text_of("tests")


def makes(line: Line) -> None:
    """A target of the Makefile."""
    assert re.search(rf"^{line.words[0]}:.*## ", (TOP / "Makefile").read_text("utf-8"), re.M)


def composes(line: Line) -> None:
    """Docker starts a file of services, of which one is scaled."""
    services = yaml.safe_load((TOP / line.after("-f")).read_text("utf-8"))["services"]
    assert line.after("--scale").partition("=")[0] in services


def joins(line: Line) -> None:
    """Ray starts a head, as its test does."""
    assert line.words[0] == "start"
    assert f'"{line.words[1]}"' in (TOP / "tests/support/nodes.py").read_text("utf-8")


def serves(line: Line) -> None:
    """vLLM has the options that its test starts it with."""
    text = text_of("tests/flows/test_vllm.py") or (TOP / "tests/flows/test_vllm.py").read_text()
    options = [word for word in (*line.words, *line.variables) if word.startswith(("--", "VLLM"))]
    assert not [option for option in options if option.partition("=")[0] not in text]


def python(line: Line) -> None:
    """Python of a reader: the standard library's venv, pip, or a file or module of a library."""
    if line.words[:2] == ("-m", "pip"):
        installs(line)
    elif line.words[:2] == ("-m", "verl.trainer.main_ppo"):
        assert f'"{line.after("--config-name")}.yaml"' in text_of("marin_rl/rollouts/verl")
    elif line.words[0].startswith("tests/"):
        runs_tests(line)
    else:
        known = {("-m", "venv"), ("my_env.py", "serve"), ("moves.py", ">")}
        assert line.words[:2] in known, line


def anything(line: Line) -> None:
    """Words of the shell, of the system's packages, and of a cluster."""
    assert line.words


CHECKS: dict[str, Callable[[Line], None]] = {
    "make": makes,
    "pip": installs,
    "prefect": deploys,
    "curl": requests,
    "pytest": runs_tests,
    "docker": composes,
    "vllm": serves,
    "ray": joins,
    "python": python,
    "source": anything,
    "export": anything,
    "apt-get": anything,
}


def check_of(line: Line) -> Callable[[Line], None] | None:
    """Return the check of a program; an interpreter may have a folder and a version."""
    name = line.program.rpartition("/")[2]
    return CHECKS.get("python" if re.fullmatch(r"python[\d.]*", name) else name)


OTHERS = [line for line in dict.fromkeys(lines()) if line.program != "marin-rl"]


def test_every_block_names_its_language_and_only_blocks_of_commands_have_commands():
    for page, text in PAGES.items():
        assert {language for _, language, _ in FENCED.findall(text)} <= LANGUAGES, page
        others = [block for _, language, block in FENCED.findall(text) if language == "text"]
        indented = re.findall(r"^ {4,}(.*)$", FENCED.sub("", text), re.MULTILINE)
        shown = [line for block in others for line in block.splitlines()]
        assert not [line for line in (*shown, *indented) if START.match(line)], page


@pytest.mark.parametrize("line", OTHERS, ids=str)
def test_a_command_of_another_program_has_right_words(line: Line):
    check = check_of(line)
    assert check is not None, f"{line}: no check of {line.program}; add one to CHECKS"
    check(line)


@pytest.mark.parametrize(
    "text",
    [
        "make demmo",
        "pip install 'marin-rl[maths]'",
        "pip install 'verifiers==0.0.1'",
        "prefect deployment run rl-loop/other",
        "prefect deployment run rl-loop/prod -p runid=a",
        "curl http://127.0.0.1:8000/v1/chat/completion",
        "MARIN_RL_NONE=1 pytest tests/flows/test_many_kills.py",
        "pytest tests/flows/test_nothing.py",
        "vllm serve FOLDER --no-such-option",
        "docker compose -f deploy/docker-compose.yaml up --scale none=2",
    ],
)
def test_wrong_words_are_noticed(text: str):
    (line,) = parsed("page", text)
    check = check_of(line)
    assert check is not None
    with pytest.raises((AssertionError, ValueError)):
        check(line)


def test_a_program_without_a_check_is_noticed():
    (line,) = parsed("page", "conjure a model")
    assert check_of(line) is None
