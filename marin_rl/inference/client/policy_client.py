"""The one client of a policy: `PolicyClient(source, dialect, proof)`.

A request goes to an endpoint that is ready, and after a fault that may pass to another one. Owns
the sending, the retries and the checks of every answer. Leaves out connections (`http_client`),
bodies (`dialects`), the coming and going of endpoints (`fleet_watch`), and which weights may answer
(`proofs`).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, TypeVar

import tenacity

from marin_rl.errors import BadResponse, EndpointUnavailable, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer, model_ids
from marin_rl.inference.client.chat_client import ChatClient
from marin_rl.inference.client.dialects import ChatDialect, Dialect, Read
from marin_rl.inference.client.fleet import FleetOptions, Member
from marin_rl.inference.client.fleet_sources import EndpointSource
from marin_rl.inference.client.fleet_watch import PROBE_TIMEOUT_S, FleetWatch
from marin_rl.inference.client.http_client import PAUSE_FIRST_S, HttpClient, Root
from marin_rl.inference.client.proofs import PolicyProof, Proof
from marin_rl.inference.client.protocol import (
    ChatRequest,
    TurnsRequest,
    parse_label,
    parse_served_model_id,
)
from marin_rl.inference.client.publishing import Publisher, Send
from marin_rl.inference.client.turn_batches import TurnBatches

PAUSE_MAX_S = 30.0

Value = TypeVar("Value")
_WATCH = FleetOptions()


class PolicyClient(ChatClient):
    """Completions of one served model from any of several equal endpoints.

    With a `source` they are a fleet: those that it names at the moment, each once it has passed the
    `proof`, of which the trainer has proven `endpoints` just now. Without one they are `endpoints`,
    for good, each asked in turn. A fault that may pass moves a request on to the next endpoint,
    with exponential back-off and full jitter after each turn around all of them, `attempts_max`
    times; an endpoint of a fleet that is lost meanwhile does not count. `connection` are the
    options of `HttpClient`. Belongs to the event loop that first uses it: one client per
    `asyncio.run`, closed at its end.
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
        self.model, self.options = model, fleet
        self.dialect = dialect or ChatDialect()
        self.gives_ids = self.dialect.gives_ids
        self._proof = proof or PolicyProof()
        self._attempts_max = attempts_max
        self._watch = FleetWatch(self, self._proof, source, endpoints)
        self._http = HttpClient(model=model, on_broken=self._watch.on_broken, **connection)
        shared = turns_per_request if isinstance(self.dialect, ChatDialect) else 1
        self._turns = TurnBatches(self._ask_turns, shared, self._watch.fleet.place_of)

    async def __aenter__(self) -> Self:
        self._watch.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop health checks and close all connections."""
        await self._watch.close()
        await self._turns.close()
        await self._http.close()

    async def wait_until_ready(self) -> list[str]:
        """URLs of the endpoints that are ready, once there are some. Raises FleetEmpty."""
        return await self._watch.wait_until_ready()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer of an endpoint; raises FleetEmpty where none is ready for too long."""
        if self._turns.takes(request):
            answer = await self._turns.ask(request)
        else:
            answer = await self.dialect.answer(request, partial(self._send, request.session))
        if self.gives_ids:
            self.check(answer, request.n)
        return answer

    async def _ask_turns(self, request: TurnsRequest) -> list[ChatAnswer]:
        """Answers to the prompts of one request, in order. Raises as `chat` does."""
        assert isinstance(self.dialect, ChatDialect), "others share no requests"
        return await self.dialect.turns(request, partial(self._send, request.session))

    def check(self, answer: ChatAnswer, n: int) -> None:
        """Raise StalePolicy or BadResponse for an answer that cannot be trained on."""
        # The id has the digest of the weights: tokens of others are never trained on as this
        # policy's.
        if answer.model != self.model:
            raise StalePolicy(
                f"asked for the model {self.model!r}, but the answer is from {answer.model!r}: "
                "the endpoint serves other weights than this round's"
            )
        # A short group would shift the baseline of its other members.
        if len(answer.completions) != n:
            raise BadResponse(f"expected {n} completions, found {len(answer.completions)}")
        if not len(answer.prompt_token_ids):
            raise BadResponse("expected the ids of the prompt, found none")
        for completion in answer.completions:
            _check_labels(self.model, [span.label for span in completion.weights])

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
        self, url: str, method: str, path: str, body: dict[str, Any] | None, **options: Any
    ) -> bytes:
        return await self._http.request(url, method, Root(path), body, admin=True, **options)

    def sender(self, member: Member) -> Send:
        """Send requests to an endpoint as an admin, past the bound on requests in flight."""
        return partial(self._send_as_admin, member.url, gate=nullcontext())

    async def probe(self, member: Member, path: str) -> bytes:
        """Answer of one endpoint to a GET, asked once. Raises as `chat` does."""
        # One that joins may have a queue before it: its canary waits there as any request.
        limit_s = min(PROBE_TIMEOUT_S, self._http.timeout_s) if member.state == "ready" else None
        return await self._http.request(
            member.url, "GET", path, gate=nullcontext(), timeout_s=limit_s
        )

    async def sample(self, member: Member, request: ChatRequest) -> ChatAnswer:
        """Answer of one endpoint, asked once; not checked. Raises as `chat` does."""

        async def send(path: str, body: dict[str, Any], read: Read) -> list[ChatAnswer]:
            return read(
                await self._http.request(member.url, "POST", path, body, gate=nullcontext())
            )

        return await self.dialect.answer(request, send)

    async def _send(
        self, session: str, path: str, body: dict[str, Any], read: Read
    ) -> list[ChatAnswer]:
        """Answers of any endpoint to a POST, accepted by the proof. Raises as `chat` does."""
        failures, samples, tried = 0, _samples(body), list[str]()
        while True:
            # Before an endpoint is chosen: what waits here goes to those that join meanwhile.
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
        member.sent(samples)
        try:
            data = await self._http.request(member.url, "POST", path, body, gate=nullcontext())
            return [await self._proof.accept(self, member, answer) for answer in read(data)]
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


def _samples(body: dict[str, Any]) -> int:
    """Completions that a request asks for."""
    match body.get("prompt"):
        case [list(), *_] as prompts:
            return len(prompts)
        case _:
            return int(body.get("n") or 1)


def _check_labels(model: str, labels: Sequence[str]) -> None:
    """Raise StalePolicy for tokens of other weights than a model's, or of several."""
    labels, served = list(dict.fromkeys(labels)), parse_served_model_id(model)
    if served is None:
        # A name without a version takes any weights, but one set of them.
        wrong = labels[1:]
    else:
        named = {label: parse_label(label) for label in labels}
        wrong = [
            label
            for label, weights in named.items()
            if weights is None
            or weights.weight_version != served.weight_version
            # In labels of our own servers it is empty, with which every digest begins.
            or not served.digest.startswith(weights.digest)
        ]
    if wrong:
        raise StalePolicy(
            f"asked for the model {model!r}, but tokens were sampled by weights "
            f"{', '.join(map(repr, labels)):.200}: new weights came in between"
        )
