"""The first words of docstrings and of names of tests; the rest of the language is read."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TOP = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "schemas", "marin_rl", "tests", "bench")

# A docstring begins with an imperative or a noun phrase, not with a question word.
FIRST_WORDS = re.compile(
    r"(What|Whether|How|Who|Whose|Which|Where|So many|So much|All of them|One of them)\b"
)


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of the repository's Python files with its file; each is parsed once."""
    return [
        (str(path.relative_to(TOP)), node)
        for package in PACKAGES
        for path in sorted((TOP / package).rglob("*.py"))
        if not any(part.startswith(".") for part in path.relative_to(TOP).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def docstrings() -> Iterator[tuple[str, str]]:
    """Places and texts of all docstrings."""
    for file, node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or ""


def test_docstrings_begin_with_an_act_or_a_noun() -> None:
    assert [place for place, text in docstrings() if FIRST_WORDS.match(text)] == []


def test_names_of_tests_follow_the_same_rule() -> None:
    names = {
        node.name.removeprefix("test_").replace("_", " ").capitalize()
        for _, node in nodes()
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert [name for name in names if FIRST_WORDS.match(name)] == []
