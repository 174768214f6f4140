"""`make up`, deployments, `make down`: a real Prefect server and worker, on a free port.

What `make up` starts, and flows that its worker starts, are whole processes, as users have them;
commands of Prefect, which only ask the server, are forked.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest
import yaml
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import EventTrigger
from prefect.settings import temporary_settings
from prefect.states import Cancelling, Suspended
from support.flow_runs import REPOSITORY, ROUNDS, debug
from support.forked_python import python
from support.nodes import wait

from flows import stack as stack_commands
from flows.server import free_port, healthy
from flows.session import resolve_config
from flows.stack import POOL, automations, declare_crashed, may_live
from marin_rl.errors import RunLocked
from marin_rl.storage.runs import Run, checkpoint_slot, latest_checkpoint
from marin_rl.storage.stores.locks import holder_in
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run

CHECKOUT = ("flows", "tasks", "marin_rl", "schemas", "configs", "prefect.yaml", "prefect.toml")
TIMEOUT_S = 400.0

pytestmark = pytest.mark.timeout(1800)  # one test waits for several things, each so long at most


class Stack:
    """A running stack in a folder that looks like a checkout."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.runs = folder / "runs"
        port = url.rpartition(":")[2].partition("/")[0]
        self.environment = {
            **os.environ,
            "PREFECT_API_URL": url,
            "PREFECT_SERVER_API_PORT": port,
            "PYTHONPATH": str(folder),
        }

    def command(self, word: str) -> str:
        """Bring the stack up or down; what that said."""
        return self._call(sys.executable, "-m", "flows.stack", word)

    def prefect(self, *words: str, expect: int = 0) -> str:
        """Run a command of Prefect in the folder; what it said."""
        return self._call(python(), "-m", "prefect", *words, expect=expect)

    def _call(self, *command: str, expect: int = 0) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    def parameters(self, run_id: str, rounds: int) -> list[str]:
        """Parameters of rl-loop/demo for a debug run."""
        return [
            *("-p", "config=configs/debug.yaml", "-p", f"run_id={run_id}"),
            *("-p", f'overrides=["root={self.runs}"]', "-p", f"rounds={rounds}"),
        ]

    def rounds(self, run_id: str) -> int:
        """Rounds that are trained."""
        if not (self.runs / run_id / "run.json").exists():
            return 0
        found = latest_checkpoint(Run.open(str(self.runs), run_id))
        return int(found.slot[-5:]) if found else 0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Brought up by flows/stack.py, and down again."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in CHECKOUT:
        (folder / name).symlink_to(REPOSITORY / name)
    up = Stack(folder, f"http://127.0.0.1:{free_port()}/api")
    try:
        told = up.command("up")
        assert f"Prefect API at {up.url}: starting" in told
        yield up
    finally:
        told = up.command("down")
    assert "worker: ended" in told
    assert "server: ended" in told
    assert not healthy(up.url)
    assert not list((folder / ".run").glob("*.pid"))


@pytest.fixture
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    """A client of the stack's server."""
    with temporary_settings(updates={"api.url": stack.url}), get_client(sync_client=True) as opened:
        yield opened


def ask_for_run(stack: Stack, client: SyncPrefectClient, run_id: str, rounds: int) -> UUID:
    """Have rl-loop/demo started by the worker."""
    deployment = client.read_deployment_by_name("rl-loop/demo")
    parameters = {
        "config": "configs/debug.yaml",
        "run_id": run_id,
        "overrides": [f"root={stack.runs}"],
        "rounds": rounds,
    }
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id


def state(client: SyncPrefectClient, flow_run: UUID) -> str:
    found = client.read_flow_run(flow_run).state
    assert found is not None
    return str(found.name)


def test_the_deployments_are_those_that_are_documented() -> None:
    found = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    names = {(item["entrypoint"].partition(":")[2], item["name"]) for item in found}
    assert names == {
        ("rl_loop", "prod"), ("rl_loop", "demo"), ("sft", "prod"), ("evaluate_run", "prod"),
        ("reward_model", "prod"), ("preference", "prod"), ("generate_shards", "prod"),
        ("sample_a_chunk", "prod"), ("evaluate_checkpoint", "prod"),
    }  # fmt: skip
    assert all((REPOSITORY / item["entrypoint"].partition(":")[0]).exists() for item in found)
    many = {item["entrypoint"] for item in found if "concurrency_limit" not in item}
    assert {entrypoint.partition(":")[0] for entrypoint in many} == {"flows/stages.py"}
    limits = [item["concurrency_limit"] for item in found if item["entrypoint"] not in many]
    assert {limit["collision_strategy"] for limit in limits} == {"CANCEL_NEW"}


def test_the_automations_watch_for_silence_and_leave_retries_to_people() -> None:
    silent, crashed = automations()
    assert (silent.enabled, crashed.enabled) == (True, False)
    frequency_s = tomllib.loads((REPOSITORY / "prefect.toml").read_text())["flows"]
    assert isinstance(silent.trigger, EventTrigger)
    assert silent.trigger.within.total_seconds() == 3 * frequency_s["heartbeat_frequency"]
    assert [action.type for action in silent.actions] == ["change-flow-run-state"]


def parameters_of(root: str) -> dict[str, Any]:
    return {
        "config": str(REPOSITORY / "configs" / "debug.yaml"),
        "run_id": "whole",
        "overrides": [f"root={root}", "policy.init=sft"],
    }


def test_a_run_that_a_process_holds_is_not_taken_for_dead(tmp_path: Path) -> None:
    """`up` must not declare a run crashed that a process works on without a worker."""
    parameters = parameters_of(str(tmp_path))
    assert not may_live(parameters, shared=False)  # it has not begun
    run = Run.create_or_open(debug(tmp_path))
    for shared in (False, True):
        assert not may_live(parameters, shared=shared)
        with run.lock():
            assert may_live(parameters, shared=shared)
    assert not may_live({"config": "nowhere.yaml"}, shared=False)


def test_runs_that_may_be_elsewhere_are_left_to_the_heartbeats(tmp_path: Path) -> None:
    unlocked = parameters_of("memory://stack")
    Run.create_or_open(resolve_config(**unlocked))
    assert may_live(unlocked, shared=False)
    elsewhere = parameters_of(str(tmp_path))
    for parameters in (elsewhere, {"config": "nowhere.yaml"}, {"n": 3}):
        assert may_live(parameters, shared=True)


class Server(BaseHTTPRequestHandler):
    """As much of a Prefect API as is asked which flow runs live; it has none."""

    asked: ClassVar[list[tuple[str, Any]]] = []

    def do_GET(self) -> None:
        self.send_error(404) if "csrf" in self.path else self._answer(b'"3.8.8"')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, json.loads(body)))
        self._answer(b"[]")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_only_flows_of_our_pool_are_judged() -> None:
    Server.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings(updates={"api.url": url}):
            declare_crashed()
        server.shutdown()
    ((path, asked),) = Server.asked
    assert path == "/api/flow_runs/filter"
    assert asked["work_pools"]["name"]["any_"] == [POOL]
    found = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    entries = [item["entrypoint"].removesuffix(".py").replace(".py:", ":") for item in found]
    flows = {
        getattr(import_module(module.replace("/", ".")), name).name
        for module, _, name in (entry.partition(":") for entry in entries)
    }
    assert set(asked["flows"]["name"]["any_"]) == flows


def test_a_number_that_another_users_process_has_by_now_is_none_of_ours(tmp_path, monkeypatch):
    def refused(pid: int, sign: int) -> None:
        raise PermissionError(pid, sign)

    (tmp_path / "worker.pid").write_text("4194000")
    monkeypatch.setattr(stack_commands, "RUN", tmp_path)
    monkeypatch.setattr(os, "kill", refused)
    assert stack_commands._alive("worker") is None


@pytest.mark.slow
def test_up_again_leaves_what_runs_alone(stack: Stack) -> None:
    pid = (stack.folder / ".run" / "worker.pid").read_text()
    assert "answers already" in stack.command("up")
    assert (stack.folder / ".run" / "worker.pid").read_text() == pid


@pytest.mark.slow
def test_a_deployment_runs_as_documented(stack: Stack) -> None:
    watched = ("deployment", "run", "rl-loop/demo", "--watch")
    told = stack.prefect(*watched, *stack.parameters("whole", ROUNDS))
    assert "Flow run finished successfully" in told
    run = Run.open(str(stack.runs), "whole")
    found = latest_checkpoint(run)
    assert found is not None
    assert found.slot == checkpoint_slot(ROUNDS)
    wrong = [*stack.parameters("wrong", ROUNDS), "-p", 'overrides=["training.learning_rat=1"]']
    stack.prefect(*watched, *wrong, expect=1)
    assert not (stack.runs / "wrong").exists()


@pytest.mark.slow
def test_pausing_resuming_and_cancelling(stack: Stack, client: SyncPrefectClient) -> None:
    flow_run = ask_for_run(stack, client, "paused", 1000)
    wait(lambda: stack.rounds("paused") >= 2, "two rounds")
    second = ask_for_run(stack, client, "second", 1)
    wait(lambda: state(client, second) == "Cancelled", "the second run to be refused")

    client.set_flow_run_state(flow_run, Suspended(timeout_seconds=1800))
    wait(lambda: is_free(stack, "paused"), "the process to let go of the run")
    assert state(client, flow_run) == "Suspended"
    stopped_at = stack.rounds("paused")
    client.resume_flow_run(flow_run)
    wait(lambda: stack.rounds("paused") >= stopped_at + 2, "the rounds to go on")

    client.set_flow_run_state(flow_run, Cancelling())
    wait(lambda: state(client, flow_run) == "Cancelled", "the flow to end")
    wait(lambda: is_free(stack, "paused"), "the process to let go of the run")


def is_free(stack: Stack, run_id: str) -> bool:
    """True if no process works on a run."""
    try:
        with Run.open(str(stack.runs), run_id).lock():
            return True
    except RunLocked:
        return False


def given_up(stack: Stack) -> int:
    """Number of times the worker reported a dead process in full: a second report would end a retry
    too.

    This advice is the last line of each report.
    """
    told = (stack.folder / ".run" / "worker.log").read_text()
    return told.count("prefect.flow_runs.worker - Check whether the flow run exceeded its memory")


def kill(stack: Stack, run_id: str) -> None:
    """Kill the process that works on a run: its lock says which."""
    lock = stack.runs / run_id / ".lock"
    wait(lambda: (found := holder_in(lock)) is not None and found.alive, "a process at work")
    holder = holder_in(lock)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_flow_outlives_its_worker(stack: Stack, client: SyncPrefectClient) -> None:
    flow_run = ask_for_run(stack, client, "orphan", ROUNDS)
    wait(lambda: stack.rounds("orphan") >= 1, "a round")
    os.kill(int((stack.folder / ".run" / "worker.pid").read_text()), signal.SIGKILL)
    wait(lambda: state(client, flow_run) == "Completed", "the flow to end without its worker")
    assert stack.rounds("orphan") == ROUNDS
    stack.command("up")


@pytest.mark.slow
def test_a_killed_flow_is_crashed_and_goes_on_by_command_and_by_itself(stack, client):
    flow_run = ask_for_run(stack, client, "killed", 1000)
    wait(lambda: stack.rounds("killed") >= 1, "a round")
    said = given_up(stack)
    kill(stack, "killed")
    wait(lambda: state(client, flow_run) == "Crashed", "the worker to notice")
    before = stack.rounds("killed")
    wait(lambda: given_up(stack) > said, "the worker to have said all of it")
    stack.prefect("flow-run", "retry", str(flow_run))
    wait(lambda: stack.rounds("killed") > before, "the rounds to go on by command")

    _, going_on = automations()
    stack.prefect("automation", "resume", going_on.name)
    kill(stack, "killed")
    before = stack.rounds("killed")
    wait(lambda: stack.rounds("killed") > before, "the rounds to go on by themselves")
    stack.prefect("automation", "pause", going_on.name)
    client.set_flow_run_state(flow_run, Cancelling())
    wait(lambda: state(client, flow_run) == "Cancelled", "the flow to end")
    wait(lambda: is_free(stack, "killed"), "the process to let go of the run")
    run = Run.open(str(stack.runs), "killed")
    assert [audited.problems for audited in audit_run(run) if audited.problems] == []
    assert check_run(str(stack.runs), "killed").whole
