"""Further turns of many dialogues in few requests: a request costs more CPU than a short turn.

Turns that come while others are being answered wait, and then go together, as group commits of
databases do: nothing waits for a time, and a single turn goes at once. Every turn keeps its own
seed, so its tokens are those that a request of its own would bring. Leaves out how a request is
sent, retried and checked (`policy_client`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from marin_rl.errors import BadResponse
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.protocol import ChatRequest, TurnsRequest
from marin_rl.types import Sampling

# One that the engine answers and one that is being written: more would split the turns.
IN_FLIGHT = 2

Ask = Callable[[TurnsRequest], Awaitable[list[ChatAnswer]]]
Turns = dict[asyncio.Future[ChatAnswer], ChatRequest]  # each with its answer, in order


class TurnBatches:
    """Collects turns of one client; `ask` sends those that may share a request, `limit` at most.

    `place` says where a session's cache is: turns of one request have it at one endpoint.
    """

    def __init__(
        self, ask: Ask, limit: int, place: Callable[[str], str] = lambda _session: ""
    ) -> None:
        self._ask, self._limit, self._place = ask, limit, place
        self._waiting: Turns = {}
        self._senders: set[asyncio.Task[None]] = set()

    def takes(self, request: ChatRequest) -> bool:
        """True for one sample of exact ids with a seed, where requests are shared at all.

        Tools stay with the chat route.
        """
        single = request.n == 1 and request.prompt_ids is not None and not request.tools
        return self._limit > 1 and single and request.sampling.seed is not None

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """The answer to one turn. Raises what its request raises."""
        answer: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = request
        if len(self._senders) < IN_FLIGHT:
            sender = asyncio.create_task(self._send_waiting())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await answer

    async def close(self) -> None:
        """Cancel what is under way."""
        senders = list(self._senders)
        for task in (*senders, *self._waiting):
            task.cancel()
        await asyncio.gather(*senders, return_exceptions=True)

    async def _send_waiting(self) -> None:
        """Send requests until no turn waits."""
        # those whose turns are due in this pass of the event loop come along
        await asyncio.sleep(0)
        while turns := self._take():
            try:
                answers = await self._ask(_joined(list(turns.values())))
                if len(answers) != len(turns):
                    raise BadResponse(f"expected {len(turns)} completions, found {len(answers)}")
                for turn, answer in zip(turns, answers, strict=True):
                    if not turn.done():  # else its caller was cancelled
                        turn.set_result(answer)
            except Exception as error:  # noqa: BLE001 - raised where each turn is awaited
                for turn in [turn for turn in turns if not turn.done()]:
                    turn.set_exception(error)
            finally:  # changes nothing but where this task is cancelled
                for turn in turns:
                    turn.cancel()
            # the members that were answered ask for their next turns before the next request
            await asyncio.sleep(0)

    def _take(self) -> Turns:
        """Remove the turns of the next request: of one sampling, the longest waiting first."""
        self._waiting = {turn: asked for turn, asked in self._waiting.items() if not turn.done()}
        shared = [(turn, self._shared(asked)) for turn, asked in self._waiting.items()]
        taken = [turn for turn, each in shared if each == shared[0][1]][: self._limit]
        return {turn: self._waiting.pop(turn) for turn in taken}

    def _shared(self, request: ChatRequest) -> tuple[Sampling, str]:
        """Sampling and place that the turns of one request have in common."""
        return replace(request.sampling, seed=None), self._place(request.session)


def _joined(turns: list[ChatRequest]) -> TurnsRequest:
    first = turns[0]
    return TurnsRequest(
        model=first.model,
        prompts=[turn.prompt_ids for turn in turns if turn.prompt_ids is not None],
        seeds=[turn.sampling.seed for turn in turns if turn.sampling.seed is not None],
        sampling=replace(first.sampling, seed=None),
        session=first.session,
        stop_token_ids=first.stop_token_ids,
    )
