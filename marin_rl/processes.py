"""Processes that train one run together: the calls that all of them make, and the end of all.

Process 0 plays the flow. What needs the devices of all is a call: process 0 posts it in the store
of the coordinator and makes it; the others `follow`, that is they wait there, on the host alone,
and make the same call. Within a call `by_first` is for what one process decides or writes. The
store is that of JAX's coordinator: texts by key, each written once. Leaves out how processes find
one another (`commands.hosts`), which calls there are (`runtime`), and what they compute.
"""

import contextvars
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from threading import Thread
from typing import Any, Protocol, TypeVar, runtime_checkable

from marin_rl.errors import MarinRLError, ProcessLost
from marin_rl.slot_ref import SlotRef

POLL_S = 1.0  # between two looks at what others have posted
# From a process's failure in a call to the same failure of the others, of whose work it may be.
SETTLE_S = 10.0
FINISH_S = 60.0  # from the end of a call in process 0 to its end in the others
LEAVE_S = 10.0  # from a signal to a process, or the end of process 0, to its exit
END, CALL = "end", "call"
HERE = "127.0.0.1"
AGAIN = "all end, and the same command goes on from what is committed"

T = TypeVar("T")


@runtime_checkable
class Store(Protocol):
    """Key-value store of JAX's coordinator (`jax.distributed`)."""

    def key_value_set(self, key: str, value: str) -> None: ...
    def key_value_try_get(self, key: str) -> str: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def key_value_delete(self, key: str) -> None: ...


class Abandoned(Exception):
    """Raised in a process other than 0 once process 0 has failed in the call."""


class _Ended(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Processes:
    """The processes of a run, as process `number` of `count` sees them, with its own `address`.

    Calls are made one at a time, and `by_first` by one thread of a call at a time.
    """

    def __init__(self, store: Store, number: int, count: int, address: str = HERE) -> None:
        self._store, self.number, self.count, self.address = store, number, count, address
        self._calls = self._said = 0
        self._leave_at: float | None = None
        self._signal = 0

    # ------------------------------------------------------------ texts

    def post(self, key: str, value: Any) -> None:
        self._store.key_value_set(key, json.dumps(value))

    def read(self, key: str, timeout_s: float = 0.0) -> Any:
        """Return what was posted under `key`; None where nothing is in time."""
        try:
            if timeout_s > 0:
                text = self._store.blocking_key_value_get(key, int(timeout_s * 1000))
            else:
                text = self._store.key_value_try_get(key)
        except RuntimeError as error:  # JAX's has no class for each
            if "NOT_FOUND" in str(error) or "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return json.loads(text)

    def _key(self, *parts: str | int) -> str:
        return "/".join(map(str, (CALL, self._calls, *parts)))

    # ------------------------------------------------------------ process 0

    def call(self, method: str, arguments: Sequence[Any], work: Callable[[], T]) -> T:
        """Have every process make a call; `work` is this process's own part.

        Raises what `work` raises once the others have given the call up too, and ProcessLost where
        another process failed, or may have gone on: then all are to end.
        """
        if self._calls > 1:  # of the last call, one may still read how it failed
            self._store.key_value_delete(f"{CALL}/{self._calls - 1}")
        self._calls, self._said = self._calls + 1, 0
        self.post(self._key("begin"), {"method": method, "arguments": [*map(_plain, arguments)]})
        pending = begun(work)
        while not _done(pending, POLL_S):
            if failed := self._failed():
                if _done(pending, SETTLE_S):
                    break  # its own error says more
                raise ProcessLost(failed)
        error = pending.exception()
        if error is None:
            self._await_ends(FINISH_S)
            if failed := self._failed():
                raise ProcessLost(failed)
            return pending.result()
        self.post(self._key("failed", 0), _text(error))
        going_on, failed = self._await_ends(SETTLE_S), self._failed()
        of_others = not isinstance(error, MarinRLError) and (failed or going_on)
        if of_others or (going_on and getattr(error, "transient", False)):
            lost = [f"process {number} has ended or works on" for number in going_on]
            told = "; ".join(filter(None, [*lost, failed]))
            raise ProcessLost(f"{told}; process 0: {_text(error)}; {AGAIN}") from error
        raise error

    def _failed(self) -> str:
        """Failures that other processes posted in this call, by their number; empty: none."""
        failures = {n: self.read(self._key("failed", n)) for n in range(1, self.count)}
        return "; ".join(f"process {n}: {text}" for n, text in failures.items() if text)

    def _await_ends(self, timeout_s: float) -> list[int]:
        """Processes that did not fail in the call, once all have ended it or the time is up.

        Raises ProcessLost where one has neither ended nor failed and this process has not either.
        """
        deadline, finished = time.monotonic() + timeout_s, list[int]()
        for number in range(1, self.count):
            while True:
                if self.read(self._key("done", number), 0.05) is not None:
                    finished.append(number)
                    break
                if self.read(self._key("failed", number)) is not None:
                    break
                if time.monotonic() > deadline:
                    if self.read(self._key("failed", 0)) is None:
                        raise ProcessLost(
                            f"process {number} did not end what process 0 ended {timeout_s:g} s "
                            "before: look at its output, and run the same command again"
                        )
                    finished.append(number)
                    break
        return finished

    def end(self, code: int) -> bool:
        """End the other processes with this exit code; True once all of them have heard it."""
        self.post(END, code)
        deadline = time.monotonic() + LEAVE_S
        heard = [
            self.read(f"bye/{n}", max(deadline - time.monotonic(), 0.01)) is not None
            for n in range(1, self.count)
        ]
        return all(heard)

    # ------------------------------------------------------------ the others

    def follow(self, perform: Callable[[str, Sequence[Any]], None]) -> int:
        """Make the calls of process 0 until it ends; return the exit code that it posted.

        `perform` takes a method and its arguments. A failure that process 0 does not share is
        posted, and ends all. A signal is left to process 0 for LEAVE_S, for it has it too.
        """
        code = self._follow(perform)
        with suppress(RuntimeError):  # of a coordinator that has left already
            self.post(f"bye/{self.number}", code)
        return code

    def _follow(self, perform: Callable[[str, Sequence[Any]], None]) -> int:
        try:
            while True:
                self._calls, self._said = self._calls + 1, 0
                call = self._awaited(lambda: self.read(self._key("begin"), POLL_S))
                arguments = [*map(_filled, call["arguments"])]
                # In a thread: one that waits for the devices of a dead process waits for ever.
                pending = begun(partial(perform, call["method"], arguments))
                self._awaited(lambda pending=pending: _done(pending, POLL_S) or None)
                if (error := pending.exception()) is None:
                    self.post(self._key("done", self.number), True)
                    continue
                self.post(self._key("failed", self.number), _text(error))
                self._awaited(lambda: self.read(self._key("failed", 0), POLL_S))
        except _Ended as ended:
            return ended.code

    def _awaited(self, look: Callable[[], T | None]) -> T:
        """Return what `look` finds in the end. Raises _Ended once this process is to leave."""
        while (found := look()) is None:
            if (code := self.read(END)) is not None:
                raise _Ended(int(code))
            if self._leave_at is not None and time.monotonic() > self._leave_at:
                raise _Ended(128 + self._signal)
        return found

    def leave_signals_to_first(self) -> None:
        """Have SIGINT and SIGTERM end this process LEAVE_S later, unless process 0 ends it."""

        def note(number: int, _: Any) -> None:
            self._signal, self._leave_at = number, time.monotonic() + LEAVE_S

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)

    # ------------------------------------------------------------ within a call

    def by_first(self, work: Callable[[], T]) -> T:
        """The result of `work`, which process 0 alone does; the others wait for it.

        It is JSON, or a reference. Raises what `work` raises in process 0, and Abandoned in the
        others.
        """
        key, self._said = self._key("said", self._said), self._said + 1
        if self.number == 0:
            result = work()
            self.post(key, {"result": _plain(result)})
            return result
        while (said := self.read(key, POLL_S)) is None:
            if (text := self.read(self._key("failed", 0))) is not None:
                raise Abandoned(text)
        return _filled(said["result"])

    def all_to_first(self, value: Any) -> list[Any]:
        """The values (JSON) of all processes in process 0, once all have come here; else none.

        Raises ProcessLost where another process fails instead.
        """
        key, self._said = self._key("said", self._said), self._said + 1
        if self.number:
            self.post(f"{key}/{self.number}", value)
            return []
        values = [value]
        while len(values) < self.count:
            if (other := self.read(f"{key}/{len(values)}", POLL_S)) is not None:
                values.append(other)
            elif failed := self._failed():
                raise ProcessLost(failed)
        return values


_joined: Processes | None = None


def join(processes: Processes) -> None:
    """Make these the processes of this one, for the functions below and calls."""
    global _joined
    _joined = processes


def joined() -> Processes | None:
    return _joined


def leads() -> bool:
    """True in the process that writes: process 0, or the only one."""
    return _joined is None or _joined.number == 0


def own_address() -> str:
    """The address at which the other processes reach this one."""
    return HERE if _joined is None else _joined.address


def process_number() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (0, 1) if _joined is None else (_joined.number, _joined.count)


def by_first(work: Callable[[], T]) -> T:
    """The result of `work`, which one process does: see `Processes.by_first`."""
    return work() if _joined is None else _joined.by_first(work)


def all_to_first(value: Any) -> list[Any]:
    """The values of all processes: see `Processes.all_to_first`."""
    return [value] if _joined is None else _joined.all_to_first(value)


def begun(work: Callable[[], T]) -> "Future[T]":
    """Start work in a thread of its own, which no end of this process waits for."""
    outcome: Future[T] = Future()

    def body() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised by who waits
            outcome.set_exception(error)

    context = contextvars.copy_context()
    Thread(target=context.run, args=(body,), name="call", daemon=True).start()
    return outcome


def _done(pending: "Future[Any]", timeout_s: float) -> bool:
    return bool(wait([pending], timeout_s).done)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    return {"slot_ref": asdict(value)} if isinstance(value, SlotRef) else value


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping) and "slot_ref" in value:
        return SlotRef(**value["slot_ref"])
    return value
