"""Checkouts of local git repositories: trees at a commit, and the row's tests run in them.

git never runs in a tree that a model has written to, and reads the objects of a clone through an
empty repository of our own: settings, hooks and filters of a clone could make it run programs.

Test files are those of the row, not of the model: they are written again before the tests run. The
verdict of pytest or unittest comes with a number that is drawn for the run and read before any code
of the repository is imported; what a program prints is no verdict, and a program that ends early
has none. A test passes where it was called and succeeded, in a file of the row, under the row's
settings of pytest and with the plugins of the interpreter. A program that searches its own process
for that number, or changes the test library from within, is not kept from it. Leaves out the
episode (`repository`) and files by name (`plain_files`).
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from marin_rl.errors import InputError
from marin_rl.isolated.sandbox import Sandbox
from marin_rl.isolated.scratch import ScratchFolder, delete_tree, entries_under
from marin_rl.plain_files import Content, contents_at, plain_parts, write_at

GIT_TIMEOUT_S = 600.0
_TIME_S = 946_684_800  # 2000-01-01, of files as of commits
_REPOSITORY = re.compile(r"(?!\.{1,2}/)[\w.-]+/(?!\.{1,2}$)[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
# Settings of this process's environment or of the user (without HOME it finds none) must not change
# a tree, and nothing is ever fetched.
_GIT = {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1", "GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "marin-rl", "GIT_AUTHOR_EMAIL": "marin-rl@localhost",
    "GIT_COMMITTER_NAME": "marin-rl", "GIT_COMMITTER_EMAIL": "marin-rl@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
}  # fmt: skip


def git(
    folder: Path,
    *arguments: str,
    stdin: bytes = b"",
    wrong: str = "",
    variables: Mapping[str, str] | None = None,
) -> bytes:
    """Return the output of git in a folder, with variables of its environment.

    Raises InputError, which begins with `wrong`.
    """
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), **_GIT, **(variables or {})},
            input=stdin,
            capture_output=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{wrong}git {arguments[0]}: {error}") from error
    if result.returncode:
        message = result.stderr.decode(errors="replace").strip()[-300:]
        raise InputError(f"{wrong}git {arguments[0]} in {folder}: {message}")
    return result.stdout


@contextlib.contextmanager
def objects_of(clone: Path) -> Iterator[dict[str, str]]:
    """Variables with which git reads the objects of a clone, and nothing else of it.

    Raises InputError where it is no repository.
    """
    own = clone / ".git"
    variables = {"GIT_DIR": str(own if own.exists() else clone)}
    name = git(clone, "rev-parse", "--git-path", "objects", variables=variables)
    objects = clone / os.fsdecode(name.removesuffix(b"\n"))
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder)
        (bare / "refs").mkdir()
        (bare / "HEAD").write_text("ref: refs/heads/none\n")
        yield {"GIT_DIR": folder, "GIT_OBJECT_DIRECTORY": str(objects.resolve())}


def clone_of(repositories: Path, name: str) -> Path:
    """Return the clone of `owner/name` below a folder. Raises InputError that lists the places."""
    if not _REPOSITORY.fullmatch(name):
        raise InputError(f"repository: expected owner/name, found {name!r:.200}")
    short = name.rpartition("/")[2]
    places = [repositories / each for each in (name, name.replace("/", "__"), short)]
    for place in [*places, *(place.with_name(place.name + ".git") for place in places)]:
        if (place / ".git").exists() or (place / "HEAD").is_file():
            return place
    raise InputError(
        f"repository {name}: expected a clone in one of {', '.join(map(str, places))}; make one: "
        f"git clone https://github.com/{name} {places[1]}"
    )


def missing_commits(clone: Path, commits: Sequence[str]) -> list[str]:
    """Return the commits that a clone does not have. Raises InputError where git cannot read it."""
    asked = "".join(f"{commit}^{{commit}}\n" for commit in commits).encode()
    with objects_of(clone) as variables:
        said = git(clone, "cat-file", "--batch-check", stdin=asked, variables=variables)
    lines = said.decode().splitlines()
    return [c for c, line in zip(commits, lines, strict=True) if line.endswith(" missing")]


def check_commit(commit: str) -> None:
    """Raise InputError where a commit is not named by its digest, but by what may change."""
    if not _COMMIT.fullmatch(commit):
        raise InputError(f"base_commit: expected 40 hexadecimal digits, found {commit!r:.100}")


class Checkouts:
    """Trees of the clones in `repositories`, in a folder of this process.

    `prepare` is called once for each commit, with a tree that all workspaces of it are copies of.
    """

    def __init__(
        self,
        repositories: Path,
        scratch: ScratchFolder | None = None,
        prepare: Callable[[Path], None] | None = None,
    ) -> None:
        self._repositories, self._prepare = repositories, prepare
        self._scratch = scratch or ScratchFolder()
        self._folder = self._scratch.path
        self._pristine: dict[tuple[str, str], Path] = {}
        self._prepared: dict[tuple[str, str], Path] = {}

    def pristine(self, name: str, commit: str) -> Path:
        """Return the tree of a commit, which nothing may write to; made once. Raises InputError.

        It is a repository of one commit, without the history, which has the solution.
        """
        key = (name, commit)
        if key not in self._pristine:
            check_commit(commit)
            clone = clone_of(self._repositories, name)
            tree = Path(tempfile.mkdtemp(dir=self._folder))
            wrong = f"repository {name} at {commit}: "
            with objects_of(clone) as objects:
                variables = {**objects, "GIT_WORK_TREE": str(tree)}
                git(tree, "read-tree", commit, wrong=wrong, variables=variables)
                git(tree, "checkout-index", "-a", wrong=wrong, variables=variables)
            git(tree, "init", "-q", "-b", "main", wrong=wrong)
            git(tree, "add", "-A", "-f", wrong=wrong)
            git(tree, "commit", "-q", "--allow-empty", "-m", "base", wrong=wrong)
            _date(tree)
            self._pristine[key] = tree
        return self._pristine[key]

    def workspace(self, name: str, commit: str) -> Path:
        """Return a copy of the tree of a commit that a program may write to.

        Raises InputError, and what `prepare` raises.
        """
        if self._prepare is None:
            return self._copy(self.pristine(name, commit))
        key = (name, commit)
        if key not in self._prepared:
            with contextlib.ExitStack() as unfinished:
                tree = self._copy(self.pristine(name, commit))
                unfinished.callback(delete_tree, tree)
                self._prepare(tree)
                _date(tree)
                unfinished.pop_all()
            self._prepared[key] = tree
        return self._copy(self._prepared[key])

    def _copy(self, source: Path) -> Path:
        tree = Path(tempfile.mkdtemp(dir=self._folder))
        shutil.copytree(source, tree, symlinks=True, dirs_exist_ok=True)
        open_to_all(tree)
        return tree

    @contextlib.contextmanager
    def patched(self, name: str, commit: str, patch: str) -> Iterator[Path]:
        """A tree of a commit with a patch applied, for a while. Raises InputError."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            tree = Path(folder)
            shutil.copytree(self.pristine(name, commit), tree, symlinks=True, dirs_exist_ok=True)
            wrong = f"repository {name} at {commit}: the test patch does not apply: "
            if patch.strip():
                text = patch if patch.endswith("\n") else patch + "\n"
                git(tree, "apply", "--whitespace=nowarn", "-", stdin=text.encode(), wrong=wrong)
            yield tree


def _date(tree: Path) -> None:
    """Give all entries one time, so that listings are alike in each run."""
    for entry in entries_under(tree):
        os.utime(entry.path, (_TIME_S, _TIME_S), follow_symlinks=False)


def open_to_all(tree: Path) -> None:
    """Let every user write to a tree: root runs each sandboxed program as another user.

    Links are left alone. Nothing may run in the tree meanwhile. Raises OSError for a path that is
    too long.
    """
    tree.chmod(0o777)
    for entry in entries_under(tree):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            Path(entry.path).chmod(0o777)
        elif stat.S_ISREG(mode):
            Path(entry.path).chmod(0o777 if mode & 0o111 else 0o666)


def restore(tree: Path, files: Mapping[str, Content]) -> None:
    """Write files and links into a tree whose other content is not trusted; None deletes one.

    What stands where a folder or a file has to be, a link for one, is removed first. Nothing may
    run in the tree meanwhile. Raises ValueError for a name that leads out of the tree, OSError.
    """
    for name, content in files.items():
        try:
            write_at(tree, name, content)
        except IsADirectoryError:  # no link is on the way to it
            delete_tree(tree.joinpath(*plain_parts(name)))
            write_at(tree, name, content)


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
        node = name.partition("::")[0]
        unfit = ("-", "@") if are_nodes([name]) else ("-",)
        if name.startswith(unfit) or node.startswith("/") or ".." in node.split("/"):
            raise ValueError(
                "expected names of tests, with plain relative paths (no .., no / or - at their "
                f"beginning), found {name!r:.200}"
            )
    return names


def are_nodes(names: Sequence[str]) -> bool:
    """Return True for names as pytest has them: `tests/test_sum.py::test_two`."""
    return any("::" in name or name.endswith(".py") for name in names)


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
