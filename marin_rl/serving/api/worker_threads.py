"""Threads next to the event loop: one tokenizes requests, one writes responses.

Another thread costs more than most of what it is woken for (0.3 ms of CPU for 0.1 ms of work,
measured), so what is short is prepared where it is read, and what is written for many requests is
handed over at once. The engine only queues what it made; decoding and JSON happen on the writer's
thread. Leaves out the content of responses (`dialect`) and the order of steps
(`request_handler`).
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

# A body of this size takes about 0.1 ms; other requests do not notice this many seconds.
SHORT_BYTES = 4096
SHORT_S = 0.001
# Few strings and lists, so few messages or prompts: each of them costs something.
SHORT_QUOTES = 200
SHORT_LISTS = 32
# What may take long however short it is; a backslash and u could spell any of them.
LONG_WORDS = (b"tools", b"response_format", b'"format"', b"\\u")
CHAT_WORDS = (b"messages", b'"input"')


class ResponseQueue:
    """Pieces of one response, then its end or an error, as the event loop awaits them.

    Made and read on the loop; other threads use `ResponseWriter.put`.
    """

    __slots__ = ("_changed", "_ended", "_error", "_pieces", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._pieces: list[bytes] = []
        self._error: BaseException | None = None
        self._ended = False

    def add(self, data: bytes, *, last: bool) -> None:
        """Append bytes; `last` if nothing follows. Ignored after the end."""
        if not self._ended:
            self._pieces += [data] if data else []
            self._ended = last
            self._changed.set()

    def fail(self, error: BaseException) -> None:
        """End with an error, which is raised after the pieces before it were read."""
        if not self._ended:
            self._error, self._ended = error, True
            self._changed.set()

    async def read(self) -> bytes | None:
        """Wait for bytes and return all that are there; None at the end. Raises the error."""
        while not (self._pieces or self._ended):
            self._changed.clear()
            await self._changed.wait()
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            return data
        if self._error is not None:
            error, self._error = self._error, None  # its frames hold the request's body
            raise error
        return None


class TokenizeWorker:
    """Parses and tokenizes requests: short ones at once on the event loop, all others on threads.

    Short is a body of few bytes, as long as bodies before it took no time to speak of. What may
    take long whatever its size (tools, forms) is known by words in the body; so is whatever could
    hide them. `alone` keeps everything off the event loop, for a tokenizer that must not be used by
    two threads.

    Work that waits for another process has separate threads, so that nothing else waits for it:
    `forms` for bodies with tools or forms, whose grammars are compiled, and `chats` for
    conversations where a worker renders the template. Without them the worker does these too.
    """

    def __init__(
        self,
        worker: Executor,
        *,
        alone: bool = False,
        forms: Executor | None = None,
        chats: Executor | None = None,
    ) -> None:
        self._worker = worker
        self._alone = alone
        self._forms = forms or worker
        self._chats = chats
        self._cpu_s = math.inf  # of the last ones, a moving mean

    def add(self, data: bytes, work: Callable[[], None]) -> None:
        """Run `work` for a body, now or soon. It must raise nothing."""
        executor = self._executor_for(data)
        if executor is None:
            self._timed(work)
        else:
            executor.submit(self._timed, work)

    async def run(self, data: bytes, work: Callable[[], T]) -> T:
        """Return the result of `work` for a body; raises what `work` raises."""
        executor = self._executor_for(data)
        if executor is None:
            return self._timed(work)
        return await asyncio.get_running_loop().run_in_executor(executor, self._timed, work)

    def _executor_for(self, data: bytes) -> Executor | None:
        """The threads that prepare a body; None for the event loop."""
        if any(word in data for word in LONG_WORDS):
            return self._forms
        if self._chats is not None and any(word in data for word in CHAT_WORDS):
            return self._chats
        is_short = (
            len(data) <= SHORT_BYTES
            and self._cpu_s <= SHORT_S
            and not self._alone
            and data.count(b'"') <= SHORT_QUOTES
            and data.count(b"[") <= SHORT_LISTS
        )
        return None if is_short else self._worker

    def _timed(self, work: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return work()
        finally:
            took, mean = time.thread_time() - began, self._cpu_s
            self._cpu_s = took if mean == math.inf else mean + (took - mean) / 4


Write = Callable[[], tuple[bytes, bool]]


class ResponseWriter:
    """The thread that writes the responses of one server, in the order in which it is asked to."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[ResponseQueue, Write] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, queue: ResponseQueue, write: Write) -> None:
        """Queue `write`, which makes a response's next bytes and marks if they are the last.

        Thread safe, and returns at once. What `write` raises becomes the queue's error.
        """
        self._waiting.put((queue, write))

    def close(self) -> None:
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            loop, hand_overs = item[0].loop, [_written(*item)]
            while not self._waiting.empty() and (item := self._waiting.get()) is not None:
                hand_overs.append(_written(*item))
            if item is None:
                self._waiting.put(None)
            # once for all of them: waking the event loop costs more than most bytes
            with suppress(RuntimeError):  # it is closed: no request waits any more
                loop.call_soon_threadsafe(_call_all, hand_overs)


def _written(queue: ResponseQueue, write: Write) -> Callable[[], None]:
    """Return what hands the bytes, or the error, to the queue: to be called on the event loop."""
    try:
        data, last = write()
    except Exception as error:  # noqa: BLE001 the reader of the queue gets it
        return partial(queue.fail, error)
    return partial(queue.add, data, last=last)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
