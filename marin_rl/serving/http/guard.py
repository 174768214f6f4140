"""ASGI middleware around all routes, and the limits that it and the routes hold requests to.

`Guard` gives each request an id and a record, checks who calls and how often, and words its errors.
Everything is closed but the health routes, by a rule that knows no paths besides them, so that a
new route cannot be forgotten. Limits are rates, the sizes and the queue that a configuration
allows, and the memory that the bodies of all requests may hold together: each body is bounded, but
2,048 at once could fill 32 GB. Connections, heads of requests and clients that read slowly are
uvicorn's, and beyond this machine a reverse proxy's. Leaves out who may call (`auth`), the shape of
a body (`errors`), the metrics (`prometheus`) and the lines of the log (`access_log`).
"""

import asyncio
import gc
import logging
import math
import re
import threading
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marin_rl.config import ServerConfig
from marin_rl.inference.client.protocol import MESSAGES_ROUTE
from marin_rl.machine import give_back_freed_memory
from marin_rl.model_apis.messages import AnthropicMessages
from marin_rl.serving.http.access_log import RequestRecord, record_of
from marin_rl.serving.http.auth import OPEN_PATHS, Keys, Origins
from marin_rl.serving.http.errors import ApiError, new_id

# A route ends its own answer at `request_timeout_s`; what still runs this much later is cancelled.
ENDING_S = 5.0

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)

# A rate is met if the bucket misses a whole token by no more than floating point does.
_ROUNDING = 1e-9

# The part of each body that is not counted: ordinary requests go on when the budget is spent.
FREE_BYTES = 2**16
# Freed memory is handed back after a peak of this size, this long after it was released.
TRIM_BYTES = 2**25
TRIM_DELAY_S = 1.0


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
        self._buckets: dict[str, TokenBucket] = {}
        if (rate := config.requests_per_second) is not None:
            burst = config.requests_burst or max(1, math.ceil(rate))
            # none for the admin, so that it can always act
            self._buckets = {caller: TokenBucket(rate, burst) for caller in ("api", "local")}
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
                refusal = failure("request_timeout")
            elif isinstance(error, HTTPException):  # no such route, or no such method
                message = f"{scope['method'][:16]} {scope['path'][:200]}: {error.detail}"
                refusal = ApiError(error.status_code, message, headers=dict(error.headers or {}))
            elif isinstance(error, ApiError):
                refusal = error
            record.reason = refusal.code
            is_messages = scope["path"].startswith(MESSAGES_ROUTE)
            body = refusal.body_of(AnthropicMessages) if is_messages else refusal.body
            answer = JSONResponse(body, refusal.status, headers=refusal.headers)
            await answer(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Raise ApiError for a request that no route shall see."""
        state, record = scope["state"], record_of(scope)
        headers: dict[bytes, list[bytes]] = state["headers"]
        self._origins().check(headers)
        if scope["path"] in OPEN_PATHS:
            record.caller = "open"
            return
        record.caller = self._keys.caller(
            headers.get(b"authorization", []), headers.get(b"x-api-key", [])
        )
        state["admin_variable"] = None if self._keys.admin else self._keys.admin_variable
        if (bucket := self._buckets.get(record.caller)) is not None:
            bucket.check()
        declared, bytes_max = headers.get(b"content-length", [b"0"])[0], self._config.body_bytes_max
        if not declared.isdigit() or int(declared) > bytes_max:
            raise body_too_large(bytes_max)


class CutShort(Exception):
    """An answer that began could not be completed; the reason was logged."""


def internal_error(request_id: str) -> ApiError:
    message = f"internal error; the server's log has it as {request_id}"
    return ApiError(500, message, code="internal_error")


async def read_body(scope: Scope, receive: Receive, bytes_max: int | None = None) -> bytes:
    """Return the whole body. ApiError 413 beyond a limit, 503 for no room, 499 for no client."""
    share, record = scope["state"]["body_share"], record_of(scope)
    assert isinstance(share, BodyShare)
    data = bytearray()  # which grows in place: a body may come in thousands of pieces
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise failure("client_left")
        data += message.get("body", b"")
        if bytes_max is not None and len(data) > bytes_max:
            raise body_too_large(bytes_max)
        share.grow_to(len(data))
        more = message.get("more_body", False)
    if record.body is not None:
        record.body = data.decode("utf-8", "replace")
    return bytes(data)


class TokenBucket:
    """`burst` requests at once, `per_second` in the long run; used from one thread."""

    def __init__(
        self, per_second: float, burst: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._clock = clock
        self._level = self._burst
        self._at = clock()

    def take(self) -> float:
        """Admit a request and return 0, or return the seconds until one will be admitted."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_second)
        self._at = now
        if self._level >= 1 - _ROUNDING:
            self._level -= 1
            return 0.0
        return (1 - self._level) / self._per_second

    def check(self) -> None:
        """Admit a request, or raise ApiError 429 with the time to retry at."""
        wait_s = self.take()
        if wait_s:
            raise ApiError(
                429,
                f"expected at most {self._per_second:g} requests a second: try again in "
                f"{wait_s:.3g} s",
                code="rate_limit_exceeded",
                headers={
                    "Retry-After": str(math.ceil(wait_s)),
                    "Retry-After-Ms": str(math.ceil(1000 * wait_s)),  # what `openai` reads first
                },
            )


def check_limits(*limits: tuple[str, str, int | None, int | None]) -> None:
    """Refuse (400) a count above its limit: (parameter, what is counted, count, most)."""
    for param, what, count, most in limits:
        if most is not None and count is not None and count > most:
            message = f"{param}: expected at most {most} {what}, found {count}"
            raise ApiError(400, message, param=param, code="limit_exceeded")


def overloaded(message: str) -> ApiError:
    return ApiError(503, f"{message}: try again later", code="overloaded", retry_s=1)


def body_too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"expected a body of at most {bytes_max} bytes", code="body_too_large")


CLIENT_LEFT = 499  # never sent; for the log and the metrics
# of requests that were let in: status, message, and the seconds after which to try again
_FAILURES: dict[str, tuple[int, str, int | None]] = {
    "draining": (503, "the server is shutting down: try again", 5),
    "queue_timeout": (503, "no slot became free in time: try again later", 5),
    "request_timeout": (
        504, "the answer was not complete in time: ask for fewer tokens or samples", None
    ),
    "client_left": (CLIENT_LEFT, "the client went away", None),
}  # fmt: skip


def failure(code: str) -> ApiError:
    status, message, retry_s = _FAILURES[code]
    return ApiError(status, message, code=code, retry_s=retry_s)


def give_back_bodies() -> None:
    # The error of a request refers to frames that have its body, and they to the error: such cycles
    # would wait for a collection that a server at rest never comes to.
    gc.collect()
    give_back_freed_memory()


class BodyBudget:
    """Bytes that the bodies of all requests may hold together. Safe from any thread."""

    def __init__(self, bytes_max: int, *, give_back: Callable[[], None] = give_back_bodies) -> None:
        self._bytes_max = bytes_max
        self._give_back = give_back
        self.lock = threading.Lock()
        self._peak = 0
        self.bytes_in_use = 0

    def add(self, count: int) -> None:
        """Reserve `count` bytes; ApiError 503 where too little is left. Negative: return them."""
        with self.lock:
            in_use = self.bytes_in_use + count
            if count > 0 and in_use > self._bytes_max:
                raise overloaded("the server is busy with other large bodies")
            self.bytes_in_use, self._peak = in_use, max(self._peak, in_use)
            trim = in_use == 0 and self._peak >= TRIM_BYTES
            if in_use == 0:
                self._peak = 0
        if trim:  # the process keeps what is freed, for training steps (see `compilation`)
            timer = threading.Timer(TRIM_DELAY_S, self._give_back)
            timer.daemon = True
            timer.start()


class BodyShare:
    """Share of one body, of at most `bytes_max`, in the budget, until it is released."""

    def __init__(self, budget: BodyBudget, bytes_max: int) -> None:
        self._budget = budget
        self._bytes_max = bytes_max
        self._bytes = 0

    def grow_to(self, size: int) -> None:
        """Reserve room for `size` bytes. ApiError: 413 for too large a body, 503 for no room."""
        if size > self._bytes_max:
            raise body_too_large(self._bytes_max)
        if (count := size - FREE_BYTES - self._bytes) > 0:
            self._budget.add(count)
            self._bytes += count

    def release(self) -> None:
        """Return the share: the body was parsed, or refused. Idempotent."""
        with self._budget.lock:  # a thread and the event loop may both come here
            count, self._bytes = self._bytes, 0
        if count:
            self._budget.add(-count)
