"""Rows and clones of strangers: names that lead out, links to the host, settings that are code."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from marin_rl.environments.repository import task_of
from marin_rl.environments.repository_checkouts import (
    Checkouts,
    clone_of,
    files_of_tests,
    missing_commits,
    names_in,
    restore,
)
from marin_rl.errors import InputError


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def committed(clones: Path, files: dict[str, str], links: dict[str, str] | None = None) -> str:
    """Make `clones/own/repo` of files and links, and return its commit."""
    place = clones / "own" / "repo"
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for name, target in (links or {}).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(target)
    git(place, "init", "-q", "-b", "main")
    git(place, "add", "-A", "-f")
    git(place, "commit", "-q", "-m", "base")
    return git(place, "rev-parse", "HEAD").strip()


def row_of(commit: str, **columns: Any) -> dict[str, Any]:
    tests = {"FAIL_TO_PASS": ["test_a.T.test_a"], "PASS_TO_PASS": []}
    return {"repo": "own/repo", "base_commit": commit, "test_patch": "", **tests, **columns}


UNFIT = [
    "/etc/passwd", "/etc/passwd::test", "../../x", "tests/../../x.py::test_x", "..",
    "link/../../../../x", "-p evil::x", "--rootdir=/", "@arguments.py",
]  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_names_of_tests_that_are_no_plain_paths_are_refused(name: str, tmp_path: Path):
    commit = committed(tmp_path, {"a.py": "x"})
    for names in ([name], json.dumps(["good.py::test", name])):
        with pytest.raises(ValueError, match="expected names of tests"):
            names_in(names)
    with pytest.raises(ValueError, match="expected names of tests"):
        task_of(row_of(commit, FAIL_TO_PASS=[name]), Checkouts(tmp_path))


def test_a_column_of_brackets_is_no_list_of_names():
    with pytest.raises(ValueError, match="expected a list of names of tests"):
        names_in("[" * 100_000)


def test_names_as_projects_have_them_are_read():
    names = [
        "tests/test_a.py::T::test_a[../x/-y]", "tests.test_a.T.test_a", "@method keeps its name",
        "test_a (tests.test_a.T)", "Redirects to a/b//c. Then to d.",
    ]  # fmt: skip
    assert names_in(names) == names


def test_a_name_means_the_same_file_where_it_is_read_and_where_it_is_written(tmp_path: Path):
    """A link that is a folder later: `..` behind it would lead to other places."""
    outside, tree = tmp_path / "outside.pth", tmp_path / "a/b/tree"
    outside.write_text("mine")
    (tree / "d0/d1/d2/d3").mkdir(parents=True)
    (tree / "d0/outside.pth").write_text("theirs")
    (tree / "link").symlink_to("d0/d1/d2/d3")
    name = "link/../../../outside.pth"
    assert (tree / name).read_text() == "theirs"
    assert files_of_tests([name], tree) == set()
    for unfit in (name, str(outside), "../../../outside.pth", "./x", "x//y", "x\0", "\ud800"):
        with pytest.raises(ValueError, match=r"expected a plain|surrogates not allowed"):
            restore(tree, {unfit: b"theirs"})
    assert outside.read_text() == "mine"


def test_entries_in_the_place_of_a_restored_file_are_replaced_and_not_followed(tmp_path: Path):
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    for folder in (outside, tree / "full/of/folders", tree / "gone.py/x"):
        folder.mkdir(parents=True)
    (outside / "kept").write_text("kept")
    (tree / "linked").symlink_to(outside)
    (tree / "file").write_text("in the way")
    os.link(outside / "kept", tree / "hard")
    os.mkfifo(tree / "pipe")
    names = ("linked/kept", "file/a/b", "hard", "pipe", "full")
    restore(tree, dict.fromkeys(names, b"new") | dict.fromkeys(("gone.py", "no/where"), None))
    assert [(tree / name).read_bytes() for name in names] == [b"new"] * len(names)
    assert {place.name for place in tree.iterdir()} == {"linked", "file", "hard", "pipe", "full"}
    assert (outside / "kept").read_text() == "kept"


def test_links_of_a_row_are_restored_as_links_and_read_nothing_of_the_host(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("TOPSECRET")
    deep = "../" * 20 + str(secret)[1:]
    links = {
        "conftest.py": str(secret), "a/conftest.py": deep, "tests": "src/tests",
        "loop.py": "loop.py", "src/tests/conftest.py": "../shared/conftest.py",
        "pytest.ini": "/proc/self/environ",
    }  # fmt: skip
    files = {"src/tests/test_a.py": "A", "src/shared/conftest.py": "shared"}
    commit = committed(tmp_path, files, links)
    names = ["tests/test_a.py::test_a", "loop.T.test_a"]
    checkouts = Checkouts(tmp_path)
    task = task_of(row_of(commit, FAIL_TO_PASS=names), checkouts)
    assert "TOPSECRET" not in repr(task.files)
    tree = checkouts.workspace("own/repo", commit)
    for name in ("src/tests/test_a.py", "src/shared/conftest.py", "conftest.py"):
        (tree / name).unlink()
        (tree / name).write_text("of the model")
    (tree / "tests").unlink()
    (tree / "tests").mkdir()
    restore(tree, task.files)
    assert {name: str((tree / name).readlink()) for name in links if name != "loop.py"} == {
        name: target for name, target in links.items() if name != "loop.py"
    }
    assert (tree / "tests/test_a.py").read_text() == "A"
    assert (tree / "tests/conftest.py").read_text() == "shared"
    assert secret.read_text() == "TOPSECRET"


def test_a_link_that_a_test_patch_adds_reads_nothing_of_the_host(tmp_path: Path):
    (tmp_path / "secret").write_text("TOPSECRET")
    commit = committed(tmp_path / "clones", {"a.py": "x", ".gitignore": "*.dat\n"})
    patch = "".join(
        f"diff --git a/{name} b/{name}\nnew file mode {mode}\n--- /dev/null\n+++ b/{name}\n"
        f"@@ -0,0 +1 @@\n+{text}\n{end}"
        for name, mode, text, end in (
            ("data.txt", "120000", tmp_path / "secret", "\\ No newline at end of file\n"),
            ("ignored.dat", "100644", "data", ""),
        )
    )
    task = task_of(row_of(commit, test_patch=patch), Checkouts(tmp_path / "clones"))
    assert "TOPSECRET" not in repr(task.files)
    # a file of the patch is one of the row also where the repository ignores its kind
    assert set(task.files) == {"data.txt", "ignored.dat"}


@pytest.mark.parametrize(
    "name", ["../private/p", "/etc/x", "a/..", "../a", ".", "a", "a/b/c", "a/b\n"]
)
def test_repositories_are_named_by_owner_and_name(name: str, tmp_path: Path):
    for place in ("private/p", "clones/own/repo"):
        (tmp_path / place).mkdir(parents=True)
        git(tmp_path / place, "init", "-q")
    with pytest.raises(InputError, match="expected owner/name"):
        clone_of(tmp_path / "clones", name)
    assert clone_of(tmp_path / "clones", "own/repo") == tmp_path / "clones/own/repo"


@pytest.mark.parametrize("commit", ["HEAD", "main", "-a", "--all", "abc1234", "HEAD~1", "g" * 40])
def test_commits_are_named_by_their_digest(commit: str, tmp_path: Path):
    committed(tmp_path, {"a.py": "x"})
    with pytest.raises(InputError, match="expected 40 hexadecimal digits"):
        Checkouts(tmp_path).pristine("own/repo", commit)


def test_settings_of_a_clone_run_nothing(tmp_path: Path):
    """Filters, hooks, a file-system monitor, a promised remote and included files of a clone."""
    files = {".gitattributes": "* filter=evil diff=evil\n", "a.py": "one\n", "b/c.py": "two\n"}
    commit = committed(tmp_path, files)
    own = tmp_path / "own/repo/.git"
    marker = tmp_path / "marker"
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\necho $0 >> {marker}\ncat\n")
    evil.chmod(0o755)
    (own / "hooks").mkdir(exist_ok=True)
    for hook in ("post-checkout", "post-index-change", "reference-transaction", "pre-auto-gc"):
        (own / "hooks" / hook).write_text(evil.read_text())
        (own / "hooks" / hook).chmod(0o755)
    (own / "info").mkdir(exist_ok=True)
    (own / "info/attributes").write_text("* filter=evil\n")
    (own / "more").write_text(
        f'[filter "evil"]\nsmudge = {evil}\nclean = {evil}\nprocess = {evil}\nrequired = true\n'
        f'[diff "evil"]\ncommand = {evil}\ntextconv = {evil}\n'
    )
    with (own / "config").open("a") as config:
        config.write(
            f"[include]\npath = more\n[core]\nfsmonitor = {evil}\nhooksPath = {own}/hooks\n"
            f"sshCommand = {evil}\npager = {evil}\nworktree = {tmp_path}\n"
            f'[remote "x"]\npromisor = true\nurl = ext::{evil}\nuploadpack = {evil}\n'
            "[extensions]\npartialClone = x\n[core]\nrepositoryformatversion = 1\n"
            '[protocol "ext"]\nallow = always\n'
        )
    clone = clone_of(tmp_path, "own/repo")
    assert missing_commits(clone, [commit, "1" * 40]) == ["1" * 40]
    checkouts = Checkouts(tmp_path)
    tree = checkouts.workspace("own/repo", commit)
    task_of(row_of(commit), checkouts)
    assert {name: (tree / name).read_text() for name in files} == files
    blob = git(tree, "rev-parse", "HEAD:a.py").strip()
    (own / "objects" / blob[:2] / blob[2:]).unlink()  # the remote would be asked for it
    with pytest.raises(InputError, match="git checkout-index"):
        Checkouts(tmp_path).pristine("own/repo", commit)
    assert not marker.exists(), marker.read_text()
