"""Start a run from Python and follow it: `run` and the `TrainingRun` it returns.

The flow plays in a thread of this process with an event loop of its own, so that it works in a
script and inside a running event loop (Jupyter) alike. Leaves out what a run does, which is the
flow's: the entry-point group `marin_rl.flows` names it, as for the command line.
"""

import asyncio
import atexit
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from marin_rl.config import Config, Overrides, as_overrides
from marin_rl.doctor.start import before_engines
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.machine import share_one_heap
from marin_rl.progress import ProgressEvent, listening, phase
from marin_rl.storage.runs import Run, checkpoint_slot, latest_checkpoint
from marin_rl.trust import Consent, trusted_config

POLL_S = 0.05  # of asynchronous code for the next round; a round takes seconds or more

Flow = Callable[[Config, "Future[None]"], Any]  # plays a run until the future has a result
Source = Config | Mapping[str, Any] | str | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One committed round.

    `number` counts from 0. `metrics` are named as in docs/metrics.md. `checkpoint` is the place of
    the checkpoint that the round ended in, `ROOT/RUN_ID/checkpoints/round-00001` after round 0: an
    `LLM` opens it, and so does `policy.checkpoint` of another run.
    """

    number: int
    metrics: Mapping[str, float]
    checkpoint: str


def run(source: Source, overrides: Overrides = (), *, trust: bool = False) -> "TrainingRun":
    """Start a run, or go on with it where it stopped, in the background of this process.

    Args:
        source: a YAML file, the folder of a run, a nested mapping as a YAML file holds it, or a
            `Config`. Code of your own is named in it (`rewards.py:score`); a callable cannot be
            passed, since workers import it by name and the run records which code it used.
        overrides: `{"rounds": 20, "training.learning_rate": 1e-4}`, or `["rounds=20"]`.
        trust: accept the code and places that the folder of another user's run names.

    Returns:
        The run, which trains already. Iterate over it for its rounds, or call `wait`. A script
        must do either: the training ends with the process.

    Raises:
        ConfigError: for a wrong key or value, and for a run that exists with other settings.
        RunLocked: where another process works on the run.
        MarinRLError: for what files tell without the engines, such as an unfit root, tokenizer or
            prompt. What shows later is raised by the iteration and by `wait`.
    """
    config = config_of(source, overrides, trust=trust)
    complete = before_engines(config, "rl-loop")
    return TrainingRun(config, None if complete is None else lambda *_: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Result of `learn`: the place of the last checkpoint, and its metrics by name."""

    checkpoint: str
    metrics: Mapping[str, float]


def learn(
    flow: Literal["sft", "reward-model", "preference"],
    source: Source,
    overrides: Overrides = (),
    *,
    trust: bool = False,
) -> Learned:
    """Do what the command `marin-rl FLOW` does, or go on with it, and wait for its end.

    Arguments and errors are those of `run`. Interrupted, it keeps what is committed; the same call
    goes on from there.
    """
    config = config_of(source, overrides, trust=trust)
    reached = before_engines(config, flow)
    if reached is None:
        # A notebook's thread runs an event loop, and the flow needs one of its own.
        with ThreadPoolExecutor(1, config.run_id) as executor:
            reached = executor.submit(flow_named(flow), config).result()
    return Learned(checkpoint=f"{config.folder}/{reached.slot}", metrics=dict(reached.summary))


def config_of(source: Source, overrides: Overrides = (), *, trust: bool = False) -> Config:
    """The configuration that a source stands for; see `run`. Raises ConfigError."""
    if isinstance(source, Config):
        tree = source.model_dump(mode="json", exclude_unset=True)
        return Config.load(tree, overrides) if overrides else source
    folder = None if isinstance(source, Mapping) else Path(source).absolute()
    if folder is None or not (folder / "run.json").is_file():
        return Config.load(source, overrides)
    opened = Run.open(str(folder.parent), folder.name)
    changes = tuple(as_overrides(overrides))
    return trusted_config(opened, Consent(overrides=changes, trust=trust))


class TrainingRun:
    """A run that trains in a thread of this process. Made by `run`; safe to use from any thread.

    Iterating yields each `Round` as it is committed, from the first one of this session on; the
    iteration ends with the run, and raises what the run raised. Asynchronous code uses `async for`.
    Rounds of earlier sessions are in `scan_metrics`.

    As a context manager it stops the run at the end of the block.
    """

    def __init__(self, config: Config, flow: Flow | None = None) -> None:
        self.config = config
        self._flow = flow
        self._rounds: list[Round] = []
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._stop: Future[None] = Future()
        self._thread = threading.Thread(target=self._train, name=config.run_id, daemon=True)
        self._thread.start()
        atexit.register(self._warn_at_exit)

    def __repr__(self) -> str:
        state = "done" if self.done else "training"
        return f"<TrainingRun {self.path}: {len(self._rounds)} rounds in this session, {state}>"

    @property
    def path(self) -> str:
        """Folder or URL of the run: `ROOT/RUN_ID`."""
        return self.config.folder

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Rounds that were committed in this session so far."""
        return tuple(self._rounds)

    @property
    def done(self) -> bool:
        """True once the run has reached its rounds, was stopped, or failed."""
        return self._ended

    def stop(self) -> None:
        """Stop the run as Ctrl-C does, and wait until it has; no error if it is done already.

        What is committed stays; `run` of the same configuration goes on from there. A training
        step that is running is waited for.
        """
        self._request_stop()
        self._thread.join()

    def wait(self, timeout_s: float | int | None = None) -> str | None:
        """Wait for the end of the run, and return the place of its latest checkpoint.

        None where the run was stopped before it had one. Raises TimeoutError after `timeout_s`
        seconds, during which the run goes on, and what the run raised.
        """
        with self._interruptible(), self._changed:
            self._changed.wait_for(lambda: self._ended, timeout_s)
        if not self._ended:
            raise TimeoutError(f"{self.path} is still training after {timeout_s} s")
        return self._outcome()

    def __await__(self) -> Generator[Any, None, str | None]:
        """`await training` waits as `wait` does, and lets other tasks run."""

        async def end() -> str | None:
            await self._poll(None)
            return self._outcome()

        return end().__await__()

    def __iter__(self) -> Iterator[Round]:
        for index in itertools.count():
            with self._interruptible(), self._changed:
                while not self._ended and index == len(self._rounds):
                    self._changed.wait()
            if index == len(self._rounds):
                self._outcome()
                return
            yield self._rounds[index]

    async def __aiter__(self) -> AsyncIterator[Round]:
        for index in itertools.count():
            await self._poll(index)
            if index == len(self._rounds):
                self._outcome()
                return
            yield self._rounds[index]

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> "TrainingRun":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._request_stop()
        await self._poll(None)

    def _train(self) -> None:
        try:
            with listening(self._note):
                (self._flow or flow_named("rl-loop"))(self.config, self._stop)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
            self._error = None if interrupted and self._stop.done() else error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _note(self, event: ProgressEvent) -> None:
        """Keep a round that was committed; other runs of this process publish their own."""
        if event.stage != "round" or event.run_id != self.config.run_id or event.round is None:
            return
        place = f"{self.path}/{checkpoint_slot(event.round + 1)}"
        with self._changed:
            self._rounds.append(
                Round(number=event.round, metrics=dict(event.metrics), checkpoint=place)
            )
            self._changed.notify_all()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Stop the run where Ctrl-C, or Jupyter's button, interrupts the thread that waits."""
        try:
            yield
        except KeyboardInterrupt:
            self._request_stop()
            raise

    def _request_stop(self) -> None:
        with suppress(InvalidStateError):  # requested already
            self._stop.set_result(None)

    def _outcome(self) -> str | None:
        if self._error is not None:
            raise self._error
        latest = None
        with suppress(ObjectMissing):  # stopped before the run was created
            config = self.config
            latest = latest_checkpoint(Run.open(config.root, config.run_id, config.storage_options))
        return None if latest is None else f"{self.path}/{latest.slot}"

    async def _poll(self, index: int | None) -> None:
        """Return once the round at `index` of this session is committed, or the run has ended."""
        # A thread that waited in our place would outlive a task that is cancelled.
        while not self._ended and (index is None or index == len(self._rounds)):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    def _warn_at_exit(self) -> None:
        if not self._ended:
            sys.stderr.write(
                f"{self.path} was still training when the script ended: call wait() on what run() "
                "returns; the same script goes on where it stopped\n"
            )


@phase("importing Prefect and JAX")
def flow_named(name: str) -> Any:
    """Return the function that runs an installed flow. Raises ConfigError for another name."""
    share_one_heap()  # before what a flow imports starts its threads
    for point in entry_points(group="marin_rl.flows", name=name):
        return point.load()
    raise ConfigError(f"the flow {name!r} is not installed: reinstall marin-rl (`make install`)")
