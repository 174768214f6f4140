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

from marin_rl.environments.http_answers import UnfitAnswer, ask_once, is_number
from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, InputError, RewardFault
from schemas.strict_json import parse_json

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
    try:
        schema = _object_at(url, "GET", "/schema")
        metadata = _object_at(url, "GET", "/metadata")
        tools = _object_at(url, "POST", "/mcp", json={**_RPC, "method": "tools/list"})
    except (httpx.HTTPError, UnfitAnswer) as error:
        raise InputError(
            f"environment.options.url: no OpenEnv server answers at {url} "
            f"({type(error).__name__}: {error}); start it, or set the URL of one"
        ) from None
    action: Any = schema.get("action")
    fields = action.get("properties", {}) if isinstance(action, dict) else None
    if not isinstance(fields, dict) or not all(isinstance(each, dict) for each in fields.values()):
        raise InputError(
            f"environment.options.url: {url} answers, but {url}/schema has no schema of an action: "
            f"expected a server of OpenEnv 0.2 or later, found {action!r:.100}"
        )
    return ServerFacts(
        name=str(metadata.get("name") or action.get("title") or "unnamed"),
        version=str(metadata.get("version") or "unknown"),
        action=action,
        tools=_tools_in(tools, f"{url}/mcp"),
    )


def _tools_in(answer: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], ...]:
    """The tools of an answer; none where it is an error. Raises InputError."""
    result = answer.get("result") or {}
    listed = result.get("tools") or [] if isinstance(result, dict) else result
    if not isinstance(listed, list):
        raise InputError(f"{source}: expected a list as result.tools, found {listed!r:.100}")
    for tool in listed:
        named = isinstance(tool, dict) and isinstance(tool.get("name"), str)
        schema = (tool.get("inputSchema") or tool.get("input_schema") or {}) if named else None
        if not isinstance(schema, dict) or not isinstance(tool.get("description") or "", str):
            raise InputError(
                f"{source}: expected tools with a name, a description and a schema of their "
                f"arguments, found {tool!r:.100}"
            )
    return tuple(listed)


def _object_at(url: str, method: str, route: str, **request: Any) -> dict[str, Any]:
    """The object in an answer; an empty one where the server refuses (4xx)."""
    answer = ask_once(method, f"{url}{route}", timeout_s=HTTP_TIMEOUT_S, **request)
    if answer.status >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise UnfitAnswer(f"{route} answers {answer.words}")
    return answer.object() if answer.ok else {}


class Session:
    """An environment on a server, for one episode."""

    def __init__(self, url: str, socket: ClientConnection, timeout_s: float) -> None:
        self._url, self._socket, self._timeout_s = url, socket, timeout_s

    async def reset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return await self._ask("reset", arguments, "observation")

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        return await self._ask("step", action, "observation")

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Result of an MCP tool. Raises ActionRefused where the server answers with an error."""
        params = {"name": name, "arguments": arguments}
        data = {**_RPC, "method": "tools/call", "params": params}
        answer = await self._ask("mcp", data, "mcp")
        if error := answer.get("error"):
            words = error.get("message", error) if isinstance(error, dict) else error
            raise ActionRefused(str(words))
        return answer.get("result")

    async def close(self) -> None:
        with suppress(Exception):  # a server that has gone has closed it already
            await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any], expected: str) -> dict[str, Any]:
        """The data of an answer. Raises ActionRefused, _AtCapacity and what an episode may."""
        try:
            async with asyncio.timeout(self._timeout_s):
                # a server without room has said so and closed: its words are still to be read
                with suppress(ConnectionClosed):
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = await self._socket.recv(decode=False)
                record = parse_json(answer)
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


def _data_of(record: Any, kind: str, expected: str, url: str) -> dict[str, Any]:
    found = record.get("type") if isinstance(record, dict) else None
    data = record.get("data") if isinstance(record, dict) else None
    if isinstance(data, dict) and found == expected:
        if expected == "observation":
            _check_observation(data, f"{url} answered {kind}")
        return data
    if not isinstance(data, dict) or found != "error":
        raise RewardFault(
            f"{url} answered {kind} with {record!r:.100}: expected a message of type {expected}, "
            "as servers of OpenEnv 0.2 or later send it"
        )
    words, code = str(data.get("message")), data.get("code")
    if code == "CAPACITY_REACHED":
        raise _AtCapacity(words)
    if code != "VALIDATION_ERROR":
        raise RewardFault(f"{url}: {kind}: {code}: {words}")
    errors, problems = data.get("errors"), list[str]()
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, dict):
            place = error.get("loc")
            name = ".".join(map(str, place if isinstance(place, list) else ()))
            problems.append(f"{name}: {error.get('msg')}")
    raise ActionRefused("; ".join(problems) or words)


def _check_observation(data: Mapping[str, Any], source: str) -> None:
    """Raise RewardFault, with the field, for an answer that is no observation of a step."""
    observation, metadata = data.get("observation"), data.get("metadata")
    tool = observation if isinstance(observation, dict) else {}
    error, reward = tool.get("error"), data.get("reward")
    for name, value, fits, expected in (
        ("observation", observation, isinstance(observation, dict), "an object"),
        ("metadata", metadata, metadata is None or isinstance(metadata, dict), "an object or null"),
        ("done", data.get("done"), data.get("done") in (None, True, False), "true or false"),
        ("reward", reward, reward is None or is_number(reward), "a finite number or null"),
        ("observation.error", error, error is None or isinstance(error, dict | str), "a text"),
    ):
        if not fits:
            raise RewardFault(f"{source}: {name}: expected {expected}, found {value!r:.100}")


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


class _Connect(connect):
    """A connection to the address itself: a redirect is an error, as any other refusal."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


async def _begun(
    url: str, arguments: Mapping[str, Any], timeout_s: float
) -> tuple[Session, dict[str, Any]]:
    """A session and its first answer. Raises _AtCapacity, EndpointUnavailable, RewardFault."""
    address = f"ws{url.removeprefix('http')}/ws"
    try:
        socket = await _Connect(
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
