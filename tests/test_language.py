"""Docstrings, comments, errors and docs use the field's words and avoid the listed ones."""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TOP = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "schemas", "marin_rl", "tests", "bench")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "bench/README.md", ".ci/run", "Makefile")
CONFIGS = ("configs/**/*.yaml", "pyproject.toml", "prefect.toml", "prefect.yaml", "flows/*.yaml")

# A docstring begins with an imperative or a noun phrase, not with a question word.
FIRST_WORDS = re.compile(
    r"(What|Whether|How|Who|Whose|Which|Where|So many|So much|All of them|One of them)\b"
)

# Words used in place of a term of the field, and phrases that a reader has to decode.
RIDDLES = re.compile(
    r"\b(told|found|held(?![- ]out)|given up|gives up|give up|whoever|nobody|everybody|so many"
    r"|so much|beside|anew|its word|(?:has|have) (?:its|their) say|comes? to the same)\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|'[^'\s][^']*'")

# Docs may say "expected …, found …".
EXPECTED = re.compile(r"\bexpected\b.*?\bfound\b", re.IGNORECASE | re.DOTALL)

Text = tuple[str, str]  # where it is, and what it says


def sources() -> Iterator[Path]:
    """Python files of the repository, without virtual environments."""
    for package in PACKAGES:
        for path in sorted((TOP / package).rglob("*.py")):
            if not any(part.startswith(".") for part in path.relative_to(TOP).parts):
                yield path


class Words(NamedTuple):
    """Texts of Python files, by kind."""

    docstrings: list[Text]
    messages: list[Text]
    tests: list[Text]


@cache
def words() -> Words:
    """Docstrings, error messages of the library and names of tests; each file is parsed once."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings, said, tests = list[Text](), list[Text](), list[Text]()
    for path in sources():
        name = path.relative_to(TOP)
        of_library = name.parts[0] not in ("tests", "bench")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                docstrings.append((f"{name}:{getattr(node, 'lineno', 1)}", text))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                tests.append((str(name), node.name))
            if of_library and isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                said.extend((f"{name}:{line}", text) for line, text in constants(node.exc))
    return Words(docstrings, said, tests)


def constants(call: ast.Call) -> Iterator[tuple[int, str]]:
    """Lines and texts of the constant strings within a call."""
    for part in ast.walk(call):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, part.value


def comments() -> Iterator[Text]:
    """Comments of Python files and of configurations."""
    for path in sources():
        yield from comments_of(path)
    for pattern in CONFIGS:
        for path in sorted(TOP.glob(pattern)):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if comment := re.search(r"(?:^|\s)#.*", line):
                    yield f"{path.relative_to(TOP)}:{number}", comment[0]


def comments_of(path: Path) -> Iterator[Text]:
    """Comments of a Python file that has a listed word behind a `#`.

    The tokenizer, which tells a comment from a `#` in a string, takes 8 s for all files.
    """
    if not RIDDLES.search("\n".join(re.findall("#.*", path.read_text(encoding="utf-8")))):
        return
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield f"{path.relative_to(TOP)}:{token.start[0]}", token.string


def messages() -> Iterator[Text]:
    """Text of the errors that the library raises: constant parts of `raise Error("…")`."""
    for place, text in words().messages:
        yield place, re.sub(r"\bfound\b", "", text)  # "expected …, found …"


def prose() -> Iterator[Text]:
    """Lines of the docs outside of blocks of code."""
    for pattern in PAGES:
        for path in sorted(TOP.glob(pattern)):
            code = False
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if line.lstrip().startswith("```"):
                    code = not code
                elif not code and not line.startswith("    "):
                    yield f"{path.relative_to(TOP)}:{number}", line


def riddles(text: str) -> list[str]:
    """Words of the list in a text, quotations left out."""
    return RIDDLES.findall(EXPECTED.sub("", QUOTED.sub("", text)))


def breaches(docstring: str) -> list[str]:
    """Words of a docstring that break the rules, in order."""
    first = FIRST_WORDS.match(docstring)
    return ([first[0]] if first else []) + riddles(docstring)


def test_docstrings_begin_with_an_act_or_a_noun_and_avoid_the_listed_words() -> None:
    wrong = [
        f"{place}: {', '.join(listed)}"
        for place, text in words().docstrings
        if (listed := breaches(text))
    ]
    assert not wrong, "\n".join(wrong)


def test_names_of_tests_follow_the_same_rules() -> None:
    wrong = []
    for place, name in words().tests:
        said = name.removeprefix("test_").replace("_", " ")
        if FIRST_WORDS.match(said.capitalize()) or riddles(said):
            wrong.append(f"{place}: {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("texts", [comments, messages, prose])
def test_other_texts_avoid_the_listed_words(texts) -> None:
    listed = ((place, riddles(text)) for place, text in texts())
    wrong = [f"{place}: {', '.join(found)}" for place, found in listed if found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Return the rows.", []),
        ("What a row says.", ["What"]),
        ("Rows, as the caller was told.", ["told"]),
        ("So many more.", ["So many", "So many"]),
        ('Message "expected a run, found none".', []),
    ],
)
def test_the_rules_catch_the_words_of_the_lists(text: str, words: list[str]) -> None:
    assert breaches(text) == words
