"""The first words of docstrings and of names of tests; the rest of the language is read."""

import re
from pathlib import Path

TOP = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "schemas", "marin_rl", "tests", "bench")

# A docstring begins with an imperative or a noun phrase, not with a question word. It is found by
# its quotes, not by a parser: the trees of all files are a million nodes.
FIRST_WORDS = (
    r"(what|whether|how|who|whose|which|where|so.many|so.much|all.of.them|one.of.them)(?![a-z])"
)


def found(beginning: str) -> list[str]:
    """Places in the repository's Python files where one of the words follows this."""
    pattern = re.compile(beginning + FIRST_WORDS, re.MULTILINE | re.IGNORECASE)
    return [
        f"{path.relative_to(TOP)}: {match[0]}"
        for package in PACKAGES
        for path in sorted((TOP / package).rglob("*.py"))
        if not any(part.startswith(".") for part in path.relative_to(TOP).parts)
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]


def test_docstrings_begin_with_an_act_or_a_noun() -> None:
    assert found('^ *"""') == []


def test_names_of_tests_follow_the_same_rule() -> None:
    assert found("^ *(async )?def test_") == []
