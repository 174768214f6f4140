"""Session of one agent: the model's API on a Unix socket, and the calls that wait for answers.

A call waits until the episode takes it and the policy has answered. Calls at the same time are
answered one after the other; a client that gave up and asks the same again joins its first call.
Leaves out the protocols (`agent_protocols`), and the meaning of a call (`agent`).
"""

import asyncio
import contextvars
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from marin_rl.integrations.agent_protocols import (
    AnthropicMessages,
    ChatCompletions,
    ModelAnswer,
    ModelCall,
    ModelProtocol,
    Responses,
)

BODY_BYTES_MAX = 2 << 20
KEEP_ALIVE_S = 10.0
CHARACTERS_PER_TOKEN = 4  # an estimate, for `count_tokens`
ENDED = "the session has ended"
# Fields of requests that differ between attempts of the same call.
_BOOKKEEPING = ("client_metadata", "metadata", "prompt_cache_key", "user")


class _Refused(Exception):
    """A request that gets an error in place of an answer."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(slots=True)
class WaitingCall:
    """A call that waits for its answer."""

    call: ModelCall
    answered: "asyncio.Future[ModelAnswer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Session:
    """An agent's way to the policy. `key` authorises it; `refusal` is what further calls get."""

    def __init__(self, model: str) -> None:
        self.key = secrets.token_hex(16)
        self.refusal: str | None = None
        self.calls: asyncio.Queue[WaitingCall] = asyncio.Queue()
        self._model = model
        self._ended = False
        self._waiting: dict[str, WaitingCall] = {}
        self._runner: web.AppRunner | None = None
        self._control: asyncio.Server | None = None
        self._held: list[asyncio.StreamWriter] = []

    async def open(self, socket: Path, control: Path) -> None:
        """Listen at `socket`; whoever connects to `control` is told the end of the session.

        Outside of the context of the caller, whose time limits are not those of the agent's calls.
        """
        loop = asyncio.get_running_loop()
        await contextvars.Context().run(loop.create_task, self._open(socket, control))
        for path in (socket, control):
            path.chmod(0o666)  # the agent is another user

    async def _open(self, socket: Path, control: Path) -> None:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        protocols: Mapping[str, ModelProtocol] = {
            "chat/completions": ChatCompletions(self._model),
            "responses": Responses(self._model),
            "messages": AnthropicMessages(self._model),
        }
        for path, protocol in protocols.items():
            for prefix in ("/v1/", "/"):
                app.router.add_post(prefix + path, self._handler(protocol))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("HEAD", "/", self._head)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(socket)).start()

        async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._held.append(writer)

        self._control = await asyncio.start_unix_server(hold, str(control))

    async def close(self) -> None:
        """End the session, and with it the agent's program."""
        self._ended = True
        for waiting in self._waiting.values():
            waiting.answered.cancel()
        if self._control is not None:
            self._control.close()
        for writer in self._held:
            writer.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _handler(self, protocol: ModelProtocol) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                waiting = await self._asked(request, protocol)
                if waiting.call.stream:
                    return await _streamed(request, protocol, waiting)
                answer = await asyncio.shield(waiting.answered)
            except _Refused as refused:
                error = protocol.error(refused.status, str(refused), refused.code)
                return web.json_response(error, status=refused.status)
            except asyncio.CancelledError:
                if self._ended:
                    return web.json_response(protocol.error(409, ENDED), status=409)
                raise  # the client is gone; it may ask again
            return web.json_response(protocol.whole(answer))

        return handle

    async def _asked(self, request: web.Request, protocol: ModelProtocol) -> WaitingCall:
        """The call of a request. Raises _Refused."""
        if not self._authorised(request):
            raise _Refused(401, "expected the key of this session")
        if self._ended:
            raise _Refused(409, ENDED)
        try:
            body = json.loads(await request.read())
            if not isinstance(body, dict):
                raise ValueError("expected a JSON object")
            call = protocol.parse(body)
        except web.HTTPRequestEntityTooLarge:
            raise _Refused(413, f"expected a body of at most {BODY_BYTES_MAX} bytes") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _Refused(400, f"the request cannot be read: {error}") from None
        if self.refusal is not None:
            raise _Refused(400, self.refusal, "context_length_exceeded")
        return self._enqueued(body, call)

    def _enqueued(self, body: Mapping[str, Any], call: ModelCall) -> WaitingCall:
        """The call of a request; that of an equal one which was not answered yet."""
        told = {name: value for name, value in body.items() if name not in _BOOKKEEPING}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        if (waiting := self._waiting.get(digest)) is None:
            waiting = self._waiting[digest] = WaitingCall(call)
            waiting.answered.add_done_callback(lambda _: self._waiting.pop(digest, None))
            self.calls.put_nowait(waiting)
        return waiting

    def _authorised(self, request: web.Request) -> bool:
        _, _, bearer = request.headers.get("Authorization", "").rpartition(" ")
        given = request.headers.get("x-api-key") or bearer
        return hmac.compare_digest(given.encode(), self.key.encode())

    async def _count_tokens(self, request: web.Request) -> web.Response:
        characters = len(await request.read())
        return web.json_response({"input_tokens": characters // CHARACTERS_PER_TOKEN})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self._model, "object": "model"}]}
        )

    async def _head(self, _: web.Request) -> web.Response:
        return web.Response()


async def _streamed(
    request: web.Request, protocol: ModelProtocol, waiting: WaitingCall
) -> web.StreamResponse:
    """The events of an answer, once it is there; comments keep the connection alive before."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while not waiting.answered.done():
        await asyncio.wait({waiting.answered}, timeout=KEEP_ALIVE_S)
        if not waiting.answered.done():
            # No empty line after it: some clients would parse an event without data.
            await response.write(b": waiting\n")
    with suppress(asyncio.CancelledError):  # the session has ended
        for name, data in protocol.events(waiting.call, waiting.answered.result()):
            head = f"event: {name}\n" if name is not None else ""
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
            await response.write(f"{head}data: {text}\n\n".encode())
    return response
