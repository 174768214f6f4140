"""The connection of a flow to its Prefect API, which may be lost while the flow goes on.

A run needs no Prefect: its files are what counts. When the API is gone (a temporary server was
killed, a real one is unreachable for longer than a restart takes), that is said in one line, what
waits to be sent is dropped, and the flow is played to its end without reporting. Nothing is
retried for longer than a flow's end may take.
"""

import asyncio
import functools
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
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

HEALTH_TIMEOUT_S = 15.0  # for a server that is busy; one that is not there refuses at once
WATCH_EVERY_S = 10.0
MISSES_MAX = 3  # in a row; a server that is restarted is back sooner
LAST_TRIES, LAST_TRY_S = 3, 2.0  # at the end of a flow, which is waiting
DISCARD_S = 2.0

# What reports, each in lines of its own, that an API does not answer.
NOISY = (
    "APILogWorker",
    "EventsWorker",
    "prefect._internal.concurrency",
    "prefect.events.clients",
    "prefect.events.worker",
)
RUNS = ("prefect.flow_runs", "prefect.task_runs")  # which say other things too

_log = get_logger("marin_rl")
_current: ContextVar["ApiConnection | None"] = ContextVar("prefect-api-connection", default=None)


class ApiLost(httpx.TransportError):
    """A request to an API that is known to be gone. Prefect's client does not retry it."""


def _drop_lost_reports(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return record.name in RUNS and not isinstance(error, httpx.TransportError)


def _filter_reports(loggers: Sequence[str]) -> None:
    for name in loggers:
        logging.getLogger(name).addFilter(_drop_lost_reports)


class ApiConnection:
    """A connection that is open until it is lost, which it stays. Thread safe.

    `temporary`: the server ends with this process and is lost only when it is killed. Prefect's
    background senders may see that first, so their reports of it are dropped from the start.
    """

    def __init__(self, url: str, *, temporary: bool = False) -> None:
        self.url = url
        if temporary:
            _filter_reports(NOISY)
        self._lost = threading.Event()
        self._lock = threading.Lock()

    @property
    def lost(self) -> bool:
        """Return True once the API is gone."""
        return self._lost.is_set()

    def lose(self, reason: str) -> None:
        """Report once that the API is gone, drop what waits for it, and send nothing more."""
        with self._lock:
            if self.lost:
                return
            self._lost.set()
        _log.warning("%s: going on without reports to Prefect; files are not affected", reason)
        _filter_reports(NOISY + RUNS)
        set_api_log_sink(lambda _: None)
        EventsWorker.set_client_override(NullEventsClient)
        discard(services())

    def close(self) -> None:
        """Leave the process as it was before the API was lost."""
        if self.lost:
            discard(services())  # before the filters go: a sender may log its failure only now
            set_api_log_sink(None)
            EventsWorker.set_client_override(None)
        for name in NOISY + RUNS:
            logging.getLogger(name).removeFilter(_drop_lost_reports)

    def confirm(self) -> None:
        """Find out whether the API is still there, before the last reports are sent."""

    def refuse_when_lost(self, _: httpx.Request) -> None:
        """Raise ApiLost instead of a request that would be retried for a minute."""
        if self.lost:
            raise ApiLost(f"the Prefect API at {self.url} is gone")


class RemoteConnection(ApiConnection):
    """A connection to a server that this process did not start, watched by a thread."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="prefect-api", daemon=True).start()

    def close(self) -> None:
        """End the watch."""
        self._closing.set()
        super().close()

    def confirm(self) -> None:
        """Ask a few times whether the API is still there."""
        for _ in range(LAST_TRIES):
            if self.lost or healthy(self.url, LAST_TRY_S):
                return
            self._closing.wait(1.0)
        self.lose(f"the Prefect API at {self.url} does not answer")

    def _watch(self) -> None:
        misses = 0
        while not self.lost and not self._closing.wait(WATCH_EVERY_S):
            misses = 0 if healthy(self.url) else misses + 1
            if misses == MISSES_MAX and not self._closing.is_set():
                self.lose(f"the Prefect API at {self.url} does not answer")


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
def using(connection: ApiConnection) -> Iterator[None]:
    """Make `connection` the current one inside the block, and close it after that."""
    token = _current.set(connection)
    try:
        yield
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
    """End background senders at once, with whatever they have not sent.

    Their own `drain` waits for every item to fail, which takes some seconds each.
    """
    for service, task in running:
        loop, done = service._loop, service._done_event
        if loop is None or done is None or done.is_set() or loop.is_closed():
            continue
        service._stop(at_exit=True)
        if task is not None:
            with suppress(RuntimeError):  # the loop ends with the process
                loop.call_soon_threadsafe(task.cancel)
                asyncio.run_coroutine_threadsafe(_within(done), loop).result(DISCARD_S + 1)


async def _within(done: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), DISCARD_S)


class _Body:
    """A flow's function, which remembers how it ended whatever becomes of its reports."""

    def __init__(self, function: Callable[..., Any], connection: ApiConnection) -> None:
        self._function, self._connection = function, connection
        self.started = self.returned = False
        self.value: Any = None
        self.error: BaseException | None = None

    async def play(self, *arguments: Any, **named: Any) -> Any:
        self.started = True
        try:
            self.value = await self._function(*arguments, **named)
            self.returned = True
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._connection.confirm()
        return self.value


def play_flow(flow: Flow[Any, Any], *arguments: Any, **named: Any) -> Any:
    """Run an asynchronous flow in this process, to its end even where its API is lost.

    Returns what the flow returns; raises what it raises.
    """
    connection = _current.get()
    assert connection is not None, "flows are played inside of prefect_api()"
    body = _Body(flow.fn, connection)
    reported = flow.with_options()
    reported.fn = functools.wraps(flow.fn)(_function(body))
    try:
        return asyncio.run(_play_connected(reported, connection, arguments, named))
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        if error is body.error:
            raise
        connection.lose(f"the Prefect API at {connection.url} is gone ({type(error).__name__})")
    if body.returned:
        return body.value
    if body.error is not None:
        raise _as_interrupt(body.error) from None
    assert not body.started, "a flow that was begun has returned or raised"
    with temporary_settings({"logging.to_api.when_missing_flow": "ignore"}):
        return asyncio.run(_play_alone(flow.fn, arguments, named))


def _function(body: _Body) -> Callable[..., Any]:
    async def played(*arguments: Any, **named: Any) -> Any:
        return await body.play(*arguments, **named)

    return played


def _as_interrupt(error: BaseException) -> BaseException:
    """Ctrl-C reaches a coroutine as a cancellation."""
    return KeyboardInterrupt() if isinstance(error, asyncio.CancelledError) else error


async def _play_connected(
    flow: Flow[Any, Any],
    connection: ApiConnection,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    async def refuse_when_lost(request: httpx.Request) -> None:
        connection.refuse_when_lost(request)

    async with AsyncClientContext() as context:
        context.client._client.event_hooks = {"request": [refuse_when_lost]}
        return await flow(*arguments, **named)


async def _play_alone(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Call a flow's function outside of a flow run; one client serves all of its tasks."""
    async with AsyncClientContext():
        return await function(*arguments, **named)
