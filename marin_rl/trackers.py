"""Trackers of metrics in addition to the run's own files: TensorBoard, W&B and trackio.

The truth is the committed metrics; trackers repeat it for people who have their own boards. Each
works on a thread of its own. One that cannot be opened, fails later, or does not keep up is named
once in the log and left out: it neither stops a run nor delays it. Trackio alone is opened by the
thread that opens the trackers, since only there its output can be suppressed.
"""

import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from queue import Full, Queue
from typing import Protocol, runtime_checkable

from marin_rl.config import Config, fingerprint_fields
from marin_rl.progress import ProgressEvent

ROWS_WAITING_MAX = 10_000
CLOSING_S = 40.0  # trackio gives itself 30

_log = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Interface of a tracker. Either method may raise; `Trackers` copes."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of one round (or, of a warm start or reward model, of one step)."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


class TensorBoard:
    """Scalars in `folder/run_id`, through tensorboardX (extra `tensorboard`).

    Written as events of its own making: `add_scalar` would rename `eval/pass@8` to `eval/pass_8`.
    """

    def __init__(self, folder: str, run_id: str) -> None:
        from tensorboardX import FileWriter

        self._writer = FileWriter(str(Path(folder) / run_id))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar per metric, named as it is defined."""
        # protobuf makes the class when it is imported
        from tensorboardX.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        scalars = [
            Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()
        ]
        self._writer.add_summary(Summary(value=scalars), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """A Weights & Biases run that is continued when the run is (extra `wandb`).

    W&B numbers its own steps and refuses to go back, so ours is logged as the metric `step`.
    """

    def __init__(self, config: Config) -> None:
        import wandb

        trackers = config.trackers
        self._run = wandb.init(
            project=trackers.wandb_project,
            name=config.run_id,
            id=config.run_id,
            resume="allow",
            mode=trackers.wandb_mode,
            config=fingerprint_fields(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row per call."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish; in offline mode `wandb sync` uploads the folder later."""
        self._run.finish()


class Trackio:
    """A trackio run on this machine, continued when the run is (extra `trackio`).

    Its files lie where TRACKIO_DIR says; `trackio show` draws them. What it prints is kept back.
    """

    def __init__(self, config: Config) -> None:
        import trackio  # pyright: ignore[reportMissingImports] - an extra that few install

        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=str(config.trackers.trackio_project),
                name=config.run_id,
                resume="allow",
                config=fingerprint_fields(config),
                embed=False,
                auto_log_gpu=False,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row per call."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait, within trackio's own limit of half a minute, until the rows are written."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()


class Board:
    """A tracker on a thread of its own: it can neither raise into the run nor hold it up."""

    def __init__(self, name: str, opening: Callable[[], Tracker]) -> None:
        self._name = name
        self._rows: Queue[tuple[Mapping[str, float], int] | None] = Queue(ROWS_WAITING_MAX)
        self._out, self._telling = threading.Event(), threading.Lock()
        self._thread = threading.Thread(
            target=self._work, args=(opening,), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand a row over, and return at once."""
        if self._out.is_set():
            return
        try:
            self._rows.put_nowait((dict(metrics), step))
        except Full:
            self._leave(f"it is {ROWS_WAITING_MAX} rows behind")

    def close(self) -> None:
        """Wait for what was handed over, within a limit of time."""
        if self._out.is_set():
            return
        with suppress(Full):
            self._rows.put(None, timeout=CLOSING_S)
            self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            self._leave(f"it did not finish within {CLOSING_S:g} s")

    def _work(self, opening: Callable[[], Tracker]) -> None:
        try:
            tracker = opening()
            while (row := self._rows.get()) is not None:
                tracker.log(*row)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - a tracker's fault must not reach the run
            self._leave(f"{type(error).__name__}: {error}")

    def _leave(self, why: str) -> None:
        with self._telling:
            if not self._out.is_set():
                _log.warning("tracker %s failed and is left out: %s", self._name, why)
                self._out.set()


class Trackers:
    """Several boards as one that never raises and never waits but in `close`."""

    def __init__(self, boards: Sequence[Board]) -> None:
        self._boards = list(boards)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give `metrics` to every board that still works."""
        for board in self._boards if metrics else ():
            board.log(metrics, step)

    def close(self) -> None:
        """Let every board that still works finish."""
        for board in self._boards:
            board.close()
        self._boards.clear()

    def listen(self, event: ProgressEvent) -> None:
        """A progress listener: what a finished round, evaluation or warm-start step measured."""
        if event.stage in ("round", "evaluate") and event.round is not None:
            self.log(event.metrics, event.round)
        elif event.stage in ("sft", "reward_model"):
            self.log(event.metrics, event.done)


def open_trackers(config: Config) -> Trackers:
    """The trackers that the configuration asks for; they open while the run begins.

    Trackio has been opened when this returns, which waits for it.
    """
    settings = config.trackers
    openings: dict[str, Callable[[], Tracker]] = {}
    if (folder := settings.tensorboard) is not None:
        openings["TensorBoard"] = lambda: TensorBoard(folder, config.run_id)
    if settings.wandb_project is not None:
        openings["WandB"] = lambda: WandB(config)
    if settings.trackio_project is not None:
        openings["Trackio"] = _opened_here(lambda: Trackio(config))
    return Trackers([Board(name, opening) for name, opening in openings.items()])


def _opened_here(opening: Callable[[], Tracker]) -> Callable[[], Tracker]:
    """Open on this thread, and let the board find the tracker, or what went wrong.

    For who must keep back what is printed meanwhile, which is one for all threads.
    """
    try:
        tracker = opening()
    except Exception as error:  # noqa: BLE001 - the tracker reports it
        failure = error

        def failed() -> Tracker:
            raise failure

        return failed
    return lambda: tracker
