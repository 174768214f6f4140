"""Links, pipes, sockets, devices and folders where a run has files: named, never followed.

The folder of a run, and those above it, may be links: the user put them there. What lies below it
may come from an archive of somebody else.
"""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.forgeries import unix_socket
from support.run_factories import whole_run

from marin_rl.analysis.status import metric_rows
from marin_rl.errors import CorruptObject, StorageError
from marin_rl.pages.charts import write_learning_curve
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.storage.stores.locks import holder_in, is_free, run_lock
from marin_rl.storage.tables.metrics import write_round_metrics
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, rule_of

PRECIOUS = b"precious"
SHARD = "shard-0000.parquet"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the whole run `run` of one round."""
    root = tmp_path_factory.mktemp("origin")
    whole_run(str(root), 1)
    return root


@pytest.fixture
def root(origin: Path, tmp_path: Path) -> Path:
    """A root with the run `run`, and a file and a folder that are not its own."""
    shutil.copytree(origin / "run", tmp_path / "runs/run")
    (tmp_path / "precious").write_bytes(PRECIOUS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(PRECIOUS)
    return tmp_path / "runs"


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": unix_socket,
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a file": lambda path: path.symlink_to("../../precious"),
}


def refused(act: Callable[[], object]) -> None:
    """It ends in an error that says what was expected."""
    with pytest.raises(StorageError, match=r"expected a (regular file|folder), found a"):
        act()


def check_kept(root: Path) -> None:
    """Files outside of the run are unchanged."""
    assert (root.parent / "precious").read_bytes() == PRECIOUS
    assert (root.parent / "folder/file").read_bytes() == PRECIOUS
    assert sorted(path.name for path in (root.parent / "folder").iterdir()) == ["file"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_of_another_kind_is_neither_emptied_nor_waited_for(root: Path, kind: str) -> None:
    path = root / "run/.lock"
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    run = Run.open(str(root), "run")

    def hold() -> None:
        with run_lock(path):
            pytest.fail("it was held")

    for act in (hold, lambda: is_free(path), lambda: holder_in(path), lambda: collect(run)):
        refused(act)
    check_kept(root)
    if kind != "folder":  # which is empty, so that no listing of files has it
        assert str(path) in {fault.place for fault in check_run(str(root), "run").faults}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("metrics.jsonl", kind) for kind in KINDS), ("metrics/round-00000.parquet", "pipe")],
)
def test_metrics_of_another_kind_are_refused(root: Path, name: str, kind: str) -> None:
    (root / "run" / name).unlink()
    KINDS[kind](root / "run" / name)
    run = Run.open(str(root), "run")
    refused(lambda: write_round_metrics(run, 1 if name == "metrics.jsonl" else 0, {"reward": 0.5}))
    check_kept(root)
    if kind != "folder":
        place = str(root / "run" / name)
        assert place in {fault.place for fault in check_run(str(root), "run").faults}


@pytest.mark.parametrize("kind", ["pipe", "link to a file"])
def test_the_picture_replaces_what_lies_in_its_place(root: Path, kind: str) -> None:
    path = root / "run/learning-curve.png"
    KINDS[kind](path)
    run = Run.open(str(root), "run")
    assert write_learning_curve(run, metric_rows(run)) == path
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.read_bytes().startswith(b"\x89PNG")
    check_kept(root)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        *((f"rollouts/round-00000/{SHARD}", kind) for kind in KINDS),
        ("rollouts/round-00000/manifest.json", "pipe"),
        ("run.json", "link to a file"),
    ],
)
def test_an_object_of_another_kind_is_a_fault(root: Path, key: str, kind: str) -> None:
    (root / "run" / key).unlink()
    KINDS[kind](root / "run" / key)
    store = open_store(str(root)).at("run")
    refused(lambda: store.read(key))
    checked = check_run(str(root), "run")
    assert not checked.whole
    assert str(root / "run" / key) in {fault.place for fault in checked.faults}
    check_kept(root)


def test_no_folder_of_a_run_may_be_a_link(root: Path) -> None:
    folder = root / "run/checkpoints/round-00000"
    outside = root.parent / "elsewhere"
    folder.rename(outside)
    folder.symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    store = Run.open(str(root), "run").store
    key = "checkpoints/round-00000/manifest.json"
    for act in (
        lambda: store.read(key),
        lambda: store.size(key),
        lambda: store.delete(key),
        lambda: store.put_part("checkpoints/round-00000/new", b"1"),
        lambda: store.put_if_absent("checkpoints/round-00000/new", b"1"),
        lambda: store.list("checkpoints/round-00000"),
        lambda: store.children("checkpoints/round-00000"),
    ):
        refused(act)
    run = Run.open(str(root), "run")
    collect(run, rule_of(run, 2, None))
    kept = {"rollouts/round-00000", "checkpoints/round-00001"}
    assert str(folder) in {fault.place for fault in check_run(str(root), "run").faults}
    assert all((root / "run" / slot / "manifest.json").exists() for slot in kept)
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


def test_a_root_and_the_folder_of_a_run_may_be_links(root: Path) -> None:
    """Users keep runs on other disks."""
    (root.parent / "disk").mkdir()
    (root / "run").rename(root.parent / "disk/run")
    (root / "run").symlink_to(root.parent / "disk/run")
    (root.parent / "link").symlink_to(root)
    place = str(root.parent / "link")
    assert check_run(place, "run").faults == ()
    run = Run.open(place, "run")
    with run.lock():
        write_round_metrics(run, 1, {"reward": 0.5})
    assert len(metric_rows(run)) == 2
    assert collect(run).garbage == ()


def test_a_sparse_record_is_not_read(root: Path) -> None:
    path = root / "run/run.json"
    os.truncate(path, 2**40)
    with pytest.raises(CorruptObject, match="67108864 bytes at most"):
        Run.open(str(root), "run")


def test_a_strange_signature_is_no_holder(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    for text in ("²", "9" * 400, "-1 host", "\xff", "0x10 host"):
        path.write_text(text, encoding="latin-1")
        assert holder_in(path) is None, text
    path.write_bytes(b"12 host" + b"\0" * 2**20)
    found = holder_in(path)
    assert found is None or found.pid == 12
