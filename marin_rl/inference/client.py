"""The one door to OpenAI clients: asks endpoints for completions, retries what can pass.

Requests go through the `openai` package's transport but past its typed models, whose per-token
objects would cost more than the sampling of a small policy; bodies are read by `protocol`.
Every answer is checked before anyone trains on it. Scoring, rollouts and files are elsewhere.
"""

import asyncio
import itertools
import random
import ssl
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import orjson
import tenacity

from marin_rl.errors import (
    BadResponse,
    EndpointUnavailable,
    InferenceError,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.protocol import (
    UPDATE_WEIGHTS_ROUTE,
    ChatAnswer,
    ChatRequest,
    decode_answer,
)
from marin_rl.types import Message, Sampling

if TYPE_CHECKING:
    import openai

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
MESSAGE_CHARACTERS_MAX = 500

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PASSING = (408, 409, 425, 429)


class PolicyClient:
    """Completions of one served model from any of several equal endpoints.

    Each request starts at the next endpoint in turn; a fault that may pass moves it on to the
    following one, with exponential back-off and full jitter after each turn around all of them.
    Belongs to the event loop that first uses it: one client per `asyncio.run`, closed at its end.
    """

    def __init__(
        self,
        *,
        endpoints: Sequence[str],
        model: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        attempts_max: int = 5,
        in_flight_max: int = 64,
    ) -> None:
        assert endpoints, "a client needs at least one endpoint"
        self._model = model
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._attempts_max = attempts_max
        self._in_flight = asyncio.Semaphore(in_flight_max)
        self._turn = itertools.count()
        self._endpoints = tuple(endpoints)
        self._clients = tuple(_connect(url, api_key, timeout_s, in_flight_max) for url in endpoints)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients:
            await client.close()

    async def chat(self, messages: Sequence[Message], n: int, sampling: Sampling) -> ChatAnswer:
        """`n` samples of one conversation, checked.

        Raises EndpointUnavailable when every attempt failed, RequestRejected when the endpoint
        refuses the request, StalePolicy when it serves another model, BadResponse when its answer
        cannot be trained on.
        """
        request = ChatRequest(model=self._model, messages=tuple(messages), n=n, sampling=sampling)
        data = await self._send("POST", "/chat/completions", request.body())
        answer = decode_answer(data)
        if answer.model != self._model:
            raise StalePolicy(
                f"asked for the model {self._model!r}, but the answer is from {answer.model!r}: "
                "the endpoint serves other weights than this round's"
            )
        if len(answer.completions) != n:
            raise BadResponse(f"expected {n} completions, found {len(answer.completions)}")
        if not len(answer.prompt_token_ids):
            raise BadResponse("expected the ids of the prompt, found none")
        return answer

    async def models(self) -> list[str]:
        """Ids that every endpoint serves, sorted. Raises as `chat` does."""
        served = [
            _model_ids(await self._attempt(index, "GET", "/models", None))
            for index in range(len(self._clients))
        ]
        return sorted(set.intersection(*served))

    async def update_weights(self, model_path: str, weight_version: int) -> None:
        """Have every endpoint load a Hugging Face folder, by SGLang's route. Raises as `chat`."""
        body = {"model_path": model_path, "weight_version": str(weight_version)}
        updates = (
            self._attempt(index, "POST", url.removesuffix("/v1") + UPDATE_WEIGHTS_ROUTE, body)
            for index, url in enumerate(self._endpoints)
        )
        await asyncio.gather(*updates)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        first = next(self._turn)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(EndpointUnavailable),
            stop=tenacity.stop_after_attempt(self._attempts_max),
            wait=self._pause_s,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                turn = first + attempt.retry_state.attempt_number - 1
                return await self._attempt(turn % len(self._clients), method, path, body)
        raise AssertionError("tenacity returns a value or raises")

    def _pause_s(self, state: tenacity.RetryCallState) -> float:
        """Seconds before the next attempt: none while an endpoint is left that was not tried."""
        turns, untried = divmod(state.attempt_number, len(self._clients))
        if untried:
            return 0.0
        return random.uniform(0, min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (turns - 1)))

    async def _attempt(
        self, index: int, method: str, path: str, body: dict[str, Any] | None
    ) -> bytes:
        """One try at one endpoint. The time limit is on the whole answer, not between bytes."""
        import httpx2
        import openai

        client, url = self._clients[index], self._endpoints[index]
        try:
            async with self._in_flight, asyncio.timeout(self._timeout_s):
                if method == "POST":
                    response = await client.post(path, cast_to=httpx2.Response, body=body)
                else:
                    response = await client.get(path, cast_to=httpx2.Response)
                return response.content
        except TimeoutError:
            raise EndpointUnavailable(f"{url}: no answer in {self._timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise EndpointUnavailable(self._told(url, error.__cause__ or error)) from None
        except openai.APIStatusError as error:
            raise self._refusal(url, error) from None

    def _refusal(self, url: str, error: "openai.APIStatusError") -> InferenceError:
        """What a status other than 2xx means to us."""
        words = error.message.removeprefix(f"Error code: {error.status_code} - ")
        told = self._told(url, f"status {error.status_code}: {words}")
        if error.status_code in _PASSING or error.status_code >= 500:
            return EndpointUnavailable(told)
        if error.status_code == 404 and _is_about_the_model(error.body):
            return StalePolicy(f"{told} (asked for {self._model!r})")
        if error.status_code == 404:
            return RequestRejected(f"{told}: no such route; does the base URL end in /v1?")
        if error.status_code in (401, 403):
            return RequestRejected(
                f"{told}: set the variable that inference.api_key_variable names"
            )
        return RequestRejected(told)

    def _told(self, url: str, message: object) -> str:
        """The endpoint's own words, short, and never with our key in them."""
        text = f"{url}: {str(message) or type(message).__name__}"
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return text[:MESSAGE_CHARACTERS_MAX]


def _connect(
    url: str, api_key: str | None, timeout_s: float, in_flight_max: int
) -> "openai.AsyncOpenAI":
    """A client without retries of its own.

    Imported here, because `openai` takes most of a second to import and only rollouts need it.
    Its own default would send OPENAI_API_KEY to whatever endpoint is configured: a key is always
    given. Proxies of the environment are not asked for what runs on this machine.
    """
    import httpx2
    import openai

    parts = urlsplit(url)
    transport = openai.DefaultAsyncHttpxClient(
        verify=_trusted() if parts.scheme == "https" else _distrusting(),
        trust_env=parts.hostname not in _LOOPBACK,
        limits=httpx2.Limits(
            max_connections=in_flight_max, max_keepalive_connections=in_flight_max
        ),
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
