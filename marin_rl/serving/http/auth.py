"""Access control: bearer tokens, and what is checked before a route sees the request.

Everything is closed but the health routes, by a rule that knows no paths besides them, so that
a new route cannot be forgotten. Tokens come from the environment and are compared in constant time.
Leaves out which hosts and pages are ours (`addresses`), and what a body means (`errors`).
"""

import asyncio
import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marin_rl.config import InferenceConfig, ServerConfig
from marin_rl.errors import ConfigError
from marin_rl.serving.http.addresses import Cors, Origins, is_loopback, listen
from marin_rl.serving.http.connections import Client, client_of
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.limits import BodyBudget, BodyShare, Deadline, Rates, request_timeout

# Compared with where no token is set, so that every comparison takes the same time.
_NO_TOKEN = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """SHA-256 digests of the API's and the admin's token; None where the variable is not set.

    Digests rather than tokens: they compare in constant time for any bytes a client sends, and a
    trace or a dump of this object gives nothing away.
    """

    api: bytes | None
    admin: bytes | None
    api_variable: str
    admin_variable: str

    @staticmethod
    def from_environment(config: InferenceConfig) -> "Keys":
        """Read both tokens. ConfigError for one with blanks inside, or one used for both."""
        api = _token(config.api_key_variable)
        admin = _token(config.server.admin_key_variable)
        if api is not None and api == admin:
            raise ConfigError(
                f"{config.api_key_variable} and {config.server.admin_key_variable} hold the same "
                "token: every caller of completions could replace the weights. Use two tokens"
            )
        return Keys(
            api=None if api is None else hashlib.sha256(api).digest(),
            admin=None if admin is None else hashlib.sha256(admin).digest(),
            api_variable=config.api_key_variable,
            admin_variable=config.server.admin_key_variable,
        )

    def caller(self, authorization: Sequence[bytes]) -> str | None:
        """Role of the sender of these Authorization headers; None if the token is unknown.

        One of "admin", "api" and "local"; "local" is every caller while no API token is set: then
        only this machine is answered.
        """
        digest = hashlib.sha256(_bearer(authorization)).digest()
        is_admin = hmac.compare_digest(digest, self.admin or _NO_TOKEN)
        is_api = hmac.compare_digest(digest, self.api or _NO_TOKEN)
        if is_admin:
            return "admin"
        if self.api is None:
            return "local"
        return "api" if is_api else None


def _token(variable: str) -> bytes | None:
    # surrogateescape gives back the very bytes of an environment that is not UTF-8
    token = os.environ.get(variable, "").strip().encode("utf-8", "surrogateescape")
    if len(token.split()) > 1:
        raise ConfigError(f"{variable}: expected a token without blanks, found blanks in it")
    return token or None


def _bearer(authorization: Sequence[bytes]) -> bytes:
    """The token of the one Authorization header; nothing for none, several, or another scheme."""
    if len(authorization) != 1:
        return b""
    scheme, _, token = authorization[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def check_address(config: InferenceConfig, host: str, port: int) -> None:
    """Raise ConfigError, in one line, for an address that a server would not start on."""
    check_reach(Keys.from_environment(config), host)
    listen(host, port).close()


def check_reach(keys: Keys, host: str) -> None:
    """Raise ConfigError for an address beyond this machine without an API token."""
    if keys.api is None and not is_loopback(host):
        raise ConfigError(
            f"a server on {host} is open to others: set a token in the environment variable "
            f"{keys.api_variable}, or bind to 127.0.0.1"
        )


OPEN_PATHS = ("/healthz", "/health", "/readyz")
CLIENT_LEFT = 499  # never sent; for the log and the metrics
# An answer that has begun gets this much longer, so that its route can end it properly.
ENDING_S = 5.0


class Guard:
    """ASGI middleware: Host and Origin, token, rate, bytes and time of every request.

    `origins` gives the rules for the address that the server is bound to at the time. Leaves in
    `scope["state"]`: `caller` ("api", "admin", "local"; "open" on the health routes),
    `deadline`, `body_share` (the memory that its body takes; see `body_parsed`), and
    `admin_variable`, which `for_admin` names. The `receive` that routes get raises ApiError 413
    or 408 for a body too large or too slow, and 503 where all bodies together are too large.
    """

    def __init__(
        self, app: ASGIApp, *, config: ServerConfig, keys: Keys, origins: Callable[[], Origins]
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._origins = origins
        self._rates = Rates(config)
        self._budget = BodyBudget(max(config.bodies_bytes_max, config.body_bytes_max))
        self._cors = Cors(self._check, config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        if self._config.origins_allowed and self._origins().is_listed(_headers(scope)[0]):
            await self._cors(scope, receive, send)
        else:
            await self._check(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, head_bytes = _headers(scope)
        refusal = self._refusal(scope, headers, head_bytes)
        if refusal is not None:
            await Refusal(refusal)(scope, receive, send)
            return
        await self._within_limits(scope, receive, send)

    def _refusal(
        self, scope: Scope, headers: dict[bytes, list[bytes]], head_bytes: int
    ) -> ApiError | None:
        refusal = self._origins().refusal(headers) or _unknown_coding(headers)
        if refusal is not None:
            return refusal
        state = scope.setdefault("state", {})
        if scope["path"] in OPEN_PATHS:
            state["caller"] = "open"
            return None
        caller = self._keys.caller(headers.get(b"authorization", []))
        if caller is None:
            return ApiError(
                401,
                "expected the header 'Authorization: Bearer <token>' with the server's token",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        state["caller"] = caller
        state["admin_variable"] = None if self._keys.admin else self._keys.admin_variable
        return self._rates.refusal(caller) or self._too_long(headers, head_bytes)

    def _too_long(self, headers: dict[bytes, list[bytes]], head_bytes: int) -> ApiError | None:
        # `connections` bounds a head that is incomplete, not one that comes in one piece
        header_max = self._config.header_bytes_max
        if head_bytes > header_max:
            message = f"expected a request line and headers of at most {header_max} bytes"
            return ApiError(431, message, code="headers_too_large")
        declared = headers.get(b"content-length", [b"0"])
        bytes_max = self._config.body_bytes_max
        if len(declared) == 1 and declared[0].isdigit() and int(declared[0]) <= bytes_max:
            return None
        return too_large(bytes_max)

    async def _within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        now, config = asyncio.get_running_loop().time(), self._config
        deadline = Deadline(
            queue_at=now + config.queue_timeout_s, total_at=now + config.request_timeout_s
        )
        share = self._budget.share()
        scope["state"] |= {"deadline": deadline, "body_share": share}
        body = BoundedBody(receive, self._config, client_of(scope), share)
        response_started = False
        timeout = asyncio.timeout_at(deadline.total_at)
        try:
            async with timeout:

                async def send_on(message: Message) -> None:
                    nonlocal response_started
                    if not response_started:
                        response_started = True
                        timeout.reschedule(deadline.total_at + ENDING_S)
                    await send(message)

                await self._app(scope, body, send_on)
        except TimeoutError:
            if response_started or not timeout.expired():
                raise
            await Refusal(request_timeout())(scope, receive, send)
        finally:
            share.release()


class BoundedBody:
    """An ASGI `receive` that raises ApiError for a body too large (413) or too slow (408).

    And 503, where the bodies of all requests together leave no room in `share`.
    """

    def __init__(
        self, receive: Receive, config: ServerConfig, client: Client, share: BodyShare
    ) -> None:
        self._receive = receive
        self._client = client
        self._share = share
        self._bytes_max = config.body_bytes_max
        self._timeout_s = config.body_timeout_s
        self._until = asyncio.get_running_loop().time() + config.body_timeout_s
        self._read = 0
        self._complete = False

    async def __call__(self) -> Message:
        """The next message; once the body is complete, without a limit of time."""
        if self._complete:
            return await self._receive()
        # most bodies come with their heads: those need no clock
        message = await (self._receive() if self._client.has_sent_all else self._in_time())
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._read > self._bytes_max:
                raise too_large(self._bytes_max)
            self._share.grow_to(self._read)
        return message

    async def _in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._timeout_s:g} s", code="body_timeout"
            ) from None


Endpoint = Callable[[Request], Awaitable[Response]]


def for_admin(endpoint: Endpoint) -> Endpoint:
    """The endpoint of an admin route: ApiError 403 for every other caller."""

    @wraps(endpoint)
    async def guarded(request: Request) -> Response:
        state = request.scope["state"]
        if state.get("caller") == "admin":
            return await endpoint(request)
        variable = state.get("admin_variable")
        message = (
            "expected the admin token, found another caller's"
            if variable is None
            else f"no admin token is set: start the server with one in the variable {variable}"
        )
        raise ApiError(403, message, code="admin_only")

    return guarded


class Refusal(JSONResponse):
    """An error as JSON; leaves its code for the request's record."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body, error.status, headers=error.headers)
        self._reason = error.body["error"]["code"] or f"http_{error.status}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        scope.setdefault("state", {})["reason"] = self._reason
        await super().__call__(scope, receive, send)


def body_parsed(scope: Scope) -> None:
    """Release a request's share of the memory for bodies: its bytes are not kept."""
    share = scope["state"]["body_share"]
    assert isinstance(share, BodyShare)
    share.release()


async def read_body(receive: Receive, bytes_max: int | None = None) -> bytes:
    """Return the whole body.

    ApiError where the guard's limits end it (413, 408, 503), beyond a route's own `bytes_max`
    (413), or where the client leaves.
    """
    data = bytearray()  # which grows in place: a body may come in thousands of pieces
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_left()
        data += message.get("body", b"")
        if bytes_max is not None and len(data) > bytes_max:
            raise too_large(bytes_max)
        if not message.get("more_body", False):
            return bytes(data)


def client_left() -> ApiError:
    """Error for a client that has disconnected."""
    return ApiError(CLIENT_LEFT, "the client went away", code="client_left")


def too_large(bytes_max: int) -> ApiError:
    """A body beyond the limit."""
    return ApiError(413, f"expected a body of at most {bytes_max} bytes", code="body_too_large")


def _unknown_coding(headers: dict[bytes, list[bytes]]) -> ApiError | None:
    """Refuse what RFC 9112 (6.1) has a server refuse: a transfer coding that it does not know."""
    codings = b",".join(headers.get(b"transfer-encoding", ())).strip().lower()
    if codings in (b"", b"chunked"):
        return None
    return ApiError(
        501,
        "expected no Transfer-Encoding but chunked: bodies are taken as they are, uncompressed",
        code="unknown_transfer_coding",
    )


def _headers(scope: Scope) -> tuple[dict[bytes, list[bytes]], int]:
    """Read all headers (names are lower case already), all their values, and the head's bytes."""
    headers: dict[bytes, list[bytes]] = {}
    head_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    for name, value in scope["headers"]:
        headers.setdefault(name, []).append(value)
        head_bytes += len(name) + len(value)
    return headers, head_bytes
