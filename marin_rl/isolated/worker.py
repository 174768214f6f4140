"""The body of a worker process: limits, and the calls of its parent, singly or interleaved.

Parent and worker write JSON, an object a line, to one socket. The first line names a module, its
settings and limits; `begin(settings)` of the module returns the work, and is answered by `{"id": 0,
"answer": …}` or `{"id": 0, "unfit": TEXT}`. Calls follow, `{"id": 1, "limit_s": null, "request":
…}`, and are answered in any order by `{"id": 1, "answer": …}` or `{"id": 1, "limit": NAME}`. Work
that is a function answers one call after another. Work that is a `Handler` has a coroutine for each
call, and one event loop; a call is not charged for the time in which others run.

Code that blocks is ended by the supervisor, which sees in shared memory which call runs and until
when it may. Imports the standard library alone, and runs as a script in interpreters that lack this
package.
"""

import asyncio
import contextvars
import importlib
import importlib.util
import json
import math
import mmap
import os
import random
import resource
import signal
import socket
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

MEMORY_EXIT_STATUS = 86  # of a worker that exceeded its memory
GRACE_S = 1.0  # for an event loop to run a timer, before the process counts as blocked
SLACK_S = 0.001  # timers of the event loop may be this early
_FILES_MAX = 32
_READ_BYTES = 1 << 20


@runtime_checkable
class Handler(Protocol):
    """Work whose calls interleave: a coroutine for each, and a context around all its slices."""

    def call(
        self, request: Any
    ) -> "tuple[Coroutine[Any, Any, bytes], AbstractContextManager[object]]":
        """The call that answers a request, as JSON. Its coroutine raises MemoryError alone."""
        ...


class Lease:
    """Memory of a worker, its supervisor and its parent, behind a descriptor: three doubles.

    The number of the call whose code runs, or the complement of the last one that did; the
    monotonic time at which the process counts as blocked; and the shortest limit of a call.
    """

    BYTES = 24

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, self.BYTES)).cast("d")

    def write(self, number: int, deadline: float, limit_s: float) -> None:
        for place, value in enumerate((number, deadline, limit_s)):
            self._memory[place] = value

    @property
    def number(self) -> int:
        return int(self._memory[0])


class RandomState:
    """Global random numbers of one episode, from a seed on, in place while its code runs."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._python = random.Random(seed).getstate()
        self._numpy: Any = None

    def __enter__(self) -> None:
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if self._numpy is None:  # perhaps it was imported meanwhile
                self._numpy = numpy.random.RandomState(self._seed % 2**32).get_state()
            numpy.random.set_state(self._numpy)

    def __exit__(self, *_: object) -> None:
        self._python = random.getstate()
        if self._numpy is not None:
            self._numpy = sys.modules["numpy"].random.get_state()


def main() -> None:
    """Serve the parent at the other end of standard input, a socket, until it closes it."""
    parent = _Parent(Lease(int(sys.argv[1])))
    os.close(int(sys.argv[1]))
    calls = parent.receive()
    while calls == []:
        calls = parent.receive()
    if calls is None:
        return
    hello, *calls = calls
    parent.limit_s = math.inf if hello["wall_s"] is None else hello["wall_s"]
    parent.answer_bytes = hello["answer_bytes"]
    module = load_module(hello["module"])
    _limit_resources(hello)
    try:
        work: Any = module.begin(hello["settings"])
    except ValueError as error:  # such as InputError
        parent.send(0, unfit=str(error))
        return
    parent.note(~0)
    parent.send(0, answer=getattr(work, "ready", None))
    if isinstance(work, Handler):
        _Interleaved(parent, work).serve(calls)
    else:
        cpu_s = hello["cpu_s"]
        while calls is not None:
            for call in calls:
                with parent.slice(call["id"], call["limit_s"] or parent.limit_s):
                    signal.setitimer(signal.ITIMER_PROF, cpu_s or 0)  # SIGPROF ends the process
                    data = work(call["request"])
                    signal.setitimer(signal.ITIMER_PROF, 0)
                parent.note(~call["id"])
                parent.send(call["id"], answer=data)
            calls = parent.receive()


def load_module(name: str) -> Any:
    """Import a module by its name, or by the path of its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None, name
    assert spec.loader is not None, name
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _limit_resources(hello: "dict[str, Any]") -> None:
    """Limit memory, and what a sealed worker may open and start; its children inherit it."""
    limits: dict[int, int] = {}
    if hello["memory_bytes"] is not None:
        in_use = 0
        with suppress(OSError, ValueError, IndexError):  # where the system does not report it
            pages = Path("/proc/self/statm").read_text().split()[5]
            in_use = int(pages) * resource.getpagesize()
        # Linux counts what a process can write to, not what libraries only reserve.
        memory = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        limits[memory] = in_use + hello["memory_bytes"]
    if hello["sealed"]:
        limits |= {
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: _FILES_MAX,
            resource.RLIMIT_NPROC: 0,
        }
    for name, most in limits.items():
        with suppress(OSError, ValueError):  # a lower limit of the user's stays
            resource.setrlimit(name, (most, most))


class _Parent:
    """The wire to the parent, and slices: the code between two awaits of a call, or all of it."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._process = os.getpid()
        self.wire = socket.socket(fileno=os.dup(0))
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        self._begun = b""
        self.limit_s, self.answer_bytes = math.inf, 0

    def receive(self) -> "list[dict[str, Any]] | None":
        """Wait for objects that are complete, perhaps none; None once the parent let go."""
        data = self.wire.recv(_READ_BYTES)
        *lines, self._begun = (self._begun + data).split(b"\n")
        return list(map(json.loads, lines)) if data else None

    def send(self, number: int, **fields: Any) -> None:
        """Write a line. An answer that is bytes is JSON already."""
        answer = fields.get("answer")
        if not isinstance(answer, bytes):
            line = json.dumps({"id": number, **fields}).encode() + b"\n"
        elif len(answer) > self.answer_bytes:
            line = b'{"id":%d,"limit":"answer"}\n' % number
        else:
            line = b'{"id":%d,"answer":%b}\n' % (number, answer)
        self.wire.sendall(line)

    def note(self, number: int, limit_s: float = math.inf) -> None:
        """Note whose code runs, or `~number` once it does not: the process may go on so for long.

        A call whose code runs is to blame for the end of the process.
        """
        self._lease.write(number, time.monotonic() + limit_s, self.limit_s)

    @contextmanager
    def slice(self, number: int, limit_s: float) -> Iterator[None]:
        """Run code of a call. Ends the process where that has used up memory, and a fork of it."""
        self.note(number, limit_s)
        try:
            yield
        except MemoryError:
            os._exit(MEMORY_EXIT_STATUS)  # nothing that needs memory may run any more
        finally:
            if os.getpid() != self._process:  # a child that goes on as if it were this process
                os._exit(0)
            try:
                os.fstat(self.wire.fileno())
            except OSError:  # it was closed: nobody could ask, or be answered, any more
                os._exit(1)


class _Charge:
    """The seconds that a call is charged for, and what is done once they are over its limit."""

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        self._limit_s, self._late = limit_s, late
        self._began = time.monotonic()
        self._paused_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit_s, self._check)

    def others_s(self) -> float:
        """Seconds since the beginning in which other calls ran."""
        return 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._paused_at is not None:
            yield
            return
        self._paused_at = time.monotonic()
        try:
            yield
        finally:
            self._began += time.monotonic() - self._paused_at
            self._paused_at = None

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now = time.monotonic() if self._paused_at is None else self._paused_at
        left_s = self._limit_s - (now - self._began - self.others_s())
        if left_s > SLACK_S:
            self._timer = self._loop.call_later(left_s, self._check)
        else:
            self._late()


_charge: "contextvars.ContextVar[_Charge | None]" = contextvars.ContextVar("charge", default=None)


@contextmanager
def uncharged() -> Iterator[None]:
    """Do not charge the call that runs for the time inside, in which it waits for others.

    A slice that blocks the process ends it also then. Does nothing outside of a call.
    """
    charge = _charge.get()
    if charge is None:
        yield
        return
    with charge.paused():
        yield


@asynccontextmanager
async def charged(limit_s: "float | None") -> "AsyncIterator[asyncio.Timeout]":
    """Limit a call here to charged seconds, or to none. TimeoutError once `expired()`."""
    async with asyncio.timeout(None) as deadline:
        if limit_s is None:  # a worker's own charge stays
            yield deadline
            return
        now = asyncio.get_running_loop().time
        charge = _Charge(limit_s, lambda: deadline.reschedule(now()))
        token = _charge.set(charge)
        try:
            yield deadline
        finally:
            charge.stop()
            _charge.reset(token)


class _Call(_Charge):
    """A call in progress of a worker."""

    def __init__(
        self, worker: "_Interleaved", number: int, around: "AbstractContextManager[object]"
    ) -> None:
        self.number, self.around = number, around
        self.own_s = 0.0
        self.ended = False
        self.task: asyncio.Task[bytes] | None = None
        self._worker, self._busy_before_s = worker, worker.busy_s
        super().__init__(worker.limit_s, lambda: worker.end_late(self))

    def _check(self) -> None:
        self._worker.note_waiting()  # a call that is not charged may wait for longer than a limit
        super()._check()

    def others_s(self) -> float:
        return self._worker.busy_s - self._busy_before_s - self.own_s


class _Interleaved:
    """Calls as tasks of one event loop, each with a time limit."""

    def __init__(self, parent: _Parent, handler: Handler) -> None:
        self._parent, self._handler, self.limit_s = parent, handler, parent.limit_s
        self._loop = asyncio.new_event_loop()
        self.busy_s = 0.0  # of all slices
        self._calls: set[_Call] = set()
        self._last = 0

    def serve(self, calls: "Iterable[dict[str, Any]]") -> None:
        """Begin a call for each that comes, until the parent lets go."""
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._task)
        self._loop.add_reader(self._parent.wire, self._receive)
        for call in calls:
            self._loop.call_soon(self._begin, call)
        try:
            while True:  # code of a call may stop the loop
                self._loop.run_forever()
        finally:
            self._parent.note(self._last)  # its code broke the loop

    def note_waiting(self) -> None:
        """Note that only the event loop runs now, which has a timer for each call."""
        limit_s = self.limit_s + GRACE_S if self._calls else math.inf
        self._parent.note(~self._last, limit_s)

    def end_late(self, call: _Call) -> None:
        self._finish(call, limit="wall")
        assert call.task is not None
        call.task.cancel()  # and no waiting for it: it may refuse to end

    def _receive(self) -> None:
        calls = self._parent.receive()
        if calls is None:
            os._exit(0)
        for call in calls:
            self._begin(call)

    def _begin(self, asked: "dict[str, Any]") -> None:
        coroutine, around = self._handler.call(asked["request"])
        call = _Call(self, asked["id"], around)
        token = _charge.set(call)
        call.task = self._loop.create_task(coroutine)
        _charge.reset(token)
        call.task.add_done_callback(lambda task: self._end(call, task))
        self._calls.add(call)  # event loops hold tasks weakly

    def _end(self, call: _Call, task: "asyncio.Task[bytes]") -> None:
        if call.ended:
            if not task.cancelled():
                task.exception()  # retrieved, though nothing waits for it any more
        elif task.cancelled():
            self._finish(call, limit="wall")
        else:
            assert task.exception() is None, "handlers answer whatever goes wrong"
            self._finish(call, answer=task.result())

    def _finish(self, call: _Call, **fields: Any) -> None:
        call.ended = True
        self._calls.discard(call)
        call.stop()
        self._parent.send(call.number, **fields)

    def _task(self, loop: Any, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        """A task; one of a call, or that a call makes, runs in slices of that call."""
        call = _charge.get()
        if isinstance(call, _Call):
            coroutine = self._sliced(coroutine, call)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def _sliced(self, coroutine: Any, call: _Call) -> Any:
        return await self._slices(coroutine, call)

    @types.coroutine
    def _slices(self, coroutine: Any, call: _Call) -> "Generator[Any, Any, Any]":
        """Run a coroutine slice by slice."""
        run: Callable[[], Any] = lambda: coroutine.send(None)
        while True:
            ended, value = self._slice(call, run)
            if ended:
                return value
            try:
                yield value
                run = lambda: coroutine.send(None)
            except BaseException as error:  # noqa: BLE001 - thrown in by the event loop
                run = lambda error=error: coroutine.throw(error)

    def _slice(self, call: _Call, run: Callable[[], Any]) -> "tuple[bool, Any]":
        """Run one slice; return True and the end's value, or what is waited for."""
        self._last = call.number
        began = time.monotonic()
        try:
            with self._parent.slice(call.number, self.limit_s), call.around:
                try:
                    return False, run()
                except StopIteration as end:
                    return True, end.value
                except (KeyboardInterrupt, SystemExit) as error:
                    # asyncio would end the loop of all calls
                    raise RuntimeError(f"{type(error).__name__} in a task") from error
        finally:
            took_s = time.monotonic() - began
            self.busy_s += took_s
            call.own_s += took_s
            self.note_waiting()


if __name__ == "__main__":
    main()
