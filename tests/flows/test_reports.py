"""Artifacts of the Prefect UI: pages that show model texts safely, and no trouble for the run."""

import json
import logging
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from prefect.client.schemas.objects import Artifact, State, TaskRun
from prefect.settings import temporary_settings
from prefect.states import Running
from support.flow_runs import Played

from flows.reports import Reporter, _linked, _quoted, round_page, rounds_table
from flows.server import free_port
from marin_rl.config import parse_config
from marin_rl.progress import ProgressEvent
from marin_rl.storage.runs import Run


def test_nothing_a_model_writes_ends_its_code_block() -> None:
    assert _quoted("plain") == ["```text", "plain", "```", ""]
    fence, text, end, _ = _quoted("a ```` b")
    assert (fence, text, end) == ("`````text", "a ```` b", "`````")
    assert _quoted("x" * 5000)[1] == "x" * 1000 + " …"


def test_the_table_has_the_newest_round_first_and_no_empty_column() -> None:
    rows = [{"round": 0, "reward": 0.123456789}, {"round": 1, "reward": 0.5, "loss": None}]
    assert json.loads(rounds_table(rows)) == [
        {"round": 1, "reward": 0.5, "loss": None},
        {"round": 0, "reward": 0.12346, "loss": None},
    ]
    assert json.loads(rounds_table(rows[:1])) == [{"round": 0, "reward": 0.12346}]


def test_the_table_is_bounded() -> None:
    table = json.loads(rounds_table([{"round": round, "reward": 0.0} for round in range(1000)]))
    assert [table[0]["round"], table[-1]["round"], len(table)] == [999, 800, 200]


def test_a_page_shows_numbers_rollouts_and_files(played: Played) -> None:
    run = Run.create_or_open(played.config)
    page = round_page(run, 1, {"reward": 0.25, "loss": 1.0}, lambda name: f"whole-{name}")
    assert page.startswith("# whole, round 1\n")
    assert "[all rounds](/artifacts/key/whole-table)" in page
    assert "| metric | value |\n|---|--:|\n| reward | 0.25 |\n| loss | 1.0 |\n" in page
    assert "| loss | 1.0 |\n| reward | 0.25 |" in page
    assert f"marin-rl view whole --root {run.config.root}" in page
    assert "## Best rollout: reward" in page
    assert "## Worst rollout: reward" in page
    assert "**user**\n```text\n" in page
    assert f"- `{run.store.url_of('checkpoints/round-00002')}`" in page


def test_places_on_buckets_can_be_clicked() -> None:
    console = "https://console.cloud.google.com/storage/browser/b/runs/demo/rollouts/round-00003"
    assert _linked("gs://b/runs/demo/rollouts/round-00003").endswith(f"({console})")
    assert "/s3/buckets/b?prefix=runs/demo)" in _linked("s3://b/runs/demo")
    assert _linked("/home/me/runs/demo") == "`/home/me/runs/demo`"


class DeadAndAlive:
    """A server that knows a flow run's second process, and what its first left."""

    def __init__(self, flow_run_id: UUID) -> None:
        self.table, self.ended = uuid4(), list[tuple[UUID, str]]()
        state = Running()
        fields = {"task_key": "t", "dynamic_key": "0", "flow_run_id": flow_run_id, "state": state}
        self.tasks = [
            TaskRun(id=uuid4(), flow_run_run_count=attempt, **fields) for attempt in (1, 1, 2)
        ]

    def read_artifacts(self, **_: Any) -> list[Artifact]:
        return [Artifact(id=self.table, key="my-run-table", type="table")]

    def read_task_runs(self, **_: Any) -> list[TaskRun]:
        return self.tasks

    def set_task_run_state(self, task: UUID, state: State[Any], **_: Any) -> None:
        self.ended.append((task, str(state.type.value)))


def test_a_retry_after_a_crash_ends_the_old_tasks_and_keeps_the_artifacts(tmp_path):
    run = Run.create_or_open(parse_config({"root": str(tmp_path), "run_id": "My_run"}))
    flow_run_id = uuid4()
    server = DeadAndAlive(flow_run_id)
    reporter = Reporter(run, flow_run_id)
    reporter._attempt = 2
    reporter._take_over(server)  # type: ignore[arg-type]
    reporter.close()
    assert server.ended == [(task.id, "CRASHED") for task in server.tasks[:2]]
    assert reporter._made == {"table": server.table}


def test_a_server_that_is_away_costs_one_line_in_the_log(tmp_path, caplog):
    run = Run.create_or_open(parse_config({"root": str(tmp_path), "run_id": "lonely"}))
    nowhere = {"api.url": f"http://127.0.0.1:{free_port()}/api", "client.max_retries": 0}
    with temporary_settings(updates=nowhere), caplog.at_level(logging.WARNING):
        reporter = Reporter(run, uuid4())
        for round in range(3):
            metrics = {"eval/accuracy": 0.5}
            event = ProgressEvent(run_id="lonely", stage="evaluate", round=round, metrics=metrics)
            reporter.listen(event)
        reporter.close()
    assert caplog.text.count("no more artifacts for this run") == 1


def test_events_of_other_runs_are_not_reported(tmp_path: Path) -> None:
    run = Run.create_or_open(parse_config({"root": str(tmp_path), "run_id": "mine"}))
    reporter = Reporter(run, uuid4())
    reporter.listen(ProgressEvent(run_id="other", stage="round", round=0, metrics={"reward": 1.0}))
    assert reporter._rows == {}
    reporter.close()
