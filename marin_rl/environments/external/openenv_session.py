"""Client of OpenEnv's servers: what they say of themselves, and sessions of one episode each.

A session is one WebSocket at `/ws`; a message is a JSON object with `type` and `data`, and each has
one answer. Leaves out what actions and observations mean (`openenv`).
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, InputError, RewardFault

HTTP_TIMEOUT_S = 30.0
MESSAGE_BYTES_MAX = 64 << 20
CLOSE_TIMEOUT_S = 2.0
# Between two attempts to get a session; a process that is silent for longer counts as blocked.
PAUSE_S, PAUSE_MAX_S = 0.05, 1.0

_RPC = {"jsonrpc": "2.0", "id": 1}


class ActionRefused(Exception):
    """The server says that an action does not fit its schema; its words are for the model."""


class _AtCapacity(Exception):
    """The server has no session to give at the moment."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Name and version of an environment, the JSON Schema of its actions, and its MCP tools."""

    name: str
    version: str
    action: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...]


def server_facts(url: str) -> ServerFacts:
    """Ask a server what it plays. Raises InputError that says what to start or change."""
    with httpx.Client(base_url=url, timeout=HTTP_TIMEOUT_S) as client:
        try:
            schema = _json_of(client.get("/schema"))
            metadata = _json_of(client.get("/metadata"))
            tools = _json_of(client.post("/mcp", json={**_RPC, "method": "tools/list"}))
        except httpx.HTTPError as error:
            raise InputError(
                f"environment.options.url: no OpenEnv server answers at {url} "
                f"({type(error).__name__}: {error}); start it, or set the URL of one"
            ) from None
    action = schema.get("action")
    if not isinstance(action, dict) or not isinstance(action.get("properties", {}), dict):
        raise InputError(
            f"environment.options.url: {url} answers, but {url}/schema has no schema of an action: "
            "expected a server of OpenEnv 0.2 or later"
        )
    listed = (tools.get("result") or {}).get("tools") or ()  # an error: it has no tools
    return ServerFacts(
        name=str(metadata.get("name") or action.get("title") or "unnamed"),
        version=str(metadata.get("version") or "unknown"),
        action=action,
        tools=tuple(listed),
    )


def _json_of(response: httpx.Response) -> dict[str, Any]:
    """The object in a response; an empty one for an error or anything else."""
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        response.raise_for_status()
    try:
        value = response.json() if response.is_success else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


class Session:
    """An environment on a server, for one episode."""

    def __init__(self, url: str, socket: ClientConnection, timeout_s: float) -> None:
        self._url, self._socket, self._timeout_s = url, socket, timeout_s

    async def reset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode, and return its first observation, reward and done."""
        return await self._ask("reset", arguments, "observation")

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Take an action, and return what follows. Raises ActionRefused for one that is none."""
        return await self._ask("step", action, "observation")

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Result of an MCP tool. Raises ActionRefused where the server answers with an error."""
        params = {"name": name, "arguments": arguments}
        data = {**_RPC, "method": "tools/call", "params": params}
        answer = await self._ask("mcp", data, "mcp")
        if error := answer.get("error"):
            raise ActionRefused(str(error.get("message", error)))
        return answer.get("result")

    async def close(self) -> None:
        """End the session, so that the server has room for another."""
        with suppress(Exception):  # a server that has gone has closed it already
            await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any], expected: str) -> dict[str, Any]:
        """The data of an answer. Raises ActionRefused, _AtCapacity and what an episode may."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send({"type": kind, "data": data})
                record = json.loads(await self._socket.recv())
        except TimeoutError:
            raise EnvironmentTimeout(
                f"{kind} at {self._url} took longer than {self._timeout_s:g} s"
            ) from None
        except ConnectionClosed as error:
            raise EndpointUnavailable(f"{self._url} ended the session: {error}") from None
        except ValueError as error:
            raise RewardFault(
                f"{self._url} answered {kind} with what is no JSON: {error}"
            ) from None
        return _data_of(record, kind, expected, self._url)

    async def _send(self, message: Mapping[str, Any]) -> None:
        # a server without room has said so and closed: its words are still to be read
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps(message))


def _data_of(record: Any, kind: str, expected: str, url: str) -> dict[str, Any]:
    found = record.get("type") if isinstance(record, dict) else None
    data = record.get("data") if isinstance(record, dict) else None
    if isinstance(data, dict) and found == expected:
        return data
    if not isinstance(data, dict) or found != "error":
        raise RewardFault(
            f"{url} answered {kind} with {record!r:.100}: expected a message of type {expected}, "
            "as servers of OpenEnv 0.2 or later send it"
        )
    words = str(data.get("message"))
    match data.get("code"):
        case "CAPACITY_REACHED":
            raise _AtCapacity(words)
        case "VALIDATION_ERROR":
            raise ActionRefused(_problems(data.get("errors")) or words)
        case code:
            raise RewardFault(f"{url}: {kind}: {code}: {words}")


def _problems(errors: Any) -> str:
    """Return what pydantic says of each field."""
    return "; ".join(
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}"
        for error in errors or ()
        if isinstance(error, dict)
    )


async def open_session(
    urls: Sequence[str], arguments: Mapping[str, Any], timeout_s: float, patience_s: float
) -> tuple[Session, dict[str, Any]]:
    """A session on the first server with room, and its answer to `reset`.

    Servers without room are asked again, with growing pauses that are drawn at random, so that
    waiting episodes do not come back together. Raises EndpointUnavailable after `patience_s`, or at
    once where no server can be reached.
    """
    deadline, pause_s = time.monotonic() + patience_s, PAUSE_S
    while True:
        full, gone = list[str](), list[str]()
        for url in urls:
            try:
                return await _begun(url, arguments, timeout_s)
            except _AtCapacity as error:
                full.append(f"{url}: {error}")
            except EndpointUnavailable as error:
                gone.append(str(error))
        if not full:
            raise EndpointUnavailable("; ".join(gone))
        if time.monotonic() + pause_s > deadline:
            raise EndpointUnavailable(
                f"no server of OpenEnv had room for an episode in {patience_s:g} s "
                f"({'; '.join(full)}): raise its max_concurrent_envs, add another server to "
                "environment.options.url, or raise environment.options.capacity_wait_s"
            )
        await asyncio.sleep(random.SystemRandom().uniform(0, pause_s))
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


async def _begun(
    url: str, arguments: Mapping[str, Any], timeout_s: float
) -> tuple[Session, dict[str, Any]]:
    """A session and its first answer. Raises _AtCapacity, EndpointUnavailable, RewardFault."""
    address = f"ws{url.removeprefix('http')}/ws"
    try:
        socket = await connect(
            address,
            max_size=MESSAGE_BYTES_MAX,
            open_timeout=timeout_s,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=None,
        )
    except (OSError, InvalidHandshake, InvalidURI) as error:
        raise EndpointUnavailable(f"{address} cannot be reached: {error}") from None
    session = Session(url, socket, timeout_s)
    try:
        return session, await session.reset(arguments)
    except ActionRefused as error:
        await session.close()
        raise RewardFault(f"{url} refuses environment.options.reset: {error}") from None
    except BaseException:
        await session.close()
        raise
