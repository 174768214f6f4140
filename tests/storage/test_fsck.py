"""fsck: silent on complete runs; every kind of damage is reported with its file."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.cases import others_slow, printed_seed
from support.fault_injection import Operations, inject_faults, opened_as
from support.run_factories import sample, whole_run

from marin_rl.errors import ObjectMissing
from marin_rl.storage.commits import (
    commit_manifest,
    new_attempt,
    new_manifest,
    parent_of,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import Run, latest_checkpoint
from marin_rl.storage.stores.local import LocalStore
from marin_rl.storage.stores.store import Keys
from marin_rl.storage.tables.metrics import write_round_metrics
from marin_rl.storage.tables.pairs import commit_pairs
from marin_rl.storage.tables.rewards import RewardSource, commit_rewards
from marin_rl.storage.upkeep.archive import verify_archive, write_archive
from marin_rl.storage.upkeep.forks import fork_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, rule_of
from marin_rl.storage.upkeep.integrity import gap_faults, link_faults
from marin_rl.storage.upkeep.inventory import MANIFEST, take_inventory
from marin_rl.types import Message, PreferencePair
from schemas.manifests import sealed_json, sha256_of
from schemas.tables import REWARDS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run of three rounds, of which a fourth has its first shard."""
    root = tmp_path_factory.mktemp("runs")
    run = whole_run(str(root), 3, evaluated=(1, 2))
    sample(run, 3, 0, latest_checkpoint(run) or pytest.fail("no checkpoint"))
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def faults(folder: Path) -> list[tuple[str, str]]:
    checked = check_run(str(folder.parent), folder.name)
    return [(fault.kind, str(Path(fault.place).relative_to(folder))) for fault in checked.faults]


def one(folder: Path, pattern: str) -> Path:
    (path, *_) = sorted(folder.glob(pattern))
    return path


COMMITTED = [
    "run.json",
    "rollouts/round-00001/manifest.json",
    "rollouts/round-00001/shard-0001.parquet",
    "rollouts/round-00003/shard-0000.parquet",
    "batches/round-00000/manifest.json",
    "batches/round-00000/batches-*.parquet",
    "batches/round-00000/dispositions-*.parquet",
    "checkpoints/round-00002/manifest.json",
    "checkpoints/round-00002/scores-*.parquet",
    "checkpoints/round-00002/*/index-*.json",
    "checkpoints/round-00002/*/arrays-*-00001.safetensors",
    "evals/round-00001/manifest.json",
    "evals/round-00001/evals-*.parquet",
    "metrics/round-00001.parquet",
]
# Of those, a manifest, a shard, a part and a file of arrays in the default suite.
TRIED = (
    "batches/round-00000/manifest.json",
    "rollouts/round-00001/shard-0001.parquet",
    "batches/round-00000/batches-*.parquet",
    "checkpoints/round-00002/*/arrays-*-00001.safetensors",
)


def test_a_whole_run_is_whole(folder: Path) -> None:
    checked = check_run(str(folder.parent), "run")
    assert checked.faults == ()
    assert checked.whole
    files = [path for path in folder.rglob("*") if path.is_file()]
    unhashed = [path for path in files if path.suffix in (".json", ".jsonl", ".lock")]
    unhashed += [path for path in files if path.name == ".lock"]
    unhashed = [path for path in unhashed if not path.name.startswith("index-")]
    assert checked.bytes == sum(p.stat().st_size for p in set(files) - set(unhashed))


@pytest.mark.parametrize("pattern", others_slow(COMMITTED, *TRIED))
def test_a_flipped_bit_is_detected_at_any_position(folder: Path, pattern: str) -> None:
    path, seed = one(folder, pattern), printed_seed()
    data = path.read_bytes()
    # What no manifest names, a writer of another version may have written.
    version = re.search(rb"parquet-cpp-arrow version ([\d.]+)", data)
    spared = range(*version.span(1)) if version is not None else range(0)
    for bit in random.Random(seed).sample(range(8 * len(data)), 3):
        if bit // 8 in spared:
            continue
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = faults(folder)
        name = str(path.relative_to(folder))
        assert ("altered", name) in found, f"seed {seed}, bit {bit} of {name}: {found}"
    path.write_bytes(data)
    assert faults(folder) == []


@pytest.mark.parametrize("pattern", others_slow(COMMITTED, *TRIED))
def test_a_truncated_file_is_detected(folder: Path, pattern: str) -> None:
    path = one(folder, pattern)
    path.write_bytes(path.read_bytes()[:-7])
    record = path.suffix == ".json" and not path.name.startswith("index-")
    kind = "altered" if record else "truncated"
    assert (kind, str(path.relative_to(folder))) in faults(folder)


@pytest.mark.parametrize("pattern", others_slow([p for p in COMMITTED if "00003" not in p], *TRIED))
def test_a_missing_file_is_detected(folder: Path, pattern: str) -> None:
    path = one(folder, pattern)
    path.unlink()
    assert ("missing", str(path.relative_to(folder))) in faults(folder)


def resealed(path: Path, change: Callable[[dict], None]) -> None:
    record = json.loads(path.read_text())
    record.pop("digest")
    change(record)
    path.write_bytes(sealed_json(record))


def test_a_wrong_parent_is_detected(folder: Path) -> None:
    path = folder / "batches/round-00001/manifest.json"
    resealed(path, lambda record: record["parents"][0].update(sha256="0" * 64))
    assert faults(folder) == [
        ("wrong parent", "batches/round-00001/manifest.json"),
        ("wrong parent", "checkpoints/round-00002/manifest.json"),  # it names the old manifest
    ]


def test_a_parent_of_another_round_is_detected(folder: Path) -> None:
    manifest = json.loads((folder / "rollouts/round-00000/manifest.json").read_text())
    assert manifest["parents"][0]["slot"] == "checkpoints/round-00000"
    path = folder / "rollouts/round-00002/manifest.json"
    other = json.loads((folder / "batches/round-00000/manifest.json").read_text())["parents"][0]
    resealed(path, lambda record: record.update(parents=[other]))
    found = faults(folder)
    assert ("wrong parent", "rollouts/round-00002/manifest.json") in found


def test_newer_versions_are_distinguished_from_damage(folder: Path) -> None:
    path = folder / "batches/round-00001/manifest.json"
    resealed(path, lambda record: record.update(version=99))
    assert ("newer version", "batches/round-00001/manifest.json") in faults(folder)
    path = folder / "run.json"
    resealed(path, lambda record: record.update(version=99))
    assert ("newer version", "run.json") in faults(folder)


def as_of_version_99(path: Path) -> None:
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata) | {b"marin_rl.schema_version": b"99"}
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_a_table_of_a_newer_version_is_detected(folder: Path) -> None:
    as_of_version_99(folder / "metrics/round-00001.parquet")
    assert faults(folder) == [("newer version", "metrics/round-00001.parquet")]


def test_pairs_of_a_newer_version_are_detected(folder: Path) -> None:
    run = Run.open(str(folder.parent), "run")
    pair = PreferencePair(
        id="x", messages=(Message(role="user", content="p"),), chosen="a", rejected="b"
    )
    commit_pairs(run, [pair], decided="f", extra={})
    assert faults(folder) == []
    path = one(folder, "pairs/*.parquet")
    as_of_version_99(path)
    digest = {"sha256": sha256_of(path.read_bytes()), "bytes": path.stat().st_size}
    resealed(folder / "pairs/manifest.json", lambda record: record["parts"][0].update(digest))
    assert faults(folder) == [("newer version", str(path.relative_to(folder)))]


class Pruned(LocalStore):
    """A run in which newer software has left tombstones since the listing."""

    def read(self, key: str) -> bytes:
        if key.endswith("/pruned.json"):
            return sealed_json({"format": "marin-rl/pruned", "version": 99})
        return super().read(key)

    def at(self, folder: str) -> "Pruned":
        return Pruned(self.url_of(folder))


def test_a_tombstone_of_a_newer_version_does_not_end_the_search(folder: Path) -> None:
    part = one(folder, "batches/round-00001/batches-*.parquet")
    part.unlink()
    one(folder, "metrics/round-00000.parquet").write_bytes(b"")
    with opened_as(lambda inner: Pruned(inner.url)):
        found = faults(folder)
    assert ("newer version", str(part.relative_to(folder))) in found
    assert ("truncated", "metrics/round-00000.parquet") in found


def test_a_damaged_tombstone_is_named(folder: Path) -> None:
    run = Run.open(str(folder.parent), "run")
    assert collect(run, rule_of(run, 2, None)).garbage
    path = folder / "checkpoints/round-00001/pruned.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert faults(folder) == [("altered", "checkpoints/round-00001/pruned.json")]


def test_orphans_are_faults_and_leftovers_are_harmless(folder: Path) -> None:
    orphans = {
        "batches/round-00001/notes.txt",
        "rollouts/round-00001/shard-0007.parquet",
        "checkpoints/old.bin",
        "metrics/extra.parquet",
    }
    for name in orphans:
        shutil.copy(folder / "rollouts/round-00000/shard-0000.parquet", folder / name)
    assert {name for kind, name in faults(folder) if kind == "orphan"} == orphans


def test_leftovers_of_attempts_are_named_and_do_not_count(folder: Path) -> None:
    run = Run.open(str(folder.parent), "run")
    late = f"batches/round-00001/batches-{new_attempt()}-0000.parquet"
    unfinished = f"checkpoints/round-00004/{new_attempt()}/d/array"
    for key in (late, unfinished, ".run.json.0123456789abcdef.tmp"):
        run.store.put_part(key, b"12")
    assert faults(folder) == [("leftover", late), ("leftover", unfinished)]
    assert check_run(str(folder.parent), "run").whole


def test_slots_before_the_first_round_are_checked_and_shared(folder: Path) -> None:
    """Preference pairs and a reward model, as their training commits them."""
    run = Run.open(str(folder.parent), "run")
    attempt, above = new_attempt(), ()
    for slot in ("pairs", "reward_model/step-00002"):
        run.store.put_part(f"{slot}/{slot[:5]}-{attempt}.bin", slot.encode())
        part = part_of(f"{slot[:5]}-{attempt}.bin", slot.encode())
        made = new_manifest(slot, attempt=attempt, fingerprint="f", parts=[part], parents=above)
        above = (parent_of(ref_of(commit_manifest(run.store, made))),)
    assert faults(folder) == []
    fork_run(run, 2, "fork")
    fork = Run.open(str(folder.parent), "fork")
    assert fork.store.children("pairs") == run.store.children("pairs")
    assert fork.folder.list() == ["run.json"]
    (folder / f"reward_model/step-00002/rewar-{attempt}.bin").write_bytes(b"?")
    (folder / "pairs/manifest.json").unlink()
    assert faults(folder) == [
        ("missing", "pairs/manifest.json"),
        ("leftover", f"pairs/pairs-{attempt}.bin"),
        ("truncated", f"reward_model/step-00002/rewar-{attempt}.bin"),
    ]


@pytest.mark.parametrize(
    ("source", "place", "told"),
    [
        ("metrics/round-00002.parquet", "metrics/round-00001.parquet", "round 1, found 2"),
        (
            "rollouts/round-00002/shard-0000.parquet",
            "rollouts/round-00003/shard-0000.parquet",
            "round 3, found 2",
        ),
        (
            "rollouts/round-00003/shard-0000.parquet",
            "rollouts/round-00003/shard-0001.parquet",
            "shard 1, found 0",
        ),
    ],
)
def test_a_valid_file_in_the_place_of_another_is_detected(folder, source, place, told):
    shutil.copy(folder / source, folder / place)
    (fault,) = check_run(str(folder.parent), "run").faults
    assert (fault.kind, fault.place) == ("altered", str(folder / place))
    assert f"expected rows of {told}" in fault.detail


def test_metrics_of_another_run_are_detected(folder: Path) -> None:
    other = Run.open(str(folder.parent), "run").config.model_copy(update={"run_id": "other"})
    write_round_metrics(Run.create_or_open(other), 1, {"reward": 0.5})
    shutil.copy(folder.parent / "other/metrics/round-00001.parquet", folder / "metrics")
    assert faults(folder) == [("altered", "metrics/round-00001.parquet")]


def score_again(run: Run, round: int, rollouts_sha256: str) -> str:
    """Commit a reward table of no rows that says which rollouts it is about."""
    source = RewardSource(function="f", source_sha256="0" * 64, rollouts_sha256=rollouts_sha256)
    return commit_rewards(run, round, "mine", source, REWARDS.empty_table()).key


def test_a_reward_table_of_other_rollouts_is_detected(folder: Path) -> None:
    run = Run.open(str(folder.parent), "run")
    manifest = folder / "rollouts/round-00001/manifest.json"
    right = score_again(run, 1, sha256_of(manifest.read_bytes()))
    assert faults(folder) == []
    wrong = score_again(run, 2, sha256_of(manifest.read_bytes()))
    assert faults(folder) == [("wrong parent", wrong)]
    (folder / wrong).unlink()
    for name in ("batches", "rollouts", "checkpoints", "metrics", "evals"):
        shutil.rmtree(folder / name)
    assert ("missing", "rollouts/round-00001/manifest.json") in faults(folder)
    assert (folder / right).exists()


def test_a_closed_round_proves_what_it_made(folder: Path) -> None:
    (folder / "batches/round-00002" / MANIFEST).unlink()
    shutil.rmtree(folder / "checkpoints/round-00003")
    found = {place for kind, place in faults(folder) if kind == "missing"}
    assert found == {f"batches/round-00002/{MANIFEST}", f"checkpoints/round-00003/{MANIFEST}"}


def test_a_fork_is_checked_with_what_it_shares(folder: Path) -> None:
    fork_run(Run.open(str(folder.parent), "run"), 2, "fork")
    assert check_run(str(folder.parent), "fork").faults == ()
    path = folder / "rollouts/round-00001/shard-0001.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    later = folder / "rollouts/round-00002/shard-0001.parquet"
    later.unlink()  # the fork does not reach it
    (fault,) = check_run(str(folder.parent), "fork").faults
    assert (fault.kind, fault.place) == ("truncated", str(path))


def test_an_ancestor_that_is_another_run_now_is_detected(folder: Path) -> None:
    fork_run(Run.open(str(folder.parent), "run"), 2, "fork")
    resealed(folder / "run.json", lambda record: record.update(attempt="another"))
    (fault,) = check_run(str(folder.parent), "fork").faults
    assert fault.kind == "wrong parent"
    assert fault.place == str(folder.parent / "fork/run.json")


def test_nothing_to_check_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match="nothing lies in"):
        check_run(str(tmp_path), "absent")


LATE = ("rollouts", "batches", "checkpoints", "metrics", "evals")


class Meanwhile(LocalStore):
    """A run in which rounds are played while it is listed: `unseen` was walked by before them.

    What is asked for later is answered as it is by then.
    """

    def __init__(self, folder: Path, unseen: tuple[str, ...]) -> None:
        super().__init__(str(folder))
        self._unseen = unseen

    def list(self, prefix: str = "") -> Keys:
        found = super().list(prefix)
        return found if prefix else [key for key in found if not key.startswith(self._unseen)]


def test_rounds_that_are_committed_while_the_run_is_listed_are_no_faults(folder: Path) -> None:
    """Whichever folders were walked before two rounds were in them."""
    (folder / "rollouts/round-00003/shard-0000.parquet").unlink()
    last = {kind: (f"{kind}/round-00001", f"{kind}/round-00002") for kind in LATE}
    last["checkpoints"] = ("checkpoints/round-00002", "checkpoints/round-00003")
    for kinds in chain.from_iterable(combinations(LATE, n) for n in range(1, 6)):
        store = Meanwhile(folder, tuple(key for kind in kinds for key in last[kind]))
        inventory = take_inventory(store)
        assert [*link_faults(store, inventory), *gap_faults(store, inventory)] == [], kinds
        assert [slot for slot in inventory.slots if slot.manifest is None] == [], kinds


def test_an_export_of_a_run_that_plays_meanwhile_can_be_verified(folder: Path) -> None:
    store = Meanwhile(folder, ("batches/round-00002", "checkpoints/round-00003"))
    run = replace(Run.open(str(folder.parent), "run"), store=store)
    made = write_archive(run, folder.parent / "run.tar", everything=True)
    assert verify_archive(made.path).faults == ()


@pytest.mark.parametrize("kind", LATE)
def test_a_deleted_object_is_still_missing(folder: Path, kind: str) -> None:
    number = 2 if kind == "checkpoints" else 1
    gone = one(folder, f"{kind}/round-0000{number}*")
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    name = gone.relative_to(folder) if kind == "metrics" else gone.relative_to(folder) / MANIFEST
    assert set(faults(folder)) == {("missing", str(name))}


def test_retention_between_the_listing_and_the_hashes_is_no_fault(folder: Path) -> None:
    run = Run.open(str(folder.parent), "run")

    class Retiring(Operations):
        def next(self, name: str, url: str) -> str | None:
            if name == "read" and "/checkpoints/" in url and not self.count:
                self.count = 1
                assert collect(run, rule_of(run, 2, None)).garbage
            return None

    with inject_faults(Retiring()):
        assert faults(folder) == []


def test_objects_elsewhere_are_checked_too() -> None:
    run = whole_run("memory://fsck", 1)
    assert check_run("memory://fsck", "run").faults == ()
    run.store.delete("rollouts/round-00000/shard-0001.parquet")
    (fault,) = check_run("memory://fsck", "run").faults
    assert (fault.kind, fault.place) == (
        "missing",
        "memory://fsck/run/rollouts/round-00000/shard-0001.parquet",
    )
