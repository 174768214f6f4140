"""Progress events of this process, and their listeners.

Stages publish events; the terminal display, trackers and reports listen. Nothing here is durable. A
listener that raises is logged and removed, so that it can never stop a run.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal[
    "start", "sft", "reward_model", "serve", "generate", "process", "train", "evaluate", "round",
    "done",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """`done` of `total` units of one stage; `metrics` are named as in the metrics file."""

    run_id: str
    stage: Stage
    round: int | None = None
    done: int = 0
    total: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    message: str = ""


Listener = Callable[[ProgressEvent], None]

_listeners: list[Listener] = []
_lock = threading.Lock()
_log = logging.getLogger(__name__)


def publish(event: ProgressEvent) -> None:
    """Call every listener. Never raises."""
    with _lock:
        listeners = tuple(_listeners)
    for listener in listeners:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - a listener's fault must not reach the run
            _log.warning("a progress listener failed and was removed", exc_info=True)
            _remove(listener)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with every event published inside the block."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        _remove(listener)


def _remove(listener: Listener) -> None:
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
