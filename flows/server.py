"""The Prefect API that a flow started by hand reports to: a configured one, or a local server.

A configured API that answers is used. Otherwise a server is started for the flow, on the database
of the user's Prefect profile: `prefect server start` shows the run afterwards. It ends with the
flow, even by `kill -9`: it reads a pipe that only the flow's process has open. Prefect's own
ephemeral server would outlive a flow that is killed, and end by the Ctrl-C that the flow reports.

A run needs its files alone. When the API is gone (a temporary server was killed, a configured one
is unreachable for longer than a restart takes), that is logged in one line, unsent reports are
dropped, and the flow is run to its end without reporting.
"""

import asyncio
import fcntl
import functools
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import ContextVar
from subprocess import Popen
from typing import IO, Any

import httpx
from prefect._internal.concurrency.services import _QueueServiceBase
from prefect._internal.concurrency.threads import get_global_loop
from prefect.context import AsyncClientContext
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError, TerminationSignal
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.logging.handlers import set_api_log_sink
from prefect.settings import get_current_settings, temporary_settings

from marin_rl.progress import phase

WATCH_EVERY_S, MISSES_MAX = 10.0, 3  # a server that is restarted is back sooner
START_TIMEOUT_S = 300.0  # others may start first
DRAIN_S, RECORD_S, STOP_TIMEOUT_S = 10.0, 10.0, 30.0
POLL_S = 0.1
LOG_SHOWN = 2000  # characters
BATCH = 200  # events that the server writes in one transaction; singly they cost 2.5 times the CPU
# Loggers of Prefect that each report an API that does not answer; runs report other things too.
SENDERS = (
    "APILogWorker", "EventsWorker", "prefect._internal.concurrency", "prefect.events.clients",
    "prefect.events.worker",
)  # fmt: skip
RUNS = ("prefect.flow_runs", "prefect.task_runs")
# As in prefect.toml, for processes that are started in another folder.
QUIET: dict[Any, Any] = {
    "client.server_version_check_enabled": False,
    "cloud.enable_orchestration_telemetry": False,
    "logging.to_api.when_missing_flow": "ignore",  # of a flow that its API never heard of
    "server.analytics_enabled": False,
    "server.services.task_run_recorder.batch_size": BATCH,
    "server.services.task_run_recorder.read_batch_size": BATCH,
    "telemetry.enable_resource_metrics": False,
}
# Of a server for one flow: no UI and no schedules; task runs are kept, the events that they are
# made of are not, which are most of a database.
EPHEMERAL = {
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_UI_ENABLED": "false",
}

_current: ContextVar["ApiConnection | None"] = ContextVar("prefect-api-connection", default=None)
_log = get_logger("marin_rl")


class ApiConnection:
    """A connection that is open until it is lost, which it stays. Thread safe.

    `server` is the process of a temporary server, which is lost only when it is killed. Prefect's
    background senders may see that first, so their reports of it are dropped from the start.
    """

    def __init__(self, url: str, server: Popen[bytes] | None = None) -> None:
        self.url, self.temporary = url, server is not None
        self._lost, self._closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        for name in SENDERS + RUNS:
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
            EventsWorker.drain_all(timeout=DRAIN_S)  # and the sender of logs
        self._closing.set()
        if self.temporary or self.lost:
            end_senders()  # before the filters go: a sender may log its failure only now
        set_api_log_sink(None)
        EventsWorker.set_client_override(None)
        for name in SENDERS + RUNS:
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
            try:
                outcome.set_result(await flow.fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised by the next line
                outcome.set_exception(error)
            return outcome.result()

        async def call(function: Any) -> Any:
            if stop is not None:
                cancel_by(stop)
            async with AsyncClientContext() as context:  # one client for all tasks
                context.client._client.event_hooks = {"request": [self._refuse_when_lost]}
                return await function(*arguments, **named)

        reported = flow.with_options()
        reported.fn = recorded
        token = _current.set(self)
        try:
            try:
                return asyncio.run(call(reported))
            except (httpx.TransportError, PrefectHTTPStatusError) as error:
                if outcome.done() and error is outcome.exception():
                    raise
                self.lose(f"the Prefect API at {self.url} is gone ({type(error).__name__})")
            return outcome.result() if outcome.done() else asyncio.run(call(flow.fn))
        except asyncio.CancelledError:  # by `stop`, or by Ctrl-C after the API was lost
            raise KeyboardInterrupt from None
        finally:
            _current.reset(token)

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
        if record.name in SENDERS:
            return not (self.lost or self.temporary)
        error = record.exc_info[1] if record.exc_info else None
        return not (self.lost and isinstance(error, httpx.TransportError))


def current_connection() -> ApiConnection | None:
    """Return the connection that runs the flow; None where Prefect itself started it."""
    return _current.get()


def cancel_by(stop: Future[None]) -> None:
    """Cancel the asyncio task that calls this once `stop` has a result, set by any thread."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(_: Future[None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the flow has ended by itself
            loop.call_soon_threadsafe(task.cancel)

    stop.add_done_callback(cancel)


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


@contextmanager
def prefect_api(warm: Sequence[str] = ()) -> Iterator[ApiConnection]:
    """Give flows inside the block an API, and yield the connection to it.

    The modules named in `warm` are imported first, while a local server takes as long to start.
    Raises RuntimeError when neither the configured API nor a local server answers, and
    KeyboardInterrupt for SIGTERM too, which commands report without a trace.
    """
    with temporary_settings(set_defaults=QUIET), ExitStack() as stack:
        try:
            url, server = get_current_settings().api.url, None
            log = stack.enter_context(tempfile.TemporaryFile())
            if not url or not healthy(url):
                reason = f"no Prefect API at {url}" if url else "no Prefect API configured"
                later = "later, `prefect server start` shows the run"
                _log.info("%s: using a temporary one (%s)", reason, later)
                for name in ("prefect.engine", "prefect.flow_runs"):
                    logging.getLogger(name).setLevel(logging.WARNING)  # links to a UI that is not
                url, server = stack.enter_context(_local_server(log))
            with phase("importing JAX"):
                for module in warm:
                    importlib.import_module(module)
            if server is not None:
                with phase("starting a Prefect server"):
                    _wait_until_healthy(server, url, log)
                stack.enter_context(temporary_settings(updates={"api.url": url}))
            yield stack.enter_context(closing(ApiConnection(url, server)))
        except TerminationSignal:
            raise KeyboardInterrupt from None


@contextmanager
def _local_server(log: IO[bytes]) -> Iterator[tuple[str, Popen[bytes]]]:
    """Start a server, which ends with the block; yield its URL, where it does not answer yet."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="marin-rl-prefect-") as spare:
        process = Popen(
            [sys.executable, "-P", __file__, str(port)],  # -P keeps this folder off its path
            env=_environment(spare),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the flow, which reports it
        )
        assert process.stdin is not None
        try:
            yield f"http://127.0.0.1:{port}/api", process
        finally:
            process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(spare: str) -> dict[str, str]:
    """Environment of a server: the user's profile, or `spare` where no home can be written."""
    settings = get_current_settings()
    environment = {**os.environ, **settings.to_environment_variables(exclude_unset=True)}
    environment |= {**EPHEMERAL, "PREFECT_HOME": str(settings.home)}
    environment.pop("PREFECT_API_URL", None)
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=settings.home).close()
    except OSError as error:
        _log.warning("Prefect keeps no history of this run: %s", error)
        database = f"sqlite+aiosqlite:///{spare}/prefect.db"
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
        environment["PREFECT_HOME"] = spare
    return environment


def _wait_until_healthy(process: Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Wait for the server's first answer, or until it is killed, which its connection reports.

    Raises RuntimeError with its log where it ends by itself, or none comes.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not healthy(url):
        code = process.poll()
        if code is not None and code < 0:
            return
        if code is not None or time.monotonic() > deadline:
            log.seek(0)
            shown = log.read().decode(errors="replace")[-LOG_SHOWN:]
            found = "does not answer" if code is None else f"ended with exit code {code}"
            raise RuntimeError(
                f"the temporary Prefect server {found}; start one with `prefect server start`, or "
                f"see its log:\n{shown}"
            )
        time.sleep(POLL_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(port: int) -> None:
    """Serve Prefect's API on a loopback port until the parent process ends."""
    import uvicorn
    from prefect.server.utilities.messaging.memory import Topic

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            with (get_current_settings().home / "marin-rl.lock").open("ab") as lock:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)  # two servers would migrate a new database
                await super().startup(sockets)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()  # the pipe ends when the process that started us does
        deadline = time.monotonic() + RECORD_S
        queues = [each._queue for each in Topic.by_name("events")._subscriptions]
        while any(queue.qsize() for queue in queues) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # what has arrived is recorded before the end
        server.should_exit = True

    app = "prefect.server.api.server:create_app"
    settings = {"log_level": "error", "timeout_graceful_shutdown": 3}
    server = Server(uvicorn.Config(app, factory=True, host="127.0.0.1", port=port, **settings))
    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
