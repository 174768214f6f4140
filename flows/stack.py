"""The local stack behind `make up` and `make down`: server, worker, deployments, automations.

`up` starts missing processes and registers deployments and automations; `down` ends the processes
that `up` started, flows included. Process ids and logs lie in .run/; addresses come from
prefect.toml, or from PREFECT_API_URL and PREFECT_SERVER_API_PORT.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import StateType
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import get_current_settings
from prefect.states import Crashed

from flows.server import healthy
from flows.session import resolve_config
from marin_rl.errors import MarinRLError, RunLocked
from marin_rl.storage.runs import LOCK_KEY, Run
from tasks.fan_out import EVALUATE, GENERATE_SHARDS, SAMPLE_CHUNK

RUN = Path(".run")
AUTOMATIONS = Path(__file__).with_name("automations.yaml")
POOL = "rl-pool"
FLOWS = (
    "rl-loop", "sft", "evaluate", "reward-model", "preference", GENERATE_SHARDS, SAMPLE_CHUNK,
    EVALUATE,
)  # fmt: skip
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2
ALIVE = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)

PREFECT = (sys.executable, "-m", "prefect")


def up(say: Callable[[str], None]) -> None:
    """Start server and worker, unless they run, and register the deployments."""
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
        deadline = time.monotonic() + START_TIMEOUT_S
        while not healthy(url):
            if _alive("server") is None or time.monotonic() > deadline:
                sys.exit(f"the server did not start: see {RUN}/server.log")
            time.sleep(POLL_S)
    if not _alive("worker"):
        _call("work-pool", "create", POOL, "--type", "process", "--overwrite")
        declare_crashed()
    _call("--no-prompt", "deploy", "--all")
    client: SyncPrefectClient
    with get_client(sync_client=True) as client:
        for automation in automations():  # those on the server, which users may change, stay
            if not client.read_automations_by_name(automation.name):
                client.create_automation(automation)
    if not _alive("worker"):
        _start("worker", *PREFECT, "worker", "start", "--pool", POOL)
    say(f"worker of pool {POOL}: polling (log in {RUN}/worker.log)")
    ui = url.removesuffix("/api")
    say(f"UI: {ui}\nTry: prefect deployment run rl-loop/demo --watch\nEnd: make down")


def down(say: Callable[[str], None]) -> None:
    for name in ("worker", "server"):
        pid = _alive(name)
        if pid is None:
            say(f"{name}: was not running")
        else:
            _end(pid)
            say(f"{name}: ended")
        (RUN / f"{name}.pid").unlink(missing_ok=True)
        if name == "worker" and healthy(_api_url()):
            declare_crashed()


def _api_url() -> str:
    settings = get_current_settings()
    server = settings.server.api
    return settings.api.url or f"http://{server.host}:{server.port}/api"


def _start(name: str, *command: str) -> None:
    """Start a process that outlives this one, in a process group of its own."""
    with (RUN / f"{name}.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (RUN / f"{name}.pid").write_text(f"{process.pid}\n", encoding="utf-8")


def _call(*arguments: str) -> None:
    done = subprocess.run([*PREFECT, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"prefect {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _alive(name: str) -> int | None:
    """The process id of a process that `up` started under this name, None unless it runs."""
    try:
        pid = int((RUN / f"{name}.pid").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the number is another user's by now
        return None
    return pid


def _end(pid: int) -> None:
    """Terminate a process group; kill it after STOP_TIMEOUT_S."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                os.killpg(pid, sign)
            except ProcessLookupError:
                return
            time.sleep(POLL_S)


def declare_crashed() -> None:
    """Mark deployed flow runs that no process works on as crashed; it frees their deployments.

    A run without a worker may have outlived it. On an API that this stack did not start, only runs
    that are known to lie on this machine are marked.
    """
    alive = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=list(ALIVE)))
    )
    shared = _alive("server") is None
    client: SyncPrefectClient
    with get_client(sync_client=True) as client:
        unfinished = client.read_flow_runs(
            flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=list(FLOWS))),
            flow_run_filter=alive,
            work_pool_filter=filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[POOL])),
        )
        for run in unfinished:
            if not may_live(run.parameters, shared=shared):
                state = Crashed(message="The local stack was stopped while this ran.")
                client.set_flow_run_state(run.id, state, force=True)


def may_live(parameters: dict[str, Any], *, shared: bool) -> bool:
    """True if a process may be working on the run that a flow run's parameters name.

    Without locks, as in a bucket, this cannot be known here: the automation on missing heartbeats
    decides. A run that does not exist may be another machine's if the API is `shared`; otherwise
    its flow ended before it created the run.
    """
    named = {key: parameters.get(key) for key in ("run_id", "overrides")}
    try:
        given_out = parameters.get("run")  # by a flow of another process, which has the lock
        if given_out is not None:
            run = Run.open(given_out["root"], given_out["run_id"], given_out["storage_options"])
        else:
            config = resolve_config(parameters["config"], **named)
            run = Run.open(config.root, config.run_id, config.storage_options)
        with run.lock():
            return run.folder.local_path(LOCK_KEY) is None
    except RunLocked:
        return True
    except (MarinRLError, KeyError, OSError):
        return shared


def automations() -> list[AutomationCore]:
    tree = yaml.safe_load(AUTOMATIONS.read_text(encoding="utf-8"))
    return [AutomationCore.model_validate(item) for item in tree["automations"]]


if __name__ == "__main__":
    {"up": up, "down": down}[sys.argv[1]](print)
