"""The local stack behind `make up` and `make down`: server, work pool, worker, deployments.

`up` starts what is not there yet and registers the deployments of prefect.yaml; `down` ends what
`up` started, flows included (their files keep whatever they had committed). Process ids and logs
lie in .run/; addresses come from prefect.toml, or from PREFECT_API_URL and PREFECT_SERVER_API_PORT.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.settings import get_current_settings
from prefect.states import Crashed

from flows.server import healthy

RUN = Path(".run")
POOL = "rl-pool"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2
ALIVE = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)

PREFECT = (sys.executable, "-m", "prefect")


def up(say: Callable[[str], None]) -> None:
    """Start server and worker and register the deployments; what runs already is left alone."""
    # A shell's background job ignores Ctrl-C, and so would everything that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["RL_ROOT"] = str(Path.cwd())
    RUN.mkdir(exist_ok=True)
    url = _api_url()
    if healthy(url):
        say(f"Prefect API at {url}: answers already")
    else:
        say(f"Prefect API at {url}: starting (log in {RUN}/server.log)")
        _start("server", *PREFECT, "server", "start")
        _wait("server", lambda: healthy(url))
    if not _alive("worker"):
        _call("work-pool", "create", POOL, "--type", "process", "--overwrite")
        _declare_crashed()
    _call("--no-prompt", "deploy", "--all")
    if not _alive("worker"):
        _start("worker", *PREFECT, "worker", "start", "--pool", POOL)
    say(f"worker of pool {POOL}: polling (log in {RUN}/worker.log)")
    ui = url.removesuffix("/api")
    say(f"UI: {ui}\nTry: prefect deployment run rl-loop/demo --watch\nEnd: make down")


def down(say: Callable[[str], None]) -> None:
    """End the worker with its flows, then the server."""
    for name in ("worker", "server"):
        pid = _alive(name)
        if pid is None:
            say(f"{name}: was not running")
        else:
            _end(pid)
            say(f"{name}: ended")
        (RUN / f"{name}.pid").unlink(missing_ok=True)
        if name == "worker" and healthy(_api_url()):
            _declare_crashed()


def _api_url() -> str:
    settings = get_current_settings()
    server = settings.server.api
    return settings.api.url or f"http://{server.host}:{server.port}/api"


def _start(name: str, *command: str) -> None:
    """Start a process that outlives this one, in a process group of its own."""
    log: TextIO
    with (RUN / f"{name}.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (RUN / f"{name}.pid").write_text(f"{process.pid}\n", encoding="utf-8")


def _call(*arguments: str) -> None:
    done = subprocess.run([*PREFECT, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"prefect {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _wait(name: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if _alive(name) is None or time.monotonic() > deadline:
            sys.exit(f"the {name} did not start: see {RUN}/{name}.log")
        time.sleep(POLL_S)


def _alive(name: str) -> int | None:
    """The process id of what `up` started under this name, while it runs."""
    try:
        pid = int((RUN / f"{name}.pid").read_text(encoding="utf-8"))
        os.kill(pid, 0)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return None
    return pid


def _end(pid: int) -> None:
    """Ask the whole process group to end; insist after a while."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                os.killpg(pid, sign)
            except ProcessLookupError:
                return
            time.sleep(POLL_S)


def _declare_crashed() -> None:
    """Deployed runs, which no process works on without a worker, free their deployments."""
    alive = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(ALIVE))))
    client: SyncPrefectClient
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=alive):
            if run.deployment_id is not None:
                state = Crashed(message="The local stack was stopped while this ran.")
                client.set_flow_run_state(run.id, state, force=True)


if __name__ == "__main__":
    {"up": up, "down": down}[sys.argv[1]](print)
