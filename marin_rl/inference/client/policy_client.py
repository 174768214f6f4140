"""The one door to OpenAI clients: asks endpoints for completions, retries what can pass.

Requests go through the `openai` package's transport but past its typed models, whose per-token
objects would cost more than the sampling of a small policy; bodies are read by `protocol`.
Every answer is checked before anyone trains on it. Scoring, rollouts and files are elsewhere.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import orjson
import tenacity
from jaxtyping import Int32

from marin_rl.errors import (
    BadResponse,
    EndpointUnavailable,
    MarinRLError,
    NoSuchRoute,
    OutOfMemory,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.client.answers import ChatAnswer, decode_answer, decode_turns
from marin_rl.inference.client.chat_client import ChatClient
from marin_rl.inference.client.connections import Connections
from marin_rl.inference.client.protocol import ChatRequest, PlainRequest, TurnsRequest
from marin_rl.inference.client.publishing import Publisher
from marin_rl.inference.client.turn_batches import TurnBatches
from marin_rl.memory import OUT_OF_MEMORY

if TYPE_CHECKING:
    import openai

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
MESSAGE_CHARACTERS_MAX = 500

Value = TypeVar("Value")

_PASSING = (408, 409, 425, 429)
_ASKS_TO_WAIT = (429, 503)
_OTHER_WEIGHTS = ("digest_mismatch", "canary_mismatch")


class PolicyClient(ChatClient):
    """Completions of one served model from any of several equal endpoints.

    Each request starts at the next endpoint in turn; a fault that may pass moves it on to the
    following one, with exponential back-off and full jitter after each turn around all of them.
    An endpoint that answers 429 or 503 with Retry-After is left alone for so long (`timeout_s` at
    most), by every request of this client. `admin_key` is sent in place of `api_key` where weights
    are updated. Belongs to the event loop that first uses it: one client per `asyncio.run`, closed
    at its end.
    """

    def __init__(
        self,
        *,
        endpoints: Sequence[str],
        model: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 600.0,
        attempts_max: int = 5,
        in_flight_max: int = 64,
        turns_per_request: int = 1,
    ) -> None:
        assert endpoints, "a client needs at least one endpoint"
        self.model = model
        self._api_key, self._admin_key = api_key, admin_key
        self._timeout_s = timeout_s
        self._attempts_max = attempts_max
        self._in_flight = asyncio.Semaphore(in_flight_max)
        self._turn = itertools.count()
        self._has_chat_tokens = True  # until an endpoint says that it has no such route
        self._turns = TurnBatches(self._ask_turns, turns_per_request, self._place_of)
        self._endpoints = tuple(endpoints)
        self._not_before: dict[str, float] = {}
        self._connections: dict[str, Connections] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._turns.close()
        for connections in self._connections.values():
            await connections.close()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer of an endpoint, which renders the messages where there are no exact ids."""
        if self._turns.takes(request):
            answer = await self._turns.ask(request)
        elif request.prompt_ids is not None and request.n == 1:
            answer = await self._go_on(request, request.prompt_ids)
        else:
            data = await self._send(request.path, request.body(), request.session)
            answer = decode_answer(data)
        self._check(answer, request.n)
        return answer

    async def _go_on(self, request: ChatRequest, prompt_ids: Int32[np.ndarray, " P"]) -> ChatAnswer:
        """Answer to exact ids: by the chat route for them, else by that of plain completions."""
        if self._has_chat_tokens:
            try:
                data = await self._send(request.path, request.body(), request.session)
                return decode_answer(data)
            except NoSuchRoute:
                # For good: later requests spare the 404.
                self._has_chat_tokens = False
        plain = PlainRequest(
            model=request.model,
            prompt=prompt_ids,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
        )
        data = await self._send(plain.path, plain.body(), request.session)
        (answer, *_) = decode_turns(data)
        return answer

    async def _ask_turns(self, request: TurnsRequest) -> list[ChatAnswer]:
        """Answers to the prompts of one request, in order. Raises as `chat` does."""
        data = await self._send(request.path, request.body(), request.session)
        try:
            return decode_turns(data)
        except BadResponse as error:
            raise BadResponse(
                f"{error}; inference.turns_per_request is for marin-rl's own server: set it to "
                "null for others"
            ) from error

    async def _ask_at(
        self, url: str, request: ChatRequest, gate: AbstractAsyncContextManager[Any]
    ) -> ChatAnswer:
        """Answer of one endpoint, asked once; not checked. Raises as `chat` does."""
        return decode_answer(
            await self._attempt(url, "POST", request.path, request.body(), gate=gate)
        )

    def _check(self, answer: ChatAnswer, n: int) -> None:
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

    async def models(self) -> list[str]:
        """Ids that every endpoint serves, sorted. Raises as `chat` does."""
        # Any endpoint may answer any request, so only what all of them serve counts.
        return sorted(set.intersection(*(await self.models_of_each()).values()))

    async def models_of_each(self) -> dict[str, set[str]]:
        """Ids that each endpoint serves. Raises as `chat` does."""
        return {
            url: model_ids(await self._attempt(url, "GET", "/models", None))
            for url in self._endpoints
        }

    async def publish(self, weights: Publisher, url: str) -> None:
        """Have one endpoint load weights, with the admin key where there is one.

        Raises InputError for an incomplete folder, StalePolicy, and as `chat` does.
        """
        await self._retried(lambda tried: weights.publish(partial(self.send_as_admin, url)))

    async def post_as_admin(self, url: str, route: str, body: dict[str, Any]) -> bytes:
        """Answer of one endpoint to a route below its host, asked with the admin key.

        Raises as `chat` does, and NoSuchRoute.
        """
        return await self._retried(lambda tried: self.send_as_admin(url, "POST", route, body))

    async def send_as_admin(
        self,
        url: str,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        gate: AbstractAsyncContextManager[Any] | None = None,
    ) -> bytes:
        """Send a request to a path from the root of an endpoint, once. Raises as `chat` does."""
        route = at_root(url, path)
        return await self._attempt(url, method, route, body, key=self._admin_key, gate=gate)

    async def _send(self, path: str, body: dict[str, Any], session: str) -> bytes:
        """Answer of any endpoint to a POST. Raises as `chat` does."""
        # Round robin: requests of a round are alike, so counting them is counting load.
        first = next(self._turn)
        return await self._retried(
            lambda tried: self._attempt(self._willing(first + tried), "POST", path, body)
        )

    async def _retried(self, send: Callable[[int], Awaitable[Value]]) -> Value:
        """`send`, given the number of tries before, until it neither passes nor fails for good."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(EndpointUnavailable),
            stop=tenacity.stop_after_attempt(self._attempts_max),
            wait=self._pause_s,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await send(attempt.retry_state.attempt_number - 1)
        raise AssertionError("tenacity returns a value or raises")

    def _pause_s(self, state: tenacity.RetryCallState) -> float:
        """Seconds before the next attempt: none while an endpoint is left that was not tried."""
        turns, untried = divmod(state.attempt_number, len(self._endpoints))
        if untried:
            return 0.0
        return random.uniform(0, min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (turns - 1)))

    def _willing(self, first: int) -> str:
        """Return endpoint `first`, or the next one after it that is not backing off."""
        count, now = len(self._endpoints), time.monotonic()
        candidates = [self._endpoints[(first + step) % count] for step in range(count)]
        # `min` takes the first of equals, so that free endpoints keep their turn.
        return min(candidates, key=lambda url: max(self._not_before.get(url, 0.0), now))

    async def _left_alone(self, url: str) -> None:
        """Wait as long as the endpoint requested, plus jitter to spread retries."""
        left_s = self._not_before.get(url, 0.0) - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s + random.uniform(0, min(left_s, PAUSE_FIRST_S)))

    async def _attempt(
        self,
        url: str,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        key: str | None = None,
        gate: AbstractAsyncContextManager[Any] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Send a request once. The time limit is on the complete answer, not between bytes.

        `gate` takes the place of the bound on requests in flight, `timeout_s` that of the client's.
        """
        import httpx2
        import openai

        # Before the semaphore: a request that waits for its server holds no place of others.
        await self._left_alone(url)
        timeout_s = timeout_s or self._timeout_s
        try:
            # In this order: the time of an answer begins once the request has its place.
            async with gate or self._in_flight, asyncio.timeout(timeout_s):
                with self._connected(url).lend() as client:
                    if key is not None:
                        client = client.with_options(api_key=key)  # over the same connections
                    if method == "POST":
                        response = await client.post(path, cast_to=httpx2.Response, body=body)
                    else:
                        response = await client.get(path, cast_to=httpx2.Response)
                    return response.content
        except TimeoutError:
            raise EndpointUnavailable(f"{url}: no answer in {timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            self._on_broken(url)
            raise EndpointUnavailable(self._message(url, error.__cause__ or error)) from None
        except openai.APIStatusError as error:
            # Bounded by our own time limit: a server may ask for days.
            if error.status_code in _ASKS_TO_WAIT:
                wait_s = min(_retry_after_s(error.response.headers), self._timeout_s)
                self._not_before[url] = time.monotonic() + wait_s
            raise self._refusal(url, error) from None

    def _connected(self, url: str) -> Connections:
        if url not in self._connections:
            self._connections[url] = Connections(url, self._api_key, self._timeout_s)
        return self._connections[url]

    def _place_of(self, session: str) -> str:
        """Endpoint that has a session's cache; empty where that does not matter."""
        return ""

    def _on_broken(self, url: str) -> None:
        """Take note that an endpoint refused or broke a connection."""

    def _refusal(self, url: str, error: "openai.APIStatusError") -> MarinRLError:
        """Error for a status other than 2xx."""
        # openai's own prefix repeats the status that is said here.
        words = error.message.removeprefix(f"Error code: {error.status_code} - ")
        message = self._message(url, f"status {error.status_code}: {words}")
        if isinstance(error.body, dict) and error.body.get("code") in _OTHER_WEIGHTS:
            return StalePolicy(message)
        # The same request again would need the same memory.
        if isinstance(error.body, dict) and error.body.get("code") == OUT_OF_MEMORY:
            return OutOfMemory(message)
        if error.status_code in _PASSING or error.status_code >= 500:
            return EndpointUnavailable(message)
        if error.status_code == 404 and _is_about_the_model(error.body):
            return StalePolicy(f"{message} (asked for {self.model!r})")
        if error.status_code == 404:
            return NoSuchRoute(f"{message}: no such route; does the base URL end in /v1?")
        if error.status_code in (401, 403):
            return RequestRejected(
                f"{message}: {self._advice(error.status_code, error.request.url.path)}"
            )
        return RequestRejected(message)

    def _advice(self, status: int, route: str) -> str:
        """Return what to do about a 401 or a 403 of a route."""
        return (
            "set the variable that inference.api_key_variable names, for new weights the one of "
            "inference.server.admin_key_variable"
        )

    def _message(self, url: str, message: object) -> str:
        """The endpoint's own words, short, and never with our key in them."""
        text = f"{url}: {str(message) or type(message).__name__}"
        # Some servers quote the request, headers included.
        for key in filter(None, (self._api_key, self._admin_key)):
            text = text.replace(key, "***")
        return text[:MESSAGE_CHARACTERS_MAX]


def at_root(url: str, path: str) -> str:
    """The URL of a path next to `/v1`, for the base URL of an endpoint."""
    return url.removesuffix("/v1") + path


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 without a valid one."""
    value = headers.get("retry-after", "").strip()
    if value.replace(".", "", 1).isdecimal():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    # A date in -0000 is parsed without a zone, and is UTC.
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _is_about_the_model(body: object) -> bool:
    if not isinstance(body, dict):
        return False
    named = body.get("param") == "model" or body.get("code") == "model_not_found"
    return named or "model" in str(body.get("message", "")).lower()


def model_ids(data: bytes) -> set[str]:
    """Ids in the answer of `/v1/models`. Raises BadResponse."""
    try:
        return {item["id"] for item in orjson.loads(data)["data"]}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BadResponse(f"expected a list of models, found {data[:80]!r}") from error
