"""Archives: the same bytes for the same run, and nothing in them can change unseen."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.run_factories import play, whole_run
from typer.testing import CliRunner

from marin_rl.analysis.scan import scan_rollouts
from marin_rl.cli import app
from marin_rl.errors import CorruptObject, InputError, StorageError
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run, latest_checkpoint
from marin_rl.storage.upkeep.archive import verify_archive, write_archive
from marin_rl.storage.upkeep.forks import fork_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, rule_of
from schemas.manifests import sealed_json


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return whole_run(str(tmp_path_factory.mktemp("runs")), 3)


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_an_archive_has_manifests_metrics_and_samples(run: Run, tmp_path: Path) -> None:
    made = write_archive(run, tmp_path / "run.tar")
    inside = names(made.path)
    assert inside[0] == "contents.json"
    assert inside[1:] == sorted(inside[1:])
    assert sum(name.endswith("/manifest.json") for name in inside) == 3 + 3 + 4
    assert [name for name in inside if "shard-" in name] == [
        "run/rollouts/round-00000/shard-0000.parquet",
        "run/rollouts/round-00002/shard-0000.parquet",
    ]
    assert {"run/run.json", "run/metrics/round-00001.parquet"} <= set(inside)
    found = verify_archive(made.path, made.root_hash)
    assert (found.faults, found.objects, found.run_id) == ((), made.objects, "run")
    # Three shards of six, three of batches and of dispositions, arrays and scores.
    assert found.left_out == 4 + 6 + 4 * 3 + 3
    assert made.left_out == found.left_out


def test_everything_is_everything_and_the_same_twice(run: Run, tmp_path: Path) -> None:
    first = write_archive(run, tmp_path / "a.tar", everything=True)
    second = write_archive(run, tmp_path / "b.tar", everything=True)
    assert first.root_hash == second.root_hash
    assert first.left_out == 0
    assert first.path.read_bytes() == second.path.read_bytes()
    found = verify_archive(first.path)
    assert (found.faults, found.left_out) == ((), 0)
    copied = shutil.copytree(run.config.root, tmp_path / "elsewhere")
    third = write_archive(Run.open(str(copied), "run"), tmp_path / "c.tar", everything=True)
    assert third.root_hash == first.root_hash


def test_an_attempts_leftovers_are_not_exported(run: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(run.config.root, "run"), tmp_path / "run")
    other = Run.open(str(tmp_path), "run")
    before = write_archive(other, tmp_path / "a.tar", everything=True).root_hash
    other.store.put_part("batches/round-00001/batches-late.parquet", b"1")
    other.store.put_part("checkpoints/round-00009/half", b"1")
    assert write_archive(other, tmp_path / "b.tar", everything=True).root_hash == before


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """The same archive with other entries."""
    with tarfile.open(path) as tar:
        found = {info.name: tar.extractfile(info).read() for info in tar}
    change(found)
    with tarfile.open(path, "w") as tar:
        for name, data in found.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


SHARD = "run/rollouts/round-00000/shard-0000.parquet"


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda e: e.update({SHARD: e[SHARD][:-1] + b"?"}), {"altered"}),
        (lambda e: e.pop(SHARD), {"missing", "altered"}),
        (lambda e: e.update({"run/extra": b"1"}), {"orphan"}),
    ],
    ids=["other bytes", "one less", "one more"],
)
def test_changed_settings_are_named(run: Run, tmp_path: Path, change, kinds) -> None:
    made = write_archive(run, tmp_path / "run.tar", everything=True)
    rewritten(made.path, change)
    found = verify_archive(made.path, made.root_hash)
    assert {fault.kind for fault in found.faults} >= kinds
    places = {fault.place for fault in found.faults}
    assert SHARD in places or "run/extra" in places


def test_a_forger_who_fits_contents_and_hash_is_caught_by_the_promised_hash(run, tmp_path):
    made = write_archive(run, tmp_path / "run.tar", everything=True)

    def forge(entries: dict[str, bytes]) -> None:
        import hashlib

        from marin_rl.storage.upkeep.archive import Entry, root_hash_of

        entries[SHARD] = entries[SHARD][:-1] + b"?"
        record = json.loads(entries["contents.json"])
        record.pop("digest")
        told = [
            Entry(name, len(data), hashlib.sha256(data).hexdigest())
            for name, data in sorted(entries.items())
            if name != "contents.json"
        ]
        record["entries"] = [[e.name, e.bytes, e.sha256] for e in told]
        record["root_hash"] = root_hash_of(told)
        entries["contents.json"] = sealed_json(record)

    rewritten(made.path, forge)
    # The manifest still tells which bytes were committed, and the promise which archive it was.
    assert {fault.place for fault in verify_archive(made.path).faults} == {SHARD}
    promised = verify_archive(made.path, made.root_hash)
    assert str(made.path) in {fault.place for fault in promised.faults}


def test_damage_is_not_exported(run: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(run.config.root, "run"), tmp_path / "run")
    path = tmp_path / "run/batches/round-00001/manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptObject, match="batches/round-00001"):
        write_archive(Run.open(str(tmp_path), "run"), tmp_path / "run.tar")
    assert not list(tmp_path.glob("*.tar*"))


def test_the_file_that_a_killed_export_left_is_written_over(run: Run, tmp_path: Path) -> None:
    left = tmp_path / ".run.tar.partial"
    left.write_bytes(b"longer than the archive" * 100_000)
    made = write_archive(run, tmp_path / "run.tar")
    assert made.path.read_bytes() == write_archive(run, tmp_path / "b.tar").path.read_bytes()
    assert not left.exists()


def test_two_exports_to_one_file_at_once_are_refused(run: Run, tmp_path: Path) -> None:
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'wb'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    partial = tmp_path / ".run.tar.partial"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(partial)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match="another process exports to"):
            write_archive(run, tmp_path / "run.tar")
        assert partial.exists(), "it is the other's"
        other.communicate("")
    assert verify_archive(write_archive(run, tmp_path / "run.tar").path).faults == ()


def test_a_place_that_cannot_be_written_to_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write \d+ bytes to /proc/run.tar"):
        write_archive(run, Path("/proc/run.tar"))
    (tmp_path / "run.tar").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        write_archive(run, tmp_path / "run.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["run.tar"]


def test_forks_and_pruned_runs_are_self_contained(run: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(run.config.root, "run"), tmp_path / "run")
    parent = Run.open(str(tmp_path), "run")
    fork = fork_run(parent, 2, "fork")
    made = write_archive(fork, tmp_path / "fork.tar", everything=True)
    inside = names(made.path)
    assert {"run/run.json", "run/checkpoints/round-00002/manifest.json"} <= set(inside)
    assert [name for name in inside if name.startswith("fork/")] == ["fork/run.json"]
    assert not any("rollouts/round-00002" in name for name in inside)
    assert verify_archive(made.path).faults == ()
    shutil.rmtree(tmp_path / "fork")
    collect(parent, rule_of(parent, 2, None))
    pruned = write_archive(parent, tmp_path / "pruned.tar", everything=True)
    found = verify_archive(pruned.path)
    assert (found.faults, found.left_out) == ((), 2 * 3)


def test_an_unpacked_fork_is_a_root_with_all_it_shares(run: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(run.config.root, "run"), tmp_path / "run")
    child = fork_run(Run.open(str(tmp_path), "run"), 2, "child")
    play(child, 2, latest_checkpoint(child) or pytest.fail("no checkpoint"))
    made = write_archive(fork_run(child, 3, "fork"), tmp_path / "fork.tar", everything=True)
    assert verify_archive(made.path).faults == ()
    with tarfile.open(made.path) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    root = str(tmp_path / "unpacked")
    assert check_run(root, "fork").faults == ()
    fork = Run.open(root, "fork")
    assert sorted(progress(fork)) == [0, 1, 2, 3]
    rows = scan_rollouts(root, "fork").select("run_id", "round").unique().sort("round").collect()
    assert rows.rows() == [("run", 0), ("run", 1), ("child", 2)]
    again = write_archive(fork, tmp_path / "again.tar", everything=True)
    assert again.root_hash == made.root_hash


def test_a_link_into_an_ancestor_is_checked(run: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(run.config.root, "run"), tmp_path / "run")
    fork = fork_run(Run.open(str(tmp_path), "run"), 2, "fork")
    play(fork, 2, latest_checkpoint(fork) or pytest.fail("no checkpoint"))
    made = write_archive(fork, tmp_path / "fork.tar", everything=True)
    rewritten(made.path, lambda e: e.pop("run/checkpoints/round-00002/manifest.json"))
    kinds = [(fault.kind, fault.place) for fault in verify_archive(made.path).faults]
    assert ("missing", "fork/checkpoints/round-00002/manifest.json") in kinds


def test_shards_of_an_open_round_are_in_it(run: Run, tmp_path: Path) -> None:
    """Each is a commit of its own; of a sealed round, the manifest says which are."""
    shutil.copytree(Path(run.config.root, "run"), tmp_path / "run")
    other = Run.open(str(tmp_path), "run")
    shard = other.store.read("rollouts/round-00002/shard-0001.parquet")
    other.store.put_if_absent("rollouts/round-00003/shard-0001.parquet", shard)
    other.store.put_if_absent("rollouts/round-00002/shard-0007.parquet", shard)
    made = write_archive(other, tmp_path / "run.tar", everything=True)
    inside = names(made.path)
    assert "run/rollouts/round-00003/shard-0001.parquet" in inside
    assert "run/rollouts/round-00002/shard-0007.parquet" not in inside
    assert verify_archive(made.path).faults == ()
    assert not any("round-00003/shard" in n for n in names(write_archive(other, made.path).path))


def test_the_commands(run: Run, tmp_path: Path) -> None:
    def invoke(*arguments: str):
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))

    target = str(tmp_path / "run.tar")
    made = invoke("export", "run", "--all", "-o", target, "--root", run.config.root, "--json")
    root_hash = json.loads(made.stdout)["root_hash"]
    checked = invoke("verify", target, "--root-hash", root_hash)
    assert checked.exit_code == 0
    assert root_hash in checked.output
    wrong = invoke("verify", target, "--root-hash", "0" * 64, "--json")
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["whole"] is False
