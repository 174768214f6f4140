"""Docstrings speak the field's language: how they begin, and words that they do without."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "schemas", "marin_rl", "tests", "bench")

# A docstring says what a thing is or does; a question's word in front says neither.
FIRST_WORDS = re.compile(
    r"(What|Whether|How|Who|Whose|Which|Where|So many|So much|All of them|One of them)\b"
)

# Words that stand for a noun of the field, and phrases that a reader has to solve.
RIDDLES = re.compile(
    r"\b(told|found|held(?![- ]out)|given up|gives up|give up|whoever|nobody|everybody|so many"
    r"|so much|beside|anew|its word|(?:has|have) (?:its|their) say|comes? to the same)\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|'[^'\s][^']*'")


def docstrings() -> Iterator[tuple[str, str]]:
    """(place, docstring) of every module, class and function."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for package in PACKAGES:
        for path in sorted((TOP / package).rglob("*.py")):
            if any(part.startswith(".") for part in path.relative_to(TOP).parts):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    yield f"{path.relative_to(TOP)}:{getattr(node, 'lineno', 1)}", text


def breaches(text: str) -> list[str]:
    """The words of a docstring that break the rules, in order."""
    first = FIRST_WORDS.match(text)
    return ([first[0]] if first else []) + RIDDLES.findall(QUOTED.sub("", text))


def test_docstrings_begin_with_an_act_or_a_noun_and_hold_no_riddles() -> None:
    wrong = [
        f"{place}: {', '.join(words)}" for place, text in docstrings() if (words := breaches(text))
    ]
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
def test_the_rules_catch_what_they_name(text: str, words: list[str]) -> None:
    assert breaches(text) == words
