"""A small server of OpenEnv's protocol: guess a number, with as many sessions as it is given.

`openenv_server` runs it in a thread; messages and error codes are those of OpenEnv 0.10.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from support.http_threads import running_application

TEXT = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}}
NUMBER = {
    "title": "Guess",
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "number": {"type": "integer"}},
    "required": ["number"],
}
CALL = {
    "properties": {
        "type": {"const": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    }
}
LOOK = {
    "name": "look",
    "description": "Look.",
    "inputSchema": {"type": "object", "properties": {"far": {"type": "boolean"}}},
}


@dataclass
class OpenEnvServer:
    """Settings of a server, and its counts of sessions."""

    action: dict[str, Any] = field(default_factory=lambda: TEXT)
    tools: tuple[dict[str, Any], ...] = ()
    sessions_max: int = 1
    seeded: bool = True
    hello: str = ""  # its first words, in place of answers, as another protocol has them
    url: str = ""
    live: int = 0
    most: int = 0
    refused: int = 0
    resets: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def play(self, socket: WebSocket) -> None:
        """Serve a session."""
        await socket.accept()
        if self.live >= self.sessions_max:
            self.refused += 1
            await socket.send_json(problem("CAPACITY_REACHED", "Maximum capacity reached"))
            await socket.close()
            return
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            await self._messages(socket)
        except WebSocketDisconnect:
            pass
        finally:
            self.live -= 1

    async def _messages(self, socket: WebSocket) -> None:
        secret = 0
        while True:
            message = await socket.receive_json()
            if self.hello:
                await socket.send_text(self.hello)
                continue
            data = message.get("data", {})
            match message["type"]:
                case "close":
                    await socket.close()
                    return
                case "reset":
                    self.resets.append(data)
                    secret = data.get("low", 0) + data["seed"] % 10
                    label = data["seed"] if self.seeded else len(self.resets)
                    await socket.send_json(observed(f"game {label}"))
                case "mcp":
                    result = {"content": [{"type": "text", "text": f"near {secret}"}]}
                    await socket.send_json({"type": "mcp", "data": {"result": result}})
                case _:
                    await socket.send_json(self._step(data, secret))

    def _step(self, data: dict[str, Any], secret: int) -> dict[str, Any]:
        if data.get("type") == "call_tool":
            text = {"content": [{"type": "text", "text": str(secret)}]}
            return observed("", reward=1.0, tool_name="look", result=text, error=None)
        guess = str(data.get("message", data.get("number")))
        if guess == "raise":
            return problem("EXECUTION_ERROR", "out of order")
        if not guess.isdigit():
            fields = [{"loc": ["message"], "msg": "expected digits", "type": "value_error"}]
            return problem("VALIDATION_ERROR", "Invalid message", errors=fields)
        if int(guess) == secret:
            return observed("yes", reward=1.0, done=True)
        return observed("higher" if int(guess) < secret else "lower")


def problem(code: str, message: str, **more: Any) -> dict[str, Any]:
    """An error as the server sends it."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def observed(
    message: str, *, reward: float | None = None, done: bool = False, **fields: Any
) -> dict[str, Any]:
    """An observation as the server sends it."""
    observation = {"message": message, "metadata": {}, **fields}
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


@contextmanager
def openenv_server(**settings: Any) -> Iterator[OpenEnvServer]:
    """A server in a thread, until the block ends."""
    game = OpenEnvServer(**settings)

    async def schema(request: Request) -> JSONResponse:
        return JSONResponse({"action": game.action, "observation": {}, "state": {}})

    async def metadata(request: Request) -> JSONResponse:
        return JSONResponse({"name": "guess", "version": "1.2"})

    async def mcp(request: Request) -> JSONResponse:
        assert json.loads(await request.body())["method"] == "tools/list"
        if not game.tools:
            return JSONResponse({"error": {"message": "Environment does not support MCP"}})
        return JSONResponse({"result": {"tools": list(game.tools)}})

    routes = [
        Route("/schema", schema),
        Route("/metadata", metadata),
        Route("/mcp", mcp, methods=["POST"]),
        WebSocketRoute("/ws", game.play),
    ]
    application = Starlette(routes=routes)
    with running_application(application, ws="websockets-sansio") as game.url:
        yield game
