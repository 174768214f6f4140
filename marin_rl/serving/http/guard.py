"""ASGI middleware around all routes: request ids, access, limits, errors, and a record of each.

Everything is closed but the health routes, by a rule that knows no paths besides them, so that
a new route cannot be forgotten. Connections, heads of requests and clients that read slowly are
uvicorn's, and beyond this machine a reverse proxy's. Leaves out what is checked (`auth`,
`limits`), the metrics (`prometheus`) and the lines of the log (`access_log`).
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marin_rl.config import ServerConfig
from marin_rl.serving.http.access_log import RequestRecord, record_of
from marin_rl.serving.http.auth import OPEN_PATHS, Keys, Origins
from marin_rl.serving.http.errors import ApiError, new_id
from marin_rl.serving.http.limits import (
    BodyBudget,
    BodyShare,
    Rates,
    body_too_large,
    request_timeout,
)

CLIENT_LEFT = 499  # never sent; for the log and the metrics
# A route ends its own answer at `request_timeout_s`; what still runs this much later is cancelled.
ENDING_S = 5.0

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)


class Guard:
    """ASGI middleware around the routes of one server.

    `origins` gives the rules for the address that the server is bound to at the time. `on_start`
    and `on_end` see each request and its record. Routes find in `scope["state"]` the `record`, the
    `body_share` (see `read_body`) and `admin_variable`, which `for_admin` names. They raise
    ApiError for what they refuse; what else they let escape is an internal error: its trace goes to
    the process's log under the request's id, and the client gets the id only.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        keys: Keys,
        origins: Callable[[], Origins],
        on_start: Callable[[], None] = lambda: None,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._origins = origins
        self._on_start = on_start
        self._on_end = on_end
        self._rates = Rates(config)
        self._budget = BodyBudget(max(config.bodies_bytes_max, config.body_bytes_max))
        self._cors = CORSMiddleware(
            self._answer,
            allow_origins=[origin.lower() for origin in config.origins_allowed],
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's clients send their own headers
            expose_headers=("x-request-id", "retry-after"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and record how it ended."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        ids = headers.get(b"x-request-id", [])
        # the client's own id where it gave exactly one that is short and plain
        sane = len(ids) == 1 and _REQUEST_ID.fullmatch(ids[0])
        record = RequestRecord(
            request_id=ids[0].decode() if sane else new_id(),
            method=scope["method"],
            arrived_at=time.time(),
            started=time.perf_counter(),
            body="" if self._config.log_prompts else None,
        )
        share = BodyShare(self._budget, self._config.body_bytes_max)
        state = scope.setdefault("state", {})
        scope["app"] = self  # which makes Starlette raise its refusals
        state |= {"record": record, "headers": headers, "body_share": share}
        added = (
            (b"x-request-id", record.request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        )

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        self._on_start()
        app = self._cors if self._origins().is_listed(headers) else self._answer
        try:
            await app(scope, receive, send_named)
        finally:
            share.release()
            record.latency_s = time.perf_counter() - record.started
            record.status = record.status or CLIENT_LEFT
            record.route = getattr(scope.get("route"), "path", record.route)
            self._on_end(record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout = asyncio.timeout(self._config.request_timeout_s + ENDING_S)
        try:
            async with timeout:
                self._admit(scope)
                await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 the last one who can tell the client anything
            record, refusal = record_of(scope), internal_error(record_of(scope).request_id)
            refused = timeout.expired() or isinstance(error, ApiError | HTTPException)
            if not refused or record.status:
                _log.error("request %s failed", record.request_id, exc_info=error)
            if record.status:  # too late for another status: an answer cut short is seen as such
                raise CutShort from None
            if timeout.expired():
                refusal = request_timeout()
            elif isinstance(error, HTTPException):  # no such route, or no such method
                message = f"{scope['method'][:16]} {scope['path'][:200]}: {error.detail}"
                refusal = ApiError(error.status_code, message, headers=dict(error.headers or {}))
            elif isinstance(error, ApiError):
                refusal = error
            record.reason = refusal.code
            answer = JSONResponse(refusal.body, refusal.status, headers=refusal.headers)
            await answer(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Raise ApiError for a request that no route shall see."""
        state, record = scope["state"], record_of(scope)
        headers: dict[bytes, list[bytes]] = state["headers"]
        self._origins().check(headers)
        if scope["path"] in OPEN_PATHS:
            record.caller = "open"
            return
        record.caller = self._keys.caller(headers.get(b"authorization", []))
        state["admin_variable"] = None if self._keys.admin else self._keys.admin_variable
        self._rates.check(record.caller)
        declared, bytes_max = headers.get(b"content-length", [b"0"])[0], self._config.body_bytes_max
        if not declared.isdigit() or int(declared) > bytes_max:
            raise body_too_large(bytes_max)


class CutShort(Exception):
    """An answer that began could not be completed; the reason was logged."""


def internal_error(request_id: str) -> ApiError:
    message = f"internal error; the server's log has it as {request_id}"
    return ApiError(500, message, code="internal_error")


def client_left() -> ApiError:
    return ApiError(CLIENT_LEFT, "the client went away", code="client_left")


async def read_body(scope: Scope, receive: Receive, bytes_max: int | None = None) -> bytes:
    """Return the whole body.

    Raises ApiError for a body beyond the server's limit or the route's own `bytes_max` (413), where
    all bodies together are too large (503), or where the client leaves.
    """
    share, record = scope["state"]["body_share"], record_of(scope)
    assert isinstance(share, BodyShare)
    data = bytearray()  # which grows in place: a body may come in thousands of pieces
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_left()
        data += message.get("body", b"")
        if bytes_max is not None and len(data) > bytes_max:
            raise body_too_large(bytes_max)
        share.grow_to(len(data))
        more = message.get("more_body", False)
    if record.body is not None:
        record.body = data.decode("utf-8", "replace")
    return bytes(data)
