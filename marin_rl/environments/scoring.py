"""Scoring under a time limit that really interrupts, in worker processes that are kept.

Scorers hang in C code, catch every exception, exhaust the interpreter lock; nothing in this process
could stop them. A worker (`worker.py`) is a fresh interpreter that imports the environment and
never JAX; it is started before it is needed, scores one completion after another, is killed at the
time limit with whatever it started (`marin_rl.isolated`), and replaced for the rest. Whatever
goes wrong with one completion is a RewardFault, returned and not raised, so that it costs one
rollout. What cannot hang is scored right here.
"""

import asyncio
import atexit
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import orjson

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import (
    Dialogues,
    Environment,
    GroupScore,
    answer_in,
    checked_components,
)
from marin_rl.errors import Abstained, InputError, RewardFault
from marin_rl.isolated.pool import Pool
from marin_rl.isolated.processes import WorkerFault, WorkerLimits, WorkerSpec, clean_environment
from marin_rl.types import Example, Message, RewardComponent
from marin_rl.user_code import packed_sources

ANSWER_BYTES_MAX = 4 << 20
MESSAGE_CHARACTERS_MAX = 500

Score = GroupScore
CompletionIds = Sequence[Sequence[int] | np.ndarray]

_PACKAGE = str(Path(__file__).parent.parent)


def score_here(
    environment: Environment,
    example: Example,
    completions: Sequence[str],
    ids: CompletionIds = (),
    dialogues: Dialogues = (),
) -> Iterator[Score]:
    """Score in this process, without a time limit; faults are yielded.

    They name the reward, the example, and the line of the function that raised. Completions are
    scored one at a time, or all in one call where the environment scores groups.
    """
    where = f"{environment.reward_name or environment.name}, example {example.example_id}"
    if not environment.scores_groups:
        for completion in completions:
            try:
                yield checked_components(environment.score(example, completion))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
                yield fault_of(error, where)
        return
    n = len(completions)
    try:
        ids = _lists(ids, n)
        dialogues = dialogues or [(Message(role="assistant", content=c),) for c in completions]
        scores = list(environment.score_group(example, completions, ids, dialogues))
        if len(scores) != n:
            raise ValueError(f"expected {n} scores of a group, found {len(scores)}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
        scores = [fault_of(error)] * n
    for score in scores:
        try:
            yield (
                fault_of(score, where)
                if isinstance(score, RewardFault)
                else (checked_components(score))
            )
        except ValueError as error:
            yield fault_of(error, where)


def _lists(ids: CompletionIds, n: int) -> list[list[int]]:
    return [[int(token) for token in one] for one in ids] if len(ids) else [[]] * n


def fault_of(error: BaseException, where: str = "") -> RewardFault:
    """Return the fault of a rollout whose environment raised `error`, after `where` it did."""
    prefix = f"{where}: " if where else ""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == RewardFault.__module__]
    if not isinstance(error, RewardFault):
        prefix, kinds = f"{prefix}{type(error).__name__}: ", [RewardFault]
    try:
        words = str(error)
    except BaseException as another:  # noqa: BLE001 - it is other people's code too
        words = f"a text that cannot be read ({type(another).__name__})"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not frames[-1].filename.startswith(_PACKAGE):
        words += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    text = f"{prefix}{words}"[:MESSAGE_CHARACTERS_MAX]
    return kinds[0](text.encode(errors="backslashreplace").decode())  # a lone surrogate is no text


class EnvironmentPool(Pool):
    """Workers with an environment, which serve a `purpose` (`worker`). A call may take `wall_s`."""

    def __init__(
        self, purpose: str, environment: Environment, config: EnvironmentConfig, wall_s: float
    ) -> None:
        settings = config.model_dump(mode="json")
        spec = WorkerSpec(
            module="marin_rl.environments.worker",
            limits=WorkerLimits(
                wall_s=wall_s,
                memory_bytes=config.reward_memory_bytes_max,
                answer_bytes=ANSWER_BYTES_MAX,
                sealed=False,  # rewards and environments are the user's code: they may write files
            ),
            settings={
                "purpose": purpose,
                "module": type(environment).__module__,
                "environment": settings,
                "code": packed_sources(settings),
            },
            environment=clean_environment(config.pass_environment),
            name="environment",
        )
        super().__init__(spec, environment.workers)


PoolT = TypeVar("PoolT", bound="Pool | Scorer")


class PoolsInUse(Generic[PoolT]):
    """Pools of this process by environment, version and settings. Thread safe.

    One is made at its first use, and all are closed when the process ends.
    """

    def __init__(self, make: Callable[[Environment, EnvironmentConfig], PoolT]) -> None:
        self._make = make
        self._pools: dict[tuple[str, str], PoolT] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def __len__(self) -> int:
        return len(self._pools)

    def of(self, environment: Environment, config: EnvironmentConfig) -> PoolT:
        key = config.model_dump_json(), environment.version
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._make(environment, config)
            return self._pools[key]

    def close(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()


class Scorer:
    """Scores groups for one environment, for as long as the process lives. Thread safe."""

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        self._environment = environment
        self._timeout_s = config.reward_timeout_s
        self._pool: EnvironmentPool | None = None
        if environment.workers:
            self._pool = EnvironmentPool("score", environment, config, config.reward_timeout_s)
            if not environment.has_episodes:  # whose steps have rewards: they may need no worker
                self._pool.start(environment.workers)
            self._threads = ThreadPoolExecutor(environment.workers, thread_name_prefix="scoring")

    async def score(
        self,
        example: Example,
        completions: Sequence[str],
        ids: CompletionIds = (),
        dialogues: Dialogues = (),
    ) -> list[Score]:
        """Score each completion; `ids` are their token ids, for rewards that read them.

        `dialogues` have all messages after the prompt, of which `completions` are the last of the
        model; they are left out where they are that one. Raises InputError where no worker can be
        started at all.
        """
        if self._pool is None:
            return list(score_here(self._environment, example, completions, ids, dialogues))
        loop, call = asyncio.get_running_loop(), (example, completions, ids, dialogues)
        return await loop.run_in_executor(self._threads, self._score, *call)

    async def scores_groups(self) -> bool:
        if self._pool is None:
            return self._environment.scores_groups
        by_group, _ = await asyncio.to_thread(self._pool.ready)
        return by_group

    def check(self) -> None:
        """Load the reward in a worker. Raises InputError where it cannot be, or does not fit."""
        if self._pool is None:
            self._environment.load_scorer()
        else:
            self._pool.ready()

    def extract(self, completions: Sequence[str]) -> list[str | None]:
        """Answers extracted in a worker; None for failures. InputError for a missing function."""
        if self._pool is None:
            return [answer_in(self._environment, text) for text in completions]
        answers: list[str | None] = []
        for extracted in self._pool.ask([orjson.dumps({"extract": text}) for text in completions]):
            if isinstance(extracted, WorkerFault):
                answers.append(None)
            elif "unfit" in extracted:
                raise InputError(f"the environment cannot extract answers: {extracted['unfit']}")
            else:
                answers.append(extracted["answer"])
        return answers

    def close(self) -> None:
        if self._pool is not None:
            self._threads.shutdown(cancel_futures=True)
            self._pool.close()

    def _score(
        self, example: Example, completions: Sequence[str], ids: CompletionIds, dialogues: Dialogues
    ) -> list[Score]:
        """Score in a worker: completion by completion, or in one call that has the time of all."""
        assert self._pool is not None, "others score where they are asked"
        # Only a worker knows: this process does not import the function.
        by_group, wants_ids = self._pool.ready()
        n = len(completions)
        calls: list[dict[str, Any]] = [{"completions": [text], "ids": []} for text in completions]
        if by_group and n:
            ids = _lists(ids, n) if wants_ids else []
            calls = [{"completions": completions, "ids": ids, "dialogues": dialogues}]
        of_example = orjson.Fragment(orjson.dumps(example))
        requests = [orjson.dumps({"example": of_example, "score": call}) for call in calls]
        environment = self._environment
        where = f"{environment.reward_name or environment.name}, example {example.example_id}"
        wall_s = self._timeout_s * (n if by_group else 1)
        scores: list[Score] = []
        for answer in self._pool.ask(requests, wall_s):
            if isinstance(answer, WorkerFault):
                reason = _explained(answer, wall_s)
                text = completions[len(scores)]
                wrong = None if by_group else environment.score_of_limit(text, reason)
                fault = RewardFault(f"{where}: {reason}")
                scores += [wrong or fault] * (n if by_group else 1)
            else:
                scores += [
                    (Abstained if each["abstained"] else RewardFault)(each["fault"])
                    if "fault" in each
                    else tuple(RewardComponent(**part) for part in each["components"])
                    for each in answer
                ]
        return scores


def _explained(fault: WorkerFault, wall_s: float) -> str:
    if fault.limit == "wall":
        return f"took longer than {wall_s:g} s; environment.reward_timeout_s sets the limit"
    if fault.limit == "answer":
        return f"expected scores of {ANSWER_BYTES_MAX} bytes at most, found {fault}"
    return str(fault) if fault.limit == "lost" else f"ended its process ({fault})"


scorers = PoolsInUse(Scorer)
scorer_for = scorers.of


def answers_in(
    environment: Environment, config: EnvironmentConfig, completions: Sequence[str]
) -> list[str | None]:
    """The answer in each completion, extracted here, or in a worker for others' code.

    Raises InputError as `Scorer.extract`.
    """
    own = environment
    if not own.workers or own.extracts_here or not own.defines("extract"):
        return [answer_in(own, text) for text in completions]
    return scorer_for(own, config).extract(completions)
