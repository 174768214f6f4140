"""Checkouts of local git repositories: trees at a commit, and the files that tests are made of.

git never runs in a tree that a model has written to, and reads the objects of a clone through an
empty repository of our own: settings, hooks and filters of a clone could make it run programs.
Leaves out what is run in a tree (`repository_tests`) and files by name (`data_paths`).
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from marin_rl.data_paths import Content, plain_parts, write_at
from marin_rl.errors import InputError
from marin_rl.isolated.scratch import ScratchFolder, delete_tree, entries_under

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
    """Let every user write to a tree: programs of root's sandboxes are users of their own.

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
