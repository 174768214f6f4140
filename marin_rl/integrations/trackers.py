"""Trackers of metrics in addition to the run's own files: TensorBoard, W&B and trackio.

Each works on a thread of its own. One that cannot be opened, fails later, or does not keep up is
named once in the log and left out: it neither stops a run nor delays it. Trackio alone is opened by
the thread that opens the trackers, since only there its output can be suppressed.
"""

import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import redirect_stdout, suppress
from pathlib import Path
from queue import Full, Queue
from typing import Protocol, runtime_checkable

from marin_rl.config import Config, fingerprint_fields
from marin_rl.progress import OF_STEPS, ProgressEvent

ROWS_WAITING_MAX = 10_000
CLOSING_S = 40.0  # trackio gives itself 30

_log = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Interface of a tracker. Either method may raise; its `Board` catches it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars in `folder/run_id`, through tensorboardX (extra `tensorboard`).

    Events are written here because `add_scalar` would rename `eval/pass@8` to `eval/pass_8`.
    """

    def __init__(self, folder: str, run_id: str) -> None:
        from tensorboardX import FileWriter

        self._writer = FileWriter(str(Path(folder) / run_id))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # protobuf makes the class when it is imported
        from tensorboardX.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        values = [Summary.Value(tag=n, simple_value=float(v)) for n, v in metrics.items()]
        self._writer.add_summary(Summary(value=values), step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run that is continued when the run is (extra `wandb`).

    W&B counts steps by itself and refuses lower ones, so ours is logged as the metric `step`.
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
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A trackio run on this machine, continued when the run is (extra `trackio`).

    Its files lie in TRACKIO_DIR; `trackio show` draws them. What it prints is suppressed.
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
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until the rows are written, at most trackio's own 30 s."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()


class Board:
    """A tracker on its own thread: it can neither raise into the run nor delay it."""

    def __init__(self, name: str, opening: Callable[[], Tracker]) -> None:
        self._name = name
        self._rows: Queue[tuple[Mapping[str, float], int] | None] = Queue(ROWS_WAITING_MAX)
        self._out, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(
            target=self._work, args=(opening,), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._out.is_set():
            return
        try:
            self._rows.put_nowait((dict(metrics), step))
        except Full:
            self._leave(f"it is {ROWS_WAITING_MAX} rows behind")

    def close(self) -> None:
        """Wait at most CLOSING_S until the queued rows are logged."""
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
        with self._lock:
            if not self._out.is_set():
                _log.warning("tracker %s failed and is left out: %s", self._name, why)
                self._out.set()


class Trackers:
    """Tracker over several boards, which never raises and waits in `close` alone."""

    def __init__(self, boards: Sequence[Board]) -> None:
        self._boards = list(boards)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for board in self._boards if metrics else ():
            board.log(metrics, step)

    def close(self) -> None:
        for board in self._boards:
            board.close()
        self._boards.clear()

    def listen(self, event: ProgressEvent) -> None:
        """A progress listener: log the metrics of rounds, evaluations and warm-start steps."""
        if not event.metrics:
            return
        if event.stage in ("round", "evaluate") and event.round is not None:
            self.log(event.metrics, event.round)
        elif event.stage in OF_STEPS:
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
        # here: standard output, which trackio's is redirected from, is one for all threads
        opened: Future[Tracker] = Future()
        try:
            opened.set_result(Trackio(config))
        except Exception as error:  # noqa: BLE001 - its board reports it
            opened.set_exception(error)
        openings["Trackio"] = opened.result
    return Trackers([Board(name, opening) for name, opening in openings.items()])
