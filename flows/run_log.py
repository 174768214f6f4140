"""Lines of a flow run's log in Prefect: each round, each new warning, and what the run learned.

Prefect's *Logs* tab and `prefect flow-run logs` show them. A flow that is started by hand has a
display of its own: its lines go to Prefect's API alone.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler

from flows.connection import has_caller
from marin_rl.analysis.status import headline
from marin_rl.analysis.warnings import NewWarnings
from marin_rl.display.tables import COLUMNS, METRICS, formatted
from marin_rl.progress import ProgressEvent, listening
from marin_rl.rollouts.data_warnings import has_more_examples
from marin_rl.storage.runs import Run

_to_api = logging.getLogger("marin_rl.flow_runs")


@contextmanager
def logging_rounds(run: Run) -> Iterator[None]:
    """Log the rounds of `run` in the flow run around this block, if there is one."""
    flow = FlowRunContext.get()
    if flow is None or flow.flow_run is None:
        yield
        return
    rows: dict[int, dict[str, Any]] = {}
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
    if not has_caller() or isinstance(adapter, logging.Logger):
        return adapter
    if not _to_api.handlers:
        _to_api.addHandler(APILogHandler())
        _to_api.setLevel(logging.INFO)
        _to_api.propagate = False
    return logging.LoggerAdapter(_to_api, adapter.extra)
