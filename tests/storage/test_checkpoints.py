"""Trees of arrays as slots: equal after a round trip on every backend, refused when damaged."""

import errno
import json
import os
import resource
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize, serialize
from support.fault_injection import FaultyStore, Operations, parse
from support.processes import joined_processes

from marin_rl import processes
from marin_rl.config import Config
from marin_rl.errors import (
    CorruptObject,
    MarinRLError,
    ObjectMissing,
    StorageError,
)
from marin_rl.machine import machine_facts
from marin_rl.storage import checkpoints, commits
from marin_rl.storage.array_files import (
    Tensor,
    cut,
    encoded,
    header_of,
    shapes_of,
    tensors_of,
    whole_box,
    within,
)
from marin_rl.storage.checkpoints import commit_checkpoint, dealt, restore_checkpoint
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, checkpoint_slot, committed_checkpoint
from marin_rl.training.model import digest_of
from marin_rl.types import SlotRef


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "parameters": {"a/weight": rng.standard_normal((5, 7), np.float32)},
        "optimizer": {
            "1.0.mu.a/weight": rng.standard_normal((5, 7), np.float32),
            "1.0.count": np.int32(3),
        },
        "rng": np.array([1, 2**32 - 1], np.uint32),
        "step": np.int32(11),
    }


def commit(run, round=0, seed=0, content=None, parents=()):
    return commit_checkpoint(
        run,
        checkpoint_slot(round),
        tree(seed),
        content={"seed": 0} if content is None else content,
        parents=parents,
        totals={"loss": 0.5},
        extra={"step": 11},
    )


@pytest.fixture
def run(root):
    return Run.create_or_open(Config(root=root.url, storage_options=root.options))


@pytest.fixture
def local_run(tmp_path):
    return Run.create_or_open(Config(root=str(tmp_path)))


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[name], value)
        else:
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)


def test_a_tree_comes_back_bit_for_bit_on_every_backend(run):
    assert committed_checkpoint(run, 0) is None
    ref = commit(run)
    assert (ref.reused, ref.summary) == (False, {"loss": 0.5})
    assert committed_checkpoint(run, 0) == ref
    assert_equal(restore_checkpoint(run, ref, tree(1)), tree())
    manifest = manifest_of(run.store, ref)
    assert manifest.extra == {"step": 11, "machine": machine_facts()}
    assert all(part.name.startswith(f"{manifest.attempt}/") for part in manifest.parts)
    stored = {key for key in run.store.list(ref.slot) if not key.endswith("manifest.json")}
    assert stored == {f"{ref.slot}/{part.name}" for part in manifest.parts}


def test_large_arrays_are_parts_that_fit_into_memory(local_run, monkeypatch):
    monkeypatch.setattr(checkpoints, "FILE_BYTES_MIN", 2**16)
    rng = np.random.default_rng(0)
    large = {
        "parameters": {
            "embedding": rng.standard_normal((2**12, 2**9), np.float32),  # 8 MiB
            "layers": rng.standard_normal((30, 2**16), np.float32),
            "norm": rng.standard_normal(64, np.float32),
        }
    }
    ref = commit_checkpoint(
        local_run, checkpoint_slot(0), large, content={}, parents=(), totals={}, extra={}
    )
    sizes = [part.bytes for part in manifest_of(local_run.store, ref).parts]
    assert sum(sizes) > 15 * 2**20
    assert max(sizes) < sum(sizes) / checkpoints.FILES_OF_PROCESS + 2**10
    assert_equal(restore_checkpoint(local_run, ref, large), large)


def test_damage_is_detected_on_every_backend_and_names_the_file(run):
    ref = commit(run)
    part = max(manifest_of(run.store, ref).parts, key=lambda part: part.bytes)
    key = f"{ref.slot}/{part.name}"
    data = bytearray(run.store.read(key))
    data[len(data) // 2] ^= 1
    run.store.put_part(key, bytes(data))
    with pytest.raises(CorruptObject, match="was damaged") as caught:
        restore_checkpoint(run, ref, tree())
    assert run.store.url_of(key) in str(caught.value)
    run.store.delete(key)
    with pytest.raises(ObjectMissing):
        restore_checkpoint(run, ref, tree())


def test_a_checkpoint_of_another_model_names_the_array(local_run):
    ref = commit(local_run)
    other = tree() | {"parameters": {"a/weight": np.zeros((5, 8), np.float32)}}
    with pytest.raises(CorruptObject, match=r"parameters/a/weight expected float32\[5, 8\], found"):
        restore_checkpoint(local_run, ref, other)


def test_a_reference_to_another_manifest_is_refused(local_run):
    ref = commit(local_run)
    with pytest.raises(CorruptObject, match="expected SHA-256"):
        restore_checkpoint(local_run, SlotRef(slot=ref.slot, sha256="0" * 64), tree())
    with pytest.raises(ObjectMissing, match="not committed"):
        restore_checkpoint(local_run, SlotRef(slot="checkpoints/round-00009", sha256=""), tree())


def test_a_file_system_that_syncs_no_folders_is_good_enough(local_run, monkeypatch):
    """Some that are mounted through FUSE; what creates manifests there takes it too."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert_equal(restore_checkpoint(local_run, commit(local_run), tree()), tree())


def test_a_full_disk_is_reported_and_the_next_attempt_succeeds(local_run, caplog):
    # A limit on the size of files stands for a disk that fills up: the write fails half-way.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"weight": np.random.default_rng(0).standard_normal((300, 300))}
    arguments = {"content": {}, "parents": [], "totals": {}, "extra": {}}
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(StorageError, match=r"write 720\d\d\d bytes .*file would be larger"):
            commit_checkpoint(local_run, checkpoint_slot(0), large, **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [r for r in caplog.records if r.name.startswith("marin_rl")]
    ref = commit_checkpoint(local_run, checkpoint_slot(0), large, **arguments)
    assert_equal(restore_checkpoint(local_run, ref, large), large)


def test_a_disk_without_room_is_reported_before_any_write(local_run, monkeypatch):
    real = os.statvfs

    def statvfs(path):
        disk = list(real(path))
        disk[4] = 1  # blocks that are free for us
        return os.statvfs_result(disk)

    monkeypatch.setattr(os, "statvfs", statvfs)
    large = {"weight": np.zeros((300, 300))}
    slot = checkpoint_slot(0)
    with pytest.raises(StorageError, match=r"write 720000 bytes .*the disk is full; free space"):
        commit_checkpoint(local_run, slot, large, content={}, parents=[], totals={}, extra={})
    assert local_run.store.list(slot) == []


TREE = {
    "parameters": {
        "trunk/x:A": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.array([1, 2.5], ml_dtypes.bfloat16),
    },
    "critic": {"parameters": {"head/bias": np.float32(3) * np.ones((), np.float32)}},
    "step": np.asarray(7, np.int32),
    "rng": np.array([0, 2**32 - 1], np.uint32),
    "none": np.zeros((0, 2), np.float32),
}


def entries(tree, path=()):
    for name, branch in tree.items():
        if isinstance(branch, dict):
            yield from entries(branch, (*path, name))
        else:
            array = np.asarray(branch)
            box = whole_box(array.shape)
            yield Tensor(path=(*path, name), box=box, dtype=array.dtype, whole=True), array


def test_a_file_of_every_dtype_reads_back_to_the_bit():
    data, header = encoded(entries(TREE))
    assert header == header_of(memoryview(data), "file")
    assert encoded(reversed(list(entries(TREE))))[0] == data
    found, values = tensors_of(header, "file"), dict(entries(TREE))
    assert len(found) == len(values)
    read = {each.path: each.values(memoryview(data), "file") for each in found}
    for tensor, array in values.items():
        assert (read[tensor.path].dtype, read[tensor.path].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[tensor.path], array)
    assert {name: tuple(each["shape"]) for name, each in deserialize(data)} == {
        tensor.name: array.shape for tensor, array in values.items()
    }  # by the library too


def named(name: str) -> bytes:
    return serialize({name: {"dtype": "float32", "shape": [1], "data": bytes(4)}})


WHOLE = encoded(entries(TREE))[0]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff" * 8, WHOLE[:-1], WHOLE[:40], named("no list"), named("[]"),
        named("3"), named(json.dumps([[]])), named(json.dumps([[0]])),
        named(json.dumps(["a", [-1]])), named(json.dumps(["a", [0, 0]])),
        named(json.dumps(["a", [True]])),
        serialize({json.dumps(path): {"dtype": "float32", "shape": [1], "data": bytes(4)}
                   for path in (["a"], ["a", "b"])}),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(data):
    def read() -> None:
        tensors = tensors_of(header_of(memoryview(data), "file"), "file")
        shapes_of(tensors, "file")
        for tensor in tensors:
            tensor.values(memoryview(data), "file")

    with pytest.raises(CorruptObject, match="file: expected a tree of arrays, found"):
        read()


# ---------------------------------------------------------------- boxes


@pytest.mark.parametrize("bytes_max", [1, 4, 30, 1000])
@pytest.mark.parametrize("axes", [None, 1])
def test_a_box_is_cut_into_all_of_its_entries_in_order(bytes_max, axes):
    array = np.arange(5 * 3 * 4, dtype=np.int32).reshape(5, 3, 4)
    box = ((1, 5), (0, 3), (1, 3))
    parts = list(cut(box, 4, bytes_max, axes))
    values = [array[within(part, whole_box(array.shape))].ravel() for part in parts]
    np.testing.assert_array_equal(np.concatenate(values), array[1:, :, 1:3].ravel())
    least = 3 * 2 * 4 if axes else 4
    assert max(each.nbytes for each in values) <= max(bytes_max, least)


def spread(array, *axes):
    """An array over both devices of the tests, cut along an axis or whole on each."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    return jax.device_put(array, jax.NamedSharding(mesh, jax.P(*axes)))


PLACES = {"rows": ("x",), "columns": (None, "x"), "copies": (), "host": None}


@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize("after", PLACES)
def test_a_checkpoint_of_any_mesh_is_read_by_any_other(before, after, local_run, monkeypatch):
    monkeypatch.setattr(checkpoints, "FILE_BYTES_MIN", 100)
    array = np.random.default_rng(0).standard_normal((6, 10), np.float32)
    written = array if PLACES[before] is None else spread(array, *PLACES[before])
    like = array
    if PLACES[after] is not None:
        sharding = spread(array, *PLACES[after]).sharding
        like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    given = {"parameters": {"w": written}, "step": np.int32(4)}
    ref = commit_checkpoint(
        local_run, checkpoint_slot(0), given, content={}, parents=[], totals={}, extra={}
    )
    assert len(manifest_of(local_run.store, ref).parts) > 2
    found = restore_checkpoint(local_run, ref, {"parameters": {"w": like}, "step": np.int32(0)})
    np.testing.assert_array_equal(found["parameters"]["w"], array)
    assert found["step"] == 4
    if PLACES[after] is not None:
        assert found["parameters"]["w"].sharding == like.sharding
    assert digest_of({"w": written}) == digest_of({"w": array})


def test_only_the_files_of_its_own_boxes_are_read(local_run, monkeypatch):
    monkeypatch.setattr(checkpoints, "FILE_BYTES_MIN", 100)
    ref = commit_checkpoint(
        local_run, checkpoint_slot(0), {"a": np.zeros((100, 10)), "b": np.ones(40)},
        content={}, parents=[], totals={}, extra={},
    )  # fmt: skip
    for part in manifest_of(local_run.store, ref).parts:
        key = f"{ref.slot}/{part.name}"
        if b'[\\"a\\"' in local_run.store.read(key) and part.name.endswith(".safetensors"):
            local_run.store.delete(key)
    found = restore_checkpoint(local_run, ref, {"b": np.zeros(40)}, unasked=("a",))
    np.testing.assert_array_equal(found["b"], np.ones(40))
    with pytest.raises(ObjectMissing, match=rf"{ref.slot}/.*\.safetensors does not exist"):
        restore_checkpoint(local_run, ref, {"a": np.zeros((100, 10)), "b": np.zeros(40)})


def test_a_file_of_another_attempt_is_named(local_run, monkeypatch):
    monkeypatch.setattr(checkpoints, "FILE_BYTES_MIN", 100)
    ref, other = commit(local_run), commit(local_run, round=1, seed=1)
    names = [part.name for part in manifest_of(local_run.store, ref).parts]
    others = [part.name for part in manifest_of(local_run.store, other).parts]
    key = f"{ref.slot}/{names[0]}"
    local_run.store.put_part(key, local_run.store.read(f"{other.slot}/{others[0]}"))
    with pytest.raises(CorruptObject, match="was damaged") as caught:
        restore_checkpoint(local_run, ref, tree())
    assert local_run.store.url_of(key) in str(caught.value)


def test_copies_are_dealt_out_so_that_all_processes_write_alike():
    def tensor(name, rows):
        return Tensor(path=(name,), box=((0, rows),), dtype=np.dtype("f4"), whole=True)

    holders = {tensor(f"w{n}", 10 + n): [0, 1, 2, 3] for n in range(40)}
    holders |= {tensor("only", 200): [2]}
    owners = dealt(holders)
    assert owners == dealt(dict(reversed(holders.items())))
    assert owners[tensor("only", 200)] == 2
    sizes = [sum(t.nbytes for t, owner in owners.items() if owner == n) for n in range(4)]
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("kind", ["fail", "delay", "late", "lose-reply", "duplicate"])
def test_a_fault_of_any_operation_of_a_process_commits_all_or_nothing(
    kind, faulty, root, monkeypatch
):
    """Process 0 names the process at fault, and the same call made again commits."""
    this, run = (
        threading.local(),
        Run.create_or_open(Config(root=root.url, storage_options=root.options)),
    )
    for name in ("by_first", "all_to_first"):
        monkeypatch.setattr(
            checkpoints, name, lambda value, name=name: getattr(this.process, name)(value)
        )
    monkeypatch.setattr(checkpoints, "process_number", lambda: (this.process.number, 2))
    monkeypatch.setattr(processes, "POLL_S", 0.02)
    monkeypatch.setattr(commits, "DEADLINE_S", 5.0)

    def save(process, runs, at):
        this.process = process
        return commit(runs[process.number], round=at)

    failures = list[str]()
    with joined_processes() as (first, other):
        used = [run, run]
        perform = lambda _, arguments: save(other, used, *arguments) and None
        follow = threading.Thread(target=other.follow, args=(perform,), daemon=True)
        follow.start()
        for at in range(1, 100):
            operations = Operations(parse(f"{kind}:{at}"))
            used[faulty] = replace(run, store=FaultyStore(run.store, operations))
            failure = ""
            try:
                first.call("save", [at], lambda at=at: save(first, used, at))
            except MarinRLError as error:
                failure = str(error)
            failures.append(failure)
            assert not failure or faulty == 0 or "process 1: " in failure
            used[:] = run, run
            ref = first.call("save", [at], lambda at=at: save(first, used, at))
            assert_equal(restore_checkpoint(run, ref, tree()), tree())
            if operations.count < at:
                break
        first.end(0)
    follow.join()
    assert len(failures) > 2
    # A create whose answer is lost is looked for; a part is not.
    assert any(failures) == (kind in ("fail", "late", "lose-reply"))


# ---------------------------------------------------------------- earlier versions


@pytest.mark.parametrize("round", [0, 1])
def test_checkpoints_of_earlier_versions_are_read(round, run):
    """Of Orbax, and a single file of an adapter."""
    golden = Path(__file__).parents[1] / "golden/checkpoints" / f"round-0000{round}"
    for file in sorted(path for path in golden.rglob("*") if path.is_file()):
        key = f"{checkpoint_slot(round)}/{file.relative_to(golden).as_posix()}"
        run.store.put_part(key, file.read_bytes())
    ref = committed_checkpoint(run, round)
    assert_equal(restore_checkpoint(run, ref, tree()), tree(round))
    expected = tree(round)["parameters"]["a/weight"]
    sharding = spread(np.zeros((5, 8))).sharding
    like = {"a/weight": jax.ShapeDtypeStruct((5, 7), np.float32, sharding=sharding)}
    beside = ("optimizer", "rng", "step")
    found = restore_checkpoint(run, ref, {"parameters": like}, unasked=beside)
    np.testing.assert_array_equal(found["parameters"]["a/weight"], expected)
    other = {"parameters": {"a/weight": np.zeros((5, 8), np.float32)}}
    with pytest.raises(CorruptObject, match=r"a/weight expected float32\[5, 8\], found"):
        restore_checkpoint(run, ref, other, unasked=beside)


def test_a_file_beside_those_of_orbax_is_not_read(local_run):
    golden = Path(__file__).parents[1] / "golden/checkpoints/round-00000"
    folder = local_run.store.local_path(checkpoint_slot(0))
    shutil.copytree(golden, folder)
    ref = committed_checkpoint(local_run, 0)
    (folder / manifest_of(local_run.store, ref).attempt / "manifest.ocdbt").write_bytes(b"x")
    with pytest.raises(CorruptObject, match="was damaged"):
        restore_checkpoint(local_run, ref, tree())
    shutil.rmtree(folder)
    shutil.copytree(golden, folder)
    (folder / manifest_of(local_run.store, ref).attempt / "d/more").write_bytes(b"x")
    assert_equal(restore_checkpoint(local_run, ref, tree()), tree(0))
