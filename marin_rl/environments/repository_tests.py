"""Tests of a repository in the sandbox: which ran, and which passed.

Test files are those of the row, not of the model: they are written again before the tests run. The
verdict of pytest or unittest comes with a number that is drawn for the run and read before any code
of the repository is imported; what a program prints is no verdict, and a program that ends early
has none. A program that searches its own process for that number is not kept from it. Leaves out
trees (`repository_checkouts`) and the episode (`repository`).
"""

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marin_rl.isolated.sandbox import Sandbox

# Run with -P, so that no module of the repository stands in for one of the runner.
_RUNNER = r"""
import json, os, sys, unittest
asked = json.loads(sys.stdin.buffer.read())
number, tests, nodes = asked.pop("number"), asked["tests"], asked["nodes"]
if nodes:
    import pytest
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, os.getcwd())
passed, finish, leave = {}, json.dumps, os._exit
if nodes:
    class Report:
        def pytest_runtest_logreport(self, report):
            good = report.passed or (report.when != "call" and report.outcome == "passed")
            passed[report.nodeid] = passed.get(report.nodeid, True) and good
    pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[Report()])
else:
    for name in tests:
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
        result = unittest.TextTestRunner().run(suite)
        passed[name] = result.testsRun > len(result.skipped) and result.wasSuccessful()
answers.write(number + finish({name: bool(good) for name, good in passed.items()}))
answers.flush()
leave(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Names of the tests that passed, and how the run ended for people."""

    passed: frozenset[str]
    how: str


def names_in(value: Any) -> list[str]:
    """Return the names of tests in a column: a list, or one as JSON. Raises ValueError."""
    names = json.loads(value) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"expected a list of names of tests, found {value!r:.80}")
    return names


def are_nodes(names: Sequence[str]) -> bool:
    """Return True for names as pytest has them: `tests/test_sum.py::test_two`."""
    return any("::" in name or name.endswith(".py") for name in names)


def files_of_tests(names: Sequence[str], tree: Path) -> set[str]:
    """Return the files of a tree that tests are in, by their names: nodes or dotted names."""
    files: set[str] = set()
    for name in names:
        node = name.partition("::")[0]
        parts = name.split(".")
        dotted = ["/".join(parts[:n]) + ".py" for n in range(len(parts), 0, -1)]
        files |= {each for each in (node, *dotted) if (tree / each).is_file()}
    return files


def run_tests(box: Sandbox, workspace: Path, names: Sequence[str], command: str | None) -> Verdict:
    """Run tests in a tree. With a `command` each test is a run that passes by exit status 0."""
    if command is not None:
        return _by_command(box, workspace, names, command)
    number = secrets.token_hex(16)
    asked = {"number": number, "tests": list(names), "nodes": are_nodes(names)}
    result = box.run(
        [box.python, "-s", "-P", "-c", _RUNNER],
        stdin=json.dumps(asked).encode(),
        workspace=workspace,
    )
    text = result.printed_after(number)
    if text is None:
        return Verdict(passed=frozenset(), how=f"no verdict: {result.how}")
    outcomes: Mapping[str, bool] = json.loads(text)
    return Verdict(passed=frozenset(n for n, good in outcomes.items() if good), how=result.how)


def _by_command(box: Sandbox, workspace: Path, names: Sequence[str], command: str) -> Verdict:
    """Run each test by itself, in the seconds that all of them have."""
    passed, left_s = set[str](), box.limits.wall_s
    for name in names:
        if left_s <= 0:
            break
        line = command.replace("{tests}", shlex.quote(name)).replace("{python}", box.python)
        result = box.run(["/bin/sh", "-c", line], workspace=workspace, wall_s=left_s)
        left_s -= result.wall_s
        if result.succeeded:
            passed.add(name)
    return Verdict(passed=frozenset(passed), how=f"{len(passed)} of {len(names)} pass")
