"""What a run shows in the Prefect UI: artifacts, made in the background, never in its way.

Per round a Markdown page (numbers, two rollouts, where the files lie); per run a table of its
rounds, a learning curve and a progress bar, updated in place. A thread of its own reads the
committed files and talks to the server, some 50 ms an artifact. Where rounds are faster than that,
some get no page. What fails is logged once, and ends the reports, not the run.
"""

import base64
import json
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.logging import get_logger

from marin_rl.analysis.report import learning_curve
from marin_rl.analysis.status import metric_rows
from marin_rl.progress import ProgressEvent, listening
from marin_rl.storage.rollouts import iter_shards
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, metrics_key, rollouts_slot

PAGES_WAITING_MAX = 16
SUMMARY_EVERY_S = 10.0
CLOSING_S = 10.0
TABLE_ROWS_MAX = 200
TEXT_CHARACTERS_MAX = 1000

TABLE_COLUMNS = {
    "reward": "reward",
    "eval/accuracy": "held-out accuracy",
    "completions/mean_length": "tokens each",
    "entropy": "entropy",
    "mismatch_kl": "mismatch KL",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "perf/tokens_per_second": "tokens/s",
    "timing_s/round": "seconds",
}

Row = dict[str, Any]


@contextmanager
def reporting(run: Run) -> Iterator[None]:
    """Report on `run` to the flow run around this block, if there is one."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    reporter = Reporter(run, context.flow_run.id)
    with listening(reporter.listen):
        try:
            yield
        finally:
            reporter.close()


class Reporter:
    """Takes in progress events and turns them into artifacts of one flow run."""

    def __init__(self, run: Run, flow_run_id: UUID) -> None:
        self._run, self._flow_run_id = run, flow_run_id
        self._slug = re.sub(r"[^a-z0-9]+", "-", run.run_id.lower()).strip("-") or "run"
        self._pages: deque[tuple[int, Row]] = deque(maxlen=PAGES_WAITING_MAX)
        self._rows: dict[int, Row] = {}
        self._lock = threading.Lock()
        self._made: dict[str, UUID] = {}
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="reports", daemon=True
        )
        self._thread.start()

    def listen(self, event: ProgressEvent) -> None:
        """A progress listener: remember what a round or an evaluation measured."""
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
        """Make what is waiting, within a limit of time."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSING_S)

    def _note(self, round: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._rows.setdefault(round, {"round": round}).update(metrics)

    def _work(self) -> None:
        try:
            for row in metric_rows(self._run):
                self._note(row["round"], {k: v for k, v in row.items() if v is not None})
            with get_client(sync_client=True) as client:
                self._report(client)
        except Exception as error:  # noqa: BLE001 - a page that cannot be made must not end a run
            get_logger("marin_rl").warning(
                "no more artifacts for this run: %s: %s", type(error).__name__, error
            )

    def _report(self, client: SyncPrefectClient) -> None:
        summed_up = -SUMMARY_EVERY_S
        closing = False
        while not closing:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()
            while self._pages:
                self._make(
                    client, "rounds", "markdown", round_page(self._run, *self._pages.popleft())
                )
            if closing or time.monotonic() - summed_up >= SUMMARY_EVERY_S:
                self._sum_up(client)
                summed_up = time.monotonic()

    def _sum_up(self, client: SyncPrefectClient) -> None:
        with self._lock:
            rows = [dict(self._rows[round]) for round in sorted(self._rows)]
        if not rows:
            return
        done = rows[-1]["round"] + ("rollouts/generated" in rows[-1])
        share = min(100.0, 100.0 * done / self._run.config.rounds)
        picture = base64.b64encode(learning_curve(rows, self._run.run_id)).decode()
        self._update(client, "progress", "progress", share)
        self._update(client, "table", "table", rounds_table(rows))
        self._update(client, "learning-curve", "image", f"data:image/png;base64,{picture}")

    def _update(self, client: SyncPrefectClient, name: str, kind: str, data: Any) -> None:
        if name in self._made:
            client.update_artifact(self._made[name], ArtifactUpdate(data=data))
        else:
            self._made[name] = self._make(client, name, kind, data)

    def _make(self, client: SyncPrefectClient, name: str, kind: str, data: Any) -> UUID:
        artifact = ArtifactCreate(
            key=f"{self._slug}-{name}",
            type=kind,
            description=f"Run {self._run.run_id} under {self._run.store.url}",
            data=data,
            flow_run_id=self._flow_run_id,
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


def round_page(run: Run, round: int, metrics: Mapping[str, float]) -> str:
    """The Markdown page of one round: its numbers, its best and its worst rollout, its files."""
    numbers = [f"| {name} | {_short(value)} |" for name, value in sorted(metrics.items())]
    slots = (
        rollouts_slot(round),
        batches_slot(round),
        checkpoint_slot(round + 1),
        metrics_key(round),
    )
    return "\n".join(
        [
            f"# {run.run_id}, round {round}",
            "| metric | value |",
            "|---|---|",
            *numbers,
            "",
            *_samples(run, round),
            "## Files",
            *(f"- `{run.store.url_of(slot)}`" for slot in slots),
        ]
    )


def _samples(run: Run, round: int) -> list[str]:
    """The best and the worst rollout of the round's first shard."""
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
    return lines


def _quoted(text: str) -> list[str]:
    """A code block that nothing in `text` can close: a model wrote it."""
    if len(text) > TEXT_CHARACTERS_MAX:
        text = text[:TEXT_CHARACTERS_MAX] + " …"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + "text", text, fence, ""]


def _short(value: float | None) -> str | float | None:
    return value if value is None else float(f"{value:.5g}")
