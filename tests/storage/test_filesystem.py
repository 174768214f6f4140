"""Promises of every backend, and their errors when the outside world fails them."""

import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.fake_stores import FakeGCS, FakeS3, Fault
from support.fault_injection import Operations, inject_faults, parse

from marin_rl.errors import (
    ConfigError,
    CorruptObject,
    ObjectMissing,
    RootUnfit,
    StorageError,
    StoreUnavailable,
)
from marin_rl.storage.stores import filesystem
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome, open_store, probe
from marin_rl.storage.stores.store import is_private

CREATED, EXISTS, UNKNOWN = PutOutcome.CREATED, PutOutcome.EXISTS, PutOutcome.UNKNOWN
NOBODY = 65534


# --- every backend -----------------------------------------------------------------------------


def test_a_key_is_created_once_and_keeps_its_first_content(store: ObjectStore) -> None:
    assert store.put_if_absent("a/b/c.json", b"first") is CREATED
    assert store.put_if_absent("a/b/c.json", b"second, longer") is EXISTS
    assert store.put_if_absent("a/b/c.json", b"") is EXISTS
    assert store.read("a/b/c.json") == b"first"
    assert store.size("a/b/c.json") == 5
    assert store.put_if_absent("empty", b"") is CREATED
    assert store.put_if_absent("empty", b"x") is EXISTS
    assert store.list() == ["a/b/c.json", "empty"], "and no temporary files"


def test_bytes_come_back_as_they_went(store: ObjectStore) -> None:
    data = bytes(range(256)) * 5000 + b"\r\n\n--==0==--\n\n"
    store.put_part("parts/x", data)
    assert store.put_if_absent("parts/y", data) is CREATED
    assert store.read("parts/x") == data == store.read("parts/y")


def test_missing_objects_are_reported_as_missing(store: ObjectStore) -> None:
    for ask in (store.read, store.size):
        with pytest.raises(ObjectMissing, match=r"never/was\.json does not exist"):
            ask("never/was.json")
    store.delete("never/was.json")
    assert store.list() == []
    assert store.list("never") == store.children("never") == []


def test_listings_are_fresh_sorted_and_respect_folders(store: ObjectStore) -> None:
    for key in ("a/2", "a/10", "ab/1", "a/deep/er/x", "a/.tmp"):
        store.put_part(key, b"1")
    assert store.list("a") == ["a/.tmp", "a/10", "a/2", "a/deep/er/x"]
    assert store.list() == ["a/.tmp", "a/10", "a/2", "a/deep/er/x", "ab/1"]
    assert store.children("a") == [".tmp", "10", "2", "deep"]
    assert store.children() == ["a", "ab"]
    store.delete("a/2")
    store.put_part("a/3", b"")
    assert store.list("a") == ["a/.tmp", "a/10", "a/3", "a/deep/er/x"]
    with pytest.raises(ObjectMissing):
        store.read("a/2")


def test_at_looks_at_the_same_objects_from_a_folder(store: ObjectStore) -> None:
    inside = store.at("run-1")
    assert inside.put_if_absent("x/y", b"1") is CREATED
    assert store.read("run-1/x/y") == b"1"
    assert inside.list() == ["x/y"]
    assert inside.url_of("x/y") == store.url_of("run-1/x/y")


def test_a_store_survives_pickling(store: ObjectStore) -> None:
    store.put_part("x", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.url == store.url
    assert copy.read("x") == b"1"
    assert copy.put_if_absent("x", b"2") is EXISTS


def test_a_sound_root_passes_the_probe_and_stays_empty(store: ObjectStore) -> None:
    probe(store)
    assert store.list() == []


def test_keys_cannot_leave_the_store(store: ObjectStore) -> None:
    for key in ("../x", "a//b", "/etc/passwd", "", "a/./b"):
        with pytest.raises(CorruptObject, match="stays below its folder"):
            store.put_if_absent(key, b"")


def test_of_many_creators_exactly_one_wins(store: ObjectStore) -> None:
    n_threads, keys = 4, [f"race/{i}" for i in range(8)]
    barrier = threading.Barrier(n_threads)
    outcomes: dict[str, list[tuple[PutOutcome, bytes]]] = {key: [] for key in keys}

    def compete(name: bytes) -> None:
        mine = pickle.loads(pickle.dumps(store))
        for key in keys:
            barrier.wait(30)
            outcomes[key].append((mine.put_if_absent(key, name * 1000), name * 1000))

    threads = [threading.Thread(target=compete, args=(bytes([65 + i]),)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for key in keys:
        assert len(outcomes[key]) == n_threads
        winners = [data for outcome, data in outcomes[key] if outcome is CREATED]
        assert len(winners) == 1
        assert store.read(key) == winners[0]


@pytest.mark.parametrize("url", ["ftp://x/y", "gs://", "s3:///", "http://bucket/x"])
def test_unknown_roots_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="root: expected"):
        open_store(url)


def test_a_local_root_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a local root takes none, found token"):
        open_store(str(tmp_path), {"token": "anon"})


def test_aliases_of_schemes(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}").url == open_store(str(tmp_path)).url == str(tmp_path)
    assert open_store("gcs://bucket/x/").url == "gs://bucket/x"
    assert open_store("s3a://bucket/x").url == "s3://bucket/x"
    assert open_store("runs").local_path("a") == Path.cwd() / "runs" / "a"


# --- local -------------------------------------------------------------------------------------


def test_local_listings_do_not_skip_what_may_not_be_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put_part("slot/x", b"")
    (tmp_path / "slot" / "loop").symlink_to("loop")
    assert store.list() == ["slot/loop", "slot/x"]
    with pytest.raises(StorageError, match="cannot read"):
        store.list("slot/x/below-a-file")


CREATE_THEN_DIE = """
import os, signal, sys
from marin_rl.storage.stores.filesystem import open_store

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

os.link = die
open_store(sys.argv[1]).put_if_absent("rollouts/round-00000/shard-0000.parquet", b"x" * 10)
"""


def test_a_kill_before_the_link_leaves_nothing_that_a_glob_can_see(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", CREATE_THEN_DIE, str(tmp_path)], check=False)
    assert result.returncode == -9
    assert list(tmp_path.glob("rollouts/*/shard-*.parquet")) == []
    store = open_store(str(tmp_path))
    (left,) = store.list()
    assert is_private(left)
    assert store.put_if_absent("rollouts/round-00000/shard-0000.parquet", b"y") is CREATED


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """This process may not write files above 64 KiB: the file system's "no" without root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 65536
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_does_not_fit_says_so_and_leaves_nothing(tmp_path, file_size_limit):
    store = open_store(str(tmp_path))
    too_much = bytes(file_size_limit + 1)
    with pytest.raises(StorageError, match=r"cannot write 65537 bytes to .*big: the file would be"):
        store.put_if_absent("slot/big", too_much)
    with pytest.raises(StorageError, match="larger than this process or file system allows"):
        store.put_part("slot/part", too_much)
    assert store.put_if_absent("slot/small", b"x") is CREATED
    assert store.children("slot") == ["part", "small"]


def _mounted(tmp_path: Path, options: str) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs privileges that this process does not have")
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = _mounted(tmp_path, "size=256k")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def readonly_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that cannot be written."""
    folder = _mounted(tmp_path, "ro,size=64k")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_costs_nothing_committed(small_disk: Path) -> None:
    store = open_store(str(small_disk))
    assert store.put_if_absent("a/committed", bytes(100_000)) is CREATED
    with pytest.raises(StorageError, match="the disk is full; free space there") as caught:
        store.put_if_absent("a/too-much", bytes(500_000))
    assert not caught.value.transient
    assert store.list() == ["a/committed"]
    assert store.read("a/committed") == bytes(100_000)
    assert store.put_if_absent("a/fits", bytes(50_000)) is CREATED


def test_a_read_only_disk_is_no_root(readonly_disk: Path) -> None:
    with pytest.raises(RootUnfit, match="the file system is read-only; choose another root"):
        probe(open_store(str(readonly_disk)))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root, to whom nothing is denied, becomes a user without rights for the while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def kept() -> Iterator[Path]:
    """A root with the object `slot/kept`, where others may look, unlike pytest's own folders."""
    folder = Path(tempfile.mkdtemp())
    assert open_store(str(folder)).put_if_absent("slot/kept", b"kept") is CREATED
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def denied(root: Path, folder: str, mode: int) -> Iterator[ObjectStore]:
    """The store at `root` while this process may do no more in `folder` than `mode` says."""
    before = (root / folder).stat().st_mode
    (root / folder).chmod(mode)
    try:
        with as_nobody():
            yield open_store(str(root))
    finally:
        (root / folder).chmod(before)


WRITES: dict[str, Callable[[ObjectStore], object]] = {
    "create": lambda store: store.put_if_absent("slot/new", b"x"),
    "create in a new folder": lambda store: store.put_if_absent("slot/deep/er/new", b"x"),
    "write": lambda store: store.put_part("slot/new", b"x"),
    "write in a new folder": lambda store: store.put_part("slot/deep/er/new", b"x"),
    "write over": lambda store: store.put_part("slot/kept", b"x"),
    "delete": lambda store: store.delete("slot/kept"),
}
LOOKS: dict[str, Callable[[ObjectStore], object]] = {
    "read": lambda store: store.read("slot/kept"),
    "size": lambda store: store.size("slot/kept"),
    "list": lambda store: store.list(),
    "children": lambda store: store.children("slot"),
    "create": lambda store: store.put_if_absent("slot/kept", b"x"),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_is_denied_says_so_and_changes_nothing(kept: Path, write: str) -> None:
    (kept / "slot" / "kept").chmod(0o444)
    with denied(kept, "slot", 0o555) as store:
        with pytest.raises(StorageError, match="permission denied; choose another root") as caught:
            WRITES[write](store)
        assert not isinstance(caught.value, ObjectMissing)
        assert not caught.value.transient
        assert str(kept / "slot") in str(caught.value)
        assert store.put_if_absent("slot/kept", b"x") is EXISTS
        assert store.read("slot/kept") == b"kept"
        assert store.list() == ["slot/kept"]
    (kept / "slot" / "kept").chmod(0o644)
    assert open_store(str(kept)).list() == ["slot/kept"]
    WRITES[write](open_store(str(kept)))


@pytest.mark.parametrize("look", LOOKS)
def test_unreadable_objects_do_not_count_as_missing(kept: Path, look: str) -> None:
    with denied(kept, "slot", 0o000) as store:
        with pytest.raises(StorageError, match="permission denied") as caught:
            LOOKS[look](store)
        assert not isinstance(caught.value, ObjectMissing)
        assert not caught.value.transient
    assert open_store(str(kept)).read("slot/kept") == b"kept"


def test_a_folder_without_permission_is_no_root(kept: Path) -> None:
    with denied(kept, ".", 0o555) as store:
        for url in (store.url, f"{store.url}/runs"):
            with pytest.raises(RootUnfit, match="permission denied; choose another root or ask"):
                probe(open_store(url))
    assert open_store(str(kept)).list() == ["slot/kept"]


# --- probes that lose their answers --------------------------------------------------------------


@contextmanager
def faulty_root(root: Path, kind: str) -> Iterator[ObjectStore]:
    """A store whose operation number 2 suffers, after a first one."""
    with inject_faults(Operations(parse(f"{kind}:2"))):
        store = open_store(str(root))
        store.put_part("a", b"a")
        yield store


def test_a_probe_is_not_fooled_by_its_own_create_sent_twice(tmp_path: Path) -> None:
    with faulty_root(tmp_path, "duplicate") as store:
        probe(store)
    assert store.children() == ["a"]


@pytest.mark.parametrize("kind", ["fail", "lose-reply", "late"])
def test_a_probe_without_an_answer_is_made_again(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(filesystem, "PROBE_PAUSES_S", ())
    with faulty_root(tmp_path, kind) as store, pytest.raises(StoreUnavailable) as caught:
        probe(store)
    assert caught.value.transient
    monkeypatch.setattr(filesystem, "PROBE_PAUSES_S", (0.0,))
    with faulty_root(tmp_path, kind) as store:
        probe(store)
    assert [name for name in store.children() if not name.startswith(".")] == ["a"]


# --- buckets -----------------------------------------------------------------------------------


def test_a_bucket_that_may_not_be_written_is_refused(gcs: FakeGCS) -> None:
    gcs.readonly = True
    with pytest.raises(RootUnfit, match="permission denied; check the credentials"):
        probe(open_store("gs://bucket/readonly", gcs.options))


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_that_does_not_exist_is_refused(scheme, request):
    server = request.getfixturevalue({"gs": "gcs", "s3": "s3"}[scheme])
    with pytest.raises(RootUnfit, match="the bucket does not exist"):
        probe(open_store(f"{scheme}://no-such-bucket/x", server.options))


Server = FakeGCS | FakeS3


@pytest.fixture(params=["gs", "s3"])
def faulty(request: pytest.FixtureRequest) -> tuple[Server, ObjectStore, str]:
    """A server with faults on request, a store on it, and the method its uploads use."""
    server = request.getfixturevalue({"gs": "gcs", "s3": "s3"}[request.param])
    folder = request.node.name.replace("[", "-").rstrip("]")
    store = open_store(f"{request.param}://bucket/{folder}", server.options)
    return server, store, {"gs": "POST", "s3": "PUT"}[request.param]


@pytest.mark.parametrize("status", [500, 503, 409, None])
def test_a_lost_reply_is_unknown_and_the_object_is_there(faulty, status):
    server, store, method = faulty
    server.faults.add(Fault(method, "slot", "after", status))
    outcome = store.put_if_absent("slot", b"mine")
    # aiohttp, below s3fs, sends a PUT again when a kept connection breaks: then our own write is
    # what "exists".
    assert outcome is UNKNOWN or (outcome is EXISTS and method == "PUT" and status is None)
    assert store.read("slot") == b"mine"
    assert store.put_if_absent("slot", b"other") is EXISTS


@pytest.mark.parametrize("status", [500, 503, 409])
def test_a_create_that_did_not_happen_is_unknown_too(faulty, status):
    server, store, method = faulty
    server.faults.clear()
    server.faults.add(Fault(method, "slot", "before", status))
    assert store.put_if_absent("slot", b"mine") is UNKNOWN
    assert server.faults.seen[method] == 1, "a create is sent once: retrying is the protocol's"
    with pytest.raises(ObjectMissing):
        store.read("slot")
    assert store.put_if_absent("slot", b"mine") is CREATED


@pytest.mark.parametrize("write", ["create", "write"])
def test_a_write_that_a_bucket_denies_is_no_unknown(faulty, write):
    server, store, method = faulty
    store.put_part("slot/kept", b"kept")
    server.faults.add(Fault(method, "slot/new", "before", 403))
    with pytest.raises(StorageError, match="permission denied; check the credentials") as caught:
        WRITES[write](store)
    assert not caught.value.transient
    assert store.list() == ["slot/kept"]
    WRITES[write](store)


def test_objects_hidden_by_a_bucket_do_not_count_as_missing(faulty):
    server, store, _ = faulty
    store.put_part("slot/kept", b"kept")
    server.faults.add(Fault("GET", "slot/kept", "before", 403))
    with pytest.raises(StorageError, match="permission denied; check the credentials") as caught:
        store.read("slot/kept")
    assert not isinstance(caught.value, ObjectMissing)


@pytest.mark.slow
def test_a_read_survives_two_faults_and_reports_the_third(faulty):
    server, store, _ = faulty
    store.put_part("slot", b"mine")
    server.faults.add(Fault("GET", "slot", "before", 503, times=2))
    assert store.read("slot") == b"mine"
    server.faults.add(Fault("GET", "slot", "before", 503, times=3))
    with pytest.raises(StoreUnavailable) as caught:
        store.read("slot")
    assert caught.value.transient


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_server_that_is_down_is_unavailable(scheme: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue({"gs": "gcs", "s3": "s3"}[scheme])
    store = open_store(
        f"{scheme}://bucket/x", server.options | {"endpoint_url": "http://127.0.0.1:9"}
    )
    assert store.put_if_absent("slot", b"") is UNKNOWN
    with pytest.raises(StoreUnavailable, match=rf"{scheme}://bucket/x/slot: "):
        store.read("slot")


def test_listings_are_complete_over_many_pages(gcs: FakeGCS) -> None:
    gcs.page_size = 3
    store = open_store("gs://bucket/pages", gcs.options)
    keys = [f"x/{i:02d}/{name}" for i in range(7) for name in "ab"]
    for key in keys:
        store.put_part(key, b"")
    assert store.list("x") == keys
    assert store.children("x") == [f"{i:02d}" for i in range(7)]


@pytest.mark.slow
def test_large_objects_go_through_in_pieces_and_whole(gcs: FakeGCS) -> None:
    store = open_store("gs://bucket/large", gcs.options)
    data = os.urandom(2**20) * 51
    store.put_part("part", data)
    assert store.put_if_absent("whole", data) is CREATED
    assert store.read("part") == data == store.read("whole")


@pytest.mark.slow
def test_a_store_opened_before_works_in_a_spawned_process(gcs: FakeGCS) -> None:
    store = open_store("gs://bucket/spawned", gcs.options)
    store.put_part("x", b"from the parent")
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).read('x').decode())"
    result = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(store), capture_output=True, check=True
    )
    assert result.stdout.strip() == b"from the parent"
