"""Calls of several processes by a real coordinator's store, each process a thread of this one."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from support.processes import joined_processes

from marin_rl import processes
from marin_rl.commands.hosts import COORDINATOR, PROCESS_ID, PROCESSES, several
from marin_rl.config import parse_config
from marin_rl.errors import ConfigError, InputError, ProcessLost, StorageError, StoreUnavailable
from marin_rl.processes import Processes
from marin_rl.runtime import CALLS, RunRuntime
from marin_rl.types import SlotRef

REF = SlotRef(slot="checkpoints/round-00001", sha256="ab" * 32, reused=True, summary={"loss": 0.5})
TIMEOUT_S = 60.0
Perform = Callable[[str, Sequence[Any]], None]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "POLL_S", 0.02)
    monkeypatch.setattr(processes, "SETTLE_S", 0.5)


@pytest.fixture
def group() -> Iterator[list[Processes]]:
    """Two processes that have joined."""
    with joined_processes() as processes:
        yield processes


@contextmanager
def following(process: Processes, perform: Perform) -> Iterator["Future[int]"]:
    """Follow in a thread; the future is the exit code."""
    code: Future[int] = Future()
    threading.Thread(target=lambda: code.set_result(process.follow(perform)), daemon=True).start()
    yield code
    code.result(TIMEOUT_S)


def test_all_make_the_calls_of_the_first_until_it_ends(group: list[Processes]):
    first, other = group
    made: list[Any] = []

    def perform(method: str, arguments: Sequence[Any]) -> None:
        made.append((method, *arguments, other.by_first(lambda: pytest.fail("it is not first"))))

    with following(other, perform) as code:
        for round in range(3):
            result = first.call("train_round", [round, REF], lambda: first.by_first(lambda: REF))
            assert result is REF
        assert first.call("init_policy", [], lambda: first.by_first(lambda: None)) is None
        assert first.end(3)
    assert code.result() == 3
    assert made == [*(("train_round", n, REF, REF) for n in range(3)), ("init_policy", None)]
    assert made[0][2].summary == REF.summary
    assert made[0][2].reused


def test_the_first_has_what_all_processes_say_once_all_have_said_it(group: list[Processes]):
    first, other = group
    sent = threading.Event()

    def perform(_: str, arguments: Sequence[Any]) -> None:
        assert other.all_to_first(["one"]) == []
        assert other.by_first(lambda: pytest.fail("it is not first")) == {"of": 2}
        sent.wait(0.1)
        assert other.all_to_first("again") == []

    def work() -> list[Any]:
        values = first.all_to_first(["zero"])
        assert first.by_first(lambda: {"of": len(values)}) == {"of": 2}
        return [values, first.all_to_first(None)]

    with following(other, perform):
        assert first.call("train_round", [0], work) == [[["zero"], ["one"]], [None, "again"]]
        first.end(0)


def test_a_process_that_fails_before_it_says_something_is_named(group: list[Processes]):
    first, other = group

    def perform(_: str, arguments: Sequence[Any]) -> None:
        raise StorageError("the disk is full")

    with following(other, perform):
        with pytest.raises(ProcessLost, match="process 1: StorageError: the disk is full"):
            first.call("train_round", [0], lambda: first.all_to_first([]))
        first.end(1)


def test_a_call_that_failed_in_the_first_is_given_up_and_made_again(group: list[Processes]):
    first, other = group
    found: list[Any] = []

    def perform(_: str, arguments: Sequence[Any]) -> None:
        found.append(other.by_first(lambda: None))

    def unavailable() -> SlotRef:
        raise StoreUnavailable("503")

    with following(other, perform) as code:
        with pytest.raises(StoreUnavailable, match="503"):  # as it is, for Prefect to retry
            first.call("train_round", [0], lambda: first.by_first(unavailable))
        assert first.call("train_round", [0], lambda: first.by_first(lambda: REF)) == REF
        first.end(0)
    assert code.result() == 0
    assert found == [REF]


def test_a_failure_of_another_is_named_while_the_first_waits_for_it(group: list[Processes]):
    first, other = group
    never = threading.Event()  # as a collective that the other does not come to

    def perform(_: str, arguments: Sequence[Any]) -> None:
        raise InputError("rows.jsonl is not here")

    with following(other, perform) as code:
        with pytest.raises(ProcessLost, match=r"process 1: InputError: rows.jsonl is not here"):
            first.call("train_round", [0], never.wait)
        first.end(1)
    assert code.result() == 1
    never.set()


def test_a_failure_of_all_is_that_of_the_first(group: list[Processes]):
    first, other = group

    def unfit(*_: Any) -> None:
        raise InputError("too long")

    with following(other, unfit) as code:
        for _ in range(2):
            with pytest.raises(InputError, match=r"^too long$"):
                first.call("run_sft_segment", [0], unfit)
        first.end(2)
    assert code.result() == 2


def test_no_retry_while_another_works_on_and_the_end_reaches_it(group: list[Processes]):
    """It may have gone on to another state, so all are to begin again from the files."""
    first, other = group
    never = threading.Event()

    def unavailable() -> SlotRef:
        raise StoreUnavailable("503")

    with following(other, lambda method, arguments: never.wait() and None) as code:
        with pytest.raises(ProcessLost, match="process 1 has ended or works on") as lost:
            first.call("train_round", [0], unavailable)
        assert not lost.value.transient
        assert "StoreUnavailable: 503" in str(lost.value)
        assert first.end(1)
    assert code.result() == 1
    never.set()


def test_a_process_that_ends_a_call_later_is_missed(group, monkeypatch):
    monkeypatch.setattr(processes, "FINISH_S", 0.2)
    first, other = group
    never = threading.Event()
    with following(other, lambda method, arguments: never.wait() and None):
        with pytest.raises(ProcessLost, match="process 1 did not end"):
            first.call("init_policy", [], lambda: None)
        first.end(1)
    never.set()


def test_calls_are_methods_of_the_runtime():
    for name in CALLS:
        assert getattr(RunRuntime, name).__wrapped__.__name__ == name


def test_the_environment_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch):
    for name in (COORDINATOR, PROCESSES, PROCESS_ID):
        monkeypatch.delenv(name, raising=False)
    alone, section = parse_config({}), parse_config({"distributed": {"coordinator": "a:1"}})
    assert several(alone) is None
    one_of_two = parse_config({"distributed": {"processes": 2, "process_id": 0}})
    monkeypatch.setenv(PROCESS_ID, "1")
    assert several(alone) is None
    known = several(one_of_two)
    assert known is not None
    assert (known.processes, known.process_id) == (2, 1)
    monkeypatch.setenv(PROCESSES, "1")
    monkeypatch.setenv(PROCESS_ID, "0")
    assert several(section) is None  # a single process has no one to wait for
    monkeypatch.setenv(COORDINATOR, "b:2")
    monkeypatch.setenv(PROCESSES, "3")
    known = several(section)
    assert known is not None
    assert (known.coordinator, known.processes, known.timeout_s) == ("b:2", 3, 300)
    monkeypatch.setenv(PROCESS_ID, "3")
    with pytest.raises(ConfigError, match=r"process 3 of 3 processes: .* from 0 to 2"):
        several(section)
    monkeypatch.setenv(PROCESSES, "two")
    with pytest.raises(ConfigError, match="MARIN_RL_PROCESSES is 'two': expected a number"):
        several(alone)
