"""Scoring under a time limit that really interrupts, in worker processes that are kept.

Scorers hang in C code, catch every exception, exhaust the interpreter lock; nothing in this process
could stop them. A worker (`worker.py`) is a fresh interpreter that imports the environment and
never JAX; it is started before it is needed, scores a group per message, is killed at the time
limit and started again for the rest. Whatever goes wrong with one completion is a RewardFault,
returned and not raised, so that it costs one rollout. What cannot hang is scored right here.
"""

import asyncio
import atexit
import contextlib
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment, answer_in, checked_components, extracts_here
from marin_rl.errors import InputError, RewardFault
from marin_rl.types import Example, RewardComponent

STARTUP_TIMEOUT_S = 120.0
MESSAGE_CHARACTERS_MAX = 500
_READ_BYTES = 1 << 16

Score = tuple[RewardComponent, ...] | RewardFault


def score_here(environment: Environment, example: Example, completion: str) -> Score:
    """Score in this process, without a time limit; a fault is returned."""
    try:
        return checked_components(environment.score(example, completion))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
        return RewardFault(f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS_MAX])


class Scorer:
    """Scores groups for one environment, for as long as the process lives. Thread safe."""

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        self._environment = environment
        self._workers: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        if environment.workers:
            hello = {
                "module": type(environment).__module__,
                "environment": config.model_dump(mode="json"),
            }
            for _ in range(environment.workers):
                self._workers.put(RewardWorker(hello, config.reward_timeout_s))
            self._pool = ThreadPoolExecutor(environment.workers, thread_name_prefix="scoring")

    async def score(self, example: Example, completions: Sequence[str]) -> list[Score]:
        """One score per completion. Raises InputError where no worker can be started at all."""
        if self._pool is None:
            return [score_here(self._environment, example, text) for text in completions]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._score_in_worker, example, completions)

    def extract(self, completions: Sequence[str]) -> list[str | None]:
        """The answer in each completion, extracted in a worker; None where that fails or hangs.

        Raises InputError where the extracting function cannot be imported.
        """
        if self._pool is None:
            return [answer_in(self._environment, text) for text in completions]
        worker = self._workers.get()
        try:
            return worker.extract(completions)
        finally:
            self._workers.put(worker)

    def close(self) -> None:
        """End the workers, once what they score now is done."""
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._workers.get_nowait().close()

    def _score_in_worker(self, example: Example, completions: Sequence[str]) -> list[Score]:
        worker = self._workers.get()
        try:
            return worker.score(example, completions)
        finally:
            self._workers.put(worker)


class RewardWorker:
    """One worker process and the pipe to it. Not thread safe: one caller at a time.

    The process starts at once; nobody waits for it before the first group. It ends with this
    process however that ends, because its standard input closes then, and a hung one soon after.
    """

    def __init__(self, hello: dict[str, Any], timeout_s: float) -> None:
        self._hello = hello
        self._timeout_s = timeout_s
        self._start()

    @property
    def process_id(self) -> int:
        """Of the process that scores at the moment."""
        return self._process.pid

    def score(self, example: Example, completions: Sequence[str]) -> list[Score]:
        """One score per completion, in order. Raises InputError where the worker cannot start."""
        scores: list[Score] = []
        while len(scores) < len(completions):
            self._ask_rest({"example": example}, completions, scores, _score_of)
        return scores

    def extract(self, completions: Sequence[str]) -> list[str | None]:
        """The answer in each completion, None where there is none. Raises InputError as `score`."""
        answers: list[str | RewardFault | None] = []
        while len(answers) < len(completions):
            self._ask_rest({"extract": True}, completions, answers, _answer_of)
        return [None if isinstance(answer, RewardFault) else answer for answer in answers]

    def close(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ask_rest(
        self,
        question: dict[str, Any],
        completions: Sequence[str],
        scores: list[Any],
        read: Callable[[dict[str, Any]], Any],
    ) -> None:
        """Ask for the completions without a score; stop early, with a fresh worker, at a fault."""
        self._wait_until_ready()
        asked = list(completions[len(scores) :])
        try:
            self._send({**question, "completions": asked, "timeout_s": self._timeout_s})
            while len(scores) < len(completions):
                scores.append(read(self._receive(self._timeout_s)))
        except TimeoutError:
            scores.append(RewardFault(f"the reward took longer than {self._timeout_s:g} s"))
            self._restart()
        except (EOFError, BrokenPipeError):
            scores.append(RewardFault(f"the reward ended its process ({self._exit_status()})"))
            self._restart()

    def _start(self) -> None:
        self._ready = False
        self._buffer = b""
        # `-c` rather than multiprocessing: spawn would import this program's main module, and with
        # it JAX; a fork would copy its threads' locks.
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from marin_rl.environments.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            bufsize=0,
        )
        with contextlib.suppress(BrokenPipeError):  # told by whoever waits until it is ready
            self._send(self._hello)

    def _restart(self) -> None:
        self.close()
        self._start()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            answer = self._receive(STARTUP_TIMEOUT_S)
        except TimeoutError:
            raise InputError(
                f"the environment could not be imported for scoring in {STARTUP_TIMEOUT_S:g} s"
            ) from None
        except EOFError:
            raise InputError(
                f"the process for scoring ended at its start ({self._exit_status()}); its standard "
                "error says why"
            ) from None
        if "unfit" in answer:
            raise InputError(f"the environment cannot score: {answer['unfit']}")
        self._ready = True

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        data = memoryview(orjson.dumps(message) + b"\n")
        while data:
            data = data[self._process.stdin.write(data) :]

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises TimeoutError, EOFError."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return orjson.loads(line)

    def _exit_status(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"signal {-code}" if code < 0 else f"exit status {code}"
        return "still running, but silent"


def _score_of(answer: dict[str, Any]) -> Score:
    if "fault" in answer:
        return RewardFault(answer["fault"])
    return tuple(RewardComponent(**component) for component in answer["components"])


def _answer_of(answer: dict[str, Any]) -> str | RewardFault | None:
    if "unfit" in answer:
        raise InputError(f"the environment cannot extract answers: {answer['unfit']}")
    return RewardFault(answer["fault"]) if "fault" in answer else answer["answer"]


@dataclass(frozen=True, slots=True)
class Judge:
    """Extracts the answers of completions: in this process, or in a worker for others' code."""

    environment: Environment
    config: EnvironmentConfig

    def answers(self, completions: Sequence[str]) -> list[str | None]:
        """The answer in each completion. Raises InputError as `Scorer.extract`."""
        if extracts_here(self.environment):
            return [answer_in(self.environment, text) for text in completions]
        return scorer_for(self.environment, self.config).extract(completions)


_scorers: dict[str, Scorer] = {}
_lock = threading.Lock()


def scorer_for(environment: Environment, config: EnvironmentConfig) -> Scorer:
    """The scorer of an environment in this process, started the first time it is asked for."""
    key = config.model_dump_json() + environment.version
    with _lock:
        if key not in _scorers:
            _scorers[key] = Scorer(environment, config)
        return _scorers[key]


@atexit.register
def close_scorers() -> None:
    """End every worker of this process."""
    with _lock:
        for scorer in _scorers.values():
            scorer.close()
        _scorers.clear()
