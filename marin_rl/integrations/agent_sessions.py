"""Sessions of agents that live elsewhere: `environment.options.sessions`, and `marin-rl sessions`.

A rollout is a session that waits in a private folder, as a Unix socket, until an agent's harness
takes it. The door listens for harnesses and agents on TCP, hands the sessions of the folder out,
and passes their requests on; it keeps nothing, and may be started again at any time. A session has
two keys: an agent's opens the model, a harness's ends the session with a reward. Both are in the
memory of the process that samples alone, and go with the session. Leaves out the meaning of a call
(`agent`), and what a rollout becomes: it is a member of its group like any other.
"""

import asyncio
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.finite import reward_number
from marin_rl.integrations.agent_gateway import ENDED, Session, body_of, has_key
from marin_rl.serving.http.auth import Keys, Origins, check_reach, http_server, run_server
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.guard import Guard

SUFFIX = ".session"
FOLDER_BYTES_MAX = 80  # a Unix socket has 107 bytes of name, a session 25 of them
RETRY_S = 1  # until there may be a session to take
REWARD_BYTES_MAX = 1 << 20  # of a body that ends a session
_HOP = ("connection", "host", "content-length", "transfer-encoding", "keep-alive")


def private_folder(name: str) -> Path:
    """The folder of a run's sessions, which no other user reaches. Raises ConfigError."""
    folder = Path(name)
    if (length := len(os.fsencode(folder.absolute()))) > FOLDER_BYTES_MAX:
        raise ConfigError(
            "environment.options.sessions: sockets of sessions need a path of at most "
            f"{FOLDER_BYTES_MAX} bytes, found {length} in {folder}: choose a shorter one"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"environment.options.sessions: expected a folder that only this user may read, found "
            f"{folder} of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        )
    return folder


class OfferedSession(Session):
    """A session that is there for whoever takes it; `task` is what its taker is told.

    `taken` is done once it was, `outcome` once its taker has ended it: with a reward, or with a
    text that the reward function is to score.
    """

    def __init__(self, model: str, folder: Path, task: Mapping[str, Any]) -> None:
        super().__init__(model)
        loop = asyncio.get_running_loop()
        self.name, self.reward_key, self._task = secrets.token_hex(8), secrets.token_hex(16), task
        self.socket = folder / f"{self.name}{SUFFIX}"
        self.taken: asyncio.Future[None] = loop.create_future()
        self.outcome: asyncio.Future[Mapping[str, float] | str] = loop.create_future()

    async def offer(self) -> None:
        # renamed once it answers: the door takes what it sees
        await self.open(self.socket.with_suffix(".opening"), mode=0o600)
        self.socket.with_suffix(".opening").rename(self.socket)

    async def close(self) -> None:
        self.socket.unlink(missing_ok=True)
        await super().close()

    def routes(self) -> list[BaseRoute]:
        return [
            *super().routes(),
            Route("/take", self._take, methods=["POST"]),
            Route("/reward", self._reward, methods=["POST"]),
        ]

    async def _take(self, _: Request) -> Response:
        if self.taken.done():
            return JSONResponse({}, 409)
        self.taken.set_result(None)
        keys = {"key": self.key, "reward_key": self.reward_key}
        return JSONResponse({"id": self.name, **keys, **self._task})

    async def _reward(self, request: Request) -> Response:
        try:
            if not has_key(request, self.reward_key):
                raise ApiError(401, "expected the reward key of this session")
            if self.outcome.done():
                raise ApiError(409, ENDED)
            outcome = outcome_of(orjson.loads(await body_of(request, REWARD_BYTES_MAX)))
        except ApiError as error:
            return JSONResponse(error.body, error.status, error.headers)
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        if isinstance(outcome, RewardFault):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)
        return JSONResponse({"ended": True})


def outcome_of(body: Any) -> Mapping[str, float] | str | RewardFault:
    """The end that a harness gives to a session. Raises ValueError for another body."""
    match body:
        case {"reward": dict(parts)} if parts:
            return {str(name): reward_number(value, str(name)) for name, value in parts.items()}
        case {"reward": value}:
            return {"reward": reward_number(value, "reward")}
        case {"output": str(output)}:
            return output
        case {"error": str(error)}:
            return RewardFault(f"its harness reports: {error}")
    raise ValueError(
        "expected an object with `reward` (a number, or numbers by name), `output` (a text that "
        "the reward function scores) or `error` (a text)"
    )


class Door:
    """The routes of a run's sessions: `POST /sessions`, and all below `/sessions/ID/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def take(self, request: Request) -> Response:
        """Give the oldest session that nobody has taken, with its keys and its addresses."""
        sockets = [path for path in self._folder.iterdir() if path.suffix == SUFFIX]
        for socket in sorted(sockets, key=_age):
            answer = await self._ask(socket, request, "/take", b"")
            if answer.status_code == 200:
                session = orjson.loads(answer.body)
                root = str(request.base_url.replace(path=f"/sessions/{session['id']}"))
                addresses = {"root_url": root, "base_url": f"{root}/v1"}
                return JSONResponse(session | addresses | {"reward_url": f"{root}/reward"}, 201)
        return JSONResponse(
            {"error": {"message": "no session waits for an agent: ask again"}},
            503,
            headers={"Retry-After": str(RETRY_S)},
        )

    async def pass_on(self, request: Request) -> Response:
        name, path = request.path_params["name"], "/" + request.path_params["path"]
        socket = self._folder / f"{name}{SUFFIX}"
        if path == "/take" or not name.isalnum() or not socket.exists():
            return _ended()
        try:
            body = await body_of(request)
        except ApiError as error:
            return JSONResponse(error.body, error.status, error.headers)
        return await self._ask(socket, request, path, body)

    async def _ask(self, socket: Path, request: Request, path: str, body: bytes) -> Response:
        """The answer of a session, unless the client goes before it comes."""
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        client = httpx.AsyncClient(transport=transport, base_url="http://session", timeout=None)
        headers = _kept(request.headers)
        asked = client.build_request(request.method, path, headers=headers, content=body)
        answering = asyncio.ensure_future(client.send(asked, stream=True))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=499)
            answer = answering.result()
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                content = await answer.aread()
                await client.aclose()
                return Response(content, answer.status_code, _kept(answer.headers))
        except httpx.TransportError:
            _delete(socket)  # of a process that is gone
            return _ended()
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                await asyncio.wait({answering})
                await client.aclose()

        async def events() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await client.aclose()

        return StreamingResponse(events(), answer.status_code, _kept(answer.headers))


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def _age(socket: Path) -> tuple[float, str]:
    with suppress(FileNotFoundError):
        return socket.stat().st_mtime, socket.name
    return float("inf"), socket.name


def _delete(socket: Path) -> None:
    socket.unlink(missing_ok=True)


async def _left(request: Request) -> None:
    """Return once the client has gone; its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _ended() -> Response:
    return JSONResponse({"error": {"message": ENDED}}, 409)


def door(folder: Path, inference: InferenceConfig, host: str) -> Any:
    """A server of a folder's sessions, not started. Raises ConfigError for an open address.

    Whoever takes a session shows the server's token, where there is one; all else has the keys of
    its session.
    """
    keys = Keys.from_environment(inference)
    check_reach(keys, host)
    own = Door(folder)
    taking = Starlette(routes=[Route("/sessions", own.take, methods=["POST"])])
    origins = Origins(inference.server, host, has_token=keys.api is not None)
    guarded = Guard(taking, config=inference.server, keys=keys, origins=lambda: origins)
    methods = ["GET", "HEAD", "POST"]
    route = Route("/sessions/{name}/{path:path}", own.pass_on, methods=methods)
    passing = Starlette(routes=[route])

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        inner = scope["type"] == "http" and scope["path"].startswith("/sessions/")
        await (passing if inner else guarded)(scope, receive, send)

    return http_server(application, inference.server, host)


def serve_sessions(
    options: Mapping[str, Any],
    inference: InferenceConfig,
    address: tuple[str, int],
    ready: Callable[[str], None],
) -> None:
    """Hand out sessions until a signal; `ready` gets the address. Raises ConfigError, InputError.

    `options` are those of the run's environment.
    """
    name = options.get("sessions")
    if name is None:
        raise InputError(
            "environment.options.sessions: expected a folder, found null: the run starts its "
            "agents by itself, or has an environment of another kind"
        )
    run_server(door(private_folder(name), inference, address[0]), *address, ready)
