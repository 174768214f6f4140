"""Who may speak to the server, and how much: what is checked before a route sees the request.

Everything is closed but the two health routes, by a rule that knows no paths besides them, so that
a new route cannot be forgotten. Leaves out what a body means (`bodies`).
"""

import asyncio
import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from marin_rl.inference.bodies import BODY_BYTES_MAX, ApiError

OPEN_PATHS = ("/healthz", "/readyz")
BODY_TIMEOUT_S = 60.0


class Guard:
    """ASGI middleware: a bearer token where one is set; else only pages and hosts of this machine.

    Without a token the server listens on loopback, where a web page in the user's browser could
    still reach it under a name of its own: so Host and Origin must be loopback too.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._digest = None if token is None else hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await as_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._digest is None:
            return _not_local(headers)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # digests of bytes: compare_digest refuses text that is not ASCII
        given = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        if scheme.lower() == "bearer" and hmac.compare_digest(given, self._digest):
            return None
        return ApiError(
            401,
            "expected the header 'Authorization: Bearer <token>' with the server's token",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _not_local(headers: Headers) -> ApiError | None:
    origin = headers.get("origin")
    hosts = [headers.get("host", "")] + ([] if origin is None else [urlsplit(origin).netloc])
    if all(is_loopback(urlsplit(f"//{host}").hostname or "") for host in hosts):
        return None
    return ApiError(
        403,
        "a server without a token answers requests to and from this machine only",
        type="permission_error",
    )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def as_response(error: ApiError) -> JSONResponse:
    """The error as JSON."""
    return JSONResponse(error.body, error.status, headers=error.headers)


async def read_body(request: Request) -> bytes:
    """The body, refused beyond BODY_BYTES_MAX before it is read or parsed (413, 408)."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > BODY_BYTES_MAX:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    raise _too_large()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away") from None
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"expected a body of at most {BODY_BYTES_MAX} bytes", code="too_large")
