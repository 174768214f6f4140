"""The body of a worker process: limits, and the calls of its parent, singly or interleaved.

Parent and worker write JSON, an object a line. The first line names a module, its settings and
limits; `begin(settings)` of the module returns the work, and is answered by `{"id": 0, "answer":
…}` or `{"id": 0, "unfit": TEXT}`. Calls follow, `{"id": 1, "limit_s": null, "request": …}`, and are
answered in any order by `{"id": 1, "answer": …}` or `{"id": 1, "limit": NAME}`. Work that is a
function answers one call after another. Work that is a `Handler` has a coroutine for each call, and
one event loop; a call is not charged for the time in which others run.

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
import struct
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

MEMORY_EXIT_STATUS = 86  # of a worker that exceeded its memory
GRACE_S = 1.0  # for an event loop to run a timer, before the process counts as blocked
SLACK_S = 0.001  # timers of the event loop may be this early
_FILES_MAX = 32
_READ_BYTES = 1 << 20


@runtime_checkable
class Handler(Protocol):
    """Work whose calls interleave: a coroutine for each, and what surrounds each of its slices."""

    def call(
        self, request: Any
    ) -> tuple[Coroutine[Any, Any, bytes], Callable[[], AbstractContextManager[object]]]:
        """The call that answers a request, as JSON. Its coroutine raises MemoryError alone."""
        ...


class SharedState:
    """Memory that a worker shares with its supervisor, behind a descriptor.

    It has the number of the call whose code runs, or the complement of the last one that did; the
    monotonic time at which the process counts as blocked; and the shortest limit of a call.
    """

    FORM = struct.Struct("<qdd")

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self.FORM.size)

    def write(self, number: int, deadline: float, limit_s: float) -> None:
        self.FORM.pack_into(self._memory, 0, number, deadline, limit_s)

    def read(self) -> tuple[int, float, float]:
        number, deadline, limit_s = self.FORM.unpack_from(self._memory)
        return number, deadline, limit_s


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


def main(requests: int, answers: int, state: int) -> None:
    """Serve the parent at the other ends of two pipes until it closes its end."""
    for descriptor in (requests, answers, state):
        os.set_inheritable(descriptor, False)
    lines = _Lines(requests)
    hello = json.loads(next(lines))
    worker = _Worker((requests, answers), state, hello)
    module = load_module(hello["module"])
    _limit(hello)
    try:
        work: Any = module.begin(hello["settings"])
    except ValueError as error:  # such as InputError
        worker.send(0, unfit=str(error))
        return
    worker.note(~0)
    worker.send(0, answer=getattr(work, "ready", None))
    if isinstance(work, Handler):
        _Interleaved(worker, work).serve(lines)
    else:
        worker.answer_singly(lines, work, hello["cpu_s"])


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


def _limit(hello: "dict[str, Any]") -> None:
    """Limit memory, and what a sealed worker may open and start; its children inherit it."""
    limits: dict[int, int] = {}
    if hello["memory_bytes"] is not None:
        # Linux counts what a process can write to, not what libraries only reserve.
        memory = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        limits[memory] = _bytes_in_use() + hello["memory_bytes"]
    if hello["sealed"]:
        limits |= {
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: _FILES_MAX,
            resource.RLIMIT_NPROC: 0,
        }
    for name, most in limits.items():
        with suppress(OSError, ValueError):  # a lower limit of the user's stays
            resource.setrlimit(name, (most, most))


def _bytes_in_use() -> int:
    """Return the bytes that this process can write to, 0 where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()


class _Lines:
    """Lines of a pipe: iterate to block for the next, `taken` for what has arrived."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._lines: list[bytes] = []  # the next one is the last
        self._begun = b""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self._lines:
            if not self.read():
                raise StopIteration
        return self._lines.pop()

    def read(self) -> bool:
        data = os.read(self.descriptor, _READ_BYTES)
        *lines, self._begun = (self._begun + data).split(b"\n")
        self._lines = lines[::-1] + self._lines
        return bool(data)

    def taken(self) -> list[bytes]:
        lines, self._lines = self._lines[::-1], []
        return lines


class _Worker:
    """Answers to the parent, and slices: the code between two awaits of a call, or all of it."""

    def __init__(self, pipes: "tuple[int, int]", state: int, hello: "dict[str, Any]") -> None:
        self._pipes, self._state = pipes, SharedState(state)
        _, self._answers = pipes
        self._answer_bytes = hello["answer_bytes"]
        self.limit_s: float = math.inf if hello["wall_s"] is None else hello["wall_s"]
        self._process = os.getpid()

    def send(self, number: int, **fields: Any) -> None:
        """Write a line. An answer that is bytes is JSON already."""
        answer = fields.get("answer")
        if isinstance(answer, bytes):
            if len(answer) > self._answer_bytes:
                self.send(number, limit="answer")
                return
            line = b'{"id":%d,"answer":%b}\n' % (number, answer)
        else:
            line = json.dumps({"id": number, **fields}).encode() + b"\n"
        left = memoryview(line)
        while left:
            left = left[os.write(self._answers, left) :]

    def note(self, number: int, limit_s: float = math.inf) -> None:
        """Note whose code runs, or `~number` once it does not: the process may go on so for long.

        A call whose code runs is to blame for the end of the process.
        """
        self._state.write(number, time.monotonic() + limit_s, self.limit_s)

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
                for pipe in self._pipes:
                    os.fstat(pipe)
            except OSError:  # it was closed: nobody could ask, or be answered, any more
                os._exit(1)

    def answer_singly(
        self, lines: _Lines, answer: Callable[[Any], bytes], cpu_s: "float | None"
    ) -> None:
        """Answer one call after another.

        CPU time is limited for each by an interval timer of the kernel, which ends the process even
        while a C function holds the interpreter lock.
        """
        for line in lines:
            call = json.loads(line)
            with self.slice(call["id"], call["limit_s"] or self.limit_s):
                signal.setitimer(signal.ITIMER_PROF, cpu_s or 0)  # SIGPROF ends the process
                data = answer(call["request"])
                signal.setitimer(signal.ITIMER_PROF, 0)
            self.note(~call["id"])
            self.send(call["id"], answer=data)


@dataclass(slots=True, eq=False)
class _Call:
    """A call in progress; times are seconds of the monotonic clock."""

    number: int
    around: Callable[[], AbstractContextManager[object]]
    begun: float
    busy_before: float  # of all slices, when it began
    own_s: float = 0.0
    uncharged_since: "float | None" = None
    ended: bool = False
    timer: "asyncio.TimerHandle | None" = None
    task: "asyncio.Task[bytes] | None" = None


_current: "contextvars.ContextVar[_Call | None]" = contextvars.ContextVar("call", default=None)
# Of a call in a process that has no worker around it.
_deadline: "contextvars.ContextVar[asyncio.Timeout | None]" = contextvars.ContextVar(
    "deadline", default=None
)


@contextmanager
def uncharged() -> Iterator[None]:
    """Do not charge the call that runs for the time inside, in which it waits for others.

    A slice that blocks the process ends it also then. Does nothing outside of a call.
    """
    call, began = _current.get(), time.monotonic()
    if call is None:
        with _paused(_deadline.get()):
            yield
        return
    if call.uncharged_since is not None:
        yield
        return
    call.uncharged_since = began
    try:
        yield
    finally:
        call.begun += time.monotonic() - began
        call.uncharged_since = None


@asynccontextmanager
async def charged(limit_s: "float | None") -> "AsyncIterator[asyncio.Timeout]":
    """Limit a call in this process to seconds that are charged; None: to none.

    Raises TimeoutError, on which the deadline has `expired()`.
    """
    async with asyncio.timeout(limit_s) as deadline:
        token = _deadline.set(deadline)
        try:
            yield deadline
        finally:
            _deadline.reset(token)


@contextmanager
def _paused(deadline: "asyncio.Timeout | None") -> Iterator[None]:
    """Stop the clock of a deadline that runs."""
    if deadline is None or deadline.expired() or (ends := deadline.when()) is None:
        yield
        return
    clock = asyncio.get_running_loop().time
    left_s = ends - clock()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(clock() + left_s)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that says when it is told to stop."""

    def __init__(self, stopped: Callable[[], None]) -> None:
        super().__init__()
        self._stopped = stopped

    def stop(self) -> None:
        self._stopped()
        super().stop()


class _Interleaved:
    """Calls as tasks of one event loop, each with a time limit."""

    def __init__(self, worker: _Worker, handler: Handler) -> None:
        self._worker, self._handler, self._limit_s = worker, handler, worker.limit_s
        self._loop = _Loop(self._stopped)
        self._busy_s = 0.0
        self._calls: set[_Call] = set()
        self._last, self._stopped_by = 0, 0

    def serve(self, lines: _Lines) -> None:
        """Begin a call for each line, until there are no more."""
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._task)
        self._loop.add_reader(lines.descriptor, self._take, lines)
        for line in lines.taken():
            self._begin(json.loads(line))
        try:
            self._loop.run_forever()
        finally:
            self._worker.note(self._stopped_by or self._last)  # or whose code broke the loop

    def _stopped(self) -> None:
        # Slices of others may still come before the loop ends.
        self._stopped_by = self._stopped_by or self._last

    def _take(self, lines: _Lines) -> None:
        if not lines.read():
            os._exit(0)
        for line in lines.taken():
            self._begin(json.loads(line))

    def _begin(self, asked: "dict[str, Any]") -> None:
        coroutine, around = self._handler.call(asked["request"])
        call = _Call(asked["id"], around, time.monotonic(), self._busy_s)
        token = _current.set(call)
        call.task = self._loop.create_task(coroutine)
        _current.reset(token)
        call.task.add_done_callback(lambda task: self._end(call, task))
        if self._limit_s < math.inf:
            call.timer = self._loop.call_later(self._limit_s, self._check, call)
        self._calls.add(call)  # event loops hold tasks weakly

    def _check(self, call: _Call) -> None:
        """End a call that is over its time; others' slices do not count."""
        others_s = self._busy_s - call.busy_before - call.own_s
        now = time.monotonic() if call.uncharged_since is None else call.uncharged_since
        left_s = self._limit_s - (now - call.begun - others_s)
        if left_s > SLACK_S:
            call.timer = self._loop.call_later(left_s, self._check, call)
            self._rest()
            return
        self._finish(call, limit="wall")
        assert call.task is not None
        call.task.cancel()  # and no waiting for it: it may refuse to end

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
        if call.timer is not None:
            call.timer.cancel()
        self._worker.send(call.number, **fields)

    def _task(self, loop: Any, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        """A task; one of a call, or that a call makes, runs in slices of that call."""
        call = _current.get()
        if call is not None:
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
            with self._worker.slice(call.number, self._limit_s), call.around():
                try:
                    return False, run()
                except StopIteration as end:
                    return True, end.value
                except (KeyboardInterrupt, SystemExit) as error:
                    # asyncio would end the loop of all calls
                    raise RuntimeError(f"{type(error).__name__} in a task") from error
        finally:
            took_s = time.monotonic() - began
            self._busy_s += took_s
            call.own_s += took_s
            self._rest()

    def _rest(self) -> None:
        """Note that only the event loop runs, which has a timer for each call."""
        self._worker.note(~self._last, self._limit_s + GRACE_S if self._calls else math.inf)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
