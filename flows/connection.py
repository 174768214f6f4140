"""The connection of a flow to its Prefect API, which may be lost while the flow continues.

A run needs its files alone. When the API is gone (a temporary server was killed, a real one is
unreachable for longer than a restart takes), that is logged in one line, unsent reports are
dropped, and the flow is played to its end without reporting.
"""

import asyncio
import functools
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import httpx
from prefect._internal.concurrency.services import _active_services, _QueueServiceBase
from prefect.context import AsyncClientContext
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.logging.handlers import APILogWorker, set_api_log_sink
from prefect.settings import temporary_settings

HEALTH_TIMEOUT_S = 15.0  # for a busy server; one that is not there refuses at once
WATCH_EVERY_S = 10.0
MISSES_MAX = 3  # in a row; a server that is restarted is back sooner
LAST_TRIES, LAST_TRY_S = 3, 2.0  # at the end of a flow, which is waiting
DISCARD_S = 10.0  # a bound: senders end as soon as they are cancelled, later on a busy machine

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


class ApiLost(httpx.TransportError):
    """A request to an API that is known to be gone. Prefect's client does not retry it."""


class ApiConnection:
    """A connection that is open until it is lost, which it stays. Thread safe.

    A `temporary` server ends with this process and is lost only when it is killed. Prefect's
    background senders may see that first, so their reports of it are dropped from the start. Any
    other server is watched by a thread.
    """

    def __init__(self, url: str, *, temporary: bool) -> None:
        self.url, self.temporary = url, temporary
        self._lost, self._closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        for name in NOISY + RUNS:
            logging.getLogger(name).addFilter(self._is_news)
        if not temporary:
            threading.Thread(target=self._watch, name="prefect-api", daemon=True).start()

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
        discard(services())

    def close(self) -> None:
        """Leave the process as it was before."""
        self._closing.set()
        if self.lost:
            discard(services())  # before the filters go: a sender may log its failure only now
            set_api_log_sink(None)
            EventsWorker.set_client_override(None)
        for name in NOISY + RUNS:
            logging.getLogger(name).removeFilter(self._is_news)

    def confirm(self) -> None:
        """Check that the API is still there, before the last reports are sent."""
        if self.temporary:  # its end is seen at once
            return
        for _ in range(LAST_TRIES):
            if self.lost or healthy(self.url, LAST_TRY_S):
                return
            self._closing.wait(1.0)
        self.lose(f"the Prefect API at {self.url} does not answer")

    def refuse_when_lost(self, _: httpx.Request) -> None:
        """Raise ApiLost instead of a request that would be retried for a minute."""
        if self.lost:
            raise ApiLost(f"the Prefect API at {self.url} is gone")

    def _watch(self) -> None:
        misses = 0
        while not self.lost and not self._closing.wait(WATCH_EVERY_S):
            misses = 0 if healthy(self.url) else misses + 1
            if misses == MISSES_MAX and not self._closing.is_set():
                self.lose(f"the Prefect API at {self.url} does not answer")

    def _is_news(self, record: logging.LogRecord) -> bool:
        if record.name in NOISY:
            return not (self.lost or self.temporary)
        error = record.exc_info[1] if record.exc_info else None
        return not (self.lost and isinstance(error, httpx.TransportError))


def healthy(url: str, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
    """Return True when a Prefect API answers at `url` (which ends in /api)."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_s) as reply:
            return reply.read().strip() == b"true"
    except (urllib.error.URLError, OSError, ValueError):
        return False


def current_connection() -> ApiConnection | None:
    """Return the connection of the flow that runs, None where Prefect itself started it."""
    return _current.get()


@contextmanager
def connected(url: str, *, temporary: bool = False) -> Iterator[ApiConnection]:
    """Make a connection to `url` the current one inside the block, and close it after that."""
    connection = ApiConnection(url, temporary=temporary)
    token = _current.set(connection)
    try:
        yield connection
    finally:
        _current.reset(token)
        connection.close()


Services = list[tuple[_QueueServiceBase[Any], "asyncio.Task[None] | None"]]


def services() -> Services:
    """Prefect's background senders of events and logs, each with the task that it runs in."""
    return [
        (service, service._task)
        for service in list(_active_services)
        if isinstance(service, EventsWorker | APILogWorker)
    ]


def discard(running: Services) -> None:
    """End background senders at once, drop their items, and wait for their ends.

    Their own `drain` would wait for every item to fail, some seconds each. Several threads may
    discard the same sender: one of them cancels its task, and all wait for its end.
    """
    for service, task in running:
        loop, done = service._loop, service._done_event
        if loop is None or done is None or done.is_set() or loop.is_closed():
            continue
        service._stop(at_exit=True)
        with suppress(RuntimeError, TimeoutError):  # the loop ends with the process
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)
            ended = asyncio.wait_for(done.wait(), DISCARD_S)
            asyncio.run_coroutine_threadsafe(ended, loop).result(DISCARD_S + 1)


_called: ContextVar[bool] = ContextVar("marin-rl-called", default=False)


def has_caller() -> bool:
    return _called.get()


def play_flow(
    flow: Flow[Any, Any], *arguments: Any, stop: Future[None] | None = None, **named: Any
) -> Any:
    """Run an asynchronous flow in this process, to its end even where its API is lost.

    Returns what the flow returns; raises what it raises, and KeyboardInterrupt once `stop` has a
    result: any thread may set it, where Ctrl-C is a signal of the main thread alone.
    """
    connection = _current.get()
    assert connection is not None, "flows are played inside of prefect_api()"
    outcome = Future[Any]()  # of the function, whether or not Prefect receives it

    @functools.wraps(flow.fn)
    async def recorded(*args: Any, **kwargs: Any) -> Any:
        outcome.set_running_or_notify_cancel()
        try:
            outcome.set_result(await flow.fn(*args, **kwargs))
        except BaseException as error:
            outcome.set_exception(error)
            raise
        finally:
            connection.confirm()
        return outcome.result()

    reported = flow.with_options()
    reported.fn = recorded
    token = _called.set(True)
    try:
        return _run(_play(reported, connection, arguments, named), stop)
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        if outcome.done() and error is outcome.exception():
            raise
        connection.lose(f"the Prefect API at {connection.url} is gone ({type(error).__name__})")
    finally:
        _called.reset(token)
    if outcome.done():
        error = outcome.exception()
        if isinstance(error, asyncio.CancelledError):  # Ctrl-C, as a coroutine gets it
            raise KeyboardInterrupt from None
        if error is not None:
            raise error from None
        return outcome.result()
    assert not outcome.running(), "a flow that was begun has returned or raised"
    with temporary_settings({"logging.to_api.when_missing_flow": "ignore"}):
        return _run(_play(flow.fn, None, arguments, named), stop)


def _run(work: Coroutine[Any, Any, Any], stop: Future[None] | None) -> Any:
    """Run `work` on an event loop of its own; raises KeyboardInterrupt where `stop` ended it."""

    async def until_stopped() -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the flow has ended by itself
                loop.call_soon_threadsafe(task.cancel)

        if stop is not None:
            stop.add_done_callback(cancel)
        return await work

    try:
        return asyncio.run(until_stopped())
    except asyncio.CancelledError:
        if stop is None or not stop.done():
            raise
        raise KeyboardInterrupt from None


async def _play(
    function: Callable[..., Any],
    connection: ApiConnection | None,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Call a flow, or its function outside of a flow run; one client serves all of its tasks."""
    async with AsyncClientContext() as context:
        if connection is not None:

            async def refuse(request: httpx.Request) -> None:
                connection.refuse_when_lost(request)

            context.client._client.event_hooks = {"request": [refuse]}
        return await function(*arguments, **named)
