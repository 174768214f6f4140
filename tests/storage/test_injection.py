"""Fault injection: faults happen where they are configured, and nowhere else."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fault_injection import (
    DELAY_S,
    FaultyStore,
    Operations,
    inject_faults,
    parse,
)
from support.faults import NamedOperations

from marin_rl.errors import StoreUnavailable
from marin_rl.storage.stores import filesystem
from marin_rl.storage.stores.filesystem import (
    MemoryStore,
    ObjectStore,
    PutOutcome,
    open_store,
    probe,
)
from marin_rl.storage.stores.local import LocalStore

CREATED, EXISTS, UNKNOWN = PutOutcome.CREATED, PutOutcome.EXISTS, PutOutcome.UNKNOWN


Opened = Callable[[str], ObjectStore]


@pytest.fixture(params=["local", "memory"])
def faulty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """Opens a store whose operation number 2 suffers."""
    with ExitStack() as stack:

        def opened(kind: str) -> ObjectStore:
            stack.enter_context(inject_faults(Operations(parse(f"{kind}:2"))))
            where = str(tmp_path / "root")
            return open_store(where if request.param == "local" else f"memory:/{where}")

        yield opened


def test_no_store_is_faulty_unless_asked_for(tmp_path: Path) -> None:
    with inject_faults(Operations(parse("fail:1"))):
        assert isinstance(open_store(str(tmp_path)), FaultyStore)
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert isinstance(open_store("memory://x"), MemoryStore)


@pytest.mark.parametrize(
    ("kind", "outcome", "there"),
    [
        ("fail", UNKNOWN, False),
        ("lose-reply", UNKNOWN, True),
        ("duplicate", EXISTS, True),
        ("delay", CREATED, True),
    ],
)
def test_a_create_suffers(
    faulty: Opened,
    kind: str,
    outcome: PutOutcome,
    there: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append)  # of that module alone: other threads sleep too
    monkeypatch.setattr("support.fault_injection.time", clock)
    store = faulty(kind)
    assert store.put_if_absent("a", b"a") is CREATED
    assert slept == []
    assert store.put_if_absent("slot", b"mine") is outcome
    assert slept == ([DELAY_S] if kind == "delay" else [])
    assert store.children() == (["a", "slot"] if there else ["a"])
    assert store.put_if_absent("slot", b"mine") is (EXISTS if there else CREATED)
    assert store.read("slot") == b"mine"


def test_a_late_create_arrives_after_its_caller_stopped_waiting(faulty: Opened) -> None:
    store = faulty("late")
    store.put_part("a", b"a")
    assert store.put_if_absent("slot", b"first") is UNKNOWN
    assert store.put_if_absent("slot", b"second") is CREATED
    time.sleep(2 * DELAY_S)
    assert store.read("slot") == b"second"


@pytest.mark.parametrize("kind", ["fail", "lose-reply", "late"])
def test_other_operations_get_no_answer(faulty: Opened, kind: str) -> None:
    store = faulty(kind).at("run")
    store.put_part("a", b"a")
    with pytest.raises(StoreUnavailable, match=r"run/a: no answer, for a fault"):
        store.read("a")
    assert store.read("a") == b"a"


def test_a_probe_is_not_fooled_by_its_own_create_sent_twice(faulty: Opened) -> None:
    store = faulty("duplicate")
    store.put_part("a", b"a")
    probe(store)
    assert store.children() == ["a"]


@pytest.mark.parametrize("kind", ["fail", "lose-reply", "late"])
def test_a_probe_without_an_answer_is_made_again(
    faulty: Opened, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "PROBE_PAUSES_S", ())
    store = faulty(kind)
    store.put_part("a", b"a")
    with pytest.raises(StoreUnavailable) as caught:
        probe(store)
    assert caught.value.transient
    monkeypatch.setattr(filesystem, "PROBE_PAUSES_S", (0.0,))
    store = faulty(kind)
    store.put_part("b", b"b")
    probe(store)
    assert [name for name in store.children() if not name.startswith(".")] == ["a", "b"]


def test_operations_of_all_stores_are_counted(tmp_path: Path) -> None:
    told = []

    class Told(Operations):
        def next(self, name: str, url: str) -> str | None:
            told.append((name, url))
            return super().next(name, url)

    with inject_faults(Told()) as operations:
        store = open_store(str(tmp_path))
    inside = store.at("run")
    inside.put_part("x/a", b"a")
    inside.put_if_absent("x/b", b"b")
    assert store.list() == ["run/x/a", "run/x/b"]
    assert inside.children("x") == ["a", "b"]
    assert inside.size("x/a") == 1
    inside.delete("x/a")
    assert inside.local_path("x/b") is not None
    names = ["write", "create", "list", "children", "size", "delete", "path"]
    assert [name for name, _ in told] == names
    assert operations.count == len(told)
    assert told[0][1] == inside.url_of("x/a")


CREATE = """
import sys
sys.path.insert(0, sys.argv[2])
from marin_rl.storage.stores.filesystem import open_store
from support.fault_injection import install
install(sys.argv[3])
store = open_store(sys.argv[1])
store.put_part("slot/part", b"0123456789")
store.put_if_absent("slot/manifest", b"0123456789")
store.read("nothing")
"""


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("kill-before:2", {"part": 10}),
        ("kill-amid:1", {"part": 5}),
        ("kill-amid:2", {"part": 10, ".manifest.*.tmp": 5}),
        ("kill-after:2", {"part": 10, "manifest": 10}),
        ("kill-after:3", {"part": 10, "manifest": 10}),
    ],
)
def test_a_kill_leaves_what_a_real_one_would(fault: str, left: dict, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CREATE, str(tmp_path), str(Path(__file__).parents[1]), fault],
        capture_output=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    found = {path: path.stat().st_size for path in (tmp_path / "slot").iterdir()}
    assert len(found) == len(left)
    assert all(
        any(p.match(name) and found[p] == size for p in found) for name, size in left.items()
    )


def test_operations_are_known_by_what_they_are_asked_for(tmp_path: Path) -> None:
    """Another attempt's names, in another run, with a fault that is met at a retry."""
    seen = []
    for attempt in ("20261121T231145-1c4fd9803ee54856", "20261122T000000-5b608889f75334c8"):
        root = tmp_path / attempt
        met = tmp_path / f"{attempt}.met"
        operations = NamedOperations(str(root), {"write run/a/*/x #2": "fail"}, met)
        with inject_faults(operations):
            store = open_store(str(root)).at("run")
        store.put_part(f"a/{attempt}/x", b"x")
        with pytest.raises(StoreUnavailable):
            store.put_part(f"a/{attempt}/x", b"x")
        store.put_part(f"a/{attempt}/x", b"x")
        assert met.read_text() == "write run/a/*/x #2\n"
        assert operations.names.waiting == {}
        seen.append(operations.names.seen)
    assert seen[0] == seen[1] == [f"write run/a/*/x #{n}" for n in (1, 2, 3)]
