"""Connections to endpoints: pools of a few, over the transport of the `openai` package.

Leaves out what is sent and how often (`policy_client`).
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import openai

POOL_CONNECTIONS = 16

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Connections:
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
        follow_redirects=False,  # an endpoint does not choose who gets prompts and token
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
