"""A resources server of NeMo Gym's protocol: a counter per session, with two tools.

Routes, cookies and answers are those of Gym's `SimpleResourcesServer` (its example of session
state), whose package needs another Python.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

COOKIE = "StatefulCounterResourcesServer"
START_S = 10


@dataclass
class CounterServer:
    """The server's sessions, and what was posted to be scored."""

    routes: tuple[str, ...] = ("/seed_session", "/verify", "/increment_counter", "/get_counter")
    counters: dict[str, int] = field(default_factory=dict[str, int])
    verified: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reward: Any = None  # in place of the right one
    url: str = ""

    async def seed(self, request: Request) -> Response:
        """Open the session of the cookie that the answer sets."""
        body = await request.json()
        session = str(uuid4())
        self.counters[session] = body["initial_count"]
        answer = JSONResponse({})
        answer.set_cookie(COOKIE, session)
        return answer

    async def increment(self, request: Request) -> Response:
        """A tool; the answer to a wrong body is FastAPI's."""
        body = await request.json()
        if not isinstance(body.get("count"), int):
            return JSONResponse({"detail": "count: expected an integer"}, status_code=422)
        self.counters[request.cookies[COOKIE]] += body["count"]
        return JSONResponse({"success": True})

    async def get(self, request: Request) -> Response:
        """A tool without arguments."""
        return JSONResponse({"count": self.counters[request.cookies[COOKIE]]})

    async def verify(self, request: Request) -> Response:
        """The whole body again, with the reward."""
        body = await request.json()
        self.verified.append(body)
        right = self.counters[request.cookies[COOKIE]] == body["expected_count"]
        reward = float(right) if self.reward is None else self.reward
        return JSONResponse({**body, "reward": reward, "reached": right})

    async def described(self, request: Request) -> Response:
        """FastAPI's description."""
        info = {"title": "FastAPI", "version": "0.1.0"}
        return JSONResponse({"info": info, "paths": {route: {} for route in self.routes}})


@contextmanager
def counter_server(**options: Any) -> Iterator[CounterServer]:
    """A running server, which ends with the block."""
    made = CounterServer(**options)
    handlers = (made.seed, made.verify, made.increment, made.get)
    routes = [
        Route(path, handler, methods=["POST"])
        for path, handler in zip(made.routes, handlers, strict=False)
    ]
    application = Starlette(routes=[*routes, Route("/openapi.json", made.described)])
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.002)
    (listener,) = server.servers[0].sockets
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield made
    finally:
        server.should_exit = True
        thread.join()
