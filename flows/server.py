"""The Prefect API that a flow started by hand reports to: a configured one, or a local server.

A configured API that answers is used. Otherwise a server is started for the flow, on the database
of the user's Prefect profile: `prefect server start` shows the run afterwards. It ends with the
flow, even by `kill -9`: it reads a pipe that only the flow's process has open. Prefect's own
ephemeral server would outlive a flow that is killed, and end by the Ctrl-C that the flow reports.
"""

import fcntl
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging import get_logger
from prefect.logging.handlers import APILogWorker
from prefect.settings import get_current_settings, temporary_settings

from flows.connection import ApiConnection, connected, discard, has_caller, healthy, services
from marin_rl.errors import MarinRLError
from marin_rl.progress import phase

DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
LOCK = "marin-rl.lock"
START_TIMEOUT_S = 300.0  # others may start first
DRAIN_S = 10.0
RECORD_S = 10.0
STOP_TIMEOUT_S = 30.0
GRACE_S = 3
POLL_S = 0.1
LOG_SHOWN = 2000  # characters
ERROR_SHOWN = 72  # characters of an error in a task's last line
BATCH = 200  # events that the server writes in one transaction; singly they cost 2.5 times the CPU

_log = get_logger("marin_rl")

# As in prefect.toml, for processes that are started in another folder.
QUIET: dict[Any, Any] = {
    "client.server_version_check_enabled": False,
    "cloud.enable_orchestration_telemetry": False,
    "server.analytics_enabled": False,
    "server.services.event_persister.batch_size": BATCH,
    "server.services.event_persister.read_batch_size": BATCH,
    "server.services.task_run_recorder.batch_size": BATCH,
    "server.services.task_run_recorder.read_batch_size": BATCH,
    "server.services.triggers.read_batch_size": BATCH,
    "telemetry.enable_resource_metrics": False,
}
# Of a server for one flow: no UI and no schedules; task runs are kept, the events that they are
# made of are not, which are most of a database.
EPHEMERAL = {
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_UI_ENABLED": "false",
}


@contextmanager
def prefect_api(warm: Sequence[str] = ()) -> Iterator[str]:
    """Give flows inside the block an API, and yield its URL.

    The modules named in `warm` are imported first, while a local server takes as long to start.
    Raises RuntimeError when neither the configured API nor a local server answers, and
    KeyboardInterrupt for SIGTERM too, which commands report without a trace.
    """
    with temporary_settings(set_defaults=QUIET), ExitStack() as stack:
        try:
            url = get_current_settings().api.url
            if url and healthy(url):
                _import(warm)
                stack.enter_context(connected(url))
            else:
                reason = f"no Prefect API at {url}" if url else "no Prefect API configured"
                later = "later, `prefect server start` shows the run"
                _log.info("%s: using a temporary one (%s)", reason, later)
                for name in ("prefect.engine", "prefect.flow_runs"):
                    logging.getLogger(name).setLevel(logging.WARNING)  # links to a UI that is not
                url = stack.enter_context(_local_server(warm))
                stack.enter_context(temporary_settings(updates={"api.url": url}))
            yield url
        except TerminationSignal:
            raise KeyboardInterrupt from None


@phase("importing JAX")
def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def quieten() -> None:
    """Reduce to one line what Prefect logs several times, or with a trace."""
    for name in ("prefect.task_runs", "prefect.flow_runs"):
        logger = logging.getLogger(name)
        if not any(isinstance(item, _Terse) for item in logger.filters):
            logger.addFilter(_Terse())


class _Terse(logging.Filter):
    """Drops the final state of tasks and flows, and the traces of errors that a caller reports.

    An error is reported in full once: by the caller of `play_flow`, else by the flow. A task, which
    may fail where its flow goes on, says how it begins. That tasks were cancelled is no news where
    a caller reports what ended the flow.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        called, message = has_caller(), str(record.msg)
        if called and message.startswith("Crash detected! Execution was "):
            return False
        if isinstance(error, MarinRLError) or (called and isinstance(error, Exception)):
            text = "" if called else str(error)
            if record.name == "prefect.task_runs":
                text = str(error).partition("\n")[0]
                if len(text) > ERROR_SHOWN:
                    text = f"{text[: ERROR_SHOWN - 1].rpartition(' ')[0]} …"
            line = f"failed: {type(error).__name__}"
            record.msg, record.args = "%s", (f"{line}: {text}" if text else line,)
            record.exc_info = record.exc_text = None
        return not message.startswith("Finished in state")


@contextmanager
def _local_server(warm: Sequence[str]) -> Iterator[str]:
    """Start a server, wait until it answers, and end it with the block."""
    port = free_port()
    with (
        _profile() as profile,
        tempfile.TemporaryFile() as log,
        connected(f"http://127.0.0.1:{port}/api", temporary=True) as connection,
    ):
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        environment = {**os.environ, **settings, **EPHEMERAL, **profile}
        environment.pop("PREFECT_API_URL", None)
        # -P keeps this folder off the child's path; a module name would need the package installed.
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(port)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the flow, which reports it
        )
        assert process.stdin is not None
        answered, ending = threading.Event(), threading.Event()

        def lose_when_ended() -> None:
            code = process.wait()
            # One that ends by itself before it has answered could not start, which is raised below.
            if not ending.is_set() and (code < 0 or answered.is_set()):
                signal_name = signal.Signals(-code).name if code < 0 else ""
                how = f"was killed by {signal_name}" if code < 0 else f"ended with {code}"
                connection.lose(f"the temporary Prefect server {how}")

        threading.Thread(target=lose_when_ended, name="prefect-server", daemon=True).start()
        try:
            _import(warm)
            with phase("starting a Prefect server"):
                _wait_until_healthy(process, connection, log)
            answered.set()
            yield connection.url
        finally:
            unsent = services()
            if not connection.lost:
                # Prefect's background reports must have arrived before the server ends.
                APILogWorker.drain_all(timeout=DRAIN_S)
                EventsWorker.drain_all(timeout=DRAIN_S)
            ending.set()
            discard(unsent)
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _profile() -> Iterator[dict[str, str]]:
    """Home and database of the user's Prefect; temporary ones where no home can be written."""
    settings = get_current_settings()
    url = settings.server.database.connection_url
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.home):
            pass
    except OSError as error:
        _log.warning("Prefect keeps no history of this run: %s", error)
        with tempfile.TemporaryDirectory(prefix="marin-rl-prefect-") as home:
            yield {"PREFECT_HOME": home, DATABASE: f"sqlite+aiosqlite:///{home}/prefect.db"}
        return
    own = {} if url is None else {DATABASE: url.get_secret_value()}
    yield {"PREFECT_HOME": str(settings.home), **own}


def _wait_until_healthy(
    process: subprocess.Popen[bytes], connection: ApiConnection, log: IO[bytes]
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not connection.lost and not healthy(connection.url):
        code = process.poll()
        if code is not None and code >= 0:
            log.seek(0)
            shown = log.read().decode(errors="replace")[-LOG_SHOWN:]
            raise RuntimeError(
                f"the temporary Prefect server ended with exit code {code}; start one with "
                f"`prefect server start`, or see its log:\n{shown}"
            )
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the temporary Prefect server did not answer at {connection.url} within "
                f"{START_TIMEOUT_S:g} s: start one with `prefect server start`"
            )
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(port: int) -> None:
    """Serve Prefect's API on a loopback port until the parent process ends."""
    import uvicorn
    from prefect.server.utilities.messaging.memory import Topic

    server = uvicorn.Server(
        uvicorn.Config(
            "prefect.server.api.server:create_app",
            factory=True,
            host="127.0.0.1",
            port=port,
            log_level="error",
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    def end_with_parent() -> None:
        sys.stdin.buffer.read()  # the pipe ends when the process that started us does
        deadline = time.monotonic() + RECORD_S
        queues = [each._queue for each in Topic.by_name("events")._subscriptions]
        while any(queue.qsize() for queue in queues) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # what has arrived is recorded before the end
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True).start()
    with (get_current_settings().home / LOCK).open("ab") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # two servers would migrate a new database at once

        def release_when_started() -> None:
            while not server.started:
                time.sleep(POLL_S)
            fcntl.flock(lock, fcntl.LOCK_UN)

        threading.Thread(target=release_when_started, daemon=True).start()
        server.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
