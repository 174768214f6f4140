"""Scoring under a time limit that really interrupts, in worker processes that are kept.

Scorers hang in C code, catch every exception, exhaust the interpreter lock; nothing in this process
could stop them. A worker (`worker.py`) is a fresh interpreter that imports the environment and
never JAX; it is started before it is needed, scores a group per message, is killed at the time
limit with whatever it started (`marin_rl.worker_process`), and started again for the rest. Whatever
goes wrong with one completion is a RewardFault, returned and not raised, so that it costs one
rollout. What cannot hang is scored right here.
"""

import asyncio
import atexit
import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment, answer_in, checked_components, extracts_here
from marin_rl.errors import InputError, RewardFault
from marin_rl.isolated.processes import EXIT_PATIENCE_S, KeptWorker
from marin_rl.types import Example, RewardComponent
from marin_rl.worker_process import clean_environment

SEND_TIMEOUT_S = 60.0  # for a worker to take in a group, which it does at once
ANSWER_BYTES_MAX = 4 << 20
MESSAGE_CHARACTERS_MAX = 500

Score = tuple[RewardComponent, ...] | RewardFault


def score_here(environment: Environment, example: Example, completion: str) -> Score:
    """Score in this process, without a time limit; a fault is returned."""
    try:
        return checked_components(environment.score(example, completion))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
        return fault_of(error)


def fault_of(error: BaseException) -> RewardFault:
    """The fault of a rollout whose environment raised `error`."""
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
        """Score each completion. Raises InputError where no worker can be started at all."""
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


class RewardWorker(KeptWorker):
    """A worker process that scores; it and what it started end with this process."""

    def __init__(self, hello: dict[str, Any], timeout_s: float) -> None:
        self._environment = hello
        self._timeout_s = timeout_s
        settings = EnvironmentConfig.model_validate(hello["environment"])
        super().__init__(
            "marin_rl.environments.worker:main",
            "reward",
            environment=clean_environment(settings.pass_environment),
            memory_bytes_max=settings.reward_memory_bytes_max,
        )

    def hello(self) -> bytes:
        """Name the environment, with a number that the first answer must repeat."""
        self._nonce = secrets.token_hex(16)
        return orjson.dumps({"nonce": self._nonce, **self._environment})

    def score(self, example: Example, completions: Sequence[str]) -> list[Score]:
        """Score each completion, in order. Raises InputError where the worker cannot start."""
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

    def _ask_rest(
        self,
        question: dict[str, Any],
        completions: Sequence[str],
        scores: list[Any],
        read: Callable[[dict[str, Any]], Any],
    ) -> None:
        """Score the remaining completions; at a fault, stop early and start a new worker."""
        self._wait_until_ready()
        unscored = list(completions[len(scores) :])
        nonce = secrets.token_hex(16)
        group = {"nonce": nonce, **question, "completions": unscored}
        try:
            self._process.send(orjson.dumps(group), SEND_TIMEOUT_S)
            for index in range(len(unscored)):
                line = self._process.receive(self._timeout_s, ANSWER_BYTES_MAX)
                scores.append(read(_checked(line, nonce, index)))
        except TimeoutError:
            scores.append(RewardFault(f"the reward took longer than {self._timeout_s:g} s"))
            self.restart()
        except (EOFError, BrokenPipeError):
            how = self._process.end(patience_s=EXIT_PATIENCE_S)
            scores.append(RewardFault(f"the reward ended its process ({how})"))
            self.restart()
        except ValueError as error:
            scores.append(RewardFault(f"the reward wrote to the scorer's own pipe: {error}"))
            self.restart()

    def _wait_until_ready(self) -> None:
        line = self.first_line(ANSWER_BYTES_MAX)
        if line is None:
            return
        try:
            answer = _checked(line, self._nonce)
        except ValueError as error:
            self.restart()
            raise InputError(
                f"the environment wrote to the scorer's own pipe while it was imported: {error}"
            ) from None
        if "unfit" in answer:
            self.restart()
            raise InputError(f"the environment cannot score: {answer['unfit']}")


def _checked(line: bytes, nonce: str, index: int | None = None) -> dict[str, Any]:
    """Parse an answer. Raises ValueError for one that the worker's own code did not write."""
    try:
        answer = orjson.loads(line)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict) or answer.get("nonce") != nonce or answer.get("index") != index:
        raise ValueError(f"expected an answer with this group's number, found {line[:40]!r}")
    return answer


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
    """The scorer of an environment in this process, started at its first use."""
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
