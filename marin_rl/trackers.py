"""Where metrics go besides the run's own files: TensorBoard and Weights & Biases, by one method.

The truth is the committed metrics; trackers repeat it for people who have their own boards. One
that cannot be opened, or fails later, is named once in the log and left out: it never stops a run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from marin_rl.config import Config, content
from marin_rl.progress import ProgressEvent

_log = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """What a board must be able to do. Either method may raise; `Trackers` copes."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of one round (or, in a warm start, of one optimizer step)."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


class TensorBoard:
    """Scalars in `folder/run_id`, through tensorboardX (extra `tensorboard`)."""

    def __init__(self, folder: str, run_id: str) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(Path(folder) / run_id))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar per metric, named as it is defined."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

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
            config=content(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row per call."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish; in offline mode `wandb sync` uploads the folder later."""
        self._run.finish()


class Trackers:
    """Several trackers as one that never raises."""

    def __init__(self, opened: Sequence[Tracker]) -> None:
        self._live = list(opened)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give `metrics` to every tracker that still works."""
        if metrics:
            self._each(lambda tracker: tracker.log(metrics, step))

    def close(self) -> None:
        """Close every tracker that still works."""
        self._each(lambda tracker: tracker.close())
        self._live.clear()

    def listen(self, event: ProgressEvent) -> None:
        """A progress listener: what a finished round, evaluation or warm-start step measured."""
        if event.stage in ("round", "evaluate") and event.round is not None:
            self.log(event.metrics, event.round)
        elif event.stage == "sft":
            self.log(event.metrics, event.done)

    def _each(self, act: Callable[[Tracker], None]) -> None:
        self._live = [item for item in self._live if _works(type(item).__name__, act, item)]


def open_trackers(config: Config) -> Trackers:
    """The trackers that the configuration asks for, as far as they can be opened."""
    opened: list[Tracker] = []
    folder = config.trackers.tensorboard
    if folder is not None:
        _works("TensorBoard", lambda: opened.append(TensorBoard(folder, config.run_id)))
    if config.trackers.wandb_project is not None:
        _works("WandB", lambda: opened.append(WandB(config)))
    return Trackers(opened)


def _works(name: str, act: Callable[..., None], *arguments: Tracker) -> bool:
    """Whether `act` went through; if not, the log says so."""
    try:
        act(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever a board does wrong must not reach the run
        _log.warning("tracker %s failed and is left out: %s: %s", name, type(error).__name__, error)
        return False
    return True
