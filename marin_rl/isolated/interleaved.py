"""The body of a worker whose calls interleave: one event loop, a time limit for each call.

A call is a coroutine. Before each slice of one (the code between two awaits) the worker names the
call on its pipe, so that the parent knows which one blocks the process. A coroutine that waits for
too long is cancelled here; a slice that never returns costs the process, which the parent ends
(`calls`), and so does one that breaks the event loop or closes its pipes: the process ends within
that call. The time that other calls' slices take is not charged. Leaves out what calls do
(`environments.episode_worker`).
"""

import asyncio
import contextvars
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from selectors import DefaultSelector
from typing import Any, BinaryIO, NoReturn, Protocol, runtime_checkable

from marin_rl.isolated.lines import MEMORY_EXIT_STATUS, PIPES_EXIT_STATUS, decoded

BEGUN, PAUSED, ANSWER, LATE, TOO_LARGE = b"begun", b"paused", b"answer", b"late", b"too large"
LINE_BYTES_MAX = 1 << 30
SLACK_S = 0.001  # timers of the event loop may be this early

Send = Callable[..., None]  # of a call's number and the parts of a line


@runtime_checkable
class Handler(Protocol):
    """Work of a worker: a coroutine for each request, and what surrounds each of its slices."""

    def call(
        self, request: bytes
    ) -> tuple[Coroutine[Any, Any, bytes], Callable[[], AbstractContextManager[object]]]:
        """The call that answers a request. Its coroutine raises MemoryError alone."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """A call in progress; times are seconds of the monotonic clock."""

    number: str
    around: Callable[[], AbstractContextManager[object]]
    begun: float
    busy_before: float  # of all slices, when it began
    own_s: float = 0.0
    uncharged_since: float | None = None
    ended: bool = False
    timer: asyncio.TimerHandle | None = None
    task: "asyncio.Task[bytes] | None" = field(default=None)


_current: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("call", default=None)
# Of a call in a process that has no worker around it.
_deadline: contextvars.ContextVar[asyncio.Timeout | None] = contextvars.ContextVar(
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
async def charged(limit_s: float | None) -> AsyncIterator[asyncio.Timeout]:
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
def _paused(deadline: asyncio.Timeout | None) -> Iterator[None]:
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


def serve(
    handler: Handler,
    questions: BinaryIO,
    send: Send,
    *,
    limit_s: float,
    answer_bytes: int,
    answers: int,
) -> None:
    """Answer calls until the parent closes its end. `answers` is the descriptor behind `send`."""
    signal.signal(
        signal.SIGINT, _interrupt
    )  # within a slice, rather than asyncio's, which ends all
    selector = DefaultSelector()
    server = _Server(handler, send, limit_s, answer_bytes)
    with asyncio.Runner(loop_factory=lambda: _Loop(selector)) as runner:
        try:
            runner.run(server.serve(questions, selector, answers))
        except BaseException:
            server.blame_last()
            raise


class _Loop(asyncio.SelectorEventLoop):
    def stop(self) -> None:
        """Stop, unless it is a call that asks for it."""
        if _current.get() is not None:
            raise RuntimeError("the event loop has other calls: expected that none stops it")
        super().stop()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class _Server:
    def __init__(self, handler: Handler, send: Send, limit_s: float, answer_bytes: int) -> None:
        self._handler, self._send = handler, send
        self._limit_s, self._answer_bytes = limit_s, answer_bytes
        self._busy_s = 0.0
        self._calls: set[_Call] = set()
        self._last: _Call | None = None
        self._needed: dict[int, tuple[int, int] | None] = {}

    def blame_last(self) -> None:
        """Name the call of the last slice as the one that ends the process."""
        if self._last is not None:
            with suppress(OSError):
                self._send(self._last.number, BEGUN)

    async def serve(self, questions: BinaryIO, selector: DefaultSelector, answers: int) -> None:
        """Read requests and begin a call for each."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
        # the loop's own pipe and that of the requests are registered by now
        registered = [key.fd for key in selector.get_map().values()]
        for descriptor in (1, 2, answers, selector.fileno(), *registered):
            self._needed[descriptor] = _identity(descriptor)
        while line := await reader.readline():
            number, (request,) = decoded(line)
            self._begin(loop, number, request)

    def _begin(self, loop: asyncio.AbstractEventLoop, number: str, request: bytes) -> None:
        coroutine, around = self._handler.call(request)
        call = _Call(number, around, time.monotonic(), self._busy_s)
        token = _current.set(call)
        call.task = loop.create_task(coroutine)
        _current.reset(token)
        call.task.add_done_callback(lambda task: self._end(call, task))
        call.timer = loop.call_later(self._limit_s, self._check, loop, call)
        self._calls.add(call)  # event loops hold tasks weakly

    def _check(self, loop: asyncio.AbstractEventLoop, call: _Call) -> None:
        """End a call that is over its time; others' slices do not count."""
        others_s = self._busy_s - call.busy_before - call.own_s
        now = time.monotonic() if call.uncharged_since is None else call.uncharged_since
        left_s = self._limit_s - (now - call.begun - others_s)
        if left_s > SLACK_S:
            call.timer = loop.call_later(left_s, self._check, loop, call)
            return
        self._finish(call, LATE)
        assert call.task is not None
        call.task.cancel()  # and no waiting for it: it may refuse to end

    def _end(self, call: _Call, task: "asyncio.Task[bytes]") -> None:
        if call.ended:
            if not task.cancelled():
                task.exception()  # retrieved, though nothing waits for it any more
            return
        if task.cancelled():
            self._finish(call, LATE)
            return
        assert task.exception() is None, "handlers answer whatever goes wrong"
        answer = task.result()
        if len(answer) > self._answer_bytes:
            self._finish(call, TOO_LARGE)
        else:
            self._finish(call, ANSWER, answer)

    def _finish(self, call: _Call, *parts: bytes) -> None:
        call.ended = True
        self._calls.discard(call)
        if call.timer is not None:
            call.timer.cancel()
        self._send(call.number, *parts)

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        """A task; one of a call, or that a call makes, runs in slices that bear its name."""
        call = _current.get()
        if call is not None:
            coroutine = self._sliced(coroutine, call)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def _sliced(self, coroutine: Any, call: _Call) -> Any:
        return await _Slices(self, coroutine, call)

    def slice(self, call: _Call, run: Callable[[], Any]) -> Any:
        """Run one slice of a call: what it waits for, or `_Ended`. Raises what it raises."""
        self._last = call
        self._send(call.number, BEGUN)
        began = time.monotonic()
        try:
            with call.around():
                try:
                    return run()
                except StopIteration as end:
                    return _Ended(end.value)
                except MemoryError:
                    os._exit(MEMORY_EXIT_STATUS)  # nothing that needs memory may run any more
                except (KeyboardInterrupt, SystemExit) as error:
                    # asyncio would end the loop of all calls
                    raise RuntimeError(f"{type(error).__name__} in a task") from error
        finally:
            if any(_identity(each) != known for each, known in self._needed.items()):
                os._exit(PIPES_EXIT_STATUS)  # before the pause: it is this call's fault
            took_s = time.monotonic() - began
            self._busy_s += took_s
            call.own_s += took_s
            self._send(call.number, PAUSED)


class _Slices:
    """A coroutine as an awaitable, which runs slice by slice."""

    def __init__(self, server: _Server, coroutine: Any, call: _Call) -> None:
        self._server, self._coroutine, self._call = server, coroutine, call

    def __await__(self) -> Generator[Any, Any, Any]:
        run: Callable[[], Any] = lambda: self._coroutine.send(None)
        while True:
            result = self._server.slice(self._call, run)
            if isinstance(result, _Ended):
                return result.value
            try:
                yield result
                run = lambda: self._coroutine.send(None)
            except BaseException as error:  # noqa: BLE001 - thrown in by the event loop
                run = lambda error=error: self._coroutine.throw(error)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Return what a descriptor leads to, None where it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class _Ended:
    """The value of a coroutine that has ended."""

    value: Any
