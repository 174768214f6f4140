"""Live progress of a run, from its progress events.

Without a terminal, one plain line is printed per round, and one for what lasts long.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from marin_rl.display.tables import METRICS, duration, formatted, plain, sparkline
from marin_rl.progress import (
    OF_STEPS,
    SILENCE_S,
    ProgressEvent,
    Say,
    listening,
    open_phase,
    phase,
    saying,
)

LIVE = (
    "reward", "eval/accuracy", "perf/tokens_per_second", "entropy", "sft/loss",
    "reward_model/loss", "reward_model/accuracy", "preference/loss", "preference/accuracy",
)  # fmt: skip

STAGES = {
    "start": "starting",
    "sft": "warm start",
    "reward_model": "reward model",
    "preference": "learning from pairs",
    "serve": "loading weights",
    "generate": "generating",
    "process": "processing",
    "train": "training",
    "evaluate": "evaluating",
    "round": "round done",
    "done": "done",
}


class RunDisplay:
    """The state of a run by its progress events; `render()` draws it."""

    def __init__(self, run_id: str, rounds: int) -> None:
        self.run_id = run_id
        self.rounds = rounds
        self.round = 0
        self.stage = "start"
        self.done = 0
        self.total = 0
        self.metrics: dict[str, float] = {}
        self.rewards: list[float] = []
        self.accuracies: list[float] = []
        self.round_seconds: list[float] = []
        self._round_ended: float | None = None
        self._stage_began = time.monotonic()

    def update(self, event: ProgressEvent) -> None:
        """Apply one event; events of other runs are ignored."""
        if event.run_id != self.run_id:
            return
        if event.stage != self.stage:
            self._stage_began = time.monotonic()
        self.stage, self.done, self.total = event.stage, event.done, event.total
        if event.round is not None:
            self.round = event.round
        self.metrics.update(event.metrics)
        if event.stage == "evaluate" and "eval/accuracy" in event.metrics:
            self.accuracies.append(event.metrics["eval/accuracy"])
        if event.stage == "round":
            now = time.monotonic()
            if self._round_ended is not None:
                self.round_seconds.append(now - self._round_ended)
            self._round_ended = now
            if "reward" in event.metrics:
                self.rewards.append(event.metrics["reward"])

    def seconds_left(self) -> float | None:
        """Rounds to come times the mean seconds of the latest ten; None before two rounds."""
        latest = self.round_seconds[-10:]
        if not latest:
            return None
        return (self.rounds - self.round - 1) * sum(latest) / len(latest)

    def render(self) -> RenderableType:
        curves = (("reward   ", self.rewards), ("held-out ", self.accuracies))
        lines = [Text(f"{name} {sparkline(values)}") for name, values in curves if values]
        finished = min(self.round + (self.stage in ("round", "done")), self.rounds)
        left = self.seconds_left()
        rounds, numbers = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 3))
        rounds.add_row(
            f"round {finished:>4}/{self.rounds}",
            ProgressBar(total=max(self.rounds, 1), completed=finished, width=36),
            "" if left is None else f"about {duration(left)} left",
        )
        numbers.add_row(
            *(
                f"[dim]{METRICS[name][0]}[/dim] [bold]{formatted(name, self.metrics)}[/bold]"
                for name in LIVE
                if name in self.metrics
            )
        )
        inner, stage = open_phase(), self.stage_line()
        line = stage if inner is None else inner.line(time.monotonic())
        stage = stage if line == stage else f"{stage}: {line}"
        return Panel(
            Group(rounds, Text(stage, style="dim"), numbers, *lines),
            title=plain(self.run_id, "bold"),
            border_style="cyan",
        )

    def stage_line(self) -> str:
        """The stage with its counts and seconds: `round 3: generating 13/64 (12 s)`."""
        before = f"round {self.round}: "
        if self.stage in ("start", *OF_STEPS, "done"):
            before = ""
        amount = f" {self.done}/{self.total}" if self.total else ""
        seconds = time.monotonic() - self._stage_began
        return f"{before}{STAGES.get(self.stage, self.stage)}{amount} ({duration(seconds)})"


@contextmanager
def showing(display: RunDisplay, console: Console, silence_s: float = SILENCE_S) -> Iterator[None]:
    """Draw `display` live while the block runs; plain lines where the console is no terminal."""

    def write(line: str) -> None:
        console.print(plain(line), soft_wrap=True)

    if not console.is_terminal:
        with (
            saying(write, silence_s) as heartbeat,
            listening(lambda event: _print_event(display, heartbeat.say, event)),
            phase(display.stage_line),
        ):
            yield
        return
    with (
        Live(get_renderable=display.render, console=console, refresh_per_second=4, transient=False),
        saying(write, silence_s=None),  # the panel shows the phase
        listening(display.update),
        phase(display.stage_line),
    ):
        yield


def _print_event(display: RunDisplay, say: Say, event: ProgressEvent) -> None:
    display.update(event)
    if event.run_id != display.run_id:
        return
    if event.message and event.stage in ("start", "done"):
        say(event.message)
    elif event.stage == "round":
        line = f"round {event.round}"
        if "reward" in event.metrics:
            line += f"  reward {event.metrics['reward']:.3f}"
        if "eval/accuracy" in display.metrics:
            line += f"  held-out {display.metrics['eval/accuracy']:.1%}"
        if (left := display.seconds_left()) is not None:
            line += f"  {duration(left)} left"
        say(line)
    elif event.stage in OF_STEPS and event.total and event.done % 50 == 0:
        loss = event.metrics.get(f"{event.stage}/loss")
        tail = f"  loss {loss:.3f}" if loss is not None else ""
        say(f"{STAGES[event.stage]} {event.done}/{event.total}{tail}")
