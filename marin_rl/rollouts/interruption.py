"""Concurrent calls, and what ends sampling early: an error, a request, or another answer.

A request to end is heard where nothing is lost: between two pieces of completions, or before a
group. An environment whose answers differ from the recorded ones ends the replay of a dialogue.
Leaves out what is kept of unfinished groups (`partial`).
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.protocol import ChatClient, ChatRequest
from marin_rl.rollouts.trajectories import Trajectory

Value = TypeVar("Value")


class Interrupted(Exception):
    """Sampling ended at the border of two pieces, or before a group began."""


class Diverged(Exception):
    """An environment answered a recorded turn otherwise than when that was sampled."""


@runtime_checkable
class KeepsTurns(Protocol):
    """Client that has recorded turns of members, which the chat method answers with.

    The state of an environment is not stored: an episode is begun again and given these turns.
    """

    def check_end(self, session: str, index: int, trajectory: Trajectory) -> None: ...

    def begin_again(self, session: str, index: int, reason: str) -> None: ...


async def all_of(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Results of concurrent calls, in order; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def all_ended(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value | Interrupted]:
    """The same, with the Interrupted of each call that was, so that others get to their border."""

    async def ended(call: Coroutine[Any, Any, Value]) -> Value | Interrupted:
        try:
            return await call
        except Interrupted as interrupted:
            return interrupted

    return await all_of(map(ended, calls))


async def results_unless_interrupted(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """The same; raises Interrupted once all have ended, where a call was interrupted."""
    results = await all_ended(calls)
    for result in results:
        if isinstance(result, Interrupted):
            raise result
    return [result for result in results if not isinstance(result, Interrupted)]


class Interruption:
    """Request to end sampling at the next border of pieces, or also before the next group."""

    def __init__(self) -> None:
        self.requested = False
        self.between_groups = False

    def request(self, *, between_groups: bool = False) -> None:
        """Have all who sample end after the piece that they wait for.

        With `between_groups` those who sample whole completions begin no further group, too.
        """
        self.requested = True
        self.between_groups |= between_groups


@asynccontextmanager
async def interruptible(
    client: AbstractAsyncContextManager[ChatClient], interruption: Interruption, at_once: int
) -> AsyncIterator[ChatClient]:
    """Yield a client with `at_once` requests under way, whose groups may be interrupted."""
    async with client as connected:
        yield InterruptibleClient(connected, interruption, at_once)


class InterruptibleClient(ChatClient):
    """Client that begins no group once an interruption is requested between groups.

    As many requests as `in_flight_max` are under way at once, so that groups which wait have not
    begun. Those that have begun go on to their end.
    """

    def __init__(self, client: ChatClient, interruption: Interruption, in_flight_max: int) -> None:
        self.model, self.gives_ids = client.model, client.gives_ids
        self._client, self._interruption = client, interruption
        self._gate = asyncio.Semaphore(in_flight_max)
        self._begun = set[str]()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        async with self._gate:
            if self._interruption.between_groups and request.session not in self._begun:
                raise Interrupted
            self._begun.add(request.session)  # the id of a group
            return await self._client.answer(request)
