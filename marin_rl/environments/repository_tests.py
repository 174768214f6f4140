"""Tests of a repository in the sandbox: which ran, and which passed.

Test files are those of the row, not of the model: they are written again before the tests run. The
verdict of pytest or unittest comes with a number that is drawn for the run and read before any code
of the repository is imported; what a program prints is no verdict, and a program that ends early
has none. A test passes where it was called and succeeded, in a file of the row, under the row's
settings of pytest and with the plugins of the interpreter. A program that searches its own process
for that number, or changes the test library from within, is not kept from it. Leaves out trees
(`repository_checkouts`) and the episode (`repository`).
"""

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from marin_rl.data_paths import Content, contents_at
from marin_rl.isolated.sandbox import Sandbox

_PATH_MAX = 4096  # of linux/limits.h; longer names are those of parameters

# Run with -P, so that no module of the repository stands in for one of the runner.
_RUNNER = r"""
import importlib.metadata, json, os, sys, unittest
asked = json.loads(sys.stdin.buffer.read())
number, tests, nodes = asked.pop("number"), asked["tests"], asked["nodes"]
if nodes:
    import pytest
here, leave, finish = os.getcwd(), os._exit, json.dumps
files = {os.path.join(here, name) for name in asked["files"]}
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# Plugins are those of the interpreter: a folder x.dist-info in the repository names none.
installed = list(importlib.metadata.distributions())
importlib.metadata.distributions = lambda **_: iter(installed)
sys.path.insert(0, here)
failed, called = set(), set()
if nodes:
    class Report:
        def pytest_configure(self, config):
            if config.inipath is not None and str(config.inipath) not in files:
                leave(3)
        def pytest_runtest_logreport(self, report):
            if not report.passed:
                failed.add(report.nodeid)
            elif report.when == "call":
                called.add(report.nodeid)
    pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[Report()])
else:
    def module_of(name):
        while name and name not in sys.modules:
            name = name.rpartition(".")[0]
        return os.path.realpath(sys.modules[name].__file__)
    for name in tests:
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
        result = unittest.TextTestRunner().run(suite)
        if result.testsRun > len(result.skipped) and result.wasSuccessful():
            place = module_of(name)
            if place in files or not place.startswith(here + os.sep):
                called.add(name)
answers.write(number + finish(sorted(called - failed)))
answers.flush()
leave(0)
"""


def names_in(value: Any) -> list[str]:
    """Return the names of tests in a column: a list, or one as JSON. Raises ValueError."""
    try:
        names = json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"expected a list of names of tests, found {value!r:.80}")
    for name in names:
        _check_name(name)
    return names


def are_nodes(names: Sequence[str]) -> bool:
    """Return True for names as pytest has them: `tests/test_sum.py::test_two`."""
    return any("::" in name or name.endswith(".py") for name in names)


def _check_name(name: str) -> None:
    """Raise ValueError for the name of a test that could be read as a place or as an option."""
    node = name.partition("::")[0]
    unfit = ("-", "@") if are_nodes([name]) else ("-",)
    if name.startswith(unfit) or node.startswith("/") or ".." in node.split("/"):
        raise ValueError(
            "expected names of tests, with plain relative paths (no .., no / or - at their "
            f"beginning), found {name!r:.200}"
        )


def files_of_tests(names: Sequence[str], tree: Path) -> set[str]:
    """Return the files of a tree that tests are in, by their names: nodes or dotted names."""
    files: set[str] = set()
    for name in names:
        parts = name.split(".") if len(name) <= _PATH_MAX else []
        dotted = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
        modules = [place + end for place in dotted for end in (".py", "/__init__.py")]
        for place in (name.partition("::")[0], *modules):
            with suppress(ValueError):  # no plain path leads to no file
                if any(isinstance(found, bytes) for found in contents_at(tree, place).values()):
                    files.add(place)
    return files


def run_tests(
    box: Sandbox,
    workspace: Path,
    names: Sequence[str],
    command: str | None,
    files: Mapping[str, Content],
) -> set[str]:
    """Run tests in a tree that has the row's `files`; return the names of those that passed.

    With a `command` each test is a run that passes by exit status 0.
    """
    if command is not None:
        return _by_command(box, workspace, names, command)
    number = secrets.token_hex(16)
    asked = {
        "number": number,
        "tests": list(names),
        "nodes": are_nodes(names),
        "files": [name for name, content in files.items() if content is not None],
    }
    result = box.run(
        [box.python, "-s", "-P", "-c", _RUNNER],
        stdin=json.dumps(asked).encode(),
        workspace=workspace,
    )
    text = result.printed_after(number)
    return set() if text is None else set(json.loads(text))


def _by_command(box: Sandbox, workspace: Path, names: Sequence[str], command: str) -> set[str]:
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
    return passed
