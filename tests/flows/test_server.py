"""The API that a flow reports to, and the life of a temporary server."""

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import get_current_settings, temporary_settings
from support.flow_runs import REPOSITORY

from flows.reports import quieten
from flows.server import ApiConnection, _current, end_senders, free_port, healthy, prefect_api

PROGRAM = """
import time
from flows.server import healthy
from flows.server import prefect_api
with prefect_api() as connection:
    url = connection.url
    try:
        print(url, flush=True)  # whoever reads it may interrupt at once
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(2)
        print(healthy(url), flush=True)
"""


def test_an_api_that_answers_is_used(api: str) -> None:
    with temporary_settings(updates={"api.url": api}), prefect_api() as connection:
        assert connection.url == api
        assert get_current_settings().api.url == api


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no such server today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nowhere = {"api.url": f"http://127.0.0.1:{free_port()}/api"}
    with (
        temporary_settings(updates=nowhere),
        pytest.raises(RuntimeError, match="no such server today"),
        prefect_api(),
    ):
        pass


class LingeringClient(NullEventsClient):
    """A client of Prefect's events that takes its time to end."""

    entered, leaving, may_end = (threading.Event() for _ in range(3))

    async def __aenter__(self) -> "LingeringClient":
        self.entered.set()
        return await super().__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        self.leaving.set()
        await asyncio.to_thread(self.may_end.wait)
        await super().__aexit__(*error)


def test_all_who_end_a_sender_wait_for_its_end(api: str) -> None:
    """Else one that ends later would report what is known."""
    EventsWorker.set_client_override(LingeringClient)
    try:
        with temporary_settings(updates={"api.url": api}):
            sender = EventsWorker.instance()
            assert LingeringClient.entered.wait(60)
            first = threading.Thread(target=end_senders)
            first.start()
            assert LingeringClient.leaving.wait(60)
            ended = list[bool]()

            def end_too() -> None:
                end_senders()
                ended.append(sender._done_event is not None and sender._done_event.is_set())

            second = threading.Thread(target=end_too)
            second.start()
            second.join(0.5)  # without a wait it would have returned
            LingeringClient.may_end.set()
            first.join()
            second.join()
    finally:
        EventsWorker.set_client_override(None)
    assert ended == [True]


CRASH = "Crash detected! Execution was cancelled by the runtime environment."
OTHER = "Crash detected! Request to http://127.0.0.1:4200 failed: ReadTimeout."


@pytest.mark.parametrize(("called", "told"), [(True, [OTHER]), (False, [CRASH, OTHER])])
def test_cancelled_tasks_are_logged_unless_a_caller_reports_the_error(
    api: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    called: object,
    told: list[str],
) -> None:
    quieten()
    logger = logging.getLogger("prefect.task_runs")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "handlers", [])
    connection = ApiConnection(api) if called else None
    token = _current.set(connection)
    logger.error(CRASH)
    logger.error(OTHER)
    _current.reset(token)
    if connection is not None:
        connection.close()
    assert [record.getMessage() for record in caplog.records] == told


def started(folder: Path) -> subprocess.Popen[str]:
    """The program, in a process group of its own as a shell makes one, and files in a folder."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_API_URL": "", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_flow_that_a_terminal_interrupts_can_still_tell_its_server(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http")
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "True\n"
    assert process.returncode == 0


@pytest.mark.slow
def test_a_temporary_server_ends_with_a_flow_that_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert healthy(url)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while healthy(url):
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.1)


HISTORY = """
import os
from prefect import flow, task
from flows.server import prefect_api

@task(retries=1, retry_delay_seconds=0)
async def stage(number):
    if number == 2 and not os.environ.pop("FAILED", None):
        os.environ["FAILED"] = "1"
        raise ValueError("once")
    return number

@flow(persist_result=False)
async def stages():
    return sum([await stage(number) for number in range(20)])

with prefect_api() as connection:
    print("result", connection.run(stages), flush=True)
"""


@pytest.mark.slow
def test_flows_at_once_leave_their_history_in_the_profile_and_pass_no_proxy(tmp_path):
    """Three begin on no database at all; nothing answers at the proxies."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    proxies = {"HTTP_PROXY": nowhere, "ALL_PROXY": nowhere, "http_proxy": nowhere}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", HISTORY],
            cwd=REPOSITORY,
            env={**os.environ, **proxies, "PREFECT_API_URL": "", "PREFECT_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for run in runs:
        out, err = run.communicate()
        assert (run.returncode, out) == (0, "result 190\n"), err
        assert "locked" not in err
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database:
        count = lambda query: database.execute(query).fetchall()
        states = "select state_type, count(*) from {} group by 1"
        assert count(states.format("flow_run")) == [("COMPLETED", 3)]
        assert count(states.format("task_run")) == [("COMPLETED", 60)]
        assert count("select sum(run_count) from task_run") == [(63,)]
        assert count("select count(*) from events") == [(0,)]
