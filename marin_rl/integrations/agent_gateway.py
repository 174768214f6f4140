"""Session of one agent: the model's APIs on a Unix socket, and the calls that wait for answers.

A call waits until the episode takes it and the policy has answered. Calls at the same time are
answered one after the other; a client that gave up and asks the same again joins its first call,
and gets the answer of one that it did not take.
Leaves out the APIs (`model_apis`), and the meaning of a call (`agent`).
"""

import asyncio
import contextvars
import hashlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, Router
from uvicorn.server import ServerState

from marin_rl.model_apis.call import ModelAnswer, ModelApi, ModelCall, server_sent
from marin_rl.model_apis.chat import ChatCompletions
from marin_rl.model_apis.messages import AnthropicMessages
from marin_rl.model_apis.responses import Responses
from marin_rl.serving.http.errors import ApiError

BODY_BYTES_MAX = 2 << 20
_DISCARDED = 16  # times a limit that is read of a longer body
WAITING_MAX = 32  # calls of a session: each may hold the largest body
KEEP_ALIVE_S = 10.0
CLOSE_S = 1.0  # that answers get to be sent after the end
CHARACTERS_PER_TOKEN = 4  # an estimate, for `count_tokens`
ENDED = "the session has ended"
REDACTED = b"..."  # in the place of a key
# Fields of requests that differ between attempts of the same call.
_BOOKKEEPING = ("client_metadata", "metadata", "prompt_cache_key", "user")


@dataclass(slots=True)
class WaitingCall:
    """A call that waits for its answer, or for a client that takes it; `digest` is its body's."""

    call: ModelCall
    digest: str
    answered: "asyncio.Future[ModelAnswer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def refused(self) -> bool:
        """True once it is known that no answer comes."""
        answered = self.answered
        return answered.done() and (answered.cancelled() or answered.exception() is not None)


class Session:
    """An agent's way to the policy. `key` authorises it; `refusal` is what further calls get."""

    def __init__(self, model: str) -> None:
        self.key = secrets.token_hex(16)
        self.refusal: str | None = None
        self.calls: asyncio.Queue[WaitingCall] = asyncio.Queue()
        self._model = model
        self._ended = False
        self._waiting: dict[str, WaitingCall] = {}
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._held: list[asyncio.StreamWriter] = []

    async def open(self, socket: Path, control: Path | None = None, *, mode: int = 0o666) -> None:
        """Listen at `socket`; whoever connects to `control` is told the end of the session.

        Outside of the context of the caller, whose time limits are not those of the agent's calls.
        """
        loop = asyncio.get_running_loop()
        await contextvars.Context().run(loop.create_task, self._open(socket, control))
        for path in filter(None, (socket, control)):
            path.chmod(mode)  # an agent in its sandbox is another user

    def routes(self) -> list[BaseRoute]:
        paths: dict[str, type[ModelApi]] = {
            "chat/completions": ChatCompletions,
            "responses": Responses,
            "messages": AnthropicMessages,
        }
        routes: list[BaseRoute] = [
            Route(prefix + path, self._endpoint(api), methods=["POST"])
            for path, api in paths.items()
            for prefix in ("/v1/", "/")
        ]
        return [
            *routes,
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/", _head, methods=["HEAD"]),
        ]

    async def _open(self, socket: Path, control: Path | None) -> None:
        # Its protocol alone: a server of uvicorn's would take signals, and wake ten times a second.
        config = uvicorn.Config(
            Router(self.routes()), http="httptools", ws="none", lifespan="off", log_config=None,
            access_log=False, date_header=False, server_header=False,
            limit_concurrency=2 * WAITING_MAX,
        )  # fmt: skip
        config.load()
        loop = asyncio.get_running_loop()
        protocol = partial(
            config.http_protocol_class, config=config, server_state=self._state, app_state={}
        )

        async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._held.append(writer)

        self._servers = [await loop.create_unix_server(protocol, str(socket))]
        if control is not None:
            self._servers.append(await asyncio.start_unix_server(hold, str(control)))

    async def close(self) -> None:
        """End the session, and with it the agent's program."""
        self._ended = True
        for waiting in self._waiting.values():
            waiting.answered.cancel()
        for server in self._servers:
            server.close()
        for writer in self._held:
            writer.close()
        for connection in [*self._state.connections]:
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=CLOSE_S)

    def refuse(self, waiting: WaitingCall, message: str) -> None:
        """Answer a call by an error that says that its prompt is too long."""
        self._waiting.pop(waiting.digest, None)
        if not waiting.answered.done():
            waiting.answered.set_exception(ApiError(400, message, code="context_length_exceeded"))

    def _endpoint(self, api: type[ModelApi]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                waiting = await self._asked(request, api)
                streams = waiting.call.stream
                await asyncio.wait({waiting.answered}, timeout=KEEP_ALIVE_S if streams else None)
                is_gone = await request.is_disconnected()
                if streams and not is_gone and not waiting.refused:
                    return StreamingResponse(
                        self._events(api, waiting), media_type="text/event-stream"
                    )
                answer = waiting.answered.result()
                if not is_gone:
                    self._waiting.pop(waiting.digest, None)
            except ApiError as error:
                return JSONResponse(error.body_of(api), error.status, error.headers)
            except asyncio.CancelledError:
                if self._ended:
                    return JSONResponse(api.error(409, ENDED), 409)
                raise
            return JSONResponse(self._writer(api, waiting.call, answer).whole(answer))

        return endpoint

    def _writer(self, api: type[ModelApi], call: ModelCall, answer: ModelAnswer) -> ModelApi:
        # Not the time of day: answers are equal from time to time.
        return api(call, model=self._model, prompt_tokens=answer.prompt_tokens)

    async def _events(self, api: type[ModelApi], waiting: WaitingCall) -> AsyncIterator[bytes]:
        """The events of an answer, once it is there; comments keep the connection alive before."""
        while not waiting.answered.done():
            # No empty line after it: some clients would parse an event without data.
            yield b": waiting\n"
            await asyncio.wait({waiting.answered}, timeout=KEEP_ALIVE_S)
        with suppress(asyncio.CancelledError):  # the session has ended
            try:
                answer = waiting.answered.result()
            except ApiError as error:
                writer = api(waiting.call, model=self._model, prompt_tokens=0)
                yield server_sent(writer.failed(error.body_of(api)))
                return
            yield server_sent(self._writer(api, waiting.call, answer).events(answer))
            self._waiting.pop(waiting.digest, None)

    async def _asked(self, request: Request, api: type[ModelApi]) -> WaitingCall:
        """The call of a request. Raises ApiError."""
        data = await self._data(request)
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise ValueError("expected a JSON object")
            call = api.read(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the request cannot be read: {error}") from None
        if self.refusal is not None:
            raise ApiError(400, self.refusal)
        return self._enqueued(body, call)

    async def _data(self, request: Request) -> bytes:
        """The body of a request that has the key, and without it. Raises ApiError.

        What an agent shows of its variables is kept with its messages.
        """
        if not has_key(request, self.key):
            raise ApiError(401, "expected the key of this session")
        if self._ended:
            raise ApiError(409, ENDED)
        return (await body_of(request)).replace(self.key.encode(), REDACTED)

    def _enqueued(self, body: Mapping[str, Any], call: ModelCall) -> WaitingCall:
        """The call of a request; that of an equal one whose answer was not taken yet.

        Raises ApiError where too many wait.
        """
        told = {name: value for name, value in body.items() if name not in _BOOKKEEPING}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        if (waiting := self._waiting.get(digest)) is None:
            if len(self._waiting) >= WAITING_MAX:
                raise ApiError(400, f"expected at most {WAITING_MAX} calls that wait for answers")
            waiting = self._waiting[digest] = WaitingCall(call, digest)
            self.calls.put_nowait(waiting)
        return waiting

    async def _count_tokens(self, request: Request) -> Response:
        try:
            characters = len(await self._data(request))
        except ApiError as error:
            return JSONResponse(error.body_of(AnthropicMessages), error.status, error.headers)
        return JSONResponse({"input_tokens": characters // CHARACTERS_PER_TOKEN})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model"}]})


def has_key(request: Request, key: str) -> bool:
    _, _, bearer = request.headers.get("Authorization", "").rpartition(" ")
    sent = request.headers.get("x-api-key") or bearer
    return hmac.compare_digest(sent.encode(), key.encode())


async def body_of(request: Request, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The body of a request. Raises ApiError beyond a limit."""
    data, read = bytearray(), 0
    async for piece in request.stream():
        read += len(piece)
        # More is read than is kept: a client that still sends would lose the answer.
        if read <= bytes_max:
            data += piece
        elif read > bytes_max * _DISCARDED:
            break
    if read > bytes_max:
        # what is left of it is not read
        too_large = f"expected a body of at most {bytes_max} bytes"
        raise ApiError(413, too_large, headers={"Connection": "close"})
    return bytes(data)


async def _head(_: Request) -> Response:
    return Response()
