"""Members that go on with recorded turns: the client's side of it, and what ends them early.

The state of an environment is not stored. An episode is begun again and given the recorded turns,
and a client that keeps turns compares what the environment answers with what it answered before.
Leaves out the record itself (`partial_members`).
"""

from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from marin_rl.rollouts.concurrent import all_of
from marin_rl.rollouts.interruption import Interrupted
from marin_rl.rollouts.trajectories import Trajectory

Value = TypeVar("Value")


class Diverged(Exception):
    """An environment answered a recorded turn otherwise than when that was sampled."""


@runtime_checkable
class KeepsTurns(Protocol):
    """Client that has recorded turns of members, which the chat method answers with."""

    def check_end(self, session: str, index: int, trajectory: Trajectory) -> None:
        """Raise Diverged for a member that ended before its recorded turns do."""
        ...

    def begin_again(self, session: str, index: int, reason: str) -> None:
        """Leave out the recorded turns of a member."""
        ...


async def results_unless_interrupted(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Results of concurrent calls, in order; the first error cancels the others and is raised.

    Raises Interrupted where a call is interrupted, once all others have ended or are too, so that
    each gets to the end of its piece.
    """

    async def ended(call: Coroutine[Any, Any, Value]) -> Value | Interrupted:
        try:
            return await call
        except Interrupted as interrupted:
            return interrupted

    results = await all_of(map(ended, calls))
    for result in results:
        if isinstance(result, Interrupted):
            raise result
    return [result for result in results if not isinstance(result, Interrupted)]
