"""The one client of a policy: `PolicyClient(source, dialect, proof)`.

A request goes to an endpoint that is ready, and after a fault that may pass to another one. Owns
the sending, the retries, the checks of every answer, and requests shared by turns of several
dialogues. Leaves out connections (`http_client`), bodies (`dialects`), the coming and going of
endpoints (`fleet_watch`), and which weights may answer (`proofs`).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import tenacity

from marin_rl.config import InferenceConfig
from marin_rl.errors import BadResponse, EndpointUnavailable, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer, model_ids
from marin_rl.inference.client.dialects import (
    ChatDialect,
    Dialect,
    Read,
    SGLangDialect,
    Template,
    VllmDialect,
)
from marin_rl.inference.client.fleet import FleetOptions, Member
from marin_rl.inference.client.fleet_sources import EndpointSource
from marin_rl.inference.client.fleet_watch import FleetWatch, Proof
from marin_rl.inference.client.http_client import PAUSE_FIRST_S, HttpClient, Root
from marin_rl.inference.client.proofs import PolicyProof, check_answer
from marin_rl.inference.client.protocol import ChatClient, ChatRequest, TurnsRequest
from marin_rl.inference.client.publishing import Publisher

PAUSE_MAX_S = 30.0

Value = TypeVar("Value")
_WATCH = FleetOptions()


# One that the engine answers and one that is being written: more would split the turns.
IN_FLIGHT = 2
Ask = Callable[[TurnsRequest], Awaitable[list[ChatAnswer]]]
Turns = dict[asyncio.Future[ChatAnswer], ChatRequest]  # each with its answer, in order


class PolicyClient(ChatClient):
    """Completions of one served model from any of several equal endpoints.

    With a `source` they are a fleet: the endpoints that it names now, each once it has passed the
    `proof`; the trainer has proven `endpoints` just now. Without one they are `endpoints`, for
    good, each asked in turn. A fault that may pass moves a request on to the next endpoint, with
    exponential back-off and full jitter after each turn around all of them, `attempts_max` times.
    `connection` are the options of `HttpClient`. One client belongs to one event loop.
    """

    def __init__(
        self,
        *,
        model: str,
        endpoints: Sequence[str] = (),
        source: EndpointSource | None = None,
        fleet: FleetOptions = _WATCH,
        dialect: Dialect | None = None,
        proof: Proof | None = None,
        attempts_max: int = 5,
        turns_per_request: int = 1,
        **connection: Any,
    ) -> None:
        assert endpoints or source, "a client needs at least one endpoint"
        self.model, self.dialect = model, dialect or ChatDialect()
        self.gives_ids = self.dialect.gives_ids
        self._proof = proof or PolicyProof()
        self._attempts_max = attempts_max
        on_broken = lambda url: self._watch.on_broken(url)
        self._http = HttpClient(model=model, on_broken=on_broken, **connection)
        self._watch = FleetWatch(self._http, self.dialect, fleet, self._proof, source, endpoints)
        shared = turns_per_request if isinstance(self.dialect, ChatDialect) else 1
        self._turns = TurnBatches(self._ask_turns, shared, self._watch.fleet.place_of)

    async def __aenter__(self) -> Self:
        self._watch.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._watch.close()
        await self._turns.close()
        await self._http.close()

    async def wait_until_ready(self) -> list[str]:
        return await self._watch.wait_until_ready()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer of an endpoint; raises FleetEmpty where none is ready for too long."""
        if self._turns.takes(request):
            answer = await self._turns.ask(request)
        else:
            answer = await self.dialect.answer(request, partial(self._send, request.session))
        if self.gives_ids:
            check_answer(answer, self.model, request.n)
        return answer

    async def _ask_turns(self, request: TurnsRequest) -> list[ChatAnswer]:
        assert isinstance(self.dialect, ChatDialect), "others share no requests"
        return await self.dialect.turns(request, partial(self._send, request.session))

    async def models(self) -> list[str]:
        """Ids that every endpoint serves, sorted. Raises as `chat` does."""
        # Any endpoint may answer any request, so only what all of them serve counts.
        return sorted(set.intersection(*(await self.models_of_each()).values()))

    async def models_of_each(self) -> dict[str, set[str]]:
        """Ids that each endpoint serves. Raises as `chat` does."""
        return {
            url: model_ids(await self._http.request(url, "GET", "/models"))
            for url in self._watch.fleet.members
        }

    async def publish(self, weights: Publisher, url: str) -> None:
        """Have one endpoint load weights, with the admin key where there is one.

        Raises InputError for an incomplete folder, StalePolicy, and as `chat` does.
        """
        await self._retried(lambda: weights.publish(partial(self._send_as_admin, url)))

    async def post_as_admin(self, url: str, route: str, body: dict[str, Any]) -> bytes:
        """Answer of one endpoint to a route below its host, asked with the admin key.

        Raises as `chat` does, and NoSuchRoute.
        """
        return await self._retried(lambda: self._send_as_admin(url, "POST", route, body))

    async def _send_as_admin(
        self, url: str, method: str, path: str, body: dict[str, Any] | None
    ) -> bytes:
        return await self._http.request(url, method, Root(path), body, admin=True)

    async def _send(
        self, session: str, path: str, body: dict[str, Any], read: Read
    ) -> list[ChatAnswer]:
        """Answers of any endpoint to a POST, accepted by the proof. Raises as `chat` does."""
        failures, tried = 0, list[str]()
        samples = len(body["prompt"]) if "seeds" in body else int(body.get("n") or 1)
        while True:
            # Before an endpoint is chosen: waiting requests go to endpoints that join meanwhile.
            async with self._http.in_flight:
                member = await self._watch.member(session, tried)
                wait_s = self._http.left_alone_s(member.url)
                if not wait_s:
                    try:
                        return await self._asked(member, samples, path, body, read)
                    except (EndpointUnavailable, StalePolicy) as error:
                        failures += self._watch.failed(member, error)
                        if failures >= self._attempts_max:
                            raise
                    tried.append(member.url)
                    wait_s = _pause_s(failures, len(self._watch.fleet.ready))
            # A request that waits holds no place of others.
            await asyncio.sleep(wait_s)

    async def _asked(
        self, member: Member, samples: int, path: str, body: dict[str, Any], read: Read
    ) -> list[ChatAnswer]:
        """Answers of one endpoint to a POST that has its place among the requests in flight."""
        endpoint = self._watch.access(member)
        member.sent(samples)
        try:
            answers = await endpoint.post(path, body, read)
            return [await self._proof.accept(endpoint, answer) for answer in answers]
        finally:
            # Also of a request that was cancelled, or it would count as work for ever.
            member.answered(samples)
            member.not_before = self._http.not_before.get(member.url, 0.0)

    async def _retried(self, send: Callable[[], Awaitable[Value]]) -> Value:
        """Result of `send` to one endpoint, once it neither passes nor fails for good."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(EndpointUnavailable),
            stop=tenacity.stop_after_attempt(self._attempts_max),
            wait=lambda state: _pause_s(state.attempt_number, 1),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await send()
        raise AssertionError("tenacity returns a value or raises")


def _pause_s(failures: int, endpoints: int) -> float:
    """Seconds before the next attempt: none while an endpoint is left that was not tried."""
    turns, untried = divmod(failures, endpoints or 1)
    if untried or not turns:  # or all were lost, and had no say
        return 0.0
    return random.uniform(0, min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (turns - 1)))


class TurnBatches:
    """Turns of one client that share requests, at most `limit` in each; `ask` sends one request.

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
        """Answer one turn. Raises as its request does."""
        answer: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = request
        if len(self._senders) < IN_FLIGHT:
            sender = asyncio.create_task(self._send_waiting())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await answer

    async def close(self) -> None:
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
                asked = list(turns.values())
                joined = TurnsRequest(
                    model=asked[0].model,
                    prompts=[turn.prompt_ids for turn in asked if turn.prompt_ids is not None],
                    seeds=[turn.sampling.seed for turn in asked if turn.sampling.seed is not None],
                    sampling=replace(asked[0].sampling, seed=None),
                    session=asked[0].session,
                    stop_token_ids=asked[0].stop_token_ids,
                )
                answers = await self._ask(joined)
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
        self._waiting = {turn: asked for turn, asked in self._waiting.items() if not turn.done()}
        # turns of one request have sampling and place in common, the longest waiting come first
        common = {
            turn: (replace(asked.sampling, seed=None), self._place(asked.session))
            for turn, asked in self._waiting.items()
        }
        first = next(iter(common.values()), None)
        taken = [turn for turn, each in common.items() if each == first][: self._limit]
        return {turn: self._waiting.pop(turn) for turn in taken}


def client_of(inference: InferenceConfig, template: Template) -> Callable[..., PolicyClient]:
    """The client of a run's endpoints; `template` renders and decodes for the routes of ids."""
    if inference.route == "sglang":
        return partial(PolicyClient, dialect=SGLangDialect(template))
    if inference.route == "vllm_generate":
        return partial(PolicyClient, dialect=VllmDialect(template))
    return PolicyClient
