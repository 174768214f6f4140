"""A Prefect server that dies while a flow runs ends nothing: the flow is played to its end.

The server is really killed. Small flows stand for the loss at each instant, a whole run of the
command line for what users see. test_many_kills.py kills a server in the middle of a run.
Where the end of a process decides nothing more, it and its server are forked: each would import for
5 s.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.faults import outcome
from support.flow_runs import DEBUG, REPOSITORY, Played, debug
from support.forked_python import fork_of, python

from flows.server import free_port, healthy

END_TIMEOUT_S = 120  # each event that nothing takes would hold up the end by seven seconds
START_TIMEOUT_S = 240
LOST = "going on without reports to Prefect"

PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from prefect import flow, task
from flows.server import prefect_api
from tasks.options import GROUP

when = sys.argv[1]

def kill_server():
    if len(sys.argv) > 2:
        servers = [int(sys.argv[2])]
    else:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        servers = [int(pid) for pid in children]
    assert len(servers) == 1
    os.kill(servers[0], signal.SIGKILL)

@task(**GROUP)
async def stage(number):
    return number

@flow(persist_result=False)
async def stages():
    total = 0
    for number in range(20):
        if number == 10 and when == "middle":
            kill_server()
        total += await stage(number)
    if when == "failure":
        kill_server()
        raise ValueError("the flow's own error")
    if when == "interrupt":
        kill_server()
        print("killed", flush=True)
        await asyncio.sleep(600)
    if when == "end":
        kill_server()
    return total

try:
    with prefect_api() as connection:
        if when == "begin":
            kill_server()
        print("result", connection.run(stages), flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def started(
    *arguments: str, api: str = "", program: str = sys.executable
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [program, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_API_URL": api, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check_end(process: subprocess.Popen[str], code: int, seconds: float) -> tuple[str, str]:
    """Wait for the end: with one line about the loss, and no more."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, err
    assert err.count(LOST) == 1, err
    assert "Still processing items" not in err
    return out, err


@pytest.mark.slow
@pytest.mark.parametrize("when", ["begin", "middle", "end"])
def test_a_flow_whose_temporary_server_is_killed_returns_its_result(when: str) -> None:
    program = sys.executable if when == "middle" else python()
    with started("-c", PROGRAM, when, program=program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "result 190\n"
        _, err = check_end(process, 0, END_TIMEOUT_S)
    for noise in ("failed with", "failed to process", "ConnectError"):
        assert noise not in err, err
    assert "the temporary Prefect server was killed by SIGKILL" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_flow_that_fails_after_its_server_raises_its_own_error() -> None:
    with started("-c", PROGRAM, "failure") as process:
        _, err = check_end(process, 1, START_TIMEOUT_S)
    assert err.rstrip().endswith("ValueError: the flow's own error")


@pytest.mark.slow
def test_an_interrupt_after_the_server_has_died_ends_the_flow() -> None:
    with started("-c", PROGRAM, "interrupt") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "killed\n"
        process.send_signal(signal.SIGINT)
        check_end(process, 130, END_TIMEOUT_S)


@pytest.mark.slow
def test_a_configured_server_that_vanishes_at_the_end_ends_no_flow(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/prefect.db",
    }
    environment.pop("PREFECT_API_URL", None)
    server = subprocess.Popen(
        [python(), "-P", str(REPOSITORY / "flows/server.py"), str(port)],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not healthy(url):
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.1)
    words = "-c", PROGRAM, "end", str(server.pid)
    with started(*words, api=url, program=python()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "result 190\n"
        check_end(process, 0, END_TIMEOUT_S)
    server.communicate()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "trace", [".lock", "checkpoints/round-00003/manifest.json"], ids=["begin", "end"]
)
def test_a_run_whose_server_is_killed_ends_with_its_table_and_the_same_files(
    played: Played, tmp_path: Path, trace: str
) -> None:
    config = debug(tmp_path)
    command = ["-m", "marin_rl", "run", str(DEBUG), "--root", str(tmp_path), "--run-id", "whole"]
    with started(*command, "--set", "policy.init=sft", program=python()) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (tmp_path / "whole" / trace).exists():
            assert process.poll() is None
            assert time.monotonic() < deadline, "the run did not come that far"
            time.sleep(0.01)
        os.kill(server_of(fork_of(process.pid)), signal.SIGKILL)
        out, _ = check_end(process, 0, START_TIMEOUT_S)
    assert "Run whole" in out
    assert "learning curve:" in out
    assert outcome(played.config).same_as(outcome(config)) == []


def server_of(process: int) -> int:
    """Process id of the Prefect server that a run has started."""
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"flows/server.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("the run has no server")
