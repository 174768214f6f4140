"""A run in Prefect: lines of its flow run's log, and artifacts, made in the background.

A line is logged for each round, each new warning, and what the run learned: Prefect's *Logs* tab
and `prefect flow-run logs` show them. A flow that is started by hand has a display of its own: its
lines go to Prefect's API alone.

Per round a Markdown page (metrics, two rollouts, places of files); per run a table of its rounds, a
learning curve (after a minute, and at the end) and a progress bar, updated in place, also by the
process that continues after a crash. That process marks the tasks of the dead one as crashed too,
which Prefect would show as running for ever. A thread of its own reads the committed files and
talks to the server, some 50 ms an artifact; where rounds are faster, some get no page. An error is
logged once, and ends the reports, not the run.
"""

import base64
import json
import logging
import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any
from urllib.parse import quote
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.logging import get_logger, get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.states import Crashed

from flows.server import current_connection
from marin_rl.analysis.status import headline, metric_rows
from marin_rl.analysis.warnings import NewWarnings
from marin_rl.display.tables import COLUMNS, METRICS, formatted
from marin_rl.errors import MarinRLError
from marin_rl.pages.charts import learning_curve
from marin_rl.progress import ProgressEvent, listening
from marin_rl.rollouts.data_warnings import has_more_examples
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, metrics_key, rollouts_slot
from marin_rl.storage.tables.rollouts import iter_shards

PAGES_WAITING_MAX = 16
SUMMARY_EVERY_S = 10.0
CURVE_EVERY_S = 60.0  # matplotlib takes 40 MB, 1.4 s of a core once and 0.2 s for every curve
CLOSING_S = 10.0
TABLE_ROWS_MAX = 200
TEXT_CHARACTERS_MAX = 1000
ERROR_SHOWN = 72  # characters of an error in a task's last line

KEPT = ("progress", "table", "learning-curve")  # artifacts that are updated in place

TABLE_COLUMNS = {
    name: METRICS[name][0] for name in (*COLUMNS[:5], "loss", "grad_norm", *COLUMNS[5:])
}

Row = dict[str, Any]

_to_api = logging.getLogger("marin_rl.flow_runs")


@contextmanager
def reporting(run: Run) -> Iterator[None]:
    """Report on `run` to the flow run around this block, if there is one."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    reporter = Reporter(run, context.flow_run.id, context.flow_run.run_count)
    with listening(reporter.listen):
        try:
            with _logging_rounds(run):
                yield
        finally:
            reporter.close()


class Reporter:
    """Makes artifacts of one flow run from progress events.

    `attempt` counts the processes of the flow run, this one included.
    """

    def __init__(self, run: Run, flow_run_id: UUID, attempt: int = 1) -> None:
        self._run, self._flow_run_id, self._attempt = run, flow_run_id, attempt
        self._connection = current_connection()
        self._slug = re.sub(r"[^a-z0-9]+", "-", run.run_id.lower()).strip("-") or "run"
        self._pages: deque[tuple[int, Row]] = deque(maxlen=PAGES_WAITING_MAX)
        self._rows: dict[int, Row] = {}
        self._lock = threading.Lock()
        self._made: dict[str, UUID] = {}
        self._drawn = time.monotonic()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="reports", daemon=True
        )
        self._thread.start()

    def listen(self, event: ProgressEvent) -> None:
        """A progress listener: note the metrics of rounds and evaluations."""
        if event.run_id != self._run.run_id or event.round is None or not event.metrics:
            return
        if event.stage == "evaluate" and "eval/accuracy" not in event.metrics:
            return
        if event.stage in ("round", "evaluate"):
            self._note(event.round, event.metrics)
        if event.stage == "round" and "rollouts/generated" in event.metrics:
            self._pages.append((event.round, dict(event.metrics)))
            self._wake.set()

    def close(self) -> None:
        """Make the waiting artifacts, for at most CLOSING_S."""
        self._closing.set()
        self._wake.set()
        if not self._api_lost():
            self._thread.join(CLOSING_S)

    def _api_lost(self) -> bool:
        return self._connection is not None and self._connection.lost

    def _note(self, round: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._rows.setdefault(round, {"round": round}).update(metrics)

    def _work(self) -> None:
        try:
            for row in metric_rows(self._run):
                self._note(row["round"], {k: v for k, v in row.items() if v is not None})
            with get_client(sync_client=True) as client:
                if self._attempt > 1:
                    self._take_over(client)
                self._report(client)
        except Exception as error:  # noqa: BLE001 - a page that cannot be made must not end a run
            if self._api_lost():
                return  # which is reported once, by the connection
            get_logger("marin_rl").warning(
                "no more artifacts for this run: %s: %s", type(error).__name__, error
            )

    def _take_over(self, client: SyncPrefectClient) -> None:
        """Take over the artifacts of earlier processes, and mark their open tasks as crashed."""
        own = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[self._flow_run_id]))
        keys = {self._key(name): name for name in KEPT}
        named = filters.ArtifactFilter(key=filters.ArtifactFilterKey(any_=list(keys)))
        for artifact in client.read_artifacts(artifact_filter=named, flow_run_filter=own):
            if artifact.key is not None and artifact.id is not None:
                self._made[keys[artifact.key]] = artifact.id
        types = filters.TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
        active_tasks = filters.TaskRunFilter(state=filters.TaskRunFilterState(type=types))
        for task in client.read_task_runs(flow_run_filter=own, task_run_filter=active_tasks):
            if task.flow_run_run_count < self._attempt:
                state = Crashed(message="The process died; another one went on from the files.")
                client.set_task_run_state(task.id, state, force=True)

    def _report(self, client: SyncPrefectClient) -> None:
        summed_up = -SUMMARY_EVERY_S
        closing = False
        while not closing:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()
            while self._pages:
                round, metrics = self._pages.popleft()
                page = round_page(self._run, round, metrics, self._key)
                shown = {"reward": "reward", "eval/accuracy": "held-out accuracy"}
                numbers = [f"{t} {metrics[n]:.3f}" for n, t in shown.items() if n in metrics]
                text = f"Round {round}: {', '.join(numbers) or 'no reward'}"
                self._make(client, "rounds", "markdown", page, text)
            if closing or time.monotonic() - summed_up >= SUMMARY_EVERY_S:
                self._sum_up(client)
                summed_up = time.monotonic()

    def _sum_up(self, client: SyncPrefectClient) -> None:
        with self._lock:
            rows = [dict(self._rows[round]) for round in sorted(self._rows)]
        if not rows:
            return
        run, planned = self._run, self._run.config.rounds
        done = min(rows[-1]["round"] + ("rollouts/generated" in rows[-1]), planned)
        text = f"{done} of {planned} rounds of {run.run_id}"
        self._update(client, "progress", "progress", 100.0 * done / planned, text)
        text = f"The rounds of {run.run_id}, newest first. Files: `{run.store.url}`"
        self._update(client, "table", "table", rounds_table(rows), text)
        if self._closing.is_set() or time.monotonic() - self._drawn >= CURVE_EVERY_S:
            self._drawn = time.monotonic()
            picture = base64.b64encode(learning_curve(rows, run.run_id)).decode()
            shown = f"![Learning curve](data:image/png;base64,{picture})"
            text = f"Reward and held-out accuracy of {run.run_id}"
            self._update(client, "learning-curve", "markdown", shown, text)

    def _key(self, name: str) -> str:
        """The key of an artifact of this run: Prefect allows letters, digits and dashes."""
        return f"{self._slug}-{name}"

    def _update(
        self, client: SyncPrefectClient, name: str, kind: str, data: Any, text: str
    ) -> None:
        if name in self._made:
            client.update_artifact(self._made[name], ArtifactUpdate(data=data, description=text))
        else:
            self._made[name] = self._make(client, name, kind, data, text)

    def _make(self, client: SyncPrefectClient, name: str, kind: str, data: Any, text: str) -> UUID:
        key, flow_run = self._key(name), self._flow_run_id
        artifact = ArtifactCreate(
            key=key, type=kind, description=text, data=data, flow_run_id=flow_run
        )
        return client.create_artifact(artifact).id


def rounds_table(rows: Sequence[Row]) -> str:
    """The latest rounds, newest first, as the JSON of a table artifact; no empty columns."""
    latest = rows[: -TABLE_ROWS_MAX - 1 : -1]
    names = [name for name in TABLE_COLUMNS if any(name in row for row in latest)]
    table = [
        {"round": row["round"], **{TABLE_COLUMNS[name]: _short(row.get(name)) for name in names}}
        for row in latest
    ]
    return json.dumps(table)


def round_page(
    run: Run, round: int, metrics: Mapping[str, float], key: Callable[[str], str]
) -> str:
    """The Markdown page of one round: main metrics, samples, commands, files, every metric.

    `key` returns the keys of the run's other artifacts, which the page links to.
    """
    main = {title: metrics[name] for name, title in TABLE_COLUMNS.items() if name in metrics}
    committed = (rollouts_slot(round), batches_slot(round), checkpoint_slot(round + 1))
    root = "" if run.config.root == "runs" else f" --root {shlex.quote(run.config.root)}"
    commands = (
        f"marin-rl view {run.run_id}{root}",
        f"marin-rl rollouts {run.run_id} --round {round} --worst{root}",
        f"marin-rl status {run.run_id}{root}",
    )
    columns = ("example_id", "turns", "answer", "reward", "status")
    table = next(iter_shards(run, round, columns))
    rows = [row for row in table.to_pylist() if row["reward"] is not None]
    rows.sort(key=lambda row: row["reward"])
    picked = [("Best", rows[-1]), ("Worst", rows[0])] if rows else []
    lines: list[str] = []
    for title, row in picked:
        lines += [f"## {title} rollout: reward {_short(row['reward'])} ({row['status']})", ""]
        for turn in row["turns"] or ():
            lines += [f"**{turn['role']}**", *_quoted(turn["content"])]
        lines += ["**reference answer**", *_quoted(row["answer"])] if row["answer"] else []
    return "\n".join(
        [
            f"# {run.run_id}, round {round}",
            f"[all rounds](/artifacts/key/{key('table')}) · "
            f"[learning curve](/artifacts/key/{key('learning-curve')})",
            "",
            *_table(main),
            *lines,
            "## Look closer",
            *_quoted("\n".join(commands)),
            "## Files",
            *(f"- {_linked(run.store.url_of(slot))}" for slot in (*committed, metrics_key(round))),
            "",
            "## Every metric",
            *_table(dict(sorted(metrics.items()))),
        ]
    )


def _linked(url: str) -> str:
    """Link a URL of a bucket to the provider's console; show others as code."""
    scheme, _, place = url.partition("://")
    bucket, _, name = place.partition("/")
    pages = {
        "gs": f"https://console.cloud.google.com/storage/browser/{quote(place)}",
        "s3": f"https://console.aws.amazon.com/s3/buckets/{quote(bucket)}?prefix={quote(name)}",
    }
    return f"[{url}]({pages[scheme]})" if scheme in pages else f"`{url}`"


def _table(numbers: Mapping[str, float]) -> list[str]:
    rows = [f"| {name} | {_short(value)} |" for name, value in numbers.items()]
    return ["| metric | value |", "|---|--:|", *rows, ""]


def _quoted(text: str) -> list[str]:
    """A code block that nothing in `text` can close: a model wrote it."""
    if len(text) > TEXT_CHARACTERS_MAX:
        text = text[:TEXT_CHARACTERS_MAX] + " …"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + "text", text, fence, ""]


def _short(value: float | None) -> str | float | None:
    return value if value is None else float(f"{value:.5g}")


@contextmanager
def _logging_rounds(run: Run) -> Iterator[None]:
    rows: dict[int, Row] = {}
    log, context = _logger(), copy_context()  # the flow's settings: events come of other threads

    def say(level: int, line: str) -> None:
        # A copy: two threads cannot be in one context at once.
        context.copy().run(log.log, level, line)

    warnings = NewWarnings(
        run.run_id, partial(say, logging.WARNING), more_examples=has_more_examples(run.config)
    )

    def listen(event: ProgressEvent) -> None:
        if event.run_id != run.run_id or event.round is None or not event.metrics:
            return
        if event.stage == "round" or "eval/accuracy" in event.metrics:
            rows.setdefault(event.round, {"round": event.round}).update(event.metrics)
        if event.stage == "round":
            say(logging.INFO, f"round {event.round}: {_numbers(event.metrics)}")
        warnings.listen(event)

    with listening(listen):
        yield
    # How held-out accuracy changed in the rounds of this process.
    if line := headline([rows[round] for round in sorted(rows)], run.run_id):
        say(logging.INFO, line)


def _numbers(metrics: Mapping[str, float]) -> str:
    named = ((METRICS[name][0], formatted(name, metrics)) for name in COLUMNS)
    return ", ".join(f"{title} {value}" for title, value in named if value)


def _logger() -> "logging.Logger | logging.LoggerAdapter[Any]":
    """The flow run's logger; of a flow that is played by hand without the console."""
    adapter = get_run_logger()
    if current_connection() is None or isinstance(adapter, logging.Logger):
        return adapter
    if not _to_api.handlers:
        _to_api.addHandler(APILogHandler())
        _to_api.setLevel(logging.INFO)
        _to_api.propagate = False
    return logging.LoggerAdapter(_to_api, adapter.extra)


def quieten() -> None:
    """Reduce Prefect's repeated lines and traces to one line each."""
    for name in ("prefect.task_runs", "prefect.flow_runs"):
        logging.getLogger(name).addFilter(_terse)


def _terse(record: logging.LogRecord) -> bool:
    """Drop the final state of tasks and flows, and the traces of errors that a caller reports.

    An error is reported in full once: by the caller of `ApiConnection.run`, else by the flow. A
    task, which may fail where its flow goes on, says how it begins. That tasks were cancelled is
    no news where a caller reports what ended the flow.
    """
    error = record.exc_info[1] if record.exc_info else None
    connection, message = current_connection(), str(record.msg)
    if connection is not None and message.startswith("Crash detected! Execution was "):
        return False
    if isinstance(error, MarinRLError) or (connection is not None and isinstance(error, Exception)):
        text = "" if connection is not None else str(error)
        if record.name == "prefect.task_runs":
            text = str(error).partition("\n")[0]
            if len(text) > ERROR_SHOWN:
                text = f"{text[: ERROR_SHOWN - 1].rpartition(' ')[0]} …"
        line = f"failed: {type(error).__name__}"
        record.msg, record.args = "%s", (f"{line}: {text}" if text else line,)
        record.exc_info = record.exc_text = None
    return not message.startswith("Finished in state")
