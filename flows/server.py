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
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import IO, Any

from prefect.exceptions import TerminationSignal
from prefect.logging import get_logger
from prefect.settings import get_current_settings, temporary_settings

from flows.connection import ApiConnection, healthy
from marin_rl.progress import phase

DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
START_TIMEOUT_S = 300.0  # others may start first
RECORD_S = 10.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
LOG_SHOWN = 2000  # characters
BATCH = 200  # events that the server writes in one transaction; singly they cost 2.5 times the CPU

_log = get_logger("marin_rl")

# As in prefect.toml, for processes that are started in another folder.
QUIET: dict[Any, Any] = {
    "client.server_version_check_enabled": False,
    "cloud.enable_orchestration_telemetry": False,
    "logging.to_api.when_missing_flow": "ignore",  # of a flow that its API never heard of
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
def prefect_api(warm: Sequence[str] = ()) -> Iterator[ApiConnection]:
    """Give flows inside the block an API, and yield the connection to it.

    The modules named in `warm` are imported first, while a local server takes as long to start.
    Raises RuntimeError when neither the configured API nor a local server answers, and
    KeyboardInterrupt for SIGTERM too, which commands report without a trace.
    """
    with temporary_settings(set_defaults=QUIET), ExitStack() as stack:
        try:
            url = get_current_settings().api.url
            if url and healthy(url):
                _import(warm)
                yield stack.enter_context(closing(ApiConnection(url)))
                return
            reason = f"no Prefect API at {url}" if url else "no Prefect API configured"
            later = "later, `prefect server start` shows the run"
            _log.info("%s: using a temporary one (%s)", reason, later)
            for name in ("prefect.engine", "prefect.flow_runs"):
                logging.getLogger(name).setLevel(logging.WARNING)  # links to a UI that is not
            connection = stack.enter_context(_local_server(warm))
            stack.enter_context(temporary_settings(updates={"api.url": connection.url}))
            yield connection
        except TerminationSignal:
            raise KeyboardInterrupt from None


@phase("importing JAX")
def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


@contextmanager
def _local_server(warm: Sequence[str]) -> Iterator[ApiConnection]:
    """Start a server, wait until it answers, and end it with the block."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    with tempfile.TemporaryFile() as log, _environment() as environment:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(port)],  # -P keeps this folder off its path
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the flow, which reports it
        )
        assert process.stdin is not None
        try:
            _import(warm)
            with phase("starting a Prefect server"):
                _wait_until_healthy(process, url, log)
            with closing(ApiConnection(url, process)) as connection:
                yield connection
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """Environment of a server: the user's profile, a temporary one where no home can be written."""
    settings = get_current_settings()
    environment = {
        **os.environ,
        **settings.to_environment_variables(exclude_unset=True),
        **EPHEMERAL,
        "PREFECT_HOME": str(settings.home),
    }
    environment.pop("PREFECT_API_URL", None)
    with tempfile.TemporaryDirectory(prefix="marin-rl-prefect-") as temporary:
        try:
            settings.home.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=settings.home).close()
        except OSError as error:
            _log.warning("Prefect keeps no history of this run: %s", error)
            database = f"sqlite+aiosqlite:///{temporary}/prefect.db"
            environment |= {"PREFECT_HOME": temporary, DATABASE: database}
        yield environment


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Wait for the server's first answer, or until it is killed, which its connection reports."""
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
    """Return a port that nothing listens on at the moment."""
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
