"""The one door to OpenAI clients: asks endpoints for completions, retries what can pass.

Requests go through the `openai` package's transport but past its typed models, whose per-token
objects would cost more than the sampling of a small policy; bodies are read by `protocol`.
Every answer is checked before anyone trains on it. Scoring, rollouts and files are elsewhere.
"""

import asyncio
import itertools
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import numpy as np
import orjson
import tenacity
from jaxtyping import Int32

from marin_rl.errors import (
    BadResponse,
    EndpointUnavailable,
    InferenceError,
    NoSuchRoute,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.client.protocol import (
    UPDATE_WEIGHTS_ROUTE,
    ChatAnswer,
    ChatRequest,
    PlainRequest,
    TurnsRequest,
    decode_answer,
    decode_turns,
)
from marin_rl.inference.client.turn_batches import TurnBatches
from marin_rl.types import Message, Sampling

if TYPE_CHECKING:
    import openai

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
MESSAGE_CHARACTERS_MAX = 500
POOL_CONNECTIONS = 16

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PASSING = (408, 409, 425, 429)
_ASKS_TO_WAIT = (429, 503)
_OTHER_WEIGHTS = ("digest_mismatch", "canary_mismatch")


class PolicyClient:
    """Completions of one served model from any of several equal endpoints.

    Each request starts at the next endpoint in turn; a fault that may pass moves it on to the
    following one, with exponential back-off and full jitter after each turn around all of them.
    An endpoint that answers 429 or 503 with Retry-After is left alone for so long (`timeout_s` at
    most), by every request of this client. `admin_key` is sent in place of `api_key` where weights
    are updated. Belongs to the event loop that first uses it: one client per `asyncio.run`, closed
    at its end.
    """

    gives_ids = True  # each answer has the ids of its prompt and its completions

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
        self._model = model
        self._api_key, self._admin_key = api_key, admin_key
        self._timeout_s = timeout_s
        self._attempts_max = attempts_max
        self._in_flight = asyncio.Semaphore(in_flight_max)
        self._turn = itertools.count()
        self._has_chat_tokens = True  # until an endpoint says that it has no such route
        self._turns = TurnBatches(self._ask_turns, turns_per_request)
        self._endpoints = tuple(endpoints)
        self._not_before = [0.0] * len(self._endpoints)
        self._connections = tuple(_Connections(url, api_key, timeout_s) for url in endpoints)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._turns.close()
        for connections in self._connections:
            await connections.close()

    async def chat(
        self,
        messages: Sequence[Message],
        n: int,
        sampling: Sampling,
        *,
        prompt_ids: Int32[np.ndarray, " P"] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatAnswer:
        """`n` samples of one conversation, checked.

        `prompt_ids` are the exact ids to go on from; without them the endpoint renders `messages`
        and `tools`.
        Raises EndpointUnavailable when every attempt failed, RequestRejected when the endpoint
        refuses the request, StalePolicy when it serves another model, BadResponse when its answer
        cannot be trained on.
        """
        request = ChatRequest(
            model=self._model,
            messages=tuple(messages),
            n=n,
            sampling=sampling,
            prompt_ids=prompt_ids,
            tools=tuple(tools),
        )
        if self._turns.takes(request):
            answer = await self._turns.ask(request)
        elif prompt_ids is not None and n == 1:
            answer = await self._go_on(request, prompt_ids)
        else:
            answer = decode_answer(await self._send("POST", request.path, request.body()))
        self._check(answer, n)
        return answer

    async def _go_on(self, request: ChatRequest, prompt_ids: Int32[np.ndarray, " P"]) -> ChatAnswer:
        """Answer to exact ids: by the chat route for them, else by that of plain completions."""
        if self._has_chat_tokens:
            try:
                return decode_answer(await self._send("POST", request.path, request.body()))
            except NoSuchRoute:
                self._has_chat_tokens = False
        plain = PlainRequest(model=request.model, prompt=prompt_ids, sampling=request.sampling)
        (answer, *_) = decode_turns(await self._send("POST", plain.path, plain.body()))
        return answer

    async def _ask_turns(self, request: TurnsRequest) -> list[ChatAnswer]:
        """Answers to the prompts of one request, in order. Raises as `chat` does."""
        data = await self._send("POST", request.path, request.body())
        try:
            return decode_turns(data)
        except BadResponse as error:
            raise BadResponse(
                f"{error}; inference.turns_per_request is for marin-rl's own server: set it to "
                "null for others"
            ) from error

    def _check(self, answer: ChatAnswer, n: int) -> None:
        """Raise StalePolicy or BadResponse for an answer that cannot be trained on."""
        # The id has the digest of the weights: tokens of others are never trained on as this
        # policy's.
        if answer.model != self._model:
            raise StalePolicy(
                f"asked for the model {self._model!r}, but the answer is from {answer.model!r}: "
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
            url: _model_ids(await self._attempt(index, "GET", "/models", None))
            for index, url in enumerate(self._endpoints)
        }

    async def update_weights(
        self, model_path: str, weight_version: int, parameters_digest: str
    ) -> None:
        """Have every endpoint load a Hugging Face folder, by SGLang's route.

        The digest is for servers that verify it (ours); others ignore it. Raises StalePolicy where
        the folder has other weights than the digest says, else as `chat` does.
        """
        body = {
            "model_path": model_path,
            "weight_version": str(weight_version),
            "parameters_digest": parameters_digest,
        }

        every = range(len(self._endpoints))
        await asyncio.gather(*(self.post_as_admin(i, UPDATE_WEIGHTS_ROUTE, body) for i in every))

    async def post_as_admin(self, index: int, route: str, body: dict[str, Any]) -> bytes:
        """Answer of one endpoint to a route below its host, asked with the admin key.

        Raises as `chat` does, and NoSuchRoute.
        """
        url = self._endpoints[index].removesuffix("/v1") + route

        async def post(_: int) -> bytes:
            return await self._attempt(index, "POST", url, body, key=self._admin_key)

        return await self._retried(post)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        # Round robin: requests of a round are alike, so counting them is counting load.
        first = next(self._turn)

        async def send(tried: int) -> bytes:
            return await self._attempt(self._willing(first + tried), method, path, body)

        return await self._retried(send)

    async def _retried(self, send: Callable[[int], Awaitable[bytes]]) -> bytes:
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

    def _willing(self, first: int) -> int:
        """Return endpoint `first`, or the next one after it that is not backing off."""
        count, now = len(self._endpoints), time.monotonic()
        candidates = [(first + step) % count for step in range(count)]
        return min(candidates, key=lambda index: max(self._not_before[index], now))

    async def _left_alone(self, index: int) -> None:
        """Wait as long as the endpoint requested, plus jitter to spread retries."""
        left_s = self._not_before[index] - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s + random.uniform(0, min(left_s, PAUSE_FIRST_S)))

    async def _attempt(
        self,
        index: int,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        key: str | None = None,
    ) -> bytes:
        """Send a request once. The time limit is on the complete answer, not between bytes."""
        import httpx2
        import openai

        url = self._endpoints[index]
        # Before the semaphore: a request that waits for its server holds no place of others.
        await self._left_alone(index)
        try:
            async with self._in_flight, asyncio.timeout(self._timeout_s):
                with self._connections[index].lend() as client:
                    if key is not None:
                        client = client.with_options(api_key=key)  # over the same connections
                    if method == "POST":
                        response = await client.post(path, cast_to=httpx2.Response, body=body)
                    else:
                        response = await client.get(path, cast_to=httpx2.Response)
                    return response.content
        except TimeoutError:
            raise EndpointUnavailable(f"{url}: no answer in {self._timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise EndpointUnavailable(self._message(url, error.__cause__ or error)) from None
        except openai.APIStatusError as error:
            # Bounded by our own time limit: a server may ask for days.
            if error.status_code in _ASKS_TO_WAIT:
                wait_s = min(_retry_after_s(error.response.headers), self._timeout_s)
                self._not_before[index] = time.monotonic() + wait_s
            raise self._refusal(url, error) from None

    def _refusal(self, url: str, error: "openai.APIStatusError") -> InferenceError:
        """Error for a status other than 2xx."""
        # openai's own prefix repeats the status that is said here.
        words = error.message.removeprefix(f"Error code: {error.status_code} - ")
        message = self._message(url, f"status {error.status_code}: {words}")
        if isinstance(error.body, dict) and error.body.get("code") in _OTHER_WEIGHTS:
            return StalePolicy(message)
        if error.status_code in _PASSING or error.status_code >= 500:
            return EndpointUnavailable(message)
        if error.status_code == 404 and _is_about_the_model(error.body):
            return StalePolicy(f"{message} (asked for {self._model!r})")
        if error.status_code == 404:
            return NoSuchRoute(f"{message}: no such route; does the base URL end in /v1?")
        if error.status_code in (401, 403):
            return RequestRejected(
                f"{message}: set the variable that inference.api_key_variable names, for new "
                "weights the one of inference.server.admin_key_variable"
            )
        return RequestRejected(message)

    def _message(self, url: str, message: object) -> str:
        """The endpoint's own words, short, and never with our key in them."""
        text = f"{url}: {str(message) or type(message).__name__}"
        # Some servers quote the request, headers included.
        for key in filter(None, (self._api_key, self._admin_key)):
            text = text.replace(key, "***")
        return text[:MESSAGE_CHARACTERS_MAX]


class _Connections:
    """Connections to one endpoint, in pools of a few.

    The HTTP library looks at every connection of a pool for each request: with 512 in one pool a
    request costs 6.5 ms of CPU, in pools of 16 it costs 2 ms.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._connect = partial(_connect, url, api_key, timeout_s, POOL_CONNECTIONS)
        self._all: list[openai.AsyncOpenAI] = []
        self._unused: list[openai.AsyncOpenAI] = []  # one entry per connection

    @contextmanager
    def lend(self) -> "Iterator[openai.AsyncOpenAI]":
        """Lend the client of a pool with a connection that no request uses."""
        if not self._unused:
            client = self._connect()
            self._all.append(client)
            self._unused += [client] * POOL_CONNECTIONS
        # the one that was returned last: its connection is the likeliest to be open still
        client = self._unused.pop()
        try:
            yield client
        finally:
            self._unused.append(client)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._all:
            await client.close()


def _connect(
    url: str, api_key: str | None, timeout_s: float, connections: int
) -> "openai.AsyncOpenAI":
    """A client without retries of its own.

    Imported here, because `openai` takes most of a second to import and only rollouts need it.
    Its own default would send OPENAI_API_KEY to any endpoint that is configured: a key is always
    given. Proxies of the environment are not asked for what runs on this machine.
    """
    import httpx2
    import openai

    parts = urlsplit(url)
    transport = openai.DefaultAsyncHttpxClient(
        verify=_trusted() if parts.scheme == "https" else _distrusting(),
        trust_env=parts.hostname not in _LOOPBACK,
        limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
    )
    return openai.AsyncOpenAI(
        api_key=api_key or "EMPTY",
        base_url=url,
        timeout=timeout_s,
        max_retries=0,
        http_client=transport,
    )


@lru_cache(maxsize=1)
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()


@lru_cache(maxsize=1)
def _distrusting() -> ssl.SSLContext:
    """For plain http, where none is used: loading the certificates of the system takes 20 ms."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 without a valid one."""
    value = headers.get("retry-after", "").strip()
    if value.replace(".", "", 1).isdecimal():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _is_about_the_model(body: object) -> bool:
    if not isinstance(body, dict):
        return False
    named = body.get("param") == "model" or body.get("code") == "model_not_found"
    return named or "model" in str(body.get("message", "")).lower()


def _model_ids(data: bytes) -> set[str]:
    try:
        return {item["id"] for item in orjson.loads(data)["data"]}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BadResponse(f"expected a list of models, found {data[:80]!r}") from error
