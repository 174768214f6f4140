"""Progress events of this process and their listeners, and phases: work that may take long.

Stages publish events; the terminal display, trackers and reports listen. Work that may last seconds
without an event is a `phase`: while one is open, a thread says its name, count and seconds whenever
nothing was said for SILENCE_S. Nothing here is durable. A listener that raises is logged and
removed, so that it can never stop a run.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal[
    "start", "sft", "reward_model", "preference", "serve", "generate", "process", "train",
    "evaluate", "round", "done",
]  # fmt: skip
OF_STEPS = ("sft", "reward_model", "preference")  # stages that count optimizer steps, no rounds


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


# Seconds without a line after which an open phase is named: a user waits 5 s at most.
SILENCE_S = 4.0
_TICKS = 8  # looks at the clock in that time

Say = Callable[[str], None]


class Phase:
    """Work in progress: `name`, and `done` of `total` units where these are counted.

    A name that is a function is asked each time: its text then has counts of its own.
    """

    def __init__(self, name: str | Callable[[], str]) -> None:
        self._name, self.done, self.total = name, 0, 0
        self.began = time.monotonic()

    def listen(self, event: ProgressEvent) -> None:
        """Take the counts of an event: a phase is a listener, too."""
        self.done, self.total = event.done, event.total

    def line(self, now: float) -> str:
        """Name, counts and seconds: `compiling the training step 3/20 (12 s)`."""
        if callable(self._name):
            return self._name()
        counts = f" {self.done}/{self.total}" if self.total else ""
        return f"{self._name}{counts} ({now - self.began:.0f} s)"


class Heartbeat:
    """Says the newest open phase, one line for each `silence_s` in which nothing else was said."""

    def __init__(self, say: Say, silence_s: float | None) -> None:
        self._say, self.silence_s = say, silence_s
        self.heard = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line, and count the silence from now on."""
        self.heard = time.monotonic()
        self._say(line)

    def beat(self, phase: Phase, now: float) -> None:
        """Say the phase if it is time."""
        # A command that read files for a while before its first phase was not silent in it.
        quiet_since = max(self.heard, _opened_at)
        if self.silence_s is not None and now - quiet_since >= self.silence_s:
            with suppress(OSError, ValueError):  # the terminal is gone; the work goes on
                self.say(f"{phase.line(now)}…")


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


_heartbeats: list[Heartbeat] = []
_phases: list[Phase] = []
_opened_at = 0.0  # when the first of the open phases began
_ticker: threading.Thread | None = None


@contextmanager
def saying(say: Say = _to_stderr, silence_s: float | None = SILENCE_S) -> Iterator[Heartbeat]:
    """Give lines and phases of the block to `say`; None: no phase is said by itself."""
    heartbeat = Heartbeat(say, silence_s)
    with _lock:
        _heartbeats.append(heartbeat)
        _tick()
    try:
        yield heartbeat
    finally:
        with _lock:
            _heartbeats.remove(heartbeat)


def say(line: str) -> None:
    """Print a line where progress of this process is printed; by default on standard error."""
    heartbeats = tuple(_heartbeats)
    (heartbeats[-1].say if heartbeats else _to_stderr)(line)


@contextmanager
def phase(name: str | Callable[[], str]) -> Iterator[Phase]:
    """Open a phase for the block, or for each call of a function that this decorates.

    It is said where something of this process is listened to by `saying`, and lasts long enough.
    """
    global _opened_at
    opened = Phase(name)
    with _lock:
        if not _phases:
            _opened_at = opened.began
        _phases.append(opened)
        _tick()
    try:
        yield opened
    finally:
        with _lock:
            _phases.remove(opened)


def open_phase() -> Phase | None:
    phases = tuple(_phases)
    return phases[-1] if phases else None


def _tick() -> None:
    """Start the thread that watches the clock; it ends with the last phase. Holds the lock."""
    global _ticker
    if _ticker is None and _heartbeats and _phases:
        _ticker = threading.Thread(target=_watch, name="heartbeat", daemon=True)
        _ticker.start()


def _watch() -> None:
    global _ticker
    while True:
        with _lock:
            if not _phases or not _heartbeats:
                _ticker = None
                return
            newest, heartbeat = _phases[-1], _heartbeats[-1]
        heartbeat.beat(newest, time.monotonic())
        time.sleep((heartbeat.silence_s or SILENCE_S) / _TICKS)
