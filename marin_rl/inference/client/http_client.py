"""HTTP requests to endpoints of a policy: one attempt each, with errors of our own tree.

Requests go through the `openai` package's transport but past its typed models, whose per-token
objects would cost more than the sampling of a small policy. Leaves out what is sent, to whom, and
how often (`policy_client`).
"""

import asyncio
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from marin_rl.errors import (
    EndpointUnavailable,
    MarinRLError,
    NoSuchRoute,
    OutOfMemory,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.client.protocol import GENERATE_ROUTE
from marin_rl.machine import LOOPBACK, OUT_OF_MEMORY

if TYPE_CHECKING:
    import openai

POOL_CONNECTIONS = 16
PAUSE_FIRST_S = 0.5
MESSAGE_CHARACTERS_MAX = 500

_PASSING = (408, 409, 425, 429)
_ASKS_TO_WAIT = (429, 503)
_OTHER_WEIGHTS = ("digest_mismatch", "canary_mismatch")


class Root(str):
    """A path next to `/v1`; other paths are below the base URL of an endpoint."""

    __slots__ = ()


class HttpClient:
    """Sends requests to endpoints, with at most `in_flight_max` in flight.

    An endpoint that answers 429 or 503 with Retry-After is left alone for so long (`timeout_s` at
    most), by every request. `admin_key` is sent in place of `api_key` where weights are updated;
    `on_broken` is called with the URL of an endpoint that refuses or breaks a connection.
    """

    def __init__(
        self,
        *,
        model: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 600.0,
        in_flight_max: int = 64,
        on_broken: Callable[[str], None],
    ) -> None:
        self.model, self._on_broken = model, on_broken
        self._api_key, self._admin_key = api_key, admin_key
        self.timeout_s = timeout_s
        self.in_flight = asyncio.Semaphore(in_flight_max)
        self.not_before: dict[str, float] = {}
        self._connections: dict[str, ConnectionPools] = {}

    async def close(self) -> None:
        for connections in self._connections.values():
            await connections.close()

    async def request(
        self,
        url: str,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        admin: bool = False,
        gate: AbstractAsyncContextManager[Any] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Send a request once. The time limit is on the complete answer, not between bytes.

        `gate` takes the place of the bound on requests in flight, `timeout_s` that of the client's.
        Raises as `ChatClient.chat` does, and NoSuchRoute.
        """
        import openai

        # Before the semaphore: a request that waits for its server holds no place of others.
        if wait_s := self.left_alone_s(url):
            await asyncio.sleep(wait_s)
        timeout_s = timeout_s or self.timeout_s
        try:
            # In this order: the time of an answer begins once the request has its place.
            async with gate or self.in_flight, asyncio.timeout(timeout_s):
                return await self._answer(url, method, path, body, admin=admin)
        except TimeoutError:
            raise EndpointUnavailable(f"{url}: no answer in {timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            self._on_broken(url)
            raise EndpointUnavailable(self._message(url, error.__cause__ or error)) from None
        except openai.APIStatusError as error:
            # Bounded by our own time limit: a server may ask for days.
            if error.status_code in _ASKS_TO_WAIT:
                wait_s = min(_retry_after_s(error.response.headers), self.timeout_s)
                self.not_before[url] = time.monotonic() + wait_s
            raise self._refusal(url, error) from None

    async def _answer(
        self, url: str, method: str, path: str, body: dict[str, Any] | None, *, admin: bool
    ) -> bytes:
        import httpx2

        if isinstance(path, Root):
            path = url.removesuffix("/v1") + path
        if url not in self._connections:
            self._connections[url] = ConnectionPools(url, self._api_key, self.timeout_s)
        with self._connections[url].lend() as client:
            if admin and self._admin_key is not None:
                # over the same connections
                client = client.with_options(api_key=self._admin_key)
            if method == "POST":
                response = await client.post(path, cast_to=httpx2.Response, body=body)
            else:
                response = await client.get(path, cast_to=httpx2.Response)
            return response.content

    def left_alone_s(self, url: str) -> float:
        """Seconds for which an endpoint asked to be left alone, and jitter to spread retries."""
        left_s = self.not_before.get(url, 0.0) - time.monotonic()
        return 0.0 if left_s <= 0 else left_s + random.uniform(0, min(left_s, PAUSE_FIRST_S))

    def _refusal(self, url: str, error: "openai.APIStatusError") -> MarinRLError:
        # openai's own prefix repeats the status that is said here.
        words = error.message.removeprefix(f"Error code: {error.status_code} - ")
        message = self._message(url, f"status {error.status_code}: {words}")
        body = error.body if isinstance(error.body, dict) else {}
        if body.get("code") in _OTHER_WEIGHTS:
            return StalePolicy(message)
        # The same request again would need the same memory.
        if body.get("code") == OUT_OF_MEMORY:
            return OutOfMemory(message)
        if error.status_code in _PASSING or error.status_code >= 500:
            return EndpointUnavailable(message)
        if error.status_code == 404:
            about_model = body.get("param") == "model" or body.get("code") == "model_not_found"
            if about_model or "model" in str(body.get("message", "")).lower():
                return StalePolicy(f"{message} (asked for {self.model!r})")
            return NoSuchRoute(f"{message}: no such route; does the base URL end in /v1?")
        if error.status_code == 403 and error.request.url.path.endswith(GENERATE_ROUTE):
            return RequestRejected(
                f"{message}: inference.route vllm_generate needs {GENERATE_ROUTE}, which vLLM 0.32 "
                "serves where it is started with --enable-scale-out"
            )
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


class ConnectionPools:
    """Connections to one endpoint, in pools of a few.

    The HTTP library looks at every connection of a pool for each request: with 512 in one pool a
    request costs 6.5 ms of CPU, in pools of 16 it costs 2 ms.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._url, self._api_key, self._timeout_s = url, api_key, timeout_s
        self._all: list[openai.AsyncOpenAI] = []
        self._unused: list[openai.AsyncOpenAI] = []  # one entry per connection

    @contextmanager
    def lend(self) -> "Iterator[openai.AsyncOpenAI]":
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
        for client in self._all:
            await client.close()

    def _connect(self) -> "openai.AsyncOpenAI":
        """Return a client that never retries.

        Imported here, because `openai` takes most of a second to import and only rollouts need it.
        Its own default would send OPENAI_API_KEY to any endpoint that is configured: a key is
        always given. Proxies of the environment are not asked for what runs on this machine.
        """
        import httpx2
        import openai

        parts, size = urlsplit(self._url), POOL_CONNECTIONS
        transport = openai.DefaultAsyncHttpxClient(
            follow_redirects=False,  # an endpoint does not choose who gets prompts and token
            verify=_tls(parts.scheme),
            trust_env=parts.hostname not in LOOPBACK,
            limits=httpx2.Limits(max_connections=size, max_keepalive_connections=size),
        )
        return openai.AsyncOpenAI(
            api_key=self._api_key or "EMPTY",
            base_url=self._url,
            timeout=self._timeout_s,
            max_retries=0,
            http_client=transport,
        )


@lru_cache(maxsize=2)
def _tls(scheme: str) -> ssl.SSLContext:
    if scheme == "https":
        return ssl.create_default_context()
    # none is used: loading the certificates of the system takes 20 ms
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
