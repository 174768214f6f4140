"""The connection of a flow to its Prefect API, which may be lost while the flow continues.

A run needs its files alone. When the API is gone (a temporary server was killed, a configured one
is unreachable for longer than a restart takes), that is logged in one line, unsent reports are
dropped, and the flow is run to its end without reporting.
"""

import asyncio
import functools
import logging
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from subprocess import Popen
from typing import Any

import httpx
from prefect._internal.concurrency.services import _QueueServiceBase
from prefect._internal.concurrency.threads import get_global_loop
from prefect.context import AsyncClientContext
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.logging.handlers import APILogWorker, set_api_log_sink

WATCH_EVERY_S, MISSES_MAX = 10.0, 3  # a server that is restarted is back sooner
DRAIN_S = 10.0
# Loggers that each report an API that does not answer.
NOISY = (
    "APILogWorker",
    "EventsWorker",
    "prefect._internal.concurrency",
    "prefect.events.clients",
    "prefect.events.worker",
)
RUNS = ("prefect.flow_runs", "prefect.task_runs")  # report other things too

_log = get_logger("marin_rl")
_current: ContextVar["ApiConnection | None"] = ContextVar("prefect-api-connection", default=None)


class ApiConnection:
    """A connection that is open until it is lost, which it stays. Thread safe.

    `server` is the process of a temporary server, which is lost only when it is killed. Prefect's
    background senders may see that first, so their reports of it are dropped from the start.
    """

    def __init__(self, url: str, server: Popen[bytes] | None = None) -> None:
        self.url, self.temporary = url, server is not None
        self._lost, self._closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        for name in NOISY + RUNS:
            logging.getLogger(name).addFilter(self._is_news)
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    def lose(self, reason: str) -> None:
        """Log once that the API is gone, drop unsent reports, and send nothing more."""
        with self._lock:
            if self.lost:
                return
            self._lost.set()
        _log.warning("%s: going on without reports to Prefect; files are not affected", reason)
        set_api_log_sink(lambda _: None)
        EventsWorker.set_client_override(NullEventsClient)
        end_senders()

    def close(self) -> None:
        """Leave the process as it was before; a temporary server gets the last reports first."""
        if self.temporary and not self.lost:
            APILogWorker.drain_all(timeout=DRAIN_S)
            EventsWorker.drain_all(timeout=DRAIN_S)
        self._closing.set()
        if self.temporary or self.lost:
            end_senders()  # before the filters go: a sender may log its failure only now
        if self.lost:
            set_api_log_sink(None)
            EventsWorker.set_client_override(None)
        for name in NOISY + RUNS:
            logging.getLogger(name).removeFilter(self._is_news)

    def run(
        self, flow: Flow[Any, Any], *arguments: Any, stop: Future[None] | None = None, **named: Any
    ) -> Any:
        """Run an asynchronous flow in this process, to its end even where the API is lost.

        Returns what the flow returns; raises what it raises, and KeyboardInterrupt once `stop` has
        a result: any thread may set it, where Ctrl-C is a signal of the main thread alone.
        """
        outcome = Future[Any]()  # of the function, whether or not Prefect receives it

        @functools.wraps(flow.fn)
        async def recorded(*args: Any, **kwargs: Any) -> Any:
            outcome.set_running_or_notify_cancel()
            try:
                outcome.set_result(await flow.fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised by the next line
                outcome.set_exception(error)
            return outcome.result()

        reported = flow.with_options()
        reported.fn = recorded
        token = _current.set(self)
        try:
            try:
                return asyncio.run(self._call(reported, stop, arguments, named))
            except (httpx.TransportError, PrefectHTTPStatusError) as error:
                if outcome.done() and error is outcome.exception():
                    raise
                self.lose(f"the Prefect API at {self.url} is gone ({type(error).__name__})")
            if outcome.done():
                return outcome.result()
            assert not outcome.running(), "a flow that was begun has returned or raised"
            return asyncio.run(self._call(flow.fn, stop, arguments, named))
        except asyncio.CancelledError:  # by `stop`, or by Ctrl-C after the API was lost
            raise KeyboardInterrupt from None
        finally:
            _current.reset(token)

    async def _call(
        self,
        function: Callable[..., Any],
        stop: Future[None] | None,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the flow has ended by itself
                loop.call_soon_threadsafe(task.cancel)

        if stop is not None:
            stop.add_done_callback(cancel)
        async with AsyncClientContext() as context:  # one client for all tasks
            context.client._client.event_hooks = {"request": [self._refuse_when_lost]}
            return await function(*arguments, **named)

    async def _refuse_when_lost(self, _: httpx.Request) -> None:
        """Fail a request that would be retried for a minute; an error of this class is not."""
        if self.lost:
            raise httpx.TransportError(f"the Prefect API at {self.url} is gone")

    def _watch(self, server: Popen[bytes] | None) -> None:
        if server is not None:
            code = server.wait()
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            reason = f"the temporary Prefect server {how}"
        else:
            misses = 0
            while misses < MISSES_MAX and not self._closing.wait(WATCH_EVERY_S):
                misses = 0 if healthy(self.url) else misses + 1
            reason = f"the Prefect API at {self.url} does not answer"
        if not self._closing.is_set():
            self.lose(reason)

    def _is_news(self, record: logging.LogRecord) -> bool:
        if record.name in NOISY:
            return not (self.lost or self.temporary)
        error = record.exc_info[1] if record.exc_info else None
        return not (self.lost and isinstance(error, httpx.TransportError))


def current_connection() -> ApiConnection | None:
    """Return the connection that runs the flow; None where Prefect itself started it."""
    return _current.get()


def healthy(url: str) -> bool:
    """Return True when a Prefect API answers at `url` (which ends in /api)."""
    try:
        # A busy server takes its time; one that is not there refuses at once.
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=15.0) as reply:
            return reply.read().strip() == b"true"
    except (urllib.error.URLError, OSError, ValueError):
        return False


def end_senders() -> None:
    """Cancel Prefect's background senders of events and logs, and wait for their ends.

    Their own `drain` would wait for every report to fail, some seconds each.
    """
    loop, name = get_global_loop()._loop, _QueueServiceBase._run.__qualname__
    assert loop is not None

    async def end() -> None:
        senders = {each for each in asyncio.all_tasks() if each.get_coro().__qualname__ == name}  # pyright: ignore
        for sender in senders:
            sender.cancel()
        if senders:  # the wait is bounded: they end at once, later on a busy machine
            await asyncio.wait(senders, timeout=DRAIN_S)

    asyncio.run_coroutine_threadsafe(end(), loop).result()
