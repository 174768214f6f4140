"""Further turns of many dialogues in few requests: a request costs more CPU than a short turn.

Turns that come while others are being answered wait, and then go together, as group commits of
databases do: nothing waits for a time, and a single turn goes at once. Every turn keeps its own
seed, so its tokens are those that a request of its own would bring. Leaves out how a request is
sent, retried and checked (`policy_client`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from marin_rl.errors import BadResponse
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.protocol import ChatRequest, TurnsRequest
from marin_rl.types import Sampling

# One that the engine answers and one that is being written: more would split the turns.
IN_FLIGHT = 2

Ask = Callable[[TurnsRequest], Awaitable[list[ChatAnswer]]]


def _anywhere(session: str) -> str:
    """The place of all sessions where there is but one."""
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A turn that waits for its answer."""

    request: ChatRequest
    answer: "asyncio.Future[ChatAnswer]"

    @property
    def shared(self) -> Sampling:
        """Sampling that the turns of one request have in common."""
        return replace(self.request.sampling, seed=None)


class TurnBatches:
    """Collects turns of one client; `ask` sends those that may share a request, `limit` at most.

    `place` says where a session's cache is: turns of one request have it at one endpoint.
    """

    def __init__(self, ask: Ask, limit: int, place: Callable[[str], str] = _anywhere) -> None:
        self._ask, self._limit, self._place = ask, limit, place
        self._waiting: list[_Turn] = []
        self._senders: set[asyncio.Task[None]] = set()

    def takes(self, request: ChatRequest) -> bool:
        """True for one sample of exact ids with a seed, where requests are shared at all.

        Tools stay with the chat route.
        """
        single = request.n == 1 and request.prompt_ids is not None and not request.tools
        return self._limit > 1 and single and request.sampling.seed is not None

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """The answer to one turn. Raises what its request raises."""
        turn = _Turn(request, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        if len(self._senders) < IN_FLIGHT:
            sender = asyncio.create_task(self._send_waiting())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await turn.answer

    async def close(self) -> None:
        """Cancel what is under way."""
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        _cancel(self._waiting)

    async def _send_waiting(self) -> None:
        """Send requests until no turn waits."""
        # those whose turns are due in this pass of the event loop come along
        await asyncio.sleep(0)
        while turns := self._take():
            try:
                answers = await self._ask(_joined(turns))
                if len(answers) != len(turns):
                    raise BadResponse(f"expected {len(turns)} completions, found {len(answers)}")
            except Exception as error:  # noqa: BLE001 - raised where each turn is awaited
                _fail(turns, error)
            else:
                _resolve(turns, answers)
            finally:  # changes nothing but where this task is cancelled
                _cancel(turns)
            # the members that were answered ask for their next turns before the next request
            await asyncio.sleep(0)

    def _take(self) -> list[_Turn]:
        """Remove the turns of the next request: of one sampling, the longest waiting first."""
        self._waiting = [turn for turn in self._waiting if not turn.answer.done()]
        if not self._waiting:
            return []
        first = self._waiting[0]
        shared, place = first.shared, self._place(first.request.session)
        taken = [
            turn
            for turn in self._waiting
            if turn.shared == shared and self._place(turn.request.session) == place
        ][: self._limit]
        chosen = set(taken)
        self._waiting = [turn for turn in self._waiting if turn not in chosen]
        return taken


def _joined(turns: list[_Turn]) -> TurnsRequest:
    first = turns[0]
    prompts = [turn.request.prompt_ids for turn in turns]
    seeds = [turn.request.sampling.seed for turn in turns]
    return TurnsRequest(
        model=first.request.model,
        prompts=[prompt for prompt in prompts if prompt is not None],
        seeds=[seed for seed in seeds if seed is not None],
        sampling=first.shared,
        session=first.request.session,
        stop_token_ids=first.request.stop_token_ids,
    )


def _resolve(turns: list[_Turn], answers: list[ChatAnswer]) -> None:
    for turn, answer in zip(turns, answers, strict=True):
        if not turn.answer.done():  # else its caller was cancelled
            turn.answer.set_result(answer)


def _fail(turns: list[_Turn], error: Exception) -> None:
    for turn in turns:
        if not turn.answer.done():
            turn.answer.set_exception(error)


def _cancel(turns: list[_Turn]) -> None:
    for turn in turns:
        turn.answer.cancel()
