"""Episodes played in worker processes: time limits that interrupt, and what becomes of the rest.

A worker holds many episodes. One that blocks its process for longer than
`environment.step_timeout_s`, exhausts its memory or ends it, costs that episode. The others of the
worker begin again in another process with the actions that they were given so far; each goes on if
the environment answers as it did before, and ends as a fault if it does not. Environments that say
`replayable = False`, because their steps change the world outside, end as a fault at once.
Environments without workers play in this process, where each call may wait for as long.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.episode import (
    FAULTS,
    Episode,
    FinishedRollout,
    PolicyAddress,
    Start,
    StepResult,
    settled,
)
from marin_rl.environments.scoring import EnvironmentPool, PoolsInUse, fault_of
from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, RewardFault
from marin_rl.isolated.pool import LOSSES_MAX
from marin_rl.isolated.processes import Worker, WorkerFault
from marin_rl.isolated.scratch import sweep
from marin_rl.isolated.worker import charged
from marin_rl.types import Example, Turn

ROLLOUTS_TIMEOUT_S = 3600.0  # of all rollouts of an example, unless the configuration says other

Operation = Literal["start", "step", "close", "rollouts"]
AnswerT = TypeVar("AnswerT", Start, StepResult, None)

# Of a turn, what an environment has no use for, and what JSON cannot hold as it is.
_PRIVATE = ("inference_metadata", "logprobs", "timing")
_ANSWERS: dict[Any, Any] = {kind: TypeAdapter(kind) for kind in (Start, StepResult, type(None))}
_ERRORS = {**FAULTS, "fault": RewardFault}
_numbers = itertools.count()


class EpisodeHere:
    """An episode in this process: a pool worker, or the process that samples.

    Each call may take `timeout_s` seconds of waiting, or raises EnvironmentTimeout; None: a worker,
    whose parent limits it.
    """

    def __init__(
        self, environment: Environment, example: Example, timeout_s: float | None = None
    ) -> None:
        self._environment, self._example, self._timeout_s = environment, example, timeout_s
        self._episode: Episode | None = None

    async def start(self) -> Start:
        self._episode = self._environment.episode(self._example)
        messages, tools = await self._limited("start", self._episode.start)
        return Start(messages=tuple(messages), tools=tuple(tools))

    async def step(self, turn: Turn) -> StepResult:
        assert self._episode is not None, "started first"
        result = await self._limited("step", self._episode.step, turn)
        if not isinstance(result, StepResult):
            raise ValueError(f"expected a StepResult of a step, found {result!r:.80}")
        return result

    async def close(self) -> None:
        """Release what the episode holds, once; nothing where it was not started."""
        episode, self._episode = self._episode, None
        if episode is not None:
            await self._limited("close", episode.close)

    async def _limited(self, operation: str, call: Callable[..., Any], *arguments: Any) -> Any:
        deadline: asyncio.Timeout | None = None
        try:
            async with charged(self._timeout_s) as deadline:
                return await settled(call(*arguments))
        except TimeoutError:
            if deadline is None or not deadline.expired():
                raise
            raise EnvironmentTimeout(
                f"the {operation} of an episode took longer than {self._timeout_s:g} s"
            ) from None


class _Lost(Exception):
    """The worker of an episode ended, by no fault of the episode."""


class EpisodeAway:
    """An episode in a worker process, and all that is needed to begin it again in another."""

    def __init__(self, pool: "EpisodePool", example: Example) -> None:
        self._pool, self._example = pool, example
        self._number = next(_numbers)
        self._worker: Worker | None = None
        self._begun: Start | None = None
        self._played: list[tuple[Turn, StepResult]] = []
        self._losses = 0

    async def start(self) -> Start:
        """The first messages and the tools. Raises RewardFault, InputError."""
        while self._begun is None:
            try:
                self._begun = await self._start()
            except _Lost as lost:
                self._release()
                self._losses += 1
                if self._losses > LOSSES_MAX:
                    raise RewardFault(f"its process ended {self._losses} times: {lost}") from None
        return self._begun

    async def step(self, turn: Turn) -> StepResult:
        """The answer to a turn. Raises RewardFault."""
        while True:
            try:
                if self._worker is None or not self._worker.alive:
                    await self._again()
                result = await self._ask("step", turn, StepResult)
            except _Lost:
                self._release()
            else:
                self._played.append((turn, result))
                return result

    async def close(self) -> None:
        """Release what the episode holds; nothing where its process has ended."""
        try:
            if self._worker is not None and self._worker.alive:
                await self._ask("close", None, type(None))
        except _Lost:
            return
        finally:
            self._release()

    async def _start(self) -> Start:
        self._worker = await asyncio.to_thread(self._pool.assign)
        return await self._ask("start", self._example, Start)

    async def _again(self) -> None:
        """Begin again in another process, with the actions so far. Raises RewardFault, _Lost."""
        self._losses += 1
        ended = f"its process ended {self._losses} times, by the fault of other episodes"
        if self._losses > LOSSES_MAX:
            raise RewardFault(f"{ended}: more than {LOSSES_MAX} are not tried")
        if not self._pool.replayable:
            raise RewardFault(f"{ended}: it cannot be replayed, as its environment says")
        self._release()
        start = await self._start()
        if start != self._begun:
            raise RewardFault(f"{ended}, and begun again it starts with other messages")
        for place, (turn, recorded) in enumerate(self._played, start=1):
            if await self._ask("step", turn, StepResult) != recorded:
                raise RewardFault(
                    f"{ended}, and replayed it answers turn {place} otherwise: it depends on more "
                    "than the example and the actions (set `replayable = False` to say so)"
                )

    def _release(self) -> None:
        if self._worker is not None:
            self._pool.release(self._worker)
            self._worker = None

    async def _ask(
        self, operation: Operation, argument: Example | Turn | None, kind: type[AnswerT]
    ) -> AnswerT:
        """The answer of the worker. Raises RewardFault, _Lost."""
        assert self._worker is not None, "started first"
        sent = _sent(argument) if isinstance(argument, Turn) else argument
        try:
            answer = await _answered(self._worker, operation, self._number, sent)
        except TypeError as error:
            raise RewardFault(f"example {self._example.example_id} is not JSON: {error}") from None
        except WorkerFault as fault:
            if fault.limit == "lost":
                raise _Lost(str(fault)) from None
            raise self._fault(operation, fault) from None
        return _ANSWERS[kind].validate_python(answer)

    def _fault(self, operation: Operation, fault: WorkerFault) -> RewardFault:
        what = f"the {operation} of an episode"
        if fault.limit == "wall":
            return EnvironmentTimeout(f"{what} took longer than {self._pool.timeout_s:g} s")
        if fault.limit == "answer":
            return RewardFault(f"{what} gave an answer that cannot be sent: {fault}")
        return RewardFault(f"{what} ended its process ({fault})")


# As a driver plays it: methods raise any exception; those of another process a RewardFault.
PlayedEpisode = EpisodeHere | EpisodeAway


async def _answered(worker: Worker, operation: Operation, number: int, argument: Any) -> Any:
    """The answer of a worker, as JSON has it.

    Raises TypeError for an argument that is not JSON, WorkerFault, and the environment's own faults
    by their kinds.
    """
    request = {"operation": operation, "episode": number, "argument": argument}
    data = orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
    answer = await asyncio.wrap_future(worker.call(data))
    if "failure" in answer:
        raise _ERRORS[answer["failure"]](answer["message"])
    return answer["answer"]


def _sent(turn: Turn) -> dict[str, Any]:
    """Return the fields of a turn that its environment gets."""
    values = {f.name: getattr(turn, f.name) for f in fields(turn) if f.name not in _PRIVATE}
    if turn.logprobs is not None:
        values["logprobs"] = np.ascontiguousarray(turn.logprobs)
    return values


class EpisodePool(EnvironmentPool):
    """Worker processes in which an environment plays episodes, or samples. Thread safe."""

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        self.replayable = environment.replayable
        purpose, limit_s = "play episodes", config.reward_timeout_s
        if environment.returns_rollouts:
            purpose, limit_s = "return rollouts", ROLLOUTS_TIMEOUT_S
        self.timeout_s = config.step_timeout_s or limit_s
        super().__init__(purpose, environment, config, self.timeout_s)

    def open(self, example: Example) -> PlayedEpisode:
        return EpisodeAway(self, example)

    async def rollouts(self, example: Example, policy: PolicyAddress) -> "Rollouts":
        """Raises TimeoutError, RewardFault, EndpointUnavailable."""
        worker = await asyncio.to_thread(self.assign)
        argument = {"example": example, "policy": policy}
        try:
            answer = await _answered(worker, "rollouts", next(_numbers), argument)
        except WorkerFault as fault:
            if fault.limit == "wall":
                raise TimeoutError from None
            raise RewardFault(f"the environment ended its process ({fault})") from None
        finally:
            self.release(worker)
        return list(map(_decoded, answer))

    def close(self) -> None:
        super().close()
        sweep()


pools = PoolsInUse(EpisodePool)


def open_episodes(
    environment: Environment, config: EnvironmentConfig, example: Example, count: int
) -> Sequence[PlayedEpisode]:
    """Episodes of an example that are not started yet: in worker processes, or in this one."""
    if environment.workers and environment.has_episodes:
        pool = pools.of(environment, config)
        return [pool.open(example) for _ in range(count)]
    limit_s = config.step_timeout_s or config.reward_timeout_s
    return [EpisodeHere(environment, example, limit_s) for _ in range(count)]


_ROLLOUT = TypeAdapter(FinishedRollout | str)

Rollouts = Sequence[FinishedRollout | RewardFault]


async def finished_rollouts(
    environment: Environment, config: EnvironmentConfig, example: Example, policy: PolicyAddress
) -> Rollouts:
    """The rollouts of an example, one per entry of `policy.sampling`; faults where they failed.

    Raises EndpointUnavailable where the environment's server cannot be reached, InputError for a
    worker that cannot be started.
    """
    assert environment.returns_rollouts, environment.name
    size, limit_s = len(policy.sampling), config.step_timeout_s or ROLLOUTS_TIMEOUT_S
    try:
        if environment.workers:
            rollouts = await pools.of(environment, config).rollouts(example, policy)
        else:
            async with asyncio.timeout(limit_s):
                rollouts = await environment.rollouts(example, policy)
    except EndpointUnavailable:
        raise
    except TimeoutError:
        late = f"the rollouts of example {example.example_id} took longer than {limit_s:g} s"
        return [EnvironmentTimeout(late)] * size
    except Exception as error:  # noqa: BLE001 - it is other people's code
        return [fault_of(error)] * size
    if len(rollouts) != size:
        wrong = f"the environment returned {len(rollouts)} rollouts: expected {size}"
        return [RewardFault(wrong)] * size
    return rollouts


def _decoded(record: Any) -> FinishedRollout | RewardFault:
    """Return a rollout of a worker's answer, or its fault."""
    try:
        rollout = _ROLLOUT.validate_python(record)
    except ValidationError as error:
        return fault_of(error)
    return RewardFault(rollout) if isinstance(rollout, str) else rollout
