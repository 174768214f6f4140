"""The work of a process in which episodes live: their start, steps and close.

Episodes of one process interleave: while one waits, others go on. Each has the state of Python's
and NumPy's global random numbers to itself, which begins with the example's seed, so that an
environment that draws from them is a function of example and actions, whatever else its process
plays. `episode_pool` asks for all this through `marin_rl.isolated.pool`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from marin_rl.environments.base import Environment
from marin_rl.environments.episode import Episode, StepResult, checked_result, episode_of, settled
from marin_rl.environments.episode_wire import (
    Failure,
    Request,
    Start,
    decode_request,
    encode_answer,
)
from marin_rl.environments.scoring import fault_of
from marin_rl.environments.worker import constructed
from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, ToolFault
from marin_rl.isolated.worker import RandomState, charged
from marin_rl.types import Example, Turn


def begin(settings: Mapping[str, Any]) -> "Episodes":
    """Construct the environment of `settings`, ready to play.

    Raises InputError where it cannot be imported or loaded.
    """
    return Episodes(constructed(settings, "play episodes", examples=True))


class EpisodeHere:
    """An episode in this process: a worker, or where there is none the process that samples.

    Each call may take `timeout_s` seconds of waiting; None: a worker, whose parent limits it. Calls
    that take longer raise EnvironmentTimeout.
    """

    def __init__(
        self, environment: Environment, example: Example, timeout_s: float | None = None
    ) -> None:
        self._environment, self._example, self._timeout_s = environment, example, timeout_s
        self._episode: Episode | None = None

    async def start(self) -> Start:
        """The first messages and the tools."""
        self._episode = episode_of(self._environment, self._example)
        messages, tools = await self._limited("start", self._episode.start)
        return Start(messages=tuple(messages), tools=tuple(tools))

    async def step(self, turn: Turn) -> StepResult:
        """The answer to a turn."""
        assert self._episode is not None, "started first"
        return checked_result(await self._limited("step", self._episode.step, turn))

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


class Episodes:
    """The episodes of this process, by the number that their owner gave them."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._episodes: dict[int, EpisodeHere] = {}
        self._random: dict[int, RandomState] = {}

    def call(
        self, request: Mapping[str, Any]
    ) -> tuple[Coroutine[Any, Any, bytes], Callable[[], AbstractContextManager[object]]]:
        """The call that answers a request; see `isolated.worker.Handler`."""
        asked = decode_request(request)
        if asked.operation == "start":
            assert isinstance(asked.argument, Example)
            self._random[asked.episode] = RandomState(asked.argument.seed)
        state = self._random.get(asked.episode, nullcontext())
        return self._answer(asked), lambda: state

    async def _answer(self, asked: Request) -> bytes:
        perform = {"start": self._start, "step": self._step, "close": self._close}[asked.operation]
        try:
            return encode_answer(await perform(asked))
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is other people's code
            return encode_answer(Failure(message=str(fault_of(error)), kind=_kind_of(error)))

    async def _start(self, asked: Request) -> Start:
        assert isinstance(asked.argument, Example)
        episode = self._episodes[asked.episode] = EpisodeHere(self._environment, asked.argument)
        return await episode.start()

    async def _step(self, asked: Request) -> StepResult:
        assert isinstance(asked.argument, Turn)
        return await self._episodes[asked.episode].step(asked.argument)

    async def _close(self, asked: Request) -> None:
        self._random.pop(asked.episode, None)
        episode = self._episodes.pop(asked.episode, None)
        if episode is not None:
            await episode.close()


def _kind_of(error: BaseException) -> Literal["fault", "tool", "unavailable"]:
    if isinstance(error, EndpointUnavailable):
        return "unavailable"
    return "tool" if isinstance(error, ToolFault) else "fault"
