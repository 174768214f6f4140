"""Fault injection: faults happen where they are configured, and nowhere else."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cases import others_slow
from support.fault_injection import DELAY_S, Operations, inject_faults, parse

from marin_rl.errors import StoreUnavailable
from marin_rl.storage.stores import filesystem
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome, open_store, probe

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


@pytest.mark.parametrize(
    ("kind", "outcome", "there"),
    [
        ("fail", UNKNOWN, False),
        ("lose-reply", UNKNOWN, True),
        ("duplicate", EXISTS, True),
        ("delay", CREATED, True),
    ],
)
def test_a_create_suffers(faulty, kind, outcome, there, monkeypatch):
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


def test_a_probe_is_not_fooled_by_its_own_create_sent_twice(faulty: Opened) -> None:
    store = faulty("duplicate")
    store.put_part("a", b"a")
    probe(store)
    assert store.children() == ["a"]


@pytest.mark.parametrize("kind", ["fail", "lose-reply", "late"])
def test_a_probe_without_an_answer_is_made_again(faulty, kind, monkeypatch):
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


CREATE = """
import sys
sys.path.insert(0, sys.argv[2])
from marin_rl.storage.stores.filesystem import open_store
from support.cases import others_slow
from support.fault_injection import install
install(sys.argv[3])
store = open_store(sys.argv[1])
store.put_part("slot/part", b"0123456789")
store.put_if_absent("slot/manifest", b"0123456789")
store.read("nothing")
"""


@pytest.mark.parametrize(
    ("fault", "left"),
    others_slow(
        [
            ("kill-amid:2", {"part": 10, ".manifest.*.tmp": 5}),
            ("kill-before:2", {"part": 10}),
            ("kill-amid:1", {"part": 5}),
            ("kill-after:2", {"part": 10, "manifest": 10}),
            ("kill-after:3", {"part": 10, "manifest": 10}),
        ],
        first=1,
        several=True,
    ),
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
